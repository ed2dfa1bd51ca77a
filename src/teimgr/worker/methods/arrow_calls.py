"""The Arrow methods: tables of inputs in, tables of results out, failed rows explained in a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from teimgr.engine.job import InferOptions, Input, Job, Lane, Output, Pair
from teimgr.errors import InvalidInput, TooLarge
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2
from teimgr.spec import LoadedModel
from teimgr.wire.arrow_inputs import InputKind, read_inputs, read_texts
from teimgr.wire.arrow_tables import write_sparse, write_table, write_vectors
from teimgr.wire.element_types import NUMBER_OF, Precision
from teimgr.wire.replies import arrow_response
from teimgr.worker.calls import CallReply, MethodCall, truncates_left
from teimgr.worker.dispatcher import Dispatcher, Part
from teimgr.worker.limits import max_token_bytes
from teimgr.worker.methods import arrow_results
from teimgr.worker.methods.arrow_results import ArrowReplyForm

T = TypeVar("T")
ArrowRequest = multiplexer_pb2.EmbedArrowRequest | multiplexer_pb2.EmbedSparseArrowRequest | arrow_pb2.ArrowRequest

# A table may decode to this multiple of the message limit, whatever a compressed body claims; the engine may hold as
# much of vectors per token until they are encoded.
_MAX_INFLATION = 8

# The output of a request that names none, by the kind of the model.
_DEFAULT_OUTPUT = {
    "embedding": Output.DENSE,
    "sparse": Output.SPARSE,
    "multi-vector": Output.MULTI_VECTOR,
    "reranker": Output.SCORES,
    "classifier": Output.SCORES,
}
_OUTPUTS: Mapping[int, Output] = {
    arrow_pb2.OUTPUT_DENSE: Output.DENSE,
    arrow_pb2.OUTPUT_SPARSE: Output.SPARSE,
    arrow_pb2.OUTPUT_MULTI_VECTOR: Output.MULTI_VECTOR,
    arrow_pb2.OUTPUT_TOKENS: Output.TOKENS,
    arrow_pb2.OUTPUT_SCORES: Output.SCORES,
}
_INPUTS: Mapping[int, InputKind | None] = {
    arrow_pb2.INPUT_UNSPECIFIED: None,
    arrow_pb2.INPUT_TEXT: InputKind.TEXT,
    arrow_pb2.INPUT_PAIR: InputKind.PAIR,
    arrow_pb2.INPUT_IDS: InputKind.IDS,
}
_ELEMENTS: Mapping[int, Precision] = {
    arrow_pb2.ELEMENT_TYPE_UNSPECIFIED: Precision.FLOAT32,
    arrow_pb2.ELEMENT_TYPE_FLOAT32: Precision.FLOAT32,
    arrow_pb2.ELEMENT_TYPE_FLOAT16: Precision.FLOAT16,
    arrow_pb2.ELEMENT_TYPE_INT8: Precision.INT8,
    arrow_pb2.ELEMENT_TYPE_UINT8: Precision.UINT8,
    arrow_pb2.ELEMENT_TYPE_BINARY: Precision.BINARY,
    arrow_pb2.ELEMENT_TYPE_UBINARY: Precision.UBINARY,
}
_LZ4: Mapping[int, bool] = {multiplexer_pb2.ARROW_COMPRESSION_NONE: False, multiplexer_pb2.ARROW_COMPRESSION_LZ4: True}
_PRECISIONS: Mapping[int, Precision] = {number: precision for precision, number in NUMBER_OF.items()}
_DTYPES = {"f32": Precision.FLOAT32, "f16": Precision.FLOAT16}
# How `arrow_output_dtype` and call statistics spell them.
_DTYPE_NAMES = {precision: name for name, precision in _DTYPES.items()}


class ReadTable(NamedTuple):
    """The rows of a request's table, and the function that writes the finished job as an IPC stream."""

    inputs: Sequence[Input]
    write: Callable[[Job], memoryview]


