"""Payloads of the gRPC methods: keyword options, protobuf requests, Arrow IPC streams and their replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from teimgr.client.checks import check_limit, check_sequence, check_source, check_text
from teimgr.client.values import Embedded, Vectors
from teimgr.config.schema import quoted
from teimgr.errors import Code, Internal, InvalidInput, ValidationError, error_from_code
from teimgr.spec import LANE_KEY, LANES
from teimgr.wire.arrow_tables import is_images
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import bytes_field
from teimgr.wire.spaces import PRECISION_KEY, SPACE_KEY, fingerprint


class Routing(TypedDict, total=False):
    """Which instance answers: `instance`, or `model` for any running instance of it.

    `lane` is "interactive" or "bulk"; by default the server chooses by the size of the call. Interactive calls go
    first; bulk calls get the rest, at least a fifth.
    """

    instance: str
    model: str
    lane: str


class TextOptions(Routing, total=False):
    """`truncate` is true unless given; `prompt_name` is one of the model's prompts."""

    truncate: bool
    truncation_left: bool
    prompt_name: str


class EmbedOptions(TextOptions, total=False):
    """`normalize` is true unless given, `dimensions` is the model's."""

    normalize: bool
    dimensions: int


class ScoreOptions(Routing, total=False):
    """`truncate` is true unless given, `raw_scores` gives logits."""

    truncate: bool
    truncation_left: bool
    raw_scores: bool


class ArrowOptions(EmbedOptions, total=False):
    """Zeros without running the model, half-precision replies, LZ4 replies."""

    noop: bool
    float16: bool
    lz4_reply: bool


class TableOptions(EmbedOptions, total=False):
    """Options of `teimgr.v1.Arrow`.

    `outputs` are of dense, sparse, multi_vector, tokens and scores; `input` is text, pair or ids where the names of the
    columns shall not decide; `keys` are columns to return unchanged. `dense_type` and `token_type` are float32,
    float16, int8, uint8, binary or ubinary. Of the vectors per token of a document 1 / `pool_factor` are left.
    """

    outputs: Sequence[str]
    input: str
    keys: Sequence[str]
    raw_scores: bool
    dense_type: str
    token_type: str
    lz4_reply: bool
    pool_factor: float


# Protobuf requests

_DIRECTIONS = (tei_pb2.TRUNCATION_DIRECTION_RIGHT, tei_pb2.TRUNCATION_DIRECTION_LEFT)


def target(options: Routing) -> mux_pb2.Target:
    """Return the routing of a call.

    Raises:
        ValidationError: not exactly one of `instance` and `model` is given.
    """
    instance, model = options.get("instance"), options.get("model")
    if (instance is None) == (model is None):
        raise ValidationError("give exactly one of `instance` and `model`")
    return mux_pb2.Target(instance_name=instance) if model is None else mux_pb2.Target(model_id=model)


def lane_metadata(options: Routing) -> tuple[tuple[str, str], ...]:
    """Return the metadata by which a caller chooses the lane.

    Raises:
        ValidationError: `lane` is not a lane.
    """
    lane = options.get("lane")
    if lane is None:
        return ()
    if lane not in LANES:
        raise ValidationError(f"lane: {quoted(lane)} is not one of {', '.join(LANES)}")
    return ((LANE_KEY, lane),)


def truncation(options: TextOptions | ScoreOptions) -> dict[str, Any]:
    """Return the fields `truncate` and `truncation_direction`, which most requests have."""
    direction = _DIRECTIONS[bool(options.get("truncation_left"))]
    return {"truncate": options.get("truncate", True), "truncation_direction": direction}


def text_fields(text: str, options: TextOptions) -> dict[str, Any]:
    return {"inputs": text, "prompt_name": options.get("prompt_name"), **truncation(options)}


def score_fields(options: ScoreOptions) -> dict[str, Any]:
    return {"raw_scores": options.get("raw_scores", False), **truncation(options)}


def embed_request(text: str, options: EmbedOptions) -> bytes:
    """`tei_multiplexer.v1.EmbedRequest` for one text."""
    inner = tei_pb2.EmbedRequest(  # not by `truncation`, which would cost a fifth more per text
        inputs=text,
        truncate=options.get("truncate", True),
        normalize=options.get("normalize", True),
        truncation_direction=_DIRECTIONS[bool(options.get("truncation_left"))],
        prompt_name=options.get("prompt_name"),
        dimensions=options.get("dimensions"),
    )
    return mux_pb2.EmbedRequest(target=target(options), request=inner).SerializeToString()


