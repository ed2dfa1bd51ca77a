"""The Arrow calls: tables of inputs in, tables of results out, failed rows in a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from teimgr.engine.job import InferOptions, Input, Job, Lane, Pair
from teimgr.errors import TooLarge
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.arrow_inputs import RowInput, read_inputs, read_texts
from teimgr.wire.arrow_tables import write_sparse, write_table, write_vectors
from teimgr.wire.element_types import Precision
from teimgr.wire.frames import Method
from teimgr.wire.replies import arrow_response
from teimgr.worker.calls import CallReply, Handler, MethodCall
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.limits import most_token_bytes
from teimgr.worker.methods import arrow_requests, arrow_results, messages
from teimgr.worker.methods.arrow_requests import Form, Table

# A table may decode to this multiple of the message limit, whatever a compressed body claims; and so much may the
# engine hold of vectors per token until they are a reply.
_MAX_INFLATION = 8
# How `arrow_output_dtype` spells them.
_WORDS = {Precision.FLOAT32: "f32", Precision.FLOAT16: "f16"}


class Asked(NamedTuple):
    """What a table asks for: its rows, and what makes an IPC stream of the finished job."""

    inputs: Sequence[Input]
    write: Callable[[Job], memoryview]


class ArrowCalls:
    """What a worker does with each Arrow frame; `handlers` is the table."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._limit_bytes = dispatcher.spec.max_message_bytes
        self.handlers: dict[int, Handler] = {
            Method.EMBED_ARROW: self._embed,
            Method.EMBED_SPARSE_ARROW: self._embed_sparse,
            Method.INFER_ARROW: self._infer,
        }

    def _embed(self, call: MethodCall) -> None:
        message = messages.parse(multiplexer_pb2.EmbedArrowRequest, call.payload)
        form = arrow_requests.embed_form(message, self._dispatcher.spec.arrow_output_dtype)
        options = arrow_requests.embed_options(message)

        def read() -> Asked:
            batches = read_texts(message.arrow_ipc, self._limit_bytes * _MAX_INFLATION, self._check_rows(options, form))
            return Asked(
                batches.texts,
                lambda job: write_vectors(job.vectors, job.errors, batches.rows, precision=form.dense, lz4=form.lz4),
            )

        self._enter(call, options, form, read, noop=message.noop)

    def _embed_sparse(self, call: MethodCall) -> None:
        message = messages.parse(multiplexer_pb2.EmbedSparseArrowRequest, call.payload)
        form = arrow_requests.sparse_form(message)
        options = arrow_requests.sparse_options(message)

        def read() -> Asked:
            batches = read_texts(message.arrow_ipc, self._limit_bytes * _MAX_INFLATION, self._check_rows(options, form))
            return Asked(batches.texts, lambda job: write_sparse(job.sparse, job.errors, batches.rows, lz4=form.lz4))

        self._enter(call, options, form, read, noop=message.noop)

    def _infer(self, call: MethodCall) -> None:
        message = messages.parse(arrow_pb2.ArrowRequest, call.payload)
        options = arrow_requests.infer_options(message, self._dispatcher.engine.info)
        form = arrow_requests.infer_form(message, options)
        table = arrow_requests.infer_table(message, arrow_results.names(options.outputs))
        self._enter(call, options, form, lambda: self._read_table(message.arrow_ipc, table, options, form))

    def _enter(
        self, call: MethodCall, options: InferOptions, form: Form, read: Callable[[], Asked], noop: bool = False
    ) -> None:
        """The way of every Arrow call; `read` runs on a codec thread, and `noop` leaves out the model."""
        call.output_dtype = _WORDS.get(form.dense, form.dense.value)
        call.streamed = False  # a table is a request of its own, of a stream too

        async def run() -> None:
            self._dispatcher.engine.check(options)
            asked = await self._dispatcher.off_loop(read)
            encode = partial(self._reply, asked, form)
            if asked.inputs and not noop:
                self._dispatcher.metrics.received(len(asked.inputs))
                self._dispatcher.infer(call, asked.inputs, options, encode)
            else:
                job = arrow_results.answer_unrun(self._dispatcher.engine.info, Job(asked.inputs, options, Lane.BULK))
                self._dispatcher.answer(call, await self._dispatcher.off_loop(encode, job))

        self._dispatcher.enter_async(call, run)

    def _read_table(self, ipc: bytes, table: Table, options: InferOptions, form: Form) -> Asked:
        model = self._dispatcher.engine.info
        batches = read_inputs(
            ipc,
            self._limit_bytes * _MAX_INFLATION,
            kind=table.kind,
            key_columns=table.key_columns,
            check_rows=self._check_rows(options, form),
        )
        inputs = [_input(item) for item in batches.inputs]
        self._check_held(most_token_bytes(model, options.outputs, inputs))

        def write(job: Job) -> memoryview:
            columns = arrow_results.columns(model, form, job, job.errors | batches.refused)
            return write_table(columns, batches.rows, batches.keys, lz4=form.lz4)

        return Asked(inputs, write)

    def _check_rows(self, options: InferOptions, form: Form) -> Callable[[int], None]:
        """What refuses a number of rows whose results cannot be sent back, however small they turn out."""
        row_bytes = arrow_results.least_row_bytes(self._dispatcher.engine.info, options, form)
        return lambda rows: self._check_size(rows * row_bytes)

    def _check_held(self, held_bytes: int) -> None:
        limit_bytes = self._limit_bytes * _MAX_INFLATION
        if held_bytes > limit_bytes:
            raise TooLarge(
                f"Vectors per token may take {held_bytes} bytes, the limit is {limit_bytes} bytes: "
                "send fewer rows per batch"
            )

    def _check_size(self, reply_bytes: int) -> None:
        if reply_bytes > self._limit_bytes:
            raise TooLarge(
                f"Arrow reply of {reply_bytes} bytes is larger than the limit of {self._limit_bytes} bytes: "
                "send fewer rows per batch"
            )

    def _reply(self, asked: Asked, form: Form, job: Job) -> CallReply:
        self._check_size(arrow_results.ragged_bytes(self._dispatcher.engine.info, form, job))
        reply = arrow_response(asked.write(job))
        self._check_size(len(reply))
        return CallReply(reply)


def _input(item: RowInput) -> Input:
    return Pair(*item) if isinstance(item, tuple) else item
