"""The three shapes of an RPC over the worker's service: one message, a conversation, a stream with one answer."""

from __future__ import annotations

import asyncio
import time

from teimgr.engine.job import Lane
from teimgr.errors import DeadlineExceeded, InvalidInput, TeimgrError, Unsupported
from teimgr.wire.frames import Flag
from teimgr.wire.rerank_stream import PairCollector, StreamWindow
from teimgr.wire.rpc import Rpc, Shape
from teimgr.worker.calls import CallReply, MethodCall
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port.exchange import RpcStream
from teimgr.worker.methods import Service

# Messages of one stream in flight, as TEI's GRPC_MAX_PARALLEL_STREAM_REQUESTS is by default.
WINDOW = 1024
# How long a stream that is collected may pause: what it said before lies in memory meanwhile.
PAUSE_S = 30.0


class GrpcCall(MethodCall):
    """A message of the instance port's gRPC, answered through a future."""

    __slots__ = ("answer",)

    def __init__(self, method: int, payload: bytes, flags: Flag, deadline: float | None) -> None:
        lane = Lane.BULK if flags & Flag.BULK else Lane.INTERACTIVE
        super().__init__(method, payload, lane, deadline, bool(flags & Flag.WAIT))
        self.answer: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()

    def reply(self, reply: CallReply) -> None:
        """Let the handler go on."""
        if not self.answer.done():
            self.answer.set_result(reply)

    def fail(self, error: TeimgrError) -> None:
        """Let the handler raise."""
        if not self.answer.done():
            self.answer.set_exception(error)
            # Whoever gave the call up never looks at its failure; that is no defect to report at collection.
            self.answer.exception()


class Calls:
    """Carries out RPCs of the table, one `answer` each."""

    def __init__(self, dispatcher: Dispatcher, service: Service) -> None:
        self._dispatcher = dispatcher
        self._service = service

    async def answer(self, rpc: Rpc, exchange: RpcStream) -> None:
        """Everything but the status. Cancelled or failing, it takes what is in flight out of the worker.

        Raises:
            TeimgrError: what the client is to be told instead.
        """
        if rpc.shape is Shape.UNARY:
            await self._unary(rpc, exchange)
        elif rpc.shape is Shape.BIDI:
            await BidiCall(self, rpc, exchange).run()
        else:
            await self._collected(rpc, exchange)

    def start(self, rpc: Rpc, payload: bytes, flags: Flag, deadline: float | None) -> GrpcCall:
        """Put one message on its way."""
        if rpc.method is None:
            raise Unsupported(f"{rpc.name} is not served by this version of teimgr")
        call = GrpcCall(rpc.method, payload, flags, deadline)
        self._service.handle(call)
        return call

    def cancel(self, call: GrpcCall) -> None:
        """Nobody waits for it; an answered call is left as it is."""
        self._dispatcher.cancel(call)

    async def _unary(self, rpc: Rpc, exchange: RpcStream) -> None:
        deadline = deadline_of(exchange)
        message = await exchange.receive()
        if message is None:
            raise InvalidInput("Missing message")
        await self._told(rpc, message, rpc.lane, deadline, exchange)

    async def _collected(self, rpc: Rpc, exchange: RpcStream) -> None:
        deadline = deadline_of(exchange)
        pairs = PairCollector(self._dispatcher.spec.max_message_bytes)
        is_empty = True
        while (message := await _next_of(exchange)) is not None:
            pairs.add(message)
            is_empty = False
        if is_empty:
            raise InvalidInput("Empty stream")
        await self._told(rpc, pairs.payload(), pairs.flags, deadline, exchange)

    async def _told(self, rpc: Rpc, payload: bytes, flags: Flag, deadline: float | None, exchange: RpcStream) -> None:
        """The one answer, after initial metadata that say what it cost."""
        call = self.start(rpc, payload, flags, deadline)
        try:
            reply = await call.answer
        finally:
            self.cancel(call)
        if rpc.tells_compute and reply.timings is not None:
            await exchange.open(reply.timings.headers())
        await exchange.send(reply.payload)


class BidiCall:
    """A stream of messages, each with its answer: they run side by side, within a window, and are answered in order."""

    def __init__(self, calls: Calls, rpc: Rpc, exchange: RpcStream) -> None:
        self._calls = calls
        self._rpc = rpc
        self._exchange = exchange
        self._deadline = deadline_of(exchange)
        self._window = StreamWindow(WINDOW)
        self._answers: asyncio.Queue[GrpcCall | Exception | None] = asyncio.Queue()
        self._unanswered: set[GrpcCall] = set()

    async def run(self) -> None:
        """Answer until the client has said everything and heard everything.

        Raises:
            TeimgrError: the message in this place failed.
        """
        await self._exchange.open()
        reader = asyncio.create_task(self._read())
        try:
            while (item := await self._answers.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                await self._answer(item)
        finally:
            reader.cancel()
            await asyncio.wait((reader,))
            for call in self._unanswered:
                self._calls.cancel(call)

    async def _answer(self, call: GrpcCall) -> None:
        reply = await call.answer
        self._unanswered.discard(call)
        await self._exchange.send(reply.payload)
        self._window.leave(len(reply.payload))

    async def _read(self) -> None:
        """Run ahead of the answers as far as the window allows."""
        try:
            while True:
                await self._window.enter()
                message = await self._exchange.receive()
                if message is None:
                    break
                flags = Flag.WAIT | Flag.BULK if self._window.is_busy else Flag.WAIT
                call = self._calls.start(self._rpc, message, flags, self._deadline)
                self._unanswered.add(call)
                self._answers.put_nowait(call)
        except Exception as error:  # not swallowed: it ends the stream in its place
            self._answers.put_nowait(error)
        else:
            self._answers.put_nowait(None)


def deadline_of(exchange: RpcStream) -> float | None:
    """When the client stops waiting, in the time of `time.monotonic`; None for never."""
    timeout_s = exchange.timeout_s()
    return None if timeout_s is None else time.monotonic() + timeout_s


async def _next_of(exchange: RpcStream) -> bytes | None:
    try:
        async with asyncio.timeout(PAUSE_S) as pause:
            return await exchange.receive()
    except TimeoutError:
        if not pause.expired():
            raise
        raise DeadlineExceeded(f"Request timeout: no further message within {PAUSE_S:g} s") from None