def arrow_request(ipc: bytes, options: ArrowOptions) -> bytes:
    """`tei_multiplexer.v1.EmbedArrowRequest` for one IPC stream of texts."""
    return mux_pb2.EmbedArrowRequest(
        target=target(options),
        arrow_ipc=ipc,
        normalize=options.get("normalize", True),
        noop=options.get("noop", False),
        prompt_name=options.get("prompt_name"),
        dimensions=options.get("dimensions"),
        compression=_reply_compression(options),
        output_dtype=mux_pb2.OUTPUT_DTYPE_F16 if options.get("float16") else mux_pb2.OUTPUT_DTYPE_UNSPECIFIED,
        **truncation(options),
    ).SerializeToString()


def infer_request(ipc: bytes, options: TableOptions) -> bytes:
    """`teimgr.v1.ArrowRequest` for one IPC stream.

    Raises:
        ValidationError: an unknown output, input or element type.
    """
    outputs = options.get("outputs") or ()
    return arrow_pb2.ArrowRequest(
        target=target(options),
        arrow_ipc=ipc,
        outputs=[_enum_name(f"outputs[{at}]", "OUTPUT_", word, arrow_pb2.Output) for at, word in enumerate(outputs)],
        input=_enum_name("input", "INPUT_", options.get("input"), arrow_pb2.Input),
        key_columns=options.get("keys") or (),
        prompt_name=options.get("prompt_name"),
        normalize=options.get("normalize", True),
        dimensions=options.get("dimensions"),
        raw_scores=options.get("raw_scores", False),
        pool_factor=options.get("pool_factor"),
        dense_type=_enum_name("dense_type", "ELEMENT_TYPE_", options.get("dense_type"), arrow_pb2.ElementType),
        token_type=_enum_name("token_type", "ELEMENT_TYPE_", options.get("token_type"), arrow_pb2.ElementType),
        compression=_reply_compression(options),
        **truncation(options),
    ).SerializeToString()


def _reply_compression(options: ArrowOptions | TableOptions) -> mux_pb2.ArrowCompression:
    return mux_pb2.ARROW_COMPRESSION_LZ4 if options.get("lz4_reply") else mux_pb2.ARROW_COMPRESSION_NONE


def _enum_name(name: str, prefix: str, word: str | None, enum: EnumTypeWrapper) -> str:
    """Return the enum's value name for a word; the unspecified value for None."""
    unspecified, *names = (key for key, _ in enum.items())
    if word is None:
        return unspecified
    if (full := f"{prefix}{word.upper()}") not in names:
        choices = ", ".join(key.removeprefix(prefix).lower() for key in names)
        raise ValidationError(f"{name} must be one of {choices}, not {quoted(word)}")
    return full


_EMBEDDINGS_TAG = b"\x0a"  # field 1 of tei.v1.EmbedResponse, length-delimited: packed floats


def vector(reply: bytes) -> Vectors:
    """Return the vector of a `tei.v1.EmbedResponse`, float32 [dim], read-only; not copied if it begins the message."""
    if reply[:1] != _EMBEDDINGS_TAG:
        return np.array(tei_pb2.EmbedResponse.FromString(reply).embeddings, np.float32)
    size = shift = 0  # a varint
    offset = 1
    while True:
        byte = reply[offset]
        offset += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return np.frombuffer(reply, "<f4", size // 4, offset)
        shift += 7


# Arrow IPC

Texts: TypeAlias = Sequence[str | None] | pa.Array | pa.ChunkedArray
Compression = Literal["lz4", "zstd"]

_ARROW_IPC = mux_pb2.EmbedArrowResponse.ARROW_IPC_FIELD_NUMBER
_COMPRESSIONS = (None, "lz4", "zstd")
_STRINGS = (pa.utf8(), pa.large_utf8(), pa.string_view())


def slices(texts: Texts, batch_rows: int) -> Iterator[Texts]:
    """Yield `texts` in slices of `batch_rows`, the last one shorter; no texts give one empty slice.

    Raises:
        ValidationError: `texts` is not a sequence, or `batch_rows` is below 1.
    """
    check_limit("batch_rows", batch_rows)
    check_sequence("texts", texts)
    for start in range(0, max(len(texts), 1), batch_rows):
        yield texts[start : start + batch_rows]


def pack_texts(
    texts: Texts, compression: Compression | None = None, *, name: str = "texts", first_row: int = 0
) -> bytes:
    """An IPC stream of one batch with the column `text`, or `image` of an Arrow array of files (binary values). The
    field is nullable only where a text is null.

    Raises:
        ValidationError: an item of `texts` is not a string; the message has `name` and the row, from `first_row`.
    """
    if isinstance(texts, pa.Array | pa.ChunkedArray) and is_images(texts.type):
        return pack_table(pa.table({"image": texts}), compression)
    column = _column(texts, name, first_row)
    schema = pa.schema([pa.field("text", column.type, nullable=bool(column.null_count))])
    return pack_table(pa.table([column], schema=schema), compression)


def pack_table(table: pa.Table, compression: Compression | None) -> bytes:
    """An IPC stream of the table, with one batch where it has no rows.

    Raises:
        ValidationError: `compression` is not a codec of Arrow IPC.
    """
    if compression not in _COMPRESSIONS:
        raise ValidationError(f"compression must be 'lz4', 'zstd' or None, not {quoted(compression)}")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
        if not table.num_rows:
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=table.schema))
    return bytes(sink.getvalue())


