"""Logs of several hosts in one order: slices, hosts that fail, hosts that join while a log is followed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from teimgr.errors import Overloaded, Unavailable
from teimgr.observability import log_source
from teimgr.observability.log_files import Gap
from teimgr.observability.log_source import Batch, FleetLogs, LocalLog, LocalLogs, LogFilter, OpenLog

LIMIT_S = 20.0
ALL = LogFilter()
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def line(second: float, message: str, level: str = "info") -> str:
    return json.dumps({"ts": (NOON + timedelta(seconds=second)).isoformat(), "level": level, "message": message})


def write(folder: Path, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "a.log").open("a") as file:
        file.write("".join(f"{each}\n" for each in lines))


class Hosts:
    """Folders of hosts, the first that of the daemon; those in `cut` do not answer."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = list(names)
        self.cut: set[str] = set()
        self._folder = folder

    def folder(self, name: str) -> Path:
        return self._folder / name

    def logs(self) -> FleetLogs:
        local = LocalLogs(self.folder(self.names[0]), self.names[0])
        return FleetLogs(local, lambda: [Host(self, name) for name in self.names[1:]])


class Host(LocalLogs):
    """The logs of a host that may be cut off, also while its log is open."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        super().__init__(hosts.folder(name), name)
        self._hosts = hosts

    async def open(self, name: str, filter: LogFilter, *, follow: bool) -> Any:
        if self.host in self._hosts.cut:
            raise Unavailable("no connection")
        opened = await super().open(name, filter, follow=follow)
        return opened and CutLog(self._hosts, self.host, opened)


class CutLog:
    unread: Sequence[str] = ()

    def __init__(self, hosts: Hosts, host: str, opened: LocalLog) -> None:
        self.total = opened.total
        self._hosts, self._host, self._opened = hosts, host, opened

    def past(self, start: int, end: int) -> AsyncGenerator[Batch]:
        return self._opened.past(start, end)

    async def live(self) -> AsyncGenerator[Batch]:
        async for batch in self._opened.live():
            if self._host in self._hosts.cut:
                raise Unavailable("cut")
            yield batch

    async def close(self) -> None: ...


async def past(log: OpenLog, start: int, end: int) -> Batch:
    return [item async for batch in log.past(start, end) for item in batch]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, ["one", "two"])


async def opened(hosts: Hosts, filter: LogFilter = ALL, *, follow: bool = False) -> OpenLog:
    found = await hosts.logs().open("a", filter, follow=follow)
    assert found is not None
    return found


@pytest.mark.parametrize("start", [0, 1, 3, 6, 9, 10])
@pytest.mark.parametrize("end", [0, 4, 10])
async def test_a_slice_is_that_of_the_logs_in_the_order_of_time(hosts: Hosts, start: int, end: int) -> None:
    whole = [line(second, f"line {second}") for second in range(10)]
    for second, each in enumerate(whole):
        write(hosts.folder("two" if second in (0, 1, 5, 8, 9) else "one"), each)
    log = await opened(hosts)
    assert log.total == 10
    assert await past(log, start, max(start, end)) == whole[start : max(start, end)]


async def test_lines_without_a_time_stay_behind_the_line_before(hosts: Hosts) -> None:
    write(hosts.folder("one"), line(0, "first"), "Traceback", "  of it", line(9, "last"))
    write(hosts.folder("two"), line(0.5, "between"))
    log = await opened(hosts)
    assert await past(log, 0, 5) == [line(0, "first"), "Traceback", "  of it", line(0.5, "between"), line(9, "last")]


async def test_a_clock_that_goes_back_changes_no_order_within_a_host(hosts: Hosts) -> None:
    write(hosts.folder("one"), line(5, "a"), line(1, "b"), line(6, "c"))
    write(hosts.folder("two"), line(5.5, "other"))
    log = await opened(hosts)
    assert await past(log, 0, 4) == [line(5, "a"), line(1, "b"), line(5.5, "other"), line(6, "c")]


async def test_filters_count_on_every_host(hosts: Hosts) -> None:
    write(hosts.folder("one"), line(0, "no"), line(1, "yes", "error"))
    write(hosts.folder("two"), line(2, "yes too", "error"), line(3, "no"))
    log = await opened(hosts, LogFilter.of("error", None))
    assert await past(log, 0, log.total) == [line(1, "yes", "error"), line(2, "yes too", "error")]


async def test_a_host_that_does_not_answer_is_named(hosts: Hosts) -> None:
    write(hosts.folder("one"), line(0, "here"))
    hosts.cut.add("two")
    log = await opened(hosts)
    assert log.unread == ["host two: no connection"]
    assert await past(log, 0, log.total) == [line(0, "here")]


async def test_without_a_log_here_the_failure_of_a_host_is_no_absence(hosts: Hosts) -> None:
    assert await hosts.logs().open("a", ALL, follow=False) is None
    hosts.cut.add("two")
    with pytest.raises(Unavailable, match="host two: no connection"):
        await hosts.logs().open("a", ALL, follow=False)


async def take(live: AsyncGenerator[Batch], count: int) -> Batch:
    found: Batch = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            found += await anext(live)
    return found


async def test_a_follower_gets_what_comes_from_hosts_that_fail_return_and_join(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_source, "_LOOK_S", 0.1)
    write(hosts.folder("one"), line(0, "old"))
    write(hosts.folder("two"), line(1, "old too"))
    log = await opened(hosts, follow=True)
    assert await past(log, 0, 2) == [line(0, "old"), line(1, "old too")]
    async with aclosing(log.live()) as live:
        write(hosts.folder("two"), line(2, "of two"))
        assert await take(live, 1) == [line(2, "of two")]
        write(hosts.folder("one"), line(3, "of one"))
        assert await take(live, 1) == [line(3, "of one")]

        hosts.cut.add("two")
        assert await take(live, 1) == [Gap("host two: cut")]
        write(hosts.folder("two"), line(4, "while it was cut off"))
        write(hosts.folder("three"), *(line(second, "before it joined") for second in range(20)))
        hosts.names.append("three")
        assert await take(live, 10) == [line(second, "before it joined") for second in range(10, 20)]
        hosts.cut.clear()
        found: Batch = []
        async with asyncio.timeout(LIMIT_S):
            for second in range(5, 10_000):  # until it is followed again, from its end on
                write(hosts.folder("two"), line(second, "again"))
                if found := await anext(live):
                    break
        assert set(map(str, found)) <= {line(n, "again") for n in range(5, 10_000)}
    await log.close()


async def test_many_lines_of_many_hosts_come_in_order(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, ["one", "two", "three"])
    for number, name in enumerate(hosts.names):
        write(hosts.folder(name), *(line(3 * second + number, "x") for second in range(2000)))
    log = await opened(hosts)
    whole = [line(second, "x") for second in range(6000)]
    assert await past(log, 0, 6000) == whole
    assert await past(log, 5990, 6000) == list(islice(whole, 5990, 6000))


async def test_few_logs_are_opened_at_a_time_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one reads all of it, on threads that others need."""
    goes_on, reading, most = threading.Event(), 0, 0
    read, lock = LocalLog.read, threading.Lock()

    def slow(*args: Any, **keys: Any) -> LocalLog | None:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        goes_on.wait(LIMIT_S)
        with lock:
            reading -= 1
        return read(*args, **keys)

    write(tmp_path, line(1, "a"))
    monkeypatch.setattr(LocalLog, "read", slow)
    logs = LocalLogs(tmp_path)
    asked = [asyncio.create_task(logs.open("a", ALL, follow=False)) for _ in range(100)]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    goes_on.set()
    await asyncio.wait(asked)
    refused = [task for task in asked if task.exception() is not None]
    assert done
    assert len(waiting) >= 36
    assert len(refused) == 100 - 36
    assert all(isinstance(task.exception(), Overloaded) for task in refused)
    assert 0 < most <= 4
    assert await logs.open("a", ALL, follow=False) is not None