def embed_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedArrow`; an absent `normalize` means false here."""
    message = call.message(multiplexer_pb2.EmbedArrowRequest)
    form = embed_form(message, dispatcher.spec.arrow_output_dtype)
    options = InferOptions(
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
        normalize=message.normalize,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )

    def read(limits: _Limits) -> ReadTable:
        texts, rows = read_texts(message.arrow_ipc, limits.decoded_bytes, limits.check_rows)
        return ReadTable(
            texts, lambda job: write_vectors(job.vectors, job.errors, rows, precision=form.dense, lz4=form.lz4)
        )

    _serve_table(dispatcher, call, options, form, read, noop=message.noop)


def embed_sparse_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedSparseArrow`."""
    message = call.message(multiplexer_pb2.EmbedSparseArrowRequest)
    form = ArrowReplyForm(lz4=_lz4(message))
    options = InferOptions(
        outputs=frozenset({Output.SPARSE}),
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
    )

    def read(limits: _Limits) -> ReadTable:
        texts, rows = read_texts(message.arrow_ipc, limits.decoded_bytes, limits.check_rows)
        return ReadTable(texts, lambda job: write_sparse(job.sparse, job.errors, rows, lz4=form.lz4))

    _serve_table(dispatcher, call, options, form, read, noop=message.noop)


def infer_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`teimgr.v1.Arrow`: any outputs of any kind of input; key columns of the request are repeated in the reply."""
    message = call.message(arrow_pb2.ArrowRequest)
    model = dispatcher.engine.info
    options = infer_options(message, model)
    form = infer_form(message, options)
    kind = _known("input", message.input, _INPUTS, "0 to 3")
    key_columns = list(dict.fromkeys(message.key_columns))  # a stream's first options come with every message
    if taken := set(key_columns) & set(arrow_results.names(options.outputs)):
        raise InvalidInput(f"Key columns may not be called {sorted(taken)}: columns of the answer are")

    def read(limits: _Limits) -> ReadTable:
        batches = read_inputs(
            message.arrow_ipc, limits.decoded_bytes, kind=kind, key_columns=key_columns, check_rows=limits.check_rows
        )
        inputs = [Pair(*item) if isinstance(item, tuple) else item for item in batches.inputs]
        limits.check_held(max_token_bytes(model, options.outputs, inputs))

        def write(job: Job) -> memoryview:
            columns = arrow_results.columns(model, form, job, job.errors | batches.refused)
            return write_table(columns, batches.rows, batches.keys, lz4=form.lz4)

        return ReadTable(inputs, write)

    _serve_table(dispatcher, call, options, form, read)


def _serve_table(
    dispatcher: Dispatcher,
    call: MethodCall,
    options: InferOptions,
    form: ArrowReplyForm,
    read: Callable[[_Limits], ReadTable],
    noop: bool = False,
) -> None:
    """Admit the call, read its table on a codec thread, run the model unless `noop`, and write the reply."""
    call.output_dtype = _DTYPE_NAMES.get(form.dense, form.dense.value)
    call.streamed = False  # a table is a request of its own, of a stream too

    async def run() -> None:
        dispatcher.engine.check(options)
        limits = _Limits(dispatcher, options, form)
        table = await dispatcher.off_loop(read, limits)

        def encode(job: Job) -> CallReply:
            limits.check_reply(arrow_results.ragged_bytes(dispatcher.engine.info, form, job))
            reply = arrow_response(table.write(job))
            limits.check_reply(len(reply))
            return CallReply(reply)

        if table.inputs and not noop:
            dispatcher.metrics.received(len(table.inputs))
            dispatcher.submit(call, [Part(range(len(table.inputs)), table.inputs, options)], encode)
        else:
            job = arrow_results.with_placeholder_results(dispatcher.engine.info, Job(table.inputs, options, Lane.BULK))
            dispatcher.answer(call, await dispatcher.off_loop(encode, job))

    dispatcher.admit_async(call, run)


