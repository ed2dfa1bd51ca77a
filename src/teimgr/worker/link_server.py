"""The worker's link server: framed connections over which calls, control commands and watches of its state arrive."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from teimgr.errors import Cancelled, InvalidInput, TeimgrError
from teimgr.observability.request_context import RequestContext
from teimgr.wire.frames import (
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    Method,
    Received,
    pack_error,
    pack_header,
    retry_after_ms,
)
from teimgr.worker.calls import CallReply, MethodCall
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods import handle

log = logging.getLogger(__name__)

# Upper bound of the bytes of a frame besides its message.
_FRAME_SLACK_BYTES = 64 * 1024
# Time limit of a control command without a deadline.
_CONTROL_LIMIT_S = 5.0

Control = Callable[[bytes, float], Awaitable[bytes]]


class LinkServer:
    """The link connections of one worker, the watchers among them, and its control commands.

    `controls` maps a control method to its handler: JSON bytes and a limit in seconds in, JSON bytes out. `ports` are
    the sockets of which other workers of the instance may get copies: listening sockets by port number, and the ends of
    the connection queue as -1 and -2.
    """

    def __init__(self, dispatcher: Dispatcher, controls: dict[Method, Control]) -> None:
        self.dispatcher = dispatcher
        self.controls = controls
        self.max_frame_bytes = dispatcher.spec.max_message_bytes + _FRAME_SLACK_BYTES
        self.open: set[LinkConnection] = set()
        self.ports: dict[int, socket.socket] = {}
        self.has_shared_ports = False
        self.watched = asyncio.Event()
        self.unwatched = asyncio.Event()
        self.unwatched.set()
        self._none_open = asyncio.Event()
        self._watchers: dict[LinkConnection, int] = {}
        self._announcement = b"{}"

    def share(self, ports: Mapping[int, socket.socket]) -> None:
        """Add sockets of which other workers of the instance get copies when they ask."""
        self.ports |= ports

    def protocol(self) -> LinkConnection:
        return LinkConnection(self)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    @property
    def has_callers(self) -> bool:
        """True if a connection has sent calls, not just control commands or watches."""
        return any(link.is_callers for link in self.open)

    def announce(self, facts: dict[str, Any]) -> None:
        """Send the worker's state to every watcher, and to later watchers when they connect."""
        self._announcement = json.dumps(facts).encode()
        for link, id in self._watchers.items():
            link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def watch(self, link: LinkConnection, id: int) -> None:
        self._watchers[link] = id
        self.watched.set()
        self.unwatched.clear()
        link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def remove(self, link: LinkConnection) -> None:
        self.open.discard(link)
        if not self.open:
            self._none_open.set()
        if self._watchers.pop(link, None) is not None and not self._watchers:
            self.watched.clear()
            self.unwatched.set()

    async def close(self, limit_s: float) -> None:
        """Close every connection once its queued frames are sent, or after `limit_s`."""
        self._none_open.clear()
        for link in tuple(self.open):
            link.close()
        if not self.open:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._none_open.wait()
        except TimeoutError:
            log.warning("%d links were not read to their end", len(self.open))


class LinkConnection(FrameProtocol):
    """One accepted link connection: its open calls, and flow control in both directions."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__(server.max_frame_bytes)
        self.is_callers = False
        self._server = server
        self._unanswered: dict[int, LinkCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=self._server.max_frame_bytes)
        self._server.open.add(self)

    def pause_writing(self) -> None:
        """Backpressure: stop reading requests while the peer does not read its replies."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.CANCEL:
            self._cancel(header.id)
        elif header.type != FrameType.REQUEST:
            log.warning("a peer sent a frame of type %d, which only workers send", header.type)
        elif header.method == Method.WATCH:
            self._server.watch(self, header.id)
        elif header.method == Method.SHARE_PORTS:
            self._share_ports(header)
        elif header.method in self._server.controls:
            task = asyncio.get_running_loop().create_task(self._run_control(header, payload))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.is_callers = True
            call = self._call(header, payload)
            self._server.dispatcher.turns.call(call.turns_of, partial(self._handle, call))

    def link_lost(self, error: Exception | None) -> None:
        self._server.remove(self)
        for id in tuple(self._unanswered):
            self._cancel(id)
        for task in tuple(self._tasks):
            task.cancel()

    def _call(self, header: Header, payload: Received) -> LinkCall:
        return LinkCall(self, self._unanswered, header, payload)

    def _handle(self, call: LinkCall) -> None:
        if call.header.id in self._unanswered:  # else it was cancelled before its turn
            handle(self._server.dispatcher, call)

    def _cancel(self, id: int) -> None:
        call = self._unanswered.pop(id, None)
        if call is not None:
            self._server.dispatcher.cancel(call)

    def _share_ports(self, header: Header) -> None:
        """Send the listening sockets over the connection's own socket, since an asyncio transport cannot send
        descriptors.

        The request is the first on its connection, so it overtakes no queued frame.
        """
        assert self._transport is not None
        numbers = json.dumps([*self._server.ports]).encode()
        frame = pack_header(len(numbers), FrameType.REPLY, header.method, header.id) + numbers
        descriptors = [port.fileno() for port in self._server.ports.values()]
        self._server.has_shared_ports |= bool(descriptors)
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as own:
            socket.send_fds(own, [frame], descriptors)

    async def _run_control(self, header: Header, payload: Received) -> None:
        try:
            limit_s = header.deadline_ms / 1000 or _CONTROL_LIMIT_S
            reply = await self._server.controls[Method(header.method)](bytes(payload), limit_s)
        except asyncio.CancelledError:
            self._fail(header, Cancelled("the worker is stopping"))
            raise
        except (ValueError, KeyError, TypeError) as error:
            self._fail(header, InvalidInput(f"malformed control message: {error}"))
        except TeimgrError as error:
            self._fail(header, error)
        except Exception as error:
            self._fail(header, masked(error))
        else:
            self.send(FrameType.REPLY, header.method, header.id, reply, flags=Flag.NONE)

    def _fail(self, header: Header, error: TeimgrError) -> None:
        self.send(FrameType.ERROR, header.method, header.id, pack_error(error))


class LinkCall(MethodCall):
    """A REQUEST frame, answered by one REPLY or ERROR frame.

    `unanswered` has the link's open calls by frame id; a call adds itself and removes itself when answered.
    """

    __slots__ = ("header", "link", "unanswered")

    def __init__(self, link: FrameProtocol, unanswered: dict[int, LinkCall], header: Header, payload: Received) -> None:
        deadline = time.monotonic() + header.deadline_ms / 1000 if header.deadline_ms else None
        super().__init__(header.method, payload, header.flags, deadline)
        self.link = link
        self.header = header
        if header.context:
            self.context = RequestContext.unpack(header.context)
        self.turns_of = self.tenant or link
        self.unanswered = unanswered
        unanswered[header.id] = self

    def reply(self, reply: CallReply) -> None:
        head, flags = reply.head, Flag.NONE
        if reply.timings is not None:
            head, flags = reply.timings.pack() + head, Flag.TIMINGS
        self.unanswered.pop(self.header.id, None)
        stats = self.context.stats if self.context is not None else None
        context = b"" if stats is None else stats.pack()
        method, id = self.header.method, self.header.id
        self.link.send(FrameType.REPLY, method, id, reply.payload, flags=flags, context=context, before=head)

    def fail(self, error: TeimgrError) -> None:
        self.unanswered.pop(self.header.id, None)
        retry_ms = retry_after_ms(error)
        self.link.send(FrameType.ERROR, self.header.method, self.header.id, pack_error(error), deadline_ms=retry_ms)
