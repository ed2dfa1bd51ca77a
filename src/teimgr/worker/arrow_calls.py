"""The Arrow calls: tables of inputs in, tables of results out, failed rows in a column."""

from __future__ import annotations

from functools import partial

import numpy as np

from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.errors import TooLarge
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.arrow import TextBatches, read_texts, write_vectors
from teimgr.wire.frames import Method
from teimgr.wire.replies import arrow_response
from teimgr.worker import convert
from teimgr.worker.calls import Handler, MethodCall, Reply
from teimgr.worker.desk import Desk

# Arrow text may decode to this multiple of the message limit, whatever a compressed body claims.
_MAX_INFLATION = 8


class ArrowCalls:
    """What a worker does with each Arrow frame; `handlers` is the table."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.handlers: dict[int, Handler] = {Method.EMBED_ARROW: self._embed}

    def _embed(self, call: MethodCall) -> None:
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

    def _zeros(self, batches: TextBatches, options: InferOptions) -> Job:
        """A finished job of zero vectors: the answer to `noop`, and to no rows."""
        job = Job(batches.texts, options, Lane.BULK)
        dimension = options.dimensions or self._desk.engine.info.dimension
        job.vectors = np.zeros((len(batches.texts), dimension), np.float32)
        return job


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
