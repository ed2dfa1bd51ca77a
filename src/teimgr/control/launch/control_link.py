"""Control links of the daemon to one worker and to one mux process, over a Unix socket or, on other hosts, mutual TLS.

A worker sends its status as it changes, in frames, and answers the calls of supervision. A mux gets routes and access
policy as lines of JSON and answers with its counters; `mux/control.py` has the messages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from teimgr.errors import DeadlineExceeded, TeimgrError, Unavailable
from teimgr.spec import LoadedModel, WorkerEndpoint, known
from teimgr.wire.fleet_tls import FleetIdentity, FleetName, peer_of
from teimgr.wire.frames import FrameProtocol, FrameType, Header, Method, Received, unpack_error
from teimgr.wire.json_messages import MAX_MUX_LINE_BYTES, read_line, write_line
from teimgr.wire.remote_frames import RemoteAddress, RemoteFrames, WrongPeer, connect, set_tcp_limits

CONNECT_LIMIT_S = 5.0
_FRAME_LIMIT_BYTES = 1 << 20
_WATCH_ID = 0
_CONNECT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's status, sent on WATCH at once and at each change.

    `address` is its listener for other hosts, if any. `build` is the `code_id` of its code, "" for workers older than
    this field.
    """

    state: str
    pid: int
    incarnation: str
    spec_hash: str
    model: LoadedModel | None = None
    reason: str | None = None
    code: int | None = None
    permanent: bool = False
    threads: int = 0
    node: str = ""
    address: str = ""
    build: str = ""

    @classmethod
    def from_json(cls, payload: bytes) -> WorkerStatus:
        """Parse the payload of a WATCH reply.

        Raises:
            ValueError: it is not a status.
        """
        try:
            values: dict[str, Any] = json.loads(payload)
            model = values.pop("model", None)
            return cls(**known(cls, values), model=LoadedModel.from_dict(model) if model else None)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a worker's status: {error}") from error