def unpack_vectors(reply: bytes) -> Embedded:
    """Return all rows of an `EmbedArrowResponse`; float16 becomes float32. float32 without nulls is not copied.

    The vectors are the column `embeddings`, else the first; the column `error` may be missing.

    Raises:
        Internal: the bytes are not such a reply.
    """
    try:
        # Parsed as a message, the reply would be copied twice.
        table = pa.ipc.open_stream(bytes_field(reply, _ARROW_IPC)).read_all()
        column = table.column("embeddings" if "embeddings" in table.column_names else 0)
        matrices = [_matrix(chunk) for chunk in column.chunks] or [np.empty((0, column.type.list_size), np.float32)]
        vectors = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        return Embedded(vectors, _failures(column, table), *space_of(table.schema))
    except (pa.ArrowException, AttributeError, IndexError, ValueError, InvalidInput) as error:
        raise Internal(f"the reply is not an Arrow stream of vectors: {error}") from error


def space_of(schema: Any) -> tuple[str, str]:
    """Return space and precision in a schema's metadata, empty if it has none."""
    metadata = schema.metadata or {}
    return metadata.get(SPACE_KEY.encode(), b"").decode(), metadata.get(PRECISION_KEY.encode(), b"").decode()


class Gathered:
    """The answer for `rows` texts from answers for parts of them, each copied into its place as it arrives."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._vectors: Vectors | None = None
        self._errors: dict[int, str] = {}
        self._space: tuple[str, str] | None = None

    def add(self, first_row: int, part: Embedded) -> None:
        """Take the answer for the texts from `first_row` on.

        Raises:
            Internal: its vectors have another width than those before.
            SpaceDiffers: they are of another space, for instance because the instance is updated meanwhile.
        """
        self._space = self._space or (part.space, part.precision)
        if part.space != self._space[0]:
            spaces = f"{fingerprint(*self._space)} and {fingerprint(part.space, part.precision)}"
            raise error_from_code(Code.SPACE_DIFFERS, f"The texts of one call got vectors of two spaces: {spaces}")
        if len(part.vectors) == self._rows:
            self._vectors = part.vectors
        else:
            if self._vectors is None:
                self._vectors = np.empty((self._rows, part.vectors.shape[1]), np.float32)
            if part.vectors.shape[1] != self._vectors.shape[1]:
                widths = f"{self._vectors.shape[1]} and {part.vectors.shape[1]}"
                raise Internal(f"the server answered vectors of {widths} numbers for texts of one job")
            self._vectors[first_row : first_row + len(part.vectors)] = part.vectors
        self._errors.update({first_row + row: reason for row, reason in part.errors.items()})

    def result(self) -> Embedded:
        """Return the whole answer, in the order of the rows, once all parts were added."""
        assert self._vectors is not None
        return Embedded(self._vectors, dict(sorted(self._errors.items())), *(self._space or ()))


def _column(texts: Texts, name: str, first_row: int) -> Any:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    if isinstance(texts, pa.Array):
        if texts.type in _STRINGS or pa.types.is_dictionary(texts.type):
            return texts
        raise ValidationError(f"{name} must be an array of strings, not of {texts.type}")
    check_source(name, texts)
    try:
        return pa.array(texts, pa.utf8())
    except (pa.ArrowException, TypeError, UnicodeEncodeError) as error:
        for row, text in enumerate(texts, first_row):
            if text is not None:
                check_text(f"{name}[{row}]", text)
        raise ValidationError(f"{name}: {error}") from error


def _matrix(column: Any) -> Vectors:
    """Return one FixedSizeList array as float32 [n, dim]; null rows are NaN."""
    dim = column.type.list_size
    # `values` ignores the array's own offset; `flatten` would drop null rows.
    values = column.values.slice(column.offset * dim, len(column) * dim).to_numpy(zero_copy_only=False)
    rows: Vectors = values.reshape(len(column), dim).astype(np.float32, copy=False)
    if not column.null_count:
        return rows
    rows = rows.copy()
    rows[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return rows


def _failures(column: Any, table: Any) -> dict[int, str]:
    """Return row → reason of the rows without a vector."""
    explained = table.column("error") if "error" in table.column_names else pa.nulls(table.num_rows)
    if not column.null_count and explained.null_count == table.num_rows:
        return {}  # the usual case, without a Python object for each row
    reasons = explained.to_pylist()
    missing = column.is_null().to_pylist()
    return {
        row: reason or "no vector"
        for row, (reason, absent) in enumerate(zip(reasons, missing, strict=True))
        if absent or reason is not None
    }