class _Limits:
    """Bounds of one table: its decoded bytes, what the engine holds for it, and its reply."""

    def __init__(self, dispatcher: Dispatcher, options: InferOptions, form: ArrowReplyForm) -> None:
        self._message_bytes = dispatcher.spec.max_message_bytes
        self._row_bytes = arrow_results.least_row_bytes(dispatcher.engine.info, options, form)
        self.decoded_bytes = self._message_bytes * _MAX_INFLATION

    def check_rows(self, rows: int) -> None:
        """Refuse a number of rows whose results are too large for a reply, however small they turn out."""
        self.check_reply(rows * self._row_bytes)

    def check_held(self, held_bytes: int) -> None:
        if held_bytes > self.decoded_bytes:
            raise TooLarge(
                f"Vectors per token may take {held_bytes} bytes, the limit is {self.decoded_bytes} bytes: "
                "send fewer rows per batch"
            )

    def check_reply(self, reply_bytes: int) -> None:
        if reply_bytes > self._message_bytes:
            raise TooLarge(
                f"Arrow reply of {reply_bytes} bytes is larger than the limit of {self._message_bytes} bytes: "
                "send fewer rows per batch"
            )


def embed_form(message: multiplexer_pb2.EmbedArrowRequest, default_dtype: str) -> ArrowReplyForm:
    """The reply form of `EmbedArrow`: `default_dtype` ("f32" or "f16") where the request names none.

    Raises:
        InvalidInput: a number that is in neither enum, or integers for vectors that are not of length 1.
    """
    dtypes = {multiplexer_pb2.OUTPUT_DTYPE_UNSPECIFIED: _DTYPES[default_dtype], **_PRECISIONS}
    precision = _known("output_dtype", message.output_dtype, dtypes, "0, 1 (F32) or 2 (F16)")
    if precision.needs_unit_vectors and not message.normalize:
        raise InvalidInput(f"`output_dtype` {precision.value} is for vectors of length 1: it needs `normalize`")
    return ArrowReplyForm(lz4=_lz4(message), dense=precision)


def infer_options(message: arrow_pb2.ArrowRequest, model: LoadedModel) -> InferOptions:
    """Options of `teimgr.v1.Arrow`: an absent `normalize` means true, absent outputs the main one of the model's kind.

    Raises:
        InvalidInput: a number that is in none of the enums.
    """
    known = {arrow_pb2.OUTPUT_UNSPECIFIED: _DEFAULT_OUTPUT[model.kind], **_OUTPUTS}
    wanted = message.outputs or [arrow_pb2.OUTPUT_UNSPECIFIED]
    return InferOptions(
        outputs=frozenset(_known("outputs", number, known, "0 to 5") for number in wanted),
        truncate=message.truncate,
        truncation_left=truncates_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        raw_scores=message.raw_scores,
    )


def infer_form(message: arrow_pb2.ArrowRequest, options: InferOptions) -> ArrowReplyForm:
    """The reply form of `teimgr.v1.Arrow`.

    Raises:
        InvalidInput: a number that is in none of the enums, or integers for vectors that are not of length 1.
    """
    dense = _known("dense_type", message.dense_type, _ELEMENTS, "0 to 6")
    token = _known("token_type", message.token_type, _ELEMENTS, "0 to 6")
    if Output.DENSE in options.outputs and dense.needs_unit_vectors and not options.normalize:
        raise InvalidInput(f"`dense_type` {dense.value} is for vectors of length 1: it needs `normalize`")
    if Output.TOKENS in options.outputs and token.needs_unit_vectors:
        raise InvalidInput(f"`token_type` {token.value} is for vectors of length 1: `tokens` are not")
    return ArrowReplyForm(lz4=_lz4(message), dense=dense, token=token)


def _prompt_name(message: ArrowRequest) -> str | None:
    return message.prompt_name if message.HasField("prompt_name") else None


def _lz4(message: ArrowRequest) -> bool:
    return _known("compression", message.compression, _LZ4, "0 (none) or 1 (LZ4)")


def _known(field: str, number: int, meanings: Mapping[int, T], choices: str) -> T:
    if number not in meanings:
        raise InvalidInput(f"`{field}` {number} is unknown: {choices}")
    return meanings[number]
