"""HTTP connections of our servers: HTTP/1.1 within the limits of a connection gate, and the detection of HTTP/2."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from teimgr.http.bodies import SINGLE_HEADERS, UNREAD, UnreadOfPort, is_host
from teimgr.http.byte_budget import Charge
from teimgr.http.connection_gate import LIMITS, ClosedConnection, Phase, StallGuard, Ticket
from teimgr.http.direct import Answer, Direct, DirectExchange
from teimgr.http.turns import PART_UNITS, REQUEST_UNITS, LoopTurns

_FLUSH_POLL_S = 0.01

# Prefix of HTTP/2's connection preface (prior knowledge) that cannot start an HTTP/1 request.
_H2_PREFACE = b"PRI * HTTP/2.0"
_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = cast(int, LIMITS[Phase.HEAD].bytes)
_MAX_DISCARDED_BYTES = cast(int, LIMITS[Phase.DISCARD].bytes)
_MAX_FIELDS = 256  # a field has an overhead of about 150 bytes
# Limit of pipelined requests; parsing pauses until one has been answered.
_MAX_PIPELINED = 4
# Received data is parsed in pieces of this size, except bodies of known length.
_PIECE_BYTES = 4 * 2**10
# The budget of callbacks per further piece (chunks of a body, fields of a head); each takes 1 to 3 µs.
_PIECE_UNITS = 8
# Heads are parsed in C, and small queries of 64 callers that arrive in one turn should form one batch.
_REQUEST_UNITS = REQUEST_UNITS // 3
# Bytes of a body, fields of a head, and bytes of a head that cost as much as a chunk.
_BYTES_PER_UNIT, _FIELDS_PER_UNIT, _HEAD_BYTES_PER_UNIT = 8 * 2**10, 4, 256
_FRAMING = (b"content-length", b"transfer-encoding")
# A small body often arrives right after its head. A short wait for it avoids waking a reader.
_SMALL_BODY_BYTES = 64 * 2**10
_HOLD_S = 0.1


class H2Connection(Protocol):
    """The methods of an HTTP/2 connection that the server calls, in addition to asyncio's."""

    def leave(self) -> None:
        """Send GOAWAY, so that the client opens another connection for its next call."""

    def shutdown(self) -> None:
        """Close, because the server ends."""


# Gets an idle connection that another process will serve.
PassOn = Callable[[socket.socket], None]
# Makes the protocol of a new connection, which then owns the ticket.
H2Factory = Callable[["ServerConnections", Ticket], asyncio.Protocol]


class ListenerState(ServerState):
    """Uvicorn's lists of connections and tasks, with the state of a shutdown.

    Attributes:
        is_leaving: Whether clients should move to other connections.
        has_ended: Whether connections are refused.
        tasks_of: Number of stream tasks by caller (address or key).
    """

    is_leaving = False
    has_ended = False

    def __init__(self) -> None:
        super().__init__()
        self.tasks_of: Counter[Hashable] = Counter()

    def leave(self) -> None:
        self.is_leaving = True

    def end(self) -> None:
        self.has_ended = True


class ServerConnections(ListenerState):
    """The state of an HTTP server that its protocols use.

    Attributes:
        config: Uvicorn's configuration, with the application.
        pass_on: Passes connections to another process when the server leaves.
        direct: Answers requests without ASGI.
        unread_replies: Budget of reply bytes that clients have not read.
    """

    def __init__(self, config: Config, direct: Direct | None = None) -> None:
        super().__init__()
        self.config = config
        self.direct = direct
        self.pass_on: PassOn | None = None
        self.unread_replies = UnreadOfPort()

    def leave_to(self, pass_on: PassOn | None) -> None:
        """Note that the server leaves, and passes connections on to `pass_on`."""
        self.leave()
        self.pass_on = pass_on


def _detach(transport: asyncio.Transport) -> socket.socket:
    """Return the connection as a socket; the transport is closed, the connection is not."""
    transport.pause_reading()
    connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    transport.abort()
    return connection


