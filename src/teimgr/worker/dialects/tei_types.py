"""The types of TEI's request bodies, as its parser has them: fields in order, words and defaults of each route.

From TEI 1.9.3 (`router/src/http/types.rs`). `tests/worker/dialects/test_tei_types.py` compares them with the request
classes of `tei.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teimgr.worker.dialects.serde_json import Fault, Path, Reader
from teimgr.worker.dialects.serde_text import shown
from teimgr.worker.dialects.serde_types import (
    AnyValue,
    Bool,
    ListOf,
    Optional,
    Struct,
    StructField,
    Text,
    Unread,
    Unsigned,
    Untagged,
    Variants,
)

_U32, _USIZE = Unsigned("u32", 2**32), Unsigned("usize", 2**64)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < _U32.end for one in value)


def _is_input(value: Any) -> bool:
    return _is_text(value) or _are_ids(value)


_INPUT = Untagged("Input", lambda value: _is_input(value) or (isinstance(value, list) and all(map(_is_input, value))))
_INPUT_IDS = Untagged(
    "InputIds", lambda value: _are_ids(value) or (isinstance(value, list) and all(map(_are_ids, value)))
)
_TOKENIZE_INPUT = Untagged("TokenizeInput", lambda value: _is_text(value) or _are_texts(value))
_INTERNAL = Untagged("Internal", lambda value: _is_text(value) or _are_texts(value))
_TEXTS = ListOf(Text())


class PredictInputs:
    """A text, a pair of texts, or a batch of those: what the first element is decides."""

    _EXPECTED = (
        "a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
        "[[string], [string, string], ...]"
    )

    def read(self, reader: Reader, path: Path) -> Any:
        with reader.within(path):
            first = reader.value_start()
            if first == ord("["):
                with reader.nested(reader.end_list):
                    return self._read_list(reader, path)
            if first == ord("{"):
                with reader.nested(reader.end_object):
                    raise Fault(f"invalid type: map, expected {self._EXPECTED}")
            if first != ord('"'):
                raise reader.wrong_type(self._EXPECTED)
            return reader.string()

    def _read_list(self, reader: Reader, path: Path) -> list[Any]:
        if not reader.has_element(0):
            raise self._invalid_length(0)
        values = [_INTERNAL.read(reader, (*path, 0))]
        if isinstance(values[0], list):
            self._check_pair(values[0])
            while reader.has_element(len(values)):
                values.append(_TEXTS.read(reader, (*path, len(values))))
                self._check_pair(values[-1])
            return values
        while reader.has_element(len(values)):
            values.append(Text().read(reader, (*path, len(values))))
            if len(values) > 2:
                raise self._invalid_length(3)
        return values

    def _check_pair(self, texts: Sequence[str]) -> None:
        if len(texts) not in (1, 2):
            raise self._invalid_length(len(texts))

    def _invalid_length(self, given: int) -> Fault:
        return Fault(f"invalid length {given}, expected {self._EXPECTED}")

    def of_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise Fault(f"invalid type: {shown(value)}, expected {self._EXPECTED}")
        if not value:
            raise self._invalid_length(0)
        if isinstance(_INTERNAL.of_value(value[0]), list):
            self._check_pair(value[0])
            for one in value[1:]:
                self._check_pair(_TEXTS.of_value(one))
            return value
        for place, one in enumerate(value[1:], 1):
            Text().of_value(one)
            if place > 1:
                raise self._invalid_length(3)
        return value


_DIRECTION = StructField(Variants(("Left", "left", "Right", "right")), has_default=True)
_FLAG = StructField(Bool(), has_default=True)
_TRUNCATE = StructField(Optional(Bool()), has_default=True)
_PROMPT_NAME = StructField(Optional(Text()))
_INPUTS = {"inputs": StructField(_INPUT), "truncate": _TRUNCATE, "truncation_direction": _DIRECTION}
_PREDICT = {"inputs": StructField(PredictInputs()), "truncate": StructField(Optional(Bool()))}

EMBED = Struct(
    "EmbedRequest",
    {**_INPUTS, "prompt_name": _PROMPT_NAME, "normalize": _FLAG, "dimensions": StructField(Optional(_USIZE))},
)
EMBED_ALL = Struct(
    "EmbedAllRequest",
    {**_INPUTS, "prompt_name": _PROMPT_NAME},
    own={"pool_factor": StructField(Unread()), "patches": StructField(Unread())},
)
EMBED_SPARSE = Struct("EmbedSparseRequest", {**_INPUTS, "prompt_name": _PROMPT_NAME})
PREDICT = Struct(
    "PredictRequest",
    {**_PREDICT, "truncation_direction": _DIRECTION, "raw_scores": _FLAG},
    own={"aggregation_strategy": StructField(Unread())},
)
RERANK = Struct(
    "RerankRequest",
    {
        "query": StructField(Text()),
        "texts": StructField(_TEXTS),
        "truncate": _TRUNCATE,
        "truncation_direction": _DIRECTION,
        "raw_scores": _FLAG,
        "return_text": _FLAG,
    },
)
_SIMILARITY_INPUT = Struct(
    "SimilarityInput", {"source_sentence": StructField(Text()), "sentences": StructField(_TEXTS)}
)
_SIMILARITY_PARAMETERS = Struct(
    "SimilarityParameters",
    {"truncate": _TRUNCATE, "truncation_direction": _DIRECTION, "prompt_name": _PROMPT_NAME},
)
SIMILARITY = Struct(
    "SimilarityRequest",
    {"inputs": StructField(_SIMILARITY_INPUT), "parameters": StructField(Optional(_SIMILARITY_PARAMETERS), True)},
)
OPENAI = Struct(
    "OpenAICompatRequest",
    {
        "input": StructField(_INPUT),
        "model": StructField(Optional(Text())),
        "user": StructField(Optional(Text())),
        "encoding_format": StructField(Variants(("float", "base64")), has_default=True),
        "dimensions": StructField(Optional(_USIZE)),
    },
)
TOKENIZE = Struct(
    "TokenizeRequest",
    {"inputs": StructField(_TOKENIZE_INPUT), "add_special_tokens": _FLAG, "prompt_name": _PROMPT_NAME},
)
DECODE = Struct("DecodeRequest", {"ids": StructField(_INPUT_IDS), "skip_special_tokens": _FLAG})
VERTEX = Struct("VertexRequest", {"instances": StructField(ListOf(AnyValue()))})
