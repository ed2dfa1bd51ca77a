"""What a host of a fleet offers the others: the logs of its workers, its models, connections to the ports of its
instances. One request for each connection (`host_link.py`). `RemoteLogs` is the daemon's side of "log".

{"op": "log", "name", "filter", "follow"}    for the daemon alone
    {"total"} or {"absent"}, then the client's {"start", "end"}, then {"lines"} …, {"past": true}; with `follow`
    {"lines"} as they come, at least every `ALIVE_S`. A line is a text, or {"gap": reason}.
{"op": "forward", "workers": [incarnation, …]}    for the daemon alone
    {"connected": true}: to the port of the instance of the first of these workers that this host has; then the bytes of
    the connection, both ways, by `HostLink.send_piece`
{"op": "model", "model_id", "revision"}      for every host
    as `host_models.py` has it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from teimgr.cluster.host_link import STALL_S, HostAddress, HostLink, NearEnd, connect, most_forwarded
from teimgr.cluster.host_models import HostModels
from teimgr.errors import Forbidden, Internal, InvalidInput, TeimgrError, Unavailable
from teimgr.http.acceptor import GatedStream
from teimgr.http.connection_gate import Phase, Ticket
from teimgr.http.server import bind
from teimgr.observability.log_files import Gap
from teimgr.observability.log_source import OPEN_LIMIT_S, Batch, LogFilter, LogSource
from teimgr.spec import check_name
from teimgr.wire.fleet_tls import FleetIdentity, FleetListener, peer_of
from teimgr.wire.json_messages import pack_error
from teimgr.wire.remote_frames import set_tcp_limits

ALIVE_S = 2.0
"""The longest pause between two messages to a follower, in seconds."""
SILENCE_LIMIT_S = 5 * ALIVE_S
_PAST_LIMIT_S = 30.0
MAX_LINKS = 128
_REFUSED = 64  # connections that get the refusal "too many"
_BACKLOG = 1024
_REQUEST_LIMIT_S = 10.0
_PORT_LIMIT_S = 2.0

log = logging.getLogger(__name__)

PortOf = Callable[[str], tuple[str, int] | None]
"""Where the port of an instance is reached on this host, by the incarnation of a worker here; None for any other."""


class HostService:
    """Answers the requests of other hosts. `logs` and `models` are those of this host."""

    def __init__(self, logs: LogSource, models: HostModels, port_of: PortOf = lambda incarnation: None) -> None:
        self._logs = logs
        self._port_of = port_of
        self._links = 0
        self._forwarded = 0
        self._operations: Mapping[str, Callable[[HostLink, dict[str, Any]], Awaitable[None]]] = {
            "log": self._log,
            "forward": self._forward,
            "model": models.serve,
        }

    async def serve(self, link: HostLink) -> None:
        """Answer one request, and close the link."""
        self._links += 1
        try:
            if self._links > MAX_LINKS:
                raise Unavailable(f"this host already answers {MAX_LINKS} requests, which is the limit")
            request = await link.receive(_REQUEST_LIMIT_S)
            operation = self._operations.get(str(request.get("op")))
            if operation is None:
                raise InvalidInput(f"op: one of {', '.join(self._operations)}")
            await operation(link, request)
        except (ValueError, TypeError, KeyError) as error:
            await _refuse(link, InvalidInput(f"malformed request: {error!r}"))
        except OSError as error:
            await _refuse(link, Internal(f"{error.filename or 'a file'}: {error.strerror or error}"))
        except TeimgrError as error:
            await _refuse(link, error)
        finally:
            self._links -= 1
            await link.finish()

    async def _log(self, link: HostLink, request: dict[str, Any]) -> None:
        if not link.peer.is_daemon:
            raise Forbidden("logs are for the daemon alone")
        name, filter = check_name(str(request["name"])), LogFilter.from_json(request["filter"])
        opened = await self._logs.open(name, filter, follow=bool(request["follow"]))
        if opened is None:
            await link.send(absent=True)
            return
        try:
            await link.send(total=opened.total)
            wanted = await link.receive(_REQUEST_LIMIT_S)
            async with aclosing(opened.past(int(wanted["start"]), int(wanted["end"]))) as past:
                async for batch in past:
                    await link.send(lines=_packed(batch))
            await link.send(past=True)
            if request["follow"]:
                clock = asyncio.get_running_loop().time
                sent_at = clock()
                async with aclosing(opened.live()) as live:
                    async for batch in live:
                        if batch or clock() - sent_at >= ALIVE_S:
                            await link.send(lines=_packed(batch))
                            sent_at = clock()
        finally:
            await opened.close()

    async def _forward(self, link: HostLink, request: dict[str, Any]) -> None:
        if not link.peer.is_daemon:
            raise Forbidden("instance ports are forwarded for the daemon alone")
        if self._forwarded >= most_forwarded():
            raise Unavailable(f"this host has {self._forwarded} forwarded connections already")
        self._links -= 1  # forwarded connections have their own limit
        self._forwarded += 1
        try:
            near = await self._connect_port([str(each) for each in request["workers"]])
            try:
                await link.send(connected=True)
                await near.relay(link, is_worker=True)
            except (OSError, Unavailable) as error:
                log.debug("a forwarded connection broke", extra={"peer": link.peer.uri, "reason": str(error)})
                near.reset()
                await link.close()
            except BaseException:
                near.reset()
                raise
            else:
                near.close()
                await link.finish(STALL_S)
        finally:
            self._forwarded -= 1
            self._links += 1

    async def _connect_port(self, workers: Sequence[str]) -> NearEnd:
        address = next((found for each in workers if (found := self._port_of(each))), None)
        if address is None:
            raise Unavailable("this host has none of the workers")
        try:
            async with asyncio.timeout(_PORT_LIMIT_S):
                return await NearEnd.connect(*address)
        except OSError as error:
            raise Unavailable(f"port {address[1]} does not answer there: {str(error) or 'timeout'}") from error


async def _refuse(link: HostLink, error: TeimgrError) -> None:
    log.info("a request of another host ended", extra={"peer": link.peer.uri, "reason": error.message})
    with suppress(Unavailable):  # the peer is gone
        await link.send(error=pack_error(error))


def _packed(batch: Batch) -> list[str | dict[str, str]]:
    return [item if isinstance(item, str) else {"gap": item.reason} for item in batch]


class HostListener(FleetListener):
    """Accepts requests of other hosts on `host`, at a free port, and has `service` answer them.

    Raises:
        PortConflict: the address cannot be bound.
    """

    def __init__(self, service: HostService, identity: FleetIdentity, host: str) -> None:
        listener = bind(host, 0, "host service")
        listener.listen(_BACKLOG)
        super().__init__(listener, identity, self._stream, MAX_LINKS + most_forwarded() + _REFUSED, noun="request")
        self._service = service
        self._links: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End open requests, and stop listening."""
        await super().close()
        for task in self._links:
            task.cancel()
        if self._links:
            await asyncio.wait(self._links)

    def _stream(self, ticket: Ticket) -> asyncio.BaseProtocol:
        return GatedStream(ticket, partial(self._connected, ticket))

    def _connected(self, ticket: Ticket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ticket.enter(Phase.ANSWER)  # its certificate of the fleet was verified
            set_tcp_limits(writer.transport)
            peer = peer_of(writer.get_extra_info("ssl_object"))
            self.identity.check(peer)
        except (OSError, TeimgrError) as error:
            writer.transport.abort()
            self.log_refusal(ticket.client, error)
            return
        link = HostLink(reader, writer, peer.name, peer.name.node or "daemon")
        task = asyncio.create_task(self._service.serve(link))
        self._links.add(task)
        task.add_done_callback(self._links.discard)


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
