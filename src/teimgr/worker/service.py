"""What a worker does with each kind of frame; the table in the constructor is the list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from teimgr.engine.job import Job
from teimgr.errors import Internal, TeimgrError, Unsupported
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.frames import Method
from teimgr.wire.replies import embed_response
from teimgr.worker import convert
from teimgr.worker.arrow_calls import ArrowCalls
from teimgr.worker.calls import LinkCall, Reply
from teimgr.worker.desk import Desk, masked


class Service:
    """Turns frames into work at the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._handlers: dict[int, Callable[[LinkCall], None]] = {
            Method.INFO: self._info,
            Method.EMBED: self._embed,
            Method.TOKENIZE: self._tokenize,
            Method.DECODE: self._decode,
            **ArrowCalls(desk).handlers,
        }

    def handle(self, call: LinkCall) -> None:
        """Answer `call`, now or later, exactly once."""
        try:
            self._handlers.get(call.header.method, _unsupported)(call)
        except TeimgrError as error:
            self._desk.metrics.failed(error)
            call.fail(error)
        except Exception as error:
            call.fail(masked(error))

    def _info(self, call: LinkCall) -> None:
        call.reply(Reply(convert.info_response(self._desk.engine.info, self._desk.spec)))

    def _embed(self, call: LinkCall) -> None:
        message = convert.parse(tei_pb2.EmbedRequest, call.payload)
        options = convert.embed_options(message)
        self._desk.metrics.received(1)
        self._desk.enter(call, lambda: self._desk.infer(call, [message.inputs], options, partial(_embedding, call)))

    def _tokenize(self, call: LinkCall) -> None:
        message = convert.parse(tei_pb2.EncodeRequest, call.payload)
        prompt_name = message.prompt_name if message.HasField("prompt_name") else None

        def work() -> Reply:
            tokens = self._desk.engine.tokenize(message.inputs, message.add_special_tokens, prompt_name)
            return Reply(convert.encode_response(tokens))

        self._aside(call, work)

    def _decode(self, call: LinkCall) -> None:
        message = convert.parse(tei_pb2.DecodeRequest, call.payload)

        def work() -> Reply:
            text = self._desk.engine.decode(list(message.ids), message.skip_special_tokens)
            return Reply(tei_pb2.DecodeResponse(text=text).SerializeToString())

        self._aside(call, work)

    def _aside(self, call: LinkCall, work: Callable[[], Reply]) -> None:
        """Work that needs the tokenizer and not the device."""

        async def run() -> None:
            self._desk.answer(call, await self._desk.off_loop(work))

        self._desk.enter_async(call, run)


def _embedding(call: LinkCall, job: Job) -> Reply:
    if error := job.errors.get(0):
        raise error
    timings = call.timings(job)
    return Reply(embed_response(job.vectors[0], timings), timings)


def _unsupported(call: LinkCall) -> None:
    try:
        name = Method(call.header.method).name.title().replace("_", "")  # as the RPC is called
    except ValueError as error:
        raise Internal(f"No method has the number {call.header.method}") from error
    raise Unsupported(f"{name} is not served by this version of teimgr")
