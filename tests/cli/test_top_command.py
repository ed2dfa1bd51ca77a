"""What `teimgr top` makes of two pages of metrics."""

from __future__ import annotations

import pytest

from teimgr.cli.output import print_table
from teimgr.cli.top_command import InstanceLoad, MetricsPage, _row, load_of
from teimgr.client.rest_values import Instance
from teimgr.observability.catalogue import DURATION_BOUNDS
from teimgr.spec import State

INSTANCE = Instance(
    name="a", model_id="m", port=1, status=State.RUNNING, details={"workers": [{"replica": 0}, {"replica": 1}]}
)


def page(moment: float, failed: int, refused: int, busy_s: float, calls: int) -> MetricsPage:
    return MetricsPage.parse(
        f'te_request_failure{{instance="a",err="inference"}} {failed}\n'
        f'te_request_failure{{instance="a",err="overloaded"}} {refused}\n'
        f'teimgr_engine_busy_seconds_total{{instance="a"}} {busy_s}\n'
        f'te_request_duration_bucket{{instance="a",le="{DURATION_BOUNDS[-1]}"}} 0\n'
        f'te_request_duration_bucket{{instance="a",le="+Inf"}} {calls}\n',
        moment,
    )


def test_refusals_are_told_from_failures_and_busy_is_a_share_of_each_worker() -> None:
    load = load_of(INSTANCE, page(0, 1, 10, 5, 0), page(2, 3, 50, 8, 1))
    assert (load.errors, load.refused, load.busy) == (1, 20, 0.75)
    assert load.p99_ms == DURATION_BOUNDS[-1] * 1e3 > 120_000, "the scale reaches two minutes"
    idle = load_of(INSTANCE, MetricsPage.parse("", 0), MetricsPage.parse("", 2))
    assert (idle.errors, idle.refused, idle.busy, idle.p99_ms) == (None, None, None, None)


def test_numbers_in_a_pipe_have_no_separators(capsys: pytest.CaptureFixture[str]) -> None:
    load = InstanceLoad("a", "running", texts=1242.1, tokens=7728.0, queue=6523.0, p99_ms=12345.6, errors=2000.0)
    print_table(("a",), [[*_row(load, ""), 1234.5]], on_terminal=False)
    cells = capsys.readouterr().out.rstrip("\n").split("\t")
    assert [cells[at] for at in (2, 3, 5, 8, 9, -1)] == ["1242.1", "7728", "6523", "12346 ms", "2000.0", "1234.5"]
    assert "1,242.1" in _row(load)
