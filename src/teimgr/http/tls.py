"""The server's end of a TLS connection, whose work is shared among the turns of the event loop.

The TLS of asyncio and uvloop processes all that was received in one go, up to 256 KiB. In records of one byte, or in
key updates (RFC 8446, section 4.6.3), that takes 10 to 100 ms for each connection, before a key or a certificate is
asked for. This one processes a few KiB at a time, for as long as `LoopTurns` has units left, and keeps 64 KiB at most.
It encrypts large writes in the same way: a reply of 40 MiB takes 35 to 65 ms.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from math import ceil
from typing import Any, ClassVar, cast

from teimgr.http.connection_gate import LIMITS, Phase
from teimgr.http.turns import PART_UNITS, TURN_UNITS, LoopTurns

# Bytes processed between two checks of the time; 1.5 ms if all are key updates.
_STEP_BYTES = 4096
_UNIT_S = 0.008 / TURN_UNITS  # all units of a turn are 8 ms
_RECORD_BYTES = 2**14  # maximum plain text
# Encrypted at a time: some 0.4 ms. What is written at once in no more bytes does not wait for a turn.
_WRITE_BYTES = 2**18
# Limits of the wait for the client's `close_notify` and of the data dropped meanwhile. asyncio clients may lose the end
# of a reply if the connection ends before they have sent it.
_CLOSE_LIMIT_S = 30.0
_MAX_DROPPED = cast(int, LIMITS[Phase.DISCARD].bytes)
# Limit of unread replies to key updates, above which the connection is aborted.
_MAX_UNREAD_ANSWERS = 2**16

Bytes = bytes | bytearray | memoryview


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """The transport of a protocol over TLS, which is itself the protocol of the TCP connection.

    `protocol` makes the protocol after the handshake; it may be an `asyncio.BufferedProtocol`. Connections with the
    same `caller` share turns.

    Attributes: handshake: Done when the handshake has ended. Its exception is an ssl.SSLError, or a ConnectionError if
    the connection ended before.
    """

    _turns = LoopTurns()  # shared by all connections
    # Receive buffer of all connections: processed or copied before the event loop receives more.
    _received: ClassVar = memoryview(bytearray(2**16))

    def __init__(
        self, context: ssl.SSLContext, protocol: Callable[[], asyncio.BaseProtocol], caller: Hashable = None
    ) -> None:
        super().__init__()
        self.handshake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._make_protocol = protocol
        self._caller = caller
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._protocol: Any = None
        self._below: Any = None  # the transport
        self._behind = memoryview(b"")  # received but not processed
        self._plain: list[bytes] = []  # decrypted but not passed to the protocol
        self._waits = False
        self._unencrypted: deque[memoryview] = deque()  # written, waits for its turn, or for the client to read
        self._unencrypted_bytes = 0
        self._encrypts_later = False
        self._is_paused = False  # the protocol has paused reading
        self._is_writing_paused = self._is_protocol_paused = False
        self._is_closing = False  # closed by the protocol
        self._is_over = False
        self._has_ended = self._has_told_end = False  # end of the client's data; the protocol was notified
        self._unread_answers = self._dropped = 0
        self._closing: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """True if it owns its socket."""
        return self._below is not None

    # The protocol of the connection below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._process(self._received[:nbytes])

    def eof_received(self) -> bool:
        self._has_ended = True
        if not self._behind and not self._plain:
            self._end()
        return True  # this class closes the transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = self._is_over = True
        if self._closing is not None:
            self._closing.cancel()
        self._behind, self._plain = memoryview(b""), []
        self._drop_unencrypted()
        protocol, self._protocol = self._protocol, None  # breaks a reference cycle
        if protocol is not None:
            protocol.connection_lost(exc)
        elif not self.handshake.done():
            self.handshake.set_exception(
                exc or ConnectionResetError("the client disconnected during the TLS handshake")
            )

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self._pause_or_resume_protocol()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._unread_answers = 0
        if self._unencrypted:
            self._encrypt_later()
        self._pause_or_resume_protocol()

    def _pause_or_resume_protocol(self) -> None:
        is_paused = self._is_writing_paused or bool(self._unencrypted)
        if is_paused == self._is_protocol_paused or self._protocol is None:
            return
        self._is_protocol_paused = is_paused
        if is_paused:
            self._protocol.pause_writing()
        else:
            self._protocol.resume_writing()

    # What is received.

    def _process(self, data: memoryview) -> None:
        """Process data as far as units are left, and the rest in later turns of the loop; until then nothing more is
        read."""
        rest = data[self._take(data) :]
        if rest and not self._is_over:
            self._behind = memoryview(bytes(rest))
            self._wait()
        self._deliver()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._below.pause_reading()
            self._turns.wait(self._caller, self._catch_up)

    def _catch_up(self) -> int:
        """Process a part of the backlog; return the units that the next part needs."""
        if not self._is_over and not self._is_paused:
            self._behind = self._behind[self._take(self._behind) :]
            self._deliver()
            if self._behind and not self._is_over and not self._is_paused:
                return PART_UNITS
        self._waits = False
        self._go_on()
        return 0

    def _go_on(self) -> None:
        """Resume reading, unless data still waits to be processed."""
        if self._is_over or self._is_paused or self._waits:
            return
        if self._behind:
            self._wait()
        elif self._has_ended:
            self._end()
        else:
            self._below.resume_reading()

    def _take(self, data: memoryview) -> int:
        """Decrypt the beginning of `data`, as long as units are left; return its length."""
        done = 0
        while done < len(data) and not self._is_over and (units := self._turns.units):
            began = now = time.thread_time()
            until = began + units * _UNIT_S
            while done < len(data) and not self._is_over and now < until:
                done += self._incoming.write(data[done : done + _STEP_BYTES])
                self._advance()
                now = time.thread_time()
            self._turns.spend(ceil((now - began) / _UNIT_S))
        return done

    def _advance(self) -> None:
        """Shake hands or decrypt, with the data that the TLS library has now."""
        try:
            if self._protocol is None and not self._shake_hands():
                return
            while data := self._tls.read(_RECORD_BYTES):
                self._keep(data)
            self._has_ended = True  # a close_notify
            self._behind = memoryview(b"")
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        if self._outgoing.pending:
            if self._is_writing_paused:
                self._unread_answers += self._outgoing.pending
            self._flush()
            if self._unread_answers > _MAX_UNREAD_ANSWERS:
                self.abort()

    def _keep(self, data: bytes) -> None:
        if not self._is_closing:
            self._plain.append(data)
            return
        self._dropped += len(data)
        if self._dropped > _MAX_DROPPED:
            self.abort()

    def _shake_hands(self) -> bool:
        """True if the handshake has ended; the protocol is made then."""
        try:
            self._tls.do_handshake()
        finally:
            self._flush()  # also sends the alert of a failed handshake
        if self.handshake.done():  # cancelled
            return False
        self._extra = {
            "sslcontext": self._context,
            "ssl_object": self._tls,
            "peercert": self._tls.getpeercert(),
            "cipher": self._tls.cipher(),
        }
        self._protocol = self._make_protocol()
        del self._make_protocol
        self.handshake.set_result(None)
        self._protocol.connection_made(self)
        return True

    def _fail(self, error: ssl.SSLError) -> None:
        if self._protocol is None and not self.handshake.done():
            self.handshake.set_exception(error.with_traceback(None))  # its frames would keep this transport alive
        self._flush()
        self.abort()

    def _deliver(self) -> None:
        """Pass decrypted data to the protocol, and its end."""
        if self._plain and not self._is_paused and not self._is_closing:
            data, self._plain = b"".join(self._plain), []
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                self._fill(self._protocol, memoryview(data))
            else:
                self._protocol.data_received(data)
        if self._has_ended and not self._behind and not self._plain:
            self._end()

    def _fill(self, protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
        while data and not self._is_closing:
            if self._is_paused:
                self._plain.insert(0, bytes(data))
                return
            buffer = memoryview(protocol.get_buffer(len(data)))
            length = min(len(buffer), len(data))
            buffer[:length] = data[:length]
            protocol.buffer_updated(length)
            data = data[length:]

    def _end(self) -> None:
        """Note that the client sends no more."""
        if self._is_closing or self._protocol is None:
            if not self._unencrypted:
                self._below.close()
        elif not self._has_told_end:
            self._has_told_end = True
            if not self._protocol.eof_received():
                self.close()

    # The transport of the protocol.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = self._extra.get(name)
        return self._below.get_extra_info(name, default) if found is None else found

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        if not self._is_paused and not self._is_closing:
            self._is_paused = True
            self._below.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self._is_closing:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._deliver()
        self._go_on()

    def write(self, data: Bytes) -> None:
        if self._is_closing or not data:
            return
        view = memoryview(data).cast("B")
        if len(view) <= _WRITE_BYTES and not self._unencrypted:
            self._encrypt(view)
        else:
            self._keep_unencrypted(view)

    def writelines(self, list_of_data: Iterable[Bytes]) -> None:
        parts = list(list_of_data)
        if sum(map(len, parts)) <= _WRITE_BYTES:
            self.write(b"".join(parts))
            return
        if not self._is_closing:
            self._keep_unencrypted(*(memoryview(part).cast("B") for part in parts if part))

    def _keep_unencrypted(self, *views: memoryview) -> None:
        """Queue what is written, then pause the protocol, which counts all of it, until it is encrypted."""
        self._unencrypted.extend(views)
        self._unencrypted_bytes += sum(map(len, views))
        if not self._is_writing_paused:
            self._encrypt_later()
        self._pause_or_resume_protocol()

    def _drop_unencrypted(self) -> None:
        self._unencrypted.clear()
        self._unencrypted_bytes = 0

    def _encrypt_later(self) -> None:
        if not self._encrypts_later:
            self._encrypts_later = True
            self._turns.wait(self._caller, self._encrypt_some)

    def _encrypt_some(self) -> int:
        """Encrypt a part of what waits; return the units that the next part needs."""
        began = now = time.thread_time()
        until = began + self._turns.units * _UNIT_S
        while self._unencrypted and not self._is_writing_paused and now < until:
            self._encrypt(self._next_unencrypted())
            now = time.thread_time()
        self._turns.spend(ceil((now - began) / _UNIT_S))
        if self._unencrypted and not self._is_writing_paused:
            return PART_UNITS
        self._encrypts_later = False
        if not self._unencrypted and self._is_closing and not self._is_over:
            self._close_tls()
        self._pause_or_resume_protocol()
        return 0

    def _next_unencrypted(self) -> Bytes:
        """Take the beginning of what waits: small parts together, as each call makes a record."""
        taken, room = [], _WRITE_BYTES
        while self._unencrypted and room:
            view = self._unencrypted.popleft()
            if len(view) > room:
                self._unencrypted.appendleft(view[room:])
                view = view[:room]
            room -= len(view)
            taken.append(view)
        self._unencrypted_bytes -= _WRITE_BYTES - room
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _encrypt(self, data: Bytes) -> None:
        try:
            self._tls.write(data)
            self._flush()
        except ssl.SSLError as error:
            self._fail(error)

    def _flush(self) -> None:
        if self._outgoing.pending and not self._below.is_closing():
            self._below.write(self._outgoing.read())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return int(self._below.get_write_buffer_size()) + self._unencrypted_bytes

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing or self._below.is_closing()

    def close(self) -> None:
        """Close after the written data is sent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._plain = []
        if not self._unencrypted:
            self._close_tls()

    def _close_tls(self) -> None:
        if self._protocol is not None:
            with suppress(ssl.SSLError):  # raised until the client's close_notify
                self._tls.unwrap()
            self._flush()
        if self._protocol is None or self._has_ended:
            self._below.close()
            return
        self._closing = asyncio.get_running_loop().call_later(_CLOSE_LIMIT_S, self.abort)
        self._is_paused = False
        self._go_on()

    def abort(self) -> None:
        self._is_closing = self._is_over = True
        self._drop_unencrypted()
        self._below.abort()
