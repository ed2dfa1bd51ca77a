"""The worker's end of its links: fronts send calls, the daemon watches."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from teimgr.errors import Cancelled, InvalidInput, TeimgrError
from teimgr.wire.frames import Flag, FrameProtocol, FrameType, Header, Method, pack_error, pack_header
from teimgr.worker.calls import LinkCall
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods import handle

log = logging.getLogger(__name__)

# Frames carry a whole gRPC message; what frames add around it is well under this.
FRAME_SLACK_BYTES = 64 * 1024

# How long a command may take that came without a deadline.
CONTROL_LIMIT_S = 5.0

Control = Callable[[bytes, float], Awaitable[bytes]]


class Links:
    """All links of one worker, the watchers among them, and the commands the daemon may give.

    `controls` maps a control method to what carries it out: JSON bytes and a limit in seconds in, JSON bytes out.
    `ports` are the sockets that a worker of the same instance may have copies of, by number.
    """

    def __init__(self, dispatcher: Dispatcher, controls: dict[Method, Control]) -> None:
        self.dispatcher = dispatcher
        self.controls = controls
        self.max_frame_bytes = dispatcher.spec.max_message_bytes + FRAME_SLACK_BYTES
        self.open: set[Link] = set()
        self.ports: dict[int, socket.socket] = {}
        self.has_shared_ports = False
        self.watched = asyncio.Event()
        self.unwatched = asyncio.Event()
        self.unwatched.set()
        self._none_open = asyncio.Event()
        self._watchers: dict[Link, int] = {}
        self._announcement = b"{}"

    def protocol(self) -> Link:
        """A link for a connection that was accepted."""
        return Link(self)

    @property
    def is_watched(self) -> bool:
        """Whether a daemon is looking."""
        return bool(self._watchers)

    @property
    def has_callers(self) -> bool:
        """Whether anybody is connected who has sent calls; one that only looks does not count."""
        return any(link.is_callers for link in self.open)

    def announce(self, facts: dict[str, Any]) -> None:
        """Tell every watcher, and each later one first thing."""
        self._announcement = json.dumps(facts).encode()
        for link, id in self._watchers.items():
            link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def watch(self, link: Link, id: int) -> None:
        """From now on `link` hears of every change, starting with how things stand."""
        self._watchers[link] = id
        self.watched.set()
        self.unwatched.clear()
        link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def forget(self, link: Link) -> None:
        """The peer of `link` is gone."""
        self.open.discard(link)
        if not self.open:
            self._none_open.set()
        if self._watchers.pop(link, None) is not None and not self._watchers:
            self.watched.clear()
            self.unwatched.set()

    async def close(self, limit_s: float) -> None:
        """Close every link, after what is queued for it, or after `limit_s`."""
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


class Link(FrameProtocol):
    """One accepted connection."""

    def __init__(self, links: Links) -> None:
        super().__init__(links.max_frame_bytes)
        self.is_callers = False
        self._links = links
        self._unanswered: dict[int, LinkCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be counted."""
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=self._links.max_frame_bytes)
        self._links.open.add(self)

    def pause_writing(self) -> None:
        """The peer does not take its answers: read no more requests until it does."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def frame_received(self, header: Header, payload: bytes) -> None:
        """Sort a frame by its type and method."""
        if header.type == FrameType.CANCEL:
            self._cancel(header.id)
        elif header.type != FrameType.REQUEST:
            log.warning("a peer sent a frame of type %d, which only workers send", header.type)
        elif header.method == Method.WATCH:
            self._links.watch(self, header.id)
        elif header.method == Method.SHARE_PORTS:
            self._share_ports(header)
        elif header.method in self._links.controls:
            self._control(header, payload)
        else:
            self.is_callers = True
            handle(self._links.dispatcher, LinkCall(self, self._unanswered, header, payload))

    def link_lost(self, error: Exception | None) -> None:
        """Nothing the peer asked for is wanted any more."""
        self._links.forget(self)
        for id in tuple(self._unanswered):
            self._cancel(id)
        for task in tuple(self._tasks):
            task.cancel()

    def _cancel(self, id: int) -> None:
        call = self._unanswered.pop(id, None)
        if call is not None:
            self._links.dispatcher.cancel(call)

    def _share_ports(self, header: Header) -> None:
        """Answer on the connection's own socket: descriptors travel beside bytes, and a transport sends bytes alone.

        Who asks does so first thing on a new connection, so nothing is on its way that this could come before.
        """
        assert self._transport is not None
        numbers = json.dumps([*self._links.ports]).encode()
        frame = pack_header(len(numbers), FrameType.REPLY, header.method, header.id) + numbers
        descriptors = [port.fileno() for port in self._links.ports.values()]
        self._links.has_shared_ports |= bool(descriptors)
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as own:
            socket.send_fds(own, [frame], descriptors)

    def _control(self, header: Header, payload: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._obey(header, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _obey(self, header: Header, payload: bytes) -> None:
        try:
            limit_s = header.deadline_ms / 1000 or CONTROL_LIMIT_S
            reply = await self._links.controls[Method(header.method)](payload, limit_s)
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
