"""Forty models on memory for four: the judge of their stays can find one too short, and a run of it finds none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bench.forty.catalogue import build
from bench.forty.residence import Answered, stays

_ROOT = Path(__file__).resolve().parents[2]
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def _events(*happened: tuple[float, str, str]) -> list[Mapping[str, Any]]:
    return [
        {
            "id": number,
            "timestamp": (_BEGAN + timedelta(seconds=at)).isoformat().replace("+00:00", "Z"),
            "instance": "a",
            "event": event,
            "reason": reason,
            "count": 1,
        }
        for number, (at, event, reason) in enumerate(happened, 7)
    ]


def _loaded(name: str) -> list[Mapping[str, Any]]:
    return [{**event, "instance": name} for event in _events((-2, "starting", ""), (-1, "running", ""))]


def _evicted_after(seconds: float) -> list[Mapping[str, Any]]:
    """A load of two seconds, and an eviction so long after it."""
    reason = f"evicted a: value 0.1 < 0.2, resident {seconds:.3g} s; for b"
    return _events((0, "starting", ""), (2, "running", ""), (2 + seconds, "evicted", reason))


def _answered(began: float, ended: float) -> Answered:
    return Answered("a", _BEGAN.timestamp() + began, _BEGAN.timestamp() + ended)


@pytest.mark.parametrize(
    ("resident_s", "calls", "is_too_short"),
    [
        (1.0, [_answered(2.1, 2.2)], True),
        (1.0, [_answered(0.0, 2.1)], False),  # the call that it was loaded for
        (1.0, [_answered(2.1, 2.95)], False),  # it was not counted yet
        (3.0, [_answered(2.1, 2.2)], False),
        (1.0, [], False),
    ],
    ids=["further calls", "none beside the first", "a call at the last moment", "long", "no call"],
)
def test_a_stay_shorter_than_its_load_is_found(resident_s: float, calls: list[Answered], is_too_short: bool) -> None:
    [stay] = stays(_evicted_after(resident_s), calls)
    assert (stay.seconds, stay.least_s, stay.is_too_short) == (resident_s, 2.0, is_too_short)


def test_a_gap_in_the_events_is_no_evidence() -> None:
    events = _evicted_after(1.0)
    with pytest.raises(ValueError, match="1 events are missing"):
        stays([events[0], events[2]], [])
    assert [stay.least_s for stay in stays([events[0], *events[1:2], {**events[2], "id": 11, "count": 3}], [])] == [2.0]


def test_a_load_begins_when_the_last_one_that_was_evicted_for_it_is_gone() -> None:
    first = {"instance": "b", "event": "evicted", "reason": "evicted b: value 0 < 1, resident 9 s; for a"}
    events = [
        *_events((0, "starting", "")),
        *({**each, **first} for each in _events((5, "", ""))),
        *({**each, "instance": "b"} for each in _events((6, "unloaded", ""))),
        *_events((8, "running", ""), (9, "evicted", "evicted a: value 0 < 1, resident 1 s; for c")),
    ]
    numbered = [{**event, "id": number} for number, event in enumerate(_loaded("b") + events)]
    assert [(stay.model, stay.least_s) for stay in stays(numbered, [])] == [("b", 1.0), ("a", 2.0)]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_minute_of_random_calls_loses_none(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from bench import report; report.RESULTS = Path(sys.argv.pop(1));"
    code += "sys.argv[0] = 'bench'; from bench.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path), "forty", "--minutes", "1", "--turns", "10", "--limit", "1500"]
    done = subprocess.run(
        command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    [report] = [json.loads(file.read_text()) for file in tmp_path.glob("forty-*.json")]
    assert report["facts"]["broken"] == "nothing"
    assert [stay for stay in report["stays"] if stay["is_used_again"]], "no stay could be judged"


def test_few_models_are_of_all_kinds_too(tmp_path: Path) -> None:
    kinds = {each.kind for each in build(tmp_path, 8)}
    assert kinds == {"dense", "reranker", "classifier", "sparse"}
