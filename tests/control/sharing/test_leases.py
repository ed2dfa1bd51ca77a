"""What a mux of another host may not do to the quotas: requests that are malformed, or that never end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teimgr.control.sharing import leases
from teimgr.control.sharing.leases import LeasesForMux
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.errors import Code
from teimgr.http.auth.policy import Policy
from teimgr.wire.tenants.quotas import Limits
from teimgr.wire.tenants.table import TenantKey


class Line:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, **values: str) -> None:
        self.sent.append(json.loads(values["leased"]))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[TenantRegistry]:
    one = TenantRegistry(tmp_path / "run", tmp_path / "state.toml")
    one.configure(Policy(keys=()), [TenantKey("one", Limits(daily=800))])
    yield one
    one.close()


@pytest.mark.parametrize(
    "message",
    [
        {"lease": [1, 1, [-1], 0]},
        {"lease": [1, 1, [1.5], 0]},
        {"lease": [1, 1, [1], 1 << 40]},
        {"lease": [1, 1, [1] * 1025, 0]},
        {"lease": [1, 1]},
        {"settled": [[1, 0, -5]]},
        {"settled": [[7, 7, 7]] * 1025},
        {"used": [[1, "a", "m", [1, 2]]]},
        {"used": [[1, "a", "m" * 4096, [1, 0, 0, 0, 0]]]},
        {"used": [[1, "a", "m", [-1, 0, 0, 0, 0]]]},
    ],
)
def test_a_malformed_message_is_refused_and_lifts_nothing(registry: TenantRegistry, message: dict[str, Any]) -> None:
    line = Line()
    desk = LeasesForMux(line, registry)
    desk.take({"lease": [1, 1, [10], 0]})

    with pytest.raises(ValueError):  # noqa: PT011  # of whatever kind: the link ends
        desk.take(message)

    desk.take({"lease": [2, 1, [791, 790], 0]})
    first, second = line.sent[-1][1]
    assert first[0] == Code.DAILY_TOKENS_EXCEEDED
    assert second is None
    assert registry.usage() == []


def test_a_lease_is_a_small_part_of_what_is_left_and_at_last_nothing(registry: TenantRegistry) -> None:
    line = Line()
    desk = LeasesForMux(line, registry)

    for number in range(60):
        desk.take({"lease": [number, 1, [10], 1000]})

    given = [leased for _, _, leased in line.sent]
    assert given[0] == 790 // 8
    assert given == sorted(given, reverse=True)
    assert given[-1] == 0
    admitted = sum(decisions == [None] for _, decisions, _ in line.sent) * 10
    assert 790 < admitted + sum(given) <= 800


def test_a_mux_that_settles_nothing_is_refused(registry: TenantRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_OPEN", 3)
    line = Line()
    desk = LeasesForMux(line, registry)
    desk.take({"lease": [1, 1, [1, 1, 1], 0]})
    desk.take({"lease": [2, 1, [1, 1], 8]})

    assert [decision[0] for decision in line.sent[-1][1]] == [Code.OVERLOADED] * 2
    assert line.sent[-1][2] == 0
    desk.take({"settled": [[1, 0, 1], [7, 7, 7]]})
    desk.take({"lease": [3, 1, [1], 0]})
    assert line.sent[-1][1] == [None]
