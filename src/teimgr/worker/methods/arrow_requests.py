"""Requests of the Arrow calls as what the engine is asked, and how the answer is to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from teimgr.engine.job import InferOptions, Output
from teimgr.errors import InvalidInput
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2
from teimgr.spec import ModelInfo
from teimgr.wire.arrow_inputs import InputKind
from teimgr.wire.element_types import NUMBER_OF, Precision
from teimgr.worker.methods import messages

T = TypeVar("T")
ContractRequest = multiplexer_pb2.EmbedArrowRequest | multiplexer_pb2.EmbedSparseArrowRequest

# What a model is for, by its kind.
_PURPOSE = {
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


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer looks: the elements of its dense vectors and of its vectors per token, bodies compressed or not."""

    lz4: bool
    dense: Precision = Precision.FLOAT32
    token: Precision = Precision.FLOAT32


@dataclass(frozen=True, slots=True)
class Table:
    """How a table of inputs is read: what its inputs are, or None to go by names, and the columns to hand back."""

    kind: InputKind | None
    key_columns: Sequence[str]


def embed_form(message: multiplexer_pb2.EmbedArrowRequest, default_dtype: str) -> Form:
    """What the request says, and `default_dtype` ("f32" or "f16") where it says nothing.

    Raises:
        InvalidInput: a number that is in neither enum, or integers for vectors that are not of length 1.
    """
    dtypes = {multiplexer_pb2.OUTPUT_DTYPE_UNSPECIFIED: _DTYPES[default_dtype], **_PRECISIONS}
    precision = _known("output_dtype", message.output_dtype, dtypes, "0, 1 (F32) or 2 (F16)")
    if precision.needs_unit_vectors and not message.normalize:
        raise InvalidInput(f"`output_dtype` {precision.value} is for vectors of length 1: it needs `normalize`")
    return Form(lz4=_lz4(message), dense=precision)


def embed_options(message: multiplexer_pb2.EmbedArrowRequest) -> InferOptions:
    """Options of `EmbedArrow`; an absent `normalize` means false here."""
    return InferOptions(
        truncate=message.truncate,
        truncation_left=messages.is_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
        normalize=message.normalize,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )


def sparse_form(message: multiplexer_pb2.EmbedSparseArrowRequest) -> Form:
    """What the request says.

    Raises:
        InvalidInput: an unknown compression.
    """
    return Form(lz4=_lz4(message))


def sparse_options(message: multiplexer_pb2.EmbedSparseArrowRequest) -> InferOptions:
    """Options of `EmbedSparseArrow`."""
    return InferOptions(
        outputs=frozenset({Output.SPARSE}),
        truncate=message.truncate,
        truncation_left=messages.is_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
    )


def infer_options(message: arrow_pb2.ArrowRequest, model: ModelInfo) -> InferOptions:
    """Options of `teimgr.v1.Arrow`; an absent `normalize` means true, no outputs those that the model is for.

    Raises:
        InvalidInput: a number that is in none of the enums.
    """
    known = {arrow_pb2.OUTPUT_UNSPECIFIED: _PURPOSE[model.kind], **_OUTPUTS}
    wanted = message.outputs or [arrow_pb2.OUTPUT_UNSPECIFIED]
    return InferOptions(
        outputs=frozenset(_known("outputs", number, known, "0 to 5") for number in wanted),
        truncate=message.truncate,
        truncation_left=messages.is_left(message.truncation_direction),
        prompt_name=_prompt_name(message),
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        raw_scores=message.raw_scores,
    )


def infer_form(message: arrow_pb2.ArrowRequest, options: InferOptions) -> Form:
    """How the answer is to look.

    Raises:
        InvalidInput: a number that is in none of the enums, or integers for vectors that are not of length 1.
    """
    dense = _known("dense_type", message.dense_type, _ELEMENTS, "0 to 6")
    token = _known("token_type", message.token_type, _ELEMENTS, "0 to 6")
    if Output.DENSE in options.outputs and dense.needs_unit_vectors and not options.normalize:
        raise InvalidInput(f"`dense_type` {dense.value} is for vectors of length 1: it needs `normalize`")
    if Output.TOKENS in options.outputs and token.needs_unit_vectors:
        raise InvalidInput(f"`token_type` {token.value} is for vectors of length 1: `tokens` are not")
    return Form(lz4=_lz4(message), dense=dense, token=token)


def infer_table(message: arrow_pb2.ArrowRequest, reserved: Sequence[str]) -> Table:
    """How the request's table is read; keys may not bear the `reserved` names of the answer's own columns.

    Raises:
        InvalidInput: an unknown kind of input, or a key column with such a name.
    """
    kind = _known("input", message.input, _INPUTS, "0 to 3")
    keys = list(dict.fromkeys(message.key_columns))  # a stream's first options come with every message
    if taken := set(keys) & set(reserved):
        raise InvalidInput(f"Key columns may not be called {sorted(taken)}: columns of the answer are")
    return Table(kind, keys)


def _prompt_name(message: ContractRequest | arrow_pb2.ArrowRequest) -> str | None:
    return message.prompt_name if message.HasField("prompt_name") else None


def _lz4(message: ContractRequest | arrow_pb2.ArrowRequest) -> bool:
    return _known("compression", message.compression, _LZ4, "0 (none) or 1 (LZ4)")


def _known(field: str, number: int, meanings: Mapping[int, T], choices: str) -> T:
    if number not in meanings:
        raise InvalidInput(f"`{field}` {number} is unknown: {choices}")
    return meanings[number]
