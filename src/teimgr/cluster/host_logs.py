"""Logs of instances on another host, read over its service (`host_service.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from teimgr.cluster.host_link import HostAddress, HostLink, connect
from teimgr.cluster.host_service import ALIVE_S
from teimgr.errors import Unavailable
from teimgr.observability.log_files import Gap
from teimgr.observability.log_filter import LogFilter
from teimgr.observability.log_source import OPEN_LIMIT_S, Batch
from teimgr.wire.fleet_tls import FleetIdentity

SILENCE_LIMIT_S = 5 * ALIVE_S
_PAST_LIMIT_S = 30.0


class RemoteLogs:
    """`LogSource` of a host of the cluster; `problem` is why it cannot be asked, empty where it can."""

    def __init__(self, address: HostAddress, identity: FleetIdentity, problem: str = "") -> None:
        self.host = address.name
        self._address = address
        self._identity = identity
        self._problem = problem

    async def open(self, name: str, filter: LogFilter, *, follow: bool) -> RemoteLog | None:
        if self._problem:
            raise Unavailable(self._problem)
        link = await connect(self._address, self._identity)
        try:
            await link.send(op="log", name=name, filter=filter.to_json(), follow=follow)
            answer = await link.receive(OPEN_LIMIT_S)
            if "total" in answer:
                return RemoteLog(link, int(answer["total"]))
        except BaseException:
            await link.close()
            raise
        await link.close()
        return None


class RemoteLog:
    """`OpenLog` of one host, which sends no faster than its lines are taken."""

    unread: Sequence[str] = ()

    def __init__(self, link: HostLink, total: int) -> None:
        self.total = total
        self._link = link
        self._past_is_over = False

    async def past(self, start: int, end: int) -> AsyncGenerator[Batch]:
        await self._link.send(start=start, end=end)
        while not self._past_is_over:
            yield await self._next(_PAST_LIMIT_S)

    async def live(self) -> AsyncGenerator[Batch]:
        while True:
            yield await self._next(SILENCE_LIMIT_S)

    async def close(self) -> None:
        await self._link.close()

    async def _next(self, limit_s: float) -> Batch:
        message = await self._link.receive(limit_s)
        self._past_is_over |= "past" in message
        lines = message.get("lines", ())
        if not isinstance(lines, list | tuple):
            raise Unavailable(f"{self._link.host}: its answer has no lines")
        return [_unpacked(each) for each in lines]


def _unpacked(item: Any) -> str | Gap:
    return Gap(str(item.get("gap"))) if isinstance(item, dict) else str(item)