class _Flow(FlowControl):
    """Uvicorn's flow control, which also pauses reading while received bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_wanted = False  # uvicorn has requested a pause
        self._has_rest = False

    def pause_reading(self) -> None:
        self._is_wanted = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_wanted = False
        if not self._has_rest:
            super().resume_reading()

    def set_rest(self, has_rest: bool) -> None:
        self._has_rest = has_rest
        if has_rest:
            super().pause_reading()
        elif not self._is_wanted:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 that ignores offers of an upgrade, such as h2c, which Java's client offers with each request.

    httptools ends a request with such an offer after its head, so its body would be parsed as the next request: request
    smuggling behind a proxy. A new parser continues there, after a head with the same framing.

    Each piece for the parser ends with a head or a body, so that parsing can stop once `_MAX_PIPELINED` requests wait.
    Trailers count as a head and are dropped. The connection's ticket has the phases and their limits.
    """

    server_state: ServerConnections
    _turns = LoopTurns()  # shared by all connections
    _exchange: DirectExchange | None = None  # the current one
    _begun: Any = None  # the current ASGI cycle; `cycle` may wait in the pipeline
    _held: DirectExchange | None = None  # waits for its small body
    _hold_timer: asyncio.TimerHandle | None = None
    _is_resuming = False
    _is_in_message = False
    _is_in_head = True
    _body_left: int | None = 0  # None for a chunked body
    _awaits_chunk = False  # after the length of a chunk, perhaps the last one
    _has_progress = False  # a body grew since the last check
    _overhead = 0  # bytes since a head began, or since the last byte of a body
    _discarded = 0
    _is_lost = False
    _closes_early = False  # close after the reply, before the request has ended
    _has_ticket = True
    _rest = b""  # received, not parsed yet
    _awaits_turn = False
    _units = 0  # cost of the current piece, counted by callbacks

    def __init__(self, *, ticket: Ticket, **rest: Any) -> None:
        super().__init__(**rest)
        self.parser = cast(Any, None)  # set by `connection_made`, but not after a failed TLS handshake
        self._ticket = ticket
        self._fields: Mapping[bytes, bytes] = {}  # of the current head; the first value of each name

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_parser()
        self.flow = self._flow = _Flow(transport)
        self._stall_guard = StallGuard(transport)
        self._unread = self.server_state.unread_replies.of_connection(self._ticket.client)
        self._buffered = Charge(self._unread)  # written, but still in the transport's buffer
        if not self._ticket.hand_to(self):
            transport.abort()
        elif self._ticket.phase is not Phase.IDLE:
            self._ticket.enter(Phase.HEAD)

    def eof_received(self) -> bool:  # type: ignore[override]
        return self._ticket.keeps_open(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closes_early and exc is None and not self.transport.get_write_buffer_size():
            task = ClosedConnection(self._ticket).take(self.transport)
            if task is not None:
                self._has_ticket = False
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        # Tasks may continue before `_lost`, and uvloop raises if they write.
        if self._begun is not None and not self._begun.response_complete:
            vars(self._begun).update(disconnected=True)  # like uvicorn, which also wakes the task
        if self._exchange is not None:
            self._exchange.lose()
        if not self._ticket.ends_later(partial(self._lost, exc)):
            self._lost(exc)

    def _lost(self, exc: Exception | None) -> None:
        if self._has_ticket:
            self._ticket.leave()
        self._stall_guard.resumed()
        self._buffered.release()
        self._rest = b""
        for exchange in (self._exchange, self._end_hold()):
            if exchange is not None:
                exchange.leave()
        if self._begun is not None and not self._begun.response_complete:
            self.cycle = self._begun  # uvicorn notifies only `cycle`; pipelined ones never begin
        super().connection_lost(exc)
        self._is_lost = True
        self._free()

    def _free(self) -> None:
        """Break the reference cycles of a lost connection, so that it is freed at once and not by a garbage collection.

        A collection over the objects of thousands of connections would block the event loop while it runs.
        """
        self.parser = cast(Any, None)
        if self.cycle is None or self.cycle.response_complete:
            self.cycle = cast(Any, None)
            self._exchange = None
            self._begun = None
        self.pipeline.clear()

    def on_expired(self, phase: Phase) -> None:
        """Called by the gate."""
        is_receiving = phase is Phase.BODY and (self._has_progress or self.flow.read_paused)
        if is_receiving or (phase is Phase.ANSWER and not self.transport.is_closing()):
            self._has_progress = False
            self._ticket.renew()
        else:
            self.transport.close()

    def on_displaced(self) -> None:
        """Called by the gate."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_guard.paused()
        self._buffered.add(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._buffered.release()
        super().resume_writing()
        self._stall_guard.resumed()

    def data_received(self, data: bytes) -> None:
        if self._ticket.phase is Phase.DISCARD:
            self._discarded += len(data)
            if self._discarded > _MAX_DISCARDED_BYTES:
                self.transport.close()
                return
        if self._rest:  # received after reading was paused
            self._rest += data
        else:
            self._feed(data)
            self._after_feed()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._discarded = 0
        self._closes_early = self.transport.is_closing() and self._is_in_message
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            if self._rest:
                self._await_turn()
        self._settle()
        if self.server_state.pass_on is not None:
            self.pass_on()
        if self._is_lost:
            self._free()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn too."""
        self._closes_early = True
        super().send_400_response(msg)

    def pass_on(self) -> None:
        """Pass the connection on if the server leaves and no request on it is being received or answered."""
        pass_on, is_answered = self.server_state.pass_on, self.cycle is None or self.cycle.response_complete
        if pass_on is None or self._is_in_message or not is_answered or self.pipeline or self._rest:
            return
        if self.transport.is_closing():
            return
        self.flow.pause_reading()
        if self.transport.get_write_buffer_size():  # the last response is not sent yet
            self.loop.call_later(_FLUSH_POLL_S, self.pass_on)
        else:
            pass_on(_detach(self.transport))

    def shutdown(self) -> None:
        """Called by the server at its end: a connection that can be passed on is not closed."""
        if self.server_state.pass_on is None:
            super().shutdown()
        else:
            self.pass_on()

    def _settle(self) -> None:
        """Enter the phase that the present state requires."""
        if not self._has_ticket:
            return
        ticket, cycle = self._ticket, self.cycle
        is_answered = cycle is None or cycle.response_complete
        phase = ticket.phase
        if self.transport.is_closing():
            phase = Phase.CLOSING
        elif self._is_in_message and not self._is_in_head:
            phase = Phase.DISCARD if is_answered else Phase.HEAD if self._awaits_chunk else Phase.BODY
        elif not is_answered:
            phase = Phase.ANSWER
        elif self._overhead:
            phase = Phase.HEAD
        elif cycle is not None and not self._rest:
            phase = Phase.IDLE
        if phase is not ticket.phase and phase is not None:
            ticket.enter(phase)
        held = self._overhead
        if self._rest:
            held += len(self._rest)
        if self._held is not None:
            held += len(self._held.body)
        if held != ticket.held:
            ticket.hold(held)

    def _after_feed(self) -> None:
        if self._held is not None and self._hold_timer is None and not self.transport.is_closing():
            if self.expect_100_continue or not 0 < (self._body_left or 0) <= _SMALL_BODY_BYTES:
                self._begin_held()
            else:
                self._hold_timer = self.loop.call_later(_HOLD_S, self._begin_held)
        self._settle()
        if self.server_state.pass_on is not None:  # the response may have been complete before the request
            self.pass_on()

    def _feed(self, data: bytes) -> None:
        """Parse as much as may be parsed in this turn of the event loop, and keep the rest."""
        start, size, units = 0, len(data), self._turns.units
        left = units
        try:
            while start < size and left > 0 and len(self.pipeline) < _MAX_PIPELINED:
                end = self._end_of_piece(data, start)
                self._overhead += end - start
                self._units = (end - start) // _BYTES_PER_UNIT
                try:
                    self.parser.feed_data(data if end - start == size else memoryview(data)[start:end])
                    start = end
                except httptools.HttpParserUpgrade as upgrade:
                    start += upgrade.args[0]
                    self._ignore_upgrade()
                left -= self._units if start == size else self._units + _PIECE_UNITS
                if self._is_in_message and self._is_in_head:
                    self._overhead = self._overhead or size  # the next head has begun
                    left -= len(self.headers)
                    self._check_count()
                if self._overhead > _MAX_HEAD_BYTES:
                    left -= _REQUEST_UNITS
                    self.send_400_response(f"The head of the request is over {_MAX_HEAD_BYTES} bytes.")
                    return
        except httptools.HttpParserError:
            left -= _REQUEST_UNITS
            self.send_400_response("Invalid HTTP request received.")
            return
        finally:
            self._turns.spend(units - left)
        if start < size:
            self._rest = data[start:]
            self._flow.set_rest(True)
            if left <= 0:
                self._await_turn()

    def _await_turn(self) -> None:
        if not self._awaits_turn:
            self._awaits_turn = True
            self._turns.wait(self._ticket.network, self._feed_rest)

    def _feed_rest(self) -> int:
        """Parse some of the rest; called by the turns. Returns the units that the next part needs, or 0."""
        data, self._rest = self._rest, b""
        if data and not self.transport.is_closing():
            self._feed(data)
            if not self._rest:
                self._flow.set_rest(False)
            self._after_feed()
        self._awaits_turn = bool(self._rest) and len(self.pipeline) < _MAX_PIPELINED
        return PART_UNITS if self._awaits_turn else 0

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return where a head or a body ends, or the trailers may end, else the end of `data` or of a piece of it.

        Short data that ends at most one head is one piece: it does not make two requests.
        """
        end = len(data)
        if not start and end <= _PIECE_BYTES and data.find(_HEAD_END) == data.rfind(_HEAD_END):
            return end
        if not self._is_in_head and self._body_left is not None:
            return min(end, start + self._body_left)
        end = min(end, start + _PIECE_BYTES)
        found = data.find(_HEAD_END, max(0, start - len(_HEAD_END) + 1), end)  # it may be split between two pieces
        return end if found < 0 else found + len(_HEAD_END)

    def on_message_begin(self) -> None:
        self._is_in_message = self._is_in_head = True
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[UNREAD] = self._unread

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer
            return
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._units += _REQUEST_UNITS + len(self.headers) // _FIELDS_PER_UNIT + self._overhead // _HEAD_BYTES_PER_UNIT
        self._is_in_head, self._overhead = False, 0
        self._fields = fields = dict(reversed(self.headers))
        self._body_left = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))
        if self._is_resuming:
            return
        self._check_fields(fields)
        method, direct = self.parser.get_method(), self.server_state.direct
        if method == b"CONNECT":
            raise ValueError("CONNECT is not supported")
        answer = None if direct is None else direct(method, self.url)
        if answer is None:
            super().on_headers_complete()
        else:
            self.scope["method"] = method.decode("ascii")
            self._answer_directly(answer)

    def _check_fields(self, fields: Mapping[bytes, bytes]) -> None:
        """Raise HttpParserError, or ValueError of which the parser makes one, if a field of the head is not valid."""
        self._check_count()
        if len(fields) < len(self.headers):
            names = [name for name, _ in self.headers]
            if any(names.count(name) > 1 for name in SINGLE_HEADERS):
                raise ValueError("a header is repeated")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.strip().lower() != b"chunked" or self.parser.get_http_version() == "1.0"):
            raise ValueError("unsupported transfer coding")
        if (host := fields.get(b"host")) is None:
            if self.parser.get_http_version() == "1.1":
                raise ValueError("an HTTP/1.1 request needs exactly one Host header (RFC 9112, 3.2)")
        elif not is_host(host):
            raise ValueError("not a host")
        if b"expect" in fields:
            self.expect_100_continue = any(
                name == b"expect" and value.lower() == b"100-continue" for name, value in self.headers
            )

    def _check_count(self) -> None:
        """Raise HttpParserError if the head has too many fields."""
        if len(self.headers) > _MAX_FIELDS:
            raise httptools.HttpParserError("too many headers")

    def on_chunk_header(self) -> None:
        self._awaits_chunk = True
        self._units += 1

    def on_body(self, body: bytes) -> None:
        self._overhead, self._awaits_chunk, self._has_progress = 0, False, True
        if self._body_left is not None:
            self._body_left -= len(body)
        if self._held is not None:
            self._held.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # otherwise `_ignore_upgrade` follows
            self._is_in_message, self._is_in_head, self._overhead, self._awaits_chunk = False, True, 0, False
            if self._held is not None:
                self._held.end()
                self._begin_held()
            else:
                super().on_message_complete()

    def _answer_directly(self, answer: Answer) -> None:
        """Answer a request whose head has arrived without ASGI, after the requests before it."""
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        exchange = DirectExchange(self, answer, self._fields, keep_alive=keep_alive, unread=self._unread)
        former, self.cycle = self.cycle, cast(Any, exchange)
        if former is None or former.response_complete:
            self._held = exchange
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _begin_held(self) -> None:
        if (held := self._end_hold()) is not None:
            self._start_asgi_task(held, self.app)

    def _end_hold(self) -> DirectExchange | None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        held, self._held = self._held, None
        return held

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Called by uvicorn too, when the answer to the request before is complete."""
        if not isinstance(cycle, DirectExchange):
            self._begun = cycle
            super()._start_asgi_task(cycle, app)
            return
        self._exchange = cycle
        task = cycle.begin()
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _make_parser(self) -> None:
        """Make a parser. It has bound methods of this object: a reference cycle until `_free`."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn

    def _ignore_upgrade(self) -> None:
        framing = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self._make_parser()
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
        self._is_resuming = False


class ProtocolSniffer(asyncio.Protocol):
    """Detects HTTP/2 or HTTP/1 from the first bytes of a connection and switches to that protocol.

    The server creates both protocols with the same keyword arguments.
    """

    def __init__(
        self,
        h2: H2Factory,
        http1: type[HttpProtocol] = HttpProtocol,
        *,
        server_state: ServerConnections,
        ticket: Ticket,
        **rest: Any,
    ) -> None:
        self._h2 = h2
        self._http1 = http1
        self._state = server_state
        self._ticket = ticket
        self._rest = rest
        self._seen = b""
        self._is_waiting = False  # for its turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._state.connections.add(cast(Any, self))
        if not self._ticket.hand_to(self):
            self.transport.abort()
            return
        if self._ticket.phase is not Phase.IDLE:
            self._ticket.enter(Phase.HEAD)
        self.pass_on()  # accepted while the server left

    def on_expired(self, phase: Phase) -> None:
        """Called by the gate."""
        self.transport.close()

    def on_displaced(self) -> None:
        """Called by the gate."""
        self.transport.abort()

    def pass_on(self) -> None:
        """Pass the connection on if the server leaves and nothing was received."""
        if self._state.pass_on is not None and not self._seen and not self.transport.is_closing():
            self._state.pass_on(_detach(self.transport))

    def data_received(self, data: bytes) -> None:
        self._seen += data
        is_undecided = len(self._seen) < len(_H2_PREFACE) and _H2_PREFACE.startswith(self._seen)
        if is_undecided or self._is_waiting:
            return
        self._is_waiting = self._ticket.begins_later(self._begin)
        if self._is_waiting:
            self.transport.pause_reading()
        else:
            self._begin()

    def _begin(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_waiting:
            self.transport.resume_reading()
        self._state.connections.discard(cast(Any, self))
        protocol: Any
        if self._seen.startswith(_H2_PREFACE):
            protocol = self._h2(self._state, self._ticket)
        else:
            protocol = self._http1(server_state=self._state, ticket=self._ticket, **self._rest)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if self._state.pass_on is not None and not isinstance(protocol, HttpProtocol):
            protocol.leave()
        protocol.data_received(self._seen)

    def eof_received(self) -> bool:
        return self._ticket.keeps_open(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._ticket.leave()

    def shutdown(self) -> None:
        """Called by uvicorn as the server ends. What was received of a first request is answered if others move."""
        if self._state.pass_on is None or not self._seen:
            self.transport.close()