class ControlLink(FrameProtocol):
    """A worker's connection. `on_status` is called in the event loop with each status, `on_lost` once at the end."""

    def __init__(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> None:
        super().__init__(_FRAME_LIMIT_BYTES)
        self._on_status = on_status
        self._on_lost = on_lost
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = count(_WATCH_ID + 1)

    @classmethod
    async def open(cls, socket: Path, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> Self:
        """Connect to the worker's socket and watch its status.

        Raises:
            Unavailable: no connection within `CONNECT_LIMIT_S`.
        """
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                _, link = await asyncio.get_running_loop().create_unix_connection(
                    lambda: cls(on_status, on_lost), str(socket)
                )
        except OSError as error:  # TimeoutError is one of them
            raise Unavailable(f"no connection to the worker: {error}") from error
        link.send(FrameType.REQUEST, Method.WATCH, _WATCH_ID)
        return link

    async def call(self, method: Method, payload: bytes = b"", *, timeout_s: float) -> bytes:
        """Send a request; the result is the payload of its reply.

        Raises:
            DeadlineExceeded: no reply in time.
            Unavailable: the link is or becomes closed.
            TeimgrError: the worker answered with an error.
        """
        reply = self.begin(method, payload, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {method.name} within {timeout_s:g} s") from None

    def begin(self, method: Method, payload: bytes = b"", *, timeout_s: float) -> asyncio.Future[bytes]:
        """Send a request with this deadline; the future, which the caller cancels, gets the payload of its reply.

        Raises:
            Unavailable: the link is closed. The future's errors are those of `call`, but for the deadline's.
        """
        if not self.is_open:
            raise Unavailable("the link to the worker is closed")
        id = next(self._ids)
        reply = self._calls[id] = self._loop.create_future()
        reply.add_done_callback(lambda _: self._calls.pop(id, None))
        self.send(FrameType.REQUEST, method, id, payload, deadline_ms=round(timeout_s * 1000))
        return reply

    async def drain(self, grace_s: float, *, handover: bool, timeout_s: float) -> None:
        """Have the worker finish its calls within `grace_s` and exit; with `handover` it leaves its ports first.

        Raises:
            TeimgrError: as `call`; the worker has not confirmed it.
        """
        payload = json.dumps({"grace_s": grace_s, "handover": handover}).encode()
        await self.call(Method.DRAIN, payload, timeout_s=timeout_s)

    def notify(self, method: Method, **values: object) -> bool:
        """Send a request and ignore its reply; False if the link is closed."""
        if self.is_open:
            self.send(FrameType.REQUEST, method, next(self._ids), json.dumps(values).encode())
        return self.is_open

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.id == _WATCH_ID:
            self._watched(header, payload)
            return
        reply = self._calls.get(header.id)
        if reply is None or reply.done():
            return
        if header.type == FrameType.ERROR:
            reply.set_exception(unpack_error(payload))
        else:
            reply.set_result(bytes(payload))

    def link_lost(self, error: Exception | None) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Unavailable("the worker closed the link"))
        self._on_lost()

    def _watched(self, header: Header, payload: Received) -> None:
        try:
            status = WorkerStatus.from_json(bytes(payload))
        except ValueError:
            self.close()  # not a worker, or one of an incompatible version
            return
        if header.type == FrameType.REPLY:
            self._on_status(status)


Connect = Callable[[Callable[[WorkerStatus], None], Callable[[], None]], Awaitable[ControlLink]]
"""Opens a control link with this `on_status` and `on_lost`."""


async def identify(socket: Path, timeout_s: float) -> WorkerStatus | None:
    """The present status of the worker at `socket`; None without an answer in time."""
    return await first_status(partial(ControlLink.open, socket), timeout_s)


async def first_status(connect: Connect, timeout_s: float) -> WorkerStatus | None:
    """The present status of the worker that `connect` reaches; None without an answer in time."""
    first: asyncio.Future[WorkerStatus | None] = asyncio.get_running_loop().create_future()

    def settle(status: WorkerStatus | None) -> None:
        if not first.done():
            first.set_result(status)

    try:
        link = await connect(settle, lambda: settle(None))
    except TeimgrError:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            return await first
    except TimeoutError:
        return None
    finally:
        link.close()


class MuxLost(Exception):
    """The mux cannot be reached or does not answer; the text is the reason."""


class MuxDisconnected(MuxLost):
    """The connection to the mux broke; the mux may still run."""


class MuxStopping(MuxLost):
    """Another process stopped the mux: it finishes its calls within `grace_s`, and its port is free."""

    def __init__(self, grace_s: float) -> None:
        super().__init__("it was stopped by another process")
        self.grace_s = grace_s


_UNASKED = frozenset({"load", "left", "lease", "settled", "used"})


class MuxLink:
    """The daemon's control connection to a mux. A read is always pending, to notice its end at once.

    `has_answered` is set by the first reply.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._reading = asyncio.ensure_future(read_line(reader))
        self.has_answered = False
        self._on_request: Callable[[dict[str, Any]], None] = lambda message: None

    @classmethod
    async def open(cls, path: str, limit_s: float) -> MuxLink:
        """Connect to the socket, which appears once the gRPC port is bound.

        Raises:
            MuxLost: it does not appear.
        """
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return cls(*await asyncio.open_unix_connection(path, limit=MAX_MUX_LINE_BYTES))
                    except (FileNotFoundError, ConnectionRefusedError):
                        await asyncio.sleep(_CONNECT_RETRY_S)
        except OSError as error:  # TimeoutError is one of them
            raise MuxLost(f"cannot connect to its control socket: {str(error) or 'timeout'}") from error

    def requests_go_to(self, handler: Callable[[dict[str, Any]], None]) -> None:
        """Call `handler` with what the mux sends unasked (`mux/control.py`)."""
        self._on_request = handler

    def send(self, **values: str) -> None:
        """Send a message of values that are JSON already."""
        members = ", ".join(f'"{key}": {value}' for key, value in values.items())
        self._writer.write(f"{{{members}}}\n".encode())

    async def ask(self, request: str) -> dict[str, Any]:
        """The answer to `stats`, or to `ack`, which confirms what was sent before.

        Raises:
            MuxLost: the connection broke, or the answer is not valid.
        """
        self.send(**{request: "true"})
        try:
            await self._writer.drain()
        except OSError as error:
            raise MuxDisconnected(f"its control connection broke: {error}") from error
        while True:
            await asyncio.wait((self._reading,))
            if (message := self._message()) is not None:
                return message

    async def wait(self, changed: asyncio.Event, limit_s: float) -> bool:
        """True if there is a change within `limit_s`.

        Raises:
            MuxLost: the mux ends.
        """
        waiting = asyncio.ensure_future(changed.wait())
        clock = asyncio.get_running_loop().time
        ends = clock() + limit_s
        try:
            while not changed.is_set() and (left_s := ends - clock()) > 0:
                await asyncio.wait((waiting, self._reading), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if self._reading.done():
                    self._message()
        finally:
            waiting.cancel()
        return changed.is_set()

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()

    def _message(self) -> dict[str, Any] | None:
        """The answer that was read; None for a message that the mux sent unasked."""
        try:
            message = self._reading.result()
        except OSError as error:
            raise MuxDisconnected(f"its control connection broke: {error}") from error
        except ValueError as error:
            raise MuxLost(f"cannot read its reply: {error}") from error
        if message is None:
            raise MuxDisconnected("it closed its control connection")
        self._reading = asyncio.ensure_future(read_line(self._reader))
        if "stopping" in message:
            raise MuxStopping(float(message["stopping"]))
        if not _UNASKED.isdisjoint(message):
            self._on_request(message)
            return None
        self.has_answered = True
        return message


_RETRY_PAUSE_S = 0.25


class RemoteControlLink(RemoteFrames, ControlLink):
    """Like `ControlLink`, but a silent worker of another host is given up within seconds."""

    ends_when_revoked = False  # used to end the workers of a removed host


async def open_control_link(
    endpoint: WorkerEndpoint,
    identity: FleetIdentity | None,
    on_status: Callable[[WorkerStatus], None],
    on_lost: Callable[[], None],
) -> ControlLink:
    """Connect to a worker and watch its status: by its unix socket on this host, over TLS on another one.

    `identity` has the daemon's certificate; workers refuse control commands of others.

    Raises:
        Unavailable: no connection within `CONNECT_LIMIT_S`, or not to this incarnation.
    """
    if endpoint.is_on(identity.node if identity else ""):
        return await ControlLink.open(Path(endpoint.socket), on_status, on_lost)
    if identity is None:
        raise Unavailable("no connection to the worker: this process has no identity in the fleet")
    address = RemoteAddress.parse(endpoint.address, endpoint.node, endpoint.incarnation)
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            link = await connect(lambda: RemoteControlLink(on_status, on_lost), address, identity)
    except (OSError, TeimgrError) as error:  # TimeoutError is an OSError
        raise Unavailable(f"no connection to the worker: {str(error) or 'no answer'}") from error
    link.send(FrameType.REQUEST, Method.WATCH, _WATCH_ID)
    return link


async def open_mux_link(address: RemoteAddress, identity: FleetIdentity, limit_s: float) -> MuxLink:
    """Connect to a mux of another host, which is tried again until it answers.

    Raises:
        MuxLost: no connection within `limit_s`, or not to this incarnation.
    """
    problem = "timeout"
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    return MuxLink(*await _greet(address, identity))
                except (OSError, ValueError, TeimgrError) as error:
                    problem = str(error) or type(error).__name__
                await asyncio.sleep(_RETRY_PAUSE_S)
    except TimeoutError:
        raise MuxLost(f"cannot connect to its control port on host {address.node}: {problem}") from None


async def _greet(address: RemoteAddress, identity: FleetIdentity) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose other end has proved that it is the mux that is expected. Raises OSError, TeimgrError."""
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=identity.client_context(), limit=MAX_MUX_LINE_BYTES
    )
    try:
        set_tcp_limits(writer.transport)
        peer = peer_of(writer.get_extra_info("ssl_object"))
        if peer.name != FleetName(address.node):
            raise WrongPeer(f"the certificate is for {peer.name.uri}, not for node '{address.node}'")
        write_line(writer, hello=address.incarnation)
        answer = await read_line(reader) or {}
        if answer.get("hello") != address.incarnation:
            raise WrongPeer(str(answer.get("error", "it closed the connection")))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer
