"""The Arrow methods: a table of inputs gives a table of results, with the errors of failed rows in a column."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from teimgr.engine.job import Content, InferOptions, Input, Job, Lane, Output, Pair, SparseRow
from teimgr.errors import InvalidInput, TeimgrError, TooLarge
from teimgr.spec import Kind, LoadedModel
from teimgr.wire import arrow_tables as tables
from teimgr.wire.arrow_inputs import (
    FILES,
    InputBatches,
    InputKind,
    RowInput,
    checked_size,
    has_files,
    read_inputs,
    read_texts,
)
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import varint
from teimgr.wire.quantisation import NUMBER_OF, Precision
from teimgr.wire.text_column import SharedTexts, TextColumn
from teimgr.worker.calls import (
    MANY_NUMBERS,
    CallReply,
    DeferredReply,
    MethodCall,
    Part,
    counted,
    job_of,
    max_token_bytes,
    number_count,
    optional,
    request_options,
    token_width,
)
from teimgr.worker.dispatcher import Dispatcher

T = TypeVar("T")
ArrowRequest = multiplexer_pb2.EmbedArrowRequest | multiplexer_pb2.EmbedSparseArrowRequest | arrow_pb2.ArrowRequest

# Limit on the rows of a table: a few hundred bytes may declare millions, and each becomes a vector.
_MAX_ROWS = 100_000
# A codec thread encodes replies with at least this many rows, with many numbers or with compression. The finisher's
# thread encodes others, which saves the switch.
_MANY_ROWS = 512
_ONE_AT_A_TIME = (
    "Input validation error: the row has `{column}` and `text`: this model embeds one at a time, send two rows"
)
# Messages and tables up to this size are read on the loop: 64 texts take some 0.2 ms, as long as switching to a thread
# and back. Files are read on a thread.
_SMALL_TABLE_BYTES = 64 * 1024
_ALIGNMENT = 8  # of Arrow's numbers
# Limit, as a multiple of the message limit, on the decoded size of a table, since a compressed body may declare any
# size, and on the vectors per token that the engine holds for it.
_MAX_INFLATION = 8

# Joining batches, converting ids and making strings of pairs copies each byte once. A row also takes a few objects.
_COPIES = 2
_ROW_BYTES = 256

# Default output by the kind of the model.
_DEFAULT_OUTPUT: Mapping[str, Output] = {
    Kind.EMBEDDING: Output.DENSE,
    Kind.SPARSE: Output.SPARSE,
    Kind.MULTI_VECTOR: Output.MULTI_VECTOR,
    Kind.RERANKER: Output.SCORES,
    Kind.CLASSIFIER: Output.SCORES,
    Kind.TOKEN_CLASSIFIER: Output.TOKENS,
}
# Our enums by the numbers of arrow.proto, whose members have the same names.
_OUTPUTS: Mapping[int, Output] = {arrow_pb2.Output.Value(f"OUTPUT_{one.name}"): one for one in Output}
_MAX_OUTPUTS = 100  # per request, repetitions included
_INPUTS: Mapping[int, InputKind | None] = {
    arrow_pb2.INPUT_UNSPECIFIED: None,
    **{arrow_pb2.Input.Value(f"INPUT_{one.name}"): one for one in InputKind if one not in FILES},
}
_ELEMENTS: Mapping[int, Precision] = {
    arrow_pb2.ELEMENT_TYPE_UNSPECIFIED: Precision.FLOAT32,
    **{arrow_pb2.ElementType.Value(f"ELEMENT_TYPE_{one.name}"): one for one in Precision},
}
_LZ4: Mapping[int, bool] = {multiplexer_pb2.ARROW_COMPRESSION_NONE: False, multiplexer_pb2.ARROW_COMPRESSION_LZ4: True}
_PRECISIONS: Mapping[int, Precision] = {number: precision for precision, number in NUMBER_OF.items()}
_DTYPES = {"f32": Precision.FLOAT32, "f16": Precision.FLOAT16}
# The spelling of `arrow_output_dtype` and of call statistics.
_DTYPE_NAMES = {precision: name for name, precision in _DTYPES.items()}


class ReadTable(NamedTuple):
    """The rows of a request's table, and the function that writes the finished job as a message with an IPC stream."""

    inputs: Sequence[Input]
    write: Callable[[Job], memoryview]
    held_bytes: int = 0
    """Upper bound for vectors per token, made on the reading thread: 100,000 pairs would hold the loop for 60 ms."""


def embed_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`EmbedArrow`; an absent `normalize` means false here."""
    (message, ipc), spaces = call.table_message(multiplexer_pb2.EmbedArrowRequest), dispatcher.space_headers
    form = embed_form(message, dispatcher.spec.arrow_output_dtype)
    options = request_options(
        message,
        Output.DENSE,
        prompt_name=optional(message, "prompt_name"),
        normalize=message.normalize,
        dimensions=optional(message, "dimensions"),
    )

    def read(ipc: bytes | memoryview, limits: _Limits) -> ReadTable:
        inputs, rows, refused = _texts_or_images(dispatcher, ipc, limits)
        return ReadTable(
            inputs,
            lambda job: tables.write_vectors(
                job.vectors, job.errors | refused, rows, form.dense, lz4=form.lz4, head=response_head, metadata=spaces
            ),
        )

    _serve_table(dispatcher, call, options, form, read, ipc, message.noop)


def _texts_or_images(
    dispatcher: Dispatcher, ipc: bytes | memoryview, limits: _Limits
) -> tuple[Sequence[Input], list[int], dict[int, InvalidInput]]:
    """The inputs of a table, the rows of each batch, and why rows are refused.

    A column `image` or `audio` counts where the model embeds such, with `text` in rows without a file, and beside one
    where the model reads both in one input.
    """
    for kind in FILES:
        if kind.value not in dispatcher.engine.info.modalities or not has_files(ipc, kind.value):
            continue
        batches = read_inputs(ipc, limits.decoded_bytes, limits.check_rows, kind, go_on=limits.go_on)
        return _inputs_of(dispatcher, batches, limits.go_on), batches.rows, batches.refused
    texts, rows = read_texts(ipc, limits.decoded_bytes, limits.check_rows, limits.go_on)
    return texts, rows, {}


def embed_sparse_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    (message, ipc), spaces = call.table_message(multiplexer_pb2.EmbedSparseArrowRequest), dispatcher.space_headers
    form = ArrowReplyForm(lz4=_lz4(message))
    options = request_options(message, Output.SPARSE, prompt_name=optional(message, "prompt_name"))

    def read(ipc: bytes | memoryview, limits: _Limits) -> ReadTable:
        texts, rows = read_texts(ipc, limits.decoded_bytes, limits.check_rows, limits.go_on)
        return ReadTable(
            texts,
            lambda job: tables.write_sparse(
                job.sparse, job.errors, rows, lz4=form.lz4, head=response_head, metadata=spaces
            ),
        )

    _serve_table(dispatcher, call, options, form, read, ipc, message.noop)


def infer_arrow(dispatcher: Dispatcher, call: MethodCall) -> None:
    """`teimgr.v1.Arrow`: any outputs of any kind of input; key columns of the request are repeated in the reply."""
    (message, ipc), spaces = call.table_message(arrow_pb2.ArrowRequest), dispatcher.space_headers
    model = dispatcher.engine.info
    options = infer_options(message, model)
    form = infer_form(message, options)
    kind = _known("input", message.input, _INPUTS, "0 to 3")
    files = [one for one in FILES if one.value in model.modalities]
    key_columns = list(dict.fromkeys(message.key_columns))  # merging repeats a stream's first options in each message
    if taken := set(key_columns) & set(column_names(options.outputs)):
        raise InvalidInput(f"Key columns must not be called {sorted(taken)}: columns of the answer have these names")

    def read(ipc: bytes | memoryview, limits: _Limits) -> ReadTable:
        batches = read_inputs(ipc, limits.decoded_bytes, limits.check_rows, kind, key_columns, limits.go_on, files)
        inputs = _inputs_of(dispatcher, batches, limits.go_on)
        limits.check_held(held_bytes := max_token_bytes(model, options.outputs, inputs))
        rows, keys, refused = batches.rows, batches.keys, batches.refused  # `write` must not keep the inputs alive

        def write(job: Job) -> memoryview:
            columns = reply_columns(model, form, job, job.errors | refused)
            return tables.write_table(columns, rows, keys, lz4=form.lz4, head=response_head, metadata=spaces)

        return ReadTable(inputs, write, held_bytes)

    _serve_table(dispatcher, call, options, form, read, ipc)


def _inputs_of(dispatcher: Dispatcher, batches: InputBatches, go_on: Callable[[], None]) -> Sequence[Input]:
    """The rows as inputs of the engine; `go_on`, called before each row, raises once the call has ended."""
    if isinstance(batches.inputs, TextColumn | SharedTexts):
        return batches.inputs
    found: list[Input] = []
    for row, item in enumerate(batches.inputs):
        go_on()
        found.append(_input(dispatcher, batches.kind, item, row, batches.refused))
    return found


def _input(
    dispatcher: Dispatcher, kind: InputKind, item: RowInput, row: int, refused: dict[int, InvalidInput]
) -> Input:
    """A row as the engine takes it; None, and an error in `refused`, for a file that is not of the table's kind.

    Raises:
        WrongModelKind: there is a file, and the model takes no image or no sound.
    """
    file, text = item if isinstance(item, tuple) else (item, None)
    if isinstance(file, str) and text is not None:
        return Pair(file, text)
    if not isinstance(file, bytes):
        return file
    try:
        if text is not None and not dispatcher.engine.info.fused:
            raise InvalidInput(_ONE_AT_A_TIME.format(column=kind.value))
        if kind is InputKind.AUDIO:
            return dispatcher.engine.sound(file)
        picture = dispatcher.engine.picture(file)
    except InvalidInput as error:
        refused[row] = error
        return None
    return picture if text is None else Content(text, (picture,))


def _serve_table(
    dispatcher: Dispatcher,
    call: MethodCall,
    options: InferOptions,
    form: ArrowReplyForm,
    read: Callable[[bytes | memoryview, _Limits], ReadTable],
    ipc: bytes | memoryview,
    noop: bool = False,
) -> None:
    """Admit the call, read its table on a codec thread, run the model unless `noop`, and write the reply."""
    call.note_output_dtype(_DTYPE_NAMES.get(form.dense, form.dense.value))

    def read_counted(limits: _Limits) -> tuple[ReadTable, Part]:
        table = read(_aligned(ipc), limits)
        return table, counted(table.inputs, options)

    async def run() -> None:
        dispatcher.engine.check(options)  # before reading the table, and for `noop`, which does not reach the engine
        limits = _Limits(dispatcher, call, options, form)
        is_short = len(ipc) <= _SMALL_TABLE_BYTES
        size = limits.size(ipc) if is_short else await dispatcher.read_off_loop(call, limits.size, ipc)
        await dispatcher.reserve(call, size)
        takes_files = any(kind.value in dispatcher.engine.info.modalities for kind in FILES)
        is_small = size <= _SMALL_TABLE_BYTES and not takes_files
        reading = partial(read_counted, limits)
        table, part = reading() if is_small else await dispatcher.read_off_loop(call, reading)

        def encode(job: Job) -> CallReply:
            limits.go_on()
            limits.check_reply(ragged_bytes(dispatcher.engine.info, form, job))
            reply = table.write(job)
            limits.check_reply(len(reply))
            return CallReply(reply)

        def encode_placeholders(part: Part) -> CallReply:
            return encode(with_placeholder_results(dispatcher.engine.info, job_of([part], Lane.BULK)))

        def encode_off_finisher(job: Job) -> CallReply | DeferredReply:
            is_long = form.lz4 or len(job.inputs) >= _MANY_ROWS or number_count(job) > MANY_NUMBERS
            return DeferredReply(partial(encode, job)) if is_long else encode(job)

        if table.inputs and not noop:
            dispatcher.metrics.received(len(table.inputs))
            dispatcher.submit(call, [part], encode_off_finisher, table.held_bytes)
        else:
            dispatcher.answer(call, await dispatcher.off_loop(encode_placeholders, part))

    dispatcher.admit_async(call, run)


def _aligned(ipc: bytes | memoryview) -> bytes | memoryview:
    """`ipc` at an address that Arrow's numbers may have: a view of a message is copied, without the GIL."""
    if not isinstance(ipc, memoryview):
        return ipc
    found = np.frombuffer(ipc, np.uint8)
    if found.ctypes.data % _ALIGNMENT == 0:
        return ipc
    copy = np.empty_like(found)
    np.copyto(copy, found)
    return copy.data


class _Limits:
    """Limits of one table: decoded bytes, held vectors per token, reply bytes, and the time of its call."""

    def __init__(self, dispatcher: Dispatcher, call: MethodCall, options: InferOptions, form: ArrowReplyForm) -> None:
        self.go_on = partial(dispatcher.check_awaited, call)
        self._message_bytes = dispatcher.spec.max_message_bytes
        self._row_bytes = least_row_bytes(dispatcher.engine.info, options, form)
        self.decoded_bytes = self._message_bytes * _MAX_INFLATION

    def size(self, ipc: bytes | memoryview) -> int:
        """Bytes that a table takes in memory: its decoded buffers, and what is made of them at most.

        Raises:
            InvalidInput: no IPC stream.
            TooLarge: more than `decoded_bytes`, or than the bounds of `wire/arrow_limits.py`.
        """
        self.go_on()
        found = checked_size(ipc, self.decoded_bytes, self.check_rows)
        return found.decoded_bytes * _COPIES + found.rows * _ROW_BYTES

    def check_rows(self, rows: int) -> None:
        """Refuse too many rows, and those whose results are too large for a reply, however small they turn out."""
        if rows > _MAX_ROWS:
            raise TooLarge(f"Arrow batch has {rows} rows, the limit is {_MAX_ROWS} rows")
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
        InvalidInput: a number that is in none of the enums, or more numbers than anyone needs.
    """
    if len(message.outputs) > _MAX_OUTPUTS:
        raise InvalidInput(f"`outputs` has {len(message.outputs)} values, more than {_MAX_OUTPUTS}")
    known = {arrow_pb2.OUTPUT_UNSPECIFIED: _DEFAULT_OUTPUT[model.kind], **_OUTPUTS}
    wanted = message.outputs or [arrow_pb2.OUTPUT_UNSPECIFIED]
    return request_options(
        message,
        frozenset(_known("outputs", number, known, "0 to 5") for number in wanted),
        prompt_name=optional(message, "prompt_name"),
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=optional(message, "dimensions"),
        raw_scores=message.raw_scores,
        pool_factor=message.pool_factor if message.HasField("pool_factor") else 1.0,
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


def _lz4(message: ArrowRequest) -> bool:
    return _known("compression", message.compression, _LZ4, "0 (none) or 1 (LZ4)")


def _known(field: str, number: int, meanings: Mapping[int, T], choices: str) -> T:
    if number not in meanings:
        raise InvalidInput(f"`{field}` {number} is unknown: {choices}")
    return meanings[number]


def response_head(ipc_bytes: int) -> bytes:
    """`EmbedArrowResponse` and its like up to the Arrow IPC stream, which is their field 1, wire type 2."""
    return b"\x0a" + varint(ipc_bytes)


_ORDER = (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKENS, Output.SCORES)
_OFFSET_BYTES = _NUMBER_BYTES = 4
# The placeholder of tei-manager; each row adds one to the indices.
_NOOP_INDICES = np.array([0, 100, 200], np.uint32)
_NOOP_VALUES = np.array([1.0, 0.5, 0.25], np.float32)


@dataclass(frozen=True, slots=True)
class ArrowReplyForm:
    """Encoding of a reply: element types of dense vectors and of vectors per token, compression of bodies."""

    lz4: bool
    dense: Precision = Precision.FLOAT32
    token: Precision = Precision.FLOAT32


def column_names(outputs: Collection[Output]) -> list[str]:
    """Names of a reply's columns, in order, after the key columns."""
    return [_name(output) for output in _ORDER if output in outputs] + ["error"]


def least_row_bytes(model: LoadedModel, options: InferOptions, form: ArrowReplyForm) -> int:
    """Bytes of the smallest possible row of a reply: a single token, no sparse entries."""
    least = {
        Output.DENSE: form.dense.size_bytes(options.dimensions or model.dimension),
        Output.SPARSE: _OFFSET_BYTES,
        Output.MULTI_VECTOR: _OFFSET_BYTES + form.token.size_bytes(model.multi_vector_dimension),
        Output.TOKENS: _OFFSET_BYTES + form.token.size_bytes(model.token_dimension),
        Output.SCORES: _NUMBER_BYTES * max(len(model.labels), 1),
    }
    return sum(least[output] for output in options.outputs)


def ragged_bytes(model: LoadedModel, form: ArrowReplyForm, job: Job) -> int:
    entries = sum(len(vector.indices) for vector in job.sparse if vector is not None)
    total = entries * tables.ENTRY_BYTES
    for matrices, width in ((job.multi_vectors, model.multi_vector_dimension), (job.tokens_of, model.token_dimension)):
        total += sum(len(matrix) for matrix in matrices if matrix is not None) * form.token.size_bytes(width)
    return total


def reply_columns(
    model: LoadedModel, form: ArrowReplyForm, job: Job, errors: Mapping[int, TeimgrError]
) -> list[tables.Column]:
    """A column per requested output, and `error`; a row in `errors` is null in every output column."""
    failed = tables.failed_rows(len(job.inputs), errors)
    made = [_column(output, model, form, job, failed) for output in _ORDER if output in job.options.outputs]
    return [*made, tables.error_column(len(job.inputs), errors)]


def with_placeholder_results(model: LoadedModel, job: Job) -> Job:
    """`job` with placeholder results, for `noop` and tables without rows: zeros, three sparse entries per row."""
    count = len(job.inputs)
    job.fill(
        np.zeros((count, job.options.dimensions or model.dimension), np.float32),
        np.zeros((count, max(len(model.labels), 1)), np.float32),
        [SparseRow(_NOOP_INDICES + np.uint32(row), _NOOP_VALUES) for row in range(count)],
    )
    return job


def _column(output: Output, model: LoadedModel, form: ArrowReplyForm, job: Job, failed: tables.Failed) -> tables.Column:
    name = _name(output)
    if output is Output.DENSE:
        return tables.vector_column(name, job.vectors, failed, form.dense, _described(form.dense, job.vectors.shape[1]))
    if output is Output.SPARSE:
        return tables.sparse_column(name, job.sparse)
    if output is Output.SCORES:
        if model.kind == Kind.RERANKER:
            return tables.number_column(name, job.scores[:, 0], failed)
        return tables.vector_column(name, job.scores, failed, metadata={"labels": json.dumps(model.labels)})
    matrices = job.multi_vectors if output is Output.MULTI_VECTOR else job.tokens_of
    width = token_width(model, output)
    return tables.matrix_column(name, matrices, width, form.token, _described(form.token, width))


def _described(precision: Precision, width: int) -> dict[str, str]:
    return {"precision": precision.value, "width": str(width)}


def _name(output: Output) -> str:
    return output.value.replace("-", "_")
