"""What a mux of another host may not do to the quotas: requests that are malformed, or that never end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teimgr.control.sharing import leases, tenants
from teimgr.control.sharing.leases import LeasesForMux
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.errors import Code
from teimgr.http.auth.policy import Policy
from teimgr.wire.tenants.table import Limits, TenantKey


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
        {"lease": [2, 1, [-1], 0]},
        {"lease": [2, 1, [1.5], 0]},
        {"lease": [2, 1, [1], 1 << 40]},
        {"lease": [2, 1, [1] * 1025, 0]},
        {"lease": [2, 1]},
        {"lease": [1, 1, [1], 0]},  # a number again: what it charged could not be settled
        {"lease": [2, 0, [1], 0]},
        {"lease": [2, -1, [1], 0]},
        {"lease": [2, 1024, [1], 0]},  # of the words behind those of the tenants
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


def test_what_a_mux_counts_under_names_without_end_takes_no_memory_without_end(
    registry: TenantRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "_MAX_COUNTED", 3)
    desk = LeasesForMux(Line(), registry)

    for name in ("a", "b", "c", "d", "e", "a"):
        desk.take({"used": [[1, name, "m", [1, 0, 0, 0, 0]]]})

    assert {row.instance: row.tokens for row in registry.usage()} == {"a": 2, "b": 1, "c": 1, "(others)": 2}


async def test_leases_that_are_open_when_the_daemon_leaves_the_table_end_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.0)
    registry = TenantRegistry(tmp_path / "run", tmp_path / "state.toml")
    registry.configure(Policy(keys=()), [TenantKey("one", Limits(concurrent=800))])
    line = Line()
    desk = LeasesForMux(line, registry)
    desk.take({"lease": [1, 1, [10], 0]})
    assert line.sent == [[1, [None], 0]]

    desk.close()
    registry.close()
    over = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.001, over.set_result, None)
    await over  # a charge that ends now would be written to memory that is unmapped, which ends the process
