"""What a worker does with each kind of frame; the table in the constructor is the list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.errors import Internal, TeimgrError, TooLarge, Unsupported
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.arrow import TextBatches, read_texts, write_vectors
from teimgr.wire.frames import Method
from teimgr.wire.replies import arrow_response, embed_response
from teimgr.worker import convert
from teimgr.worker.calls import LinkCall, Reply
from teimgr.worker.desk import Desk, masked

# Arrow text may decode to this multiple of the message limit, whatever a compressed body claims.
_MAX_INFLATION = 8


class Service:
    """Turns frames into work at the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._handlers: dict[int, Callable[[LinkCall], None]] = {
            Method.INFO: self._info,
            Method.EMBED: self._embed,
            Method.EMBED_ARROW: self._embed_arrow,
            Method.TOKENIZE: self._tokenize,
            Method.DECODE: self._decode,
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

    def _embed_arrow(self, call: LinkCall) -> None:
        message = convert.parse(multiplexer_pb2.EmbedArrowRequest, call.payload)
        form = convert.arrow_form(message, self._desk.spec.arrow_output_dtype)
        options = convert.arrow_options(message)

        async def read_then_infer() -> None:
            row_bytes = self._row_bytes(options, form)
            batches = await self._desk.off_loop(self._read, message.arrow_ipc, row_bytes)
            encode = partial(_arrow, batches, form, self._desk.spec.max_message_bytes)
            if message.noop or not batches.texts:
                self._desk.answer(call, await self._desk.off_loop(encode, self._zeros(batches, options)))
            else:
                self._desk.metrics.received(len(batches.texts))
                self._desk.infer(call, batches.texts, options, encode)

        self._desk.enter_async(call, read_then_infer)

    def _read(self, ipc: bytes, row_bytes: int) -> TextBatches:
        """Codec thread: the texts, once it is known that their vectors can be sent back."""
        limit_bytes = self._desk.spec.max_message_bytes
        return read_texts(ipc, limit_bytes * _MAX_INFLATION, lambda rows: _check_size(rows * row_bytes, limit_bytes))

    def _row_bytes(self, options: InferOptions, form: convert.ArrowForm) -> int:
        """What a row of the reply takes at least."""
        engine = self._desk.engine
        engine.check(options)
        return (options.dimensions or engine.info.dimension) * (2 if form.half else 4)

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

    def _zeros(self, batches: TextBatches, options: InferOptions) -> Job:
        """A finished job of zero vectors: the answer to `noop`, and to no rows."""
        job = Job(batches.texts, options, Lane.BULK)
        dimension = options.dimensions or self._desk.engine.info.dimension
        job.vectors = np.zeros((len(batches.texts), dimension), np.float32)
        return job


def _embedding(call: LinkCall, job: Job) -> Reply:
    if error := job.errors.get(0):
        raise error
    timings = call.timings(job)
    return Reply(embed_response(job.vectors[0], timings), timings)


def _arrow(batches: TextBatches, form: convert.ArrowForm, limit_bytes: int, job: Job) -> Reply:
    ipc = write_vectors(job.vectors, job.errors, batches.rows, half=form.half, lz4=form.lz4)
    reply = arrow_response(ipc)
    _check_size(len(reply), limit_bytes)
    return Reply(reply)


def _check_size(reply_bytes: int, limit_bytes: int) -> None:
    if reply_bytes > limit_bytes:
        raise TooLarge(
            f"Arrow reply of {reply_bytes} bytes is larger than the limit of {limit_bytes} bytes: "
            "send fewer rows per batch"
        )


def _unsupported(call: LinkCall) -> None:
    try:
        name = Method(call.header.method).name.title().replace("_", "")  # as the RPC is called
    except ValueError as error:
        raise Internal(f"No method has the number {call.header.method}") from error
    raise Unsupported(f"{name} is not served by this version of teimgr")
