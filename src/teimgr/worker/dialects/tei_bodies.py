"""TEI's request types: fields, texts and defaults of each route; and bodies that orjson may read differently: repeated
fields, -0 as an integer, deep nesting.

The types are from TEI 1.9.3 (`router/src/http/types.rs`). `tests/worker/dialects/test_tei_bodies.py` compares them with
the request classes of `tei.py`. A search of some microseconds finds candidates of such bodies, false ones included; the
keys and numbers of candidates are then checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import orjson

from teimgr.wire.json_scan import Steps, completed, end_of_string, mentions, name_pattern, occurrences
from teimgr.worker.dialects.serde_json import Fault, Path, Reader
from teimgr.worker.dialects.serde_text import end_of_run, shown
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

_WINDOW_BYTES = 2**18
_BYTES_A_STEP = 2**14  # one to two milliseconds
_DEEPEST = 100
_LONGEST_NAME = 256  # bytes of a field's name with each letter escaped
_QUOTE = b'"'[0]
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_IN_FLOATS = frozenset((b".", b"e", b"E", *(b"%d" % digit for digit in range(10))))
_ESCAPED_LETTERS = (rb"\u005", rb"\u006", rb"\u007")
_MINUS_ZERO = re.compile(rb"[:,\[\s]-0[\s,}\]]")  # an integer to orjson, a float to TEI
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Text that leaves the depth unchanged, including lists and objects of scalars.
_SCALARS = rb'[^"\[\]{}]++|' + _STRING
_SMALL = rb"\[(?:" + _SCALARS + rb")*+\]|\{(?:" + _SCALARS + rb")*+\}"
_LEVEL = re.compile(rb"(?:" + _SCALARS + rb"|" + _SMALL + rb")*+", re.DOTALL)
_OPENING = frozenset(b"[{")

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
    """A text, a pair of texts, or a batch of those, distinguished by the first element."""

    _EXPECTED = (
        "a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
        "[[string], [string, string], ...]"
    )

    def read(self, reader: Reader, path: Path) -> Steps[Any]:
        with reader.within(path):
            first = yield from reader.value_start()
            if first == ord("["):
                with reader.nested(reader.end_list):
                    return (yield from self._read_list(reader, path))
            if first == ord("{"):
                with reader.nested(reader.end_object):
                    raise Fault(f"invalid type: map, expected {self._EXPECTED}")
            if first != ord('"'):
                raise reader.wrong_type(self._EXPECTED)
            return reader.string()

    def _read_list(self, reader: Reader, path: Path) -> Steps[list[Any]]:
        if not reader.has_element(0):
            raise self._invalid_length(0)
        values = [(yield from _INTERNAL.read(reader, (*path, 0)))]
        if isinstance(values[0], list):
            self._check_pair(values[0])
            while reader.has_element(len(values)):
                values.append((yield from _TEXTS.read(reader, (*path, len(values)))))
                self._check_pair(values[-1])
            return values
        while reader.has_element(len(values)):
            values.append((yield from Text().read(reader, (*path, len(values)))))
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


def may_be_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """False for most correct bodies; `fields` are the names of a request's fields, in quotes."""
    if len(body) > _WINDOW_BYTES:
        return _may_be_ambiguous_by_windows(fields, body)
    if b"\\u00" in body and any(letter in body for letter in _ESCAPED_LETTERS):
        return True  # the search below does not find escaped field names
    return (b"-0" in body and _MINUS_ZERO.search(body) is not None) or (
        body.count(b":") > 1 and any(body.count(name) > 1 for name in fields)
    )


def _may_be_ambiguous_by_windows(fields: Collection[bytes], body: bytes) -> bool:
    """The same of megabytes: one search of all would hold the GIL."""
    if occurrences(body, b"\\u00") and any(occurrences(body, letter) for letter in _ESCAPED_LETTERS):
        return True
    windows = (_MINUS_ZERO.search(body, at, at + _WINDOW_BYTES + 3) for at in range(0, len(body), _WINDOW_BYTES))
    return (mentions(body, b"-0") and any(windows)) or any(occurrences(body, name) > 1 for name in fields)


@cache
def _all_but(fields: frozenset[bytes]) -> re.Pattern[bytes]:
    """All but a string that is a field's name, each letter of which may be written as an escape, with a colon behind
    it; but -0; and but what the window cuts.

    None of these calls holds the GIL for longer than a window takes.
    """
    names = (name_pattern(name[1:-1]) for name in sorted(fields))
    field = rb'"(?:' + b"|".join(names) + rb')"[ \t\r\n]*+(?::|\Z)'
    string = rb"(?!" + field + rb")" + _STRING
    return re.compile(rb'(?:[^"\-]++|' + string + rb"|-(?!0|\Z)|-0[.eE\d]|(?<=[eE])-)*+", re.DOTALL)


def is_ambiguous(fields: Collection[bytes], body: bytes) -> Steps[bool]:
    """Whether a body that orjson takes has a field twice, at whatever depth, or -0."""
    seen: set[bytes] = set()
    at, other, pause_at = 0, _all_but(frozenset(fields)), _BYTES_A_STEP
    while at < len(body):
        start, at = at, end_of_run(other, body, at, _BYTES_A_STEP)
        if at >= pause_at:
            pause_at = at + _BYTES_A_STEP
            yield
        if at - start > _BYTES_A_STEP or at >= len(body):  # the run continues, or the body ends
            continue
        if body[at] != _QUOTE:  # a minus sign
            if body[at + 1 : at + 2] == b"0" and body[at + 2 : at + 3] not in _IN_FLOATS:
                return True
            at += 1
            continue
        end = yield from end_of_string(body, at + 1)
        after = end_of_run(_SPACE, body, end)
        if body[after : after + 1] == b":" and end - at <= _LONGEST_NAME:
            name = body[at:end]
            if b"\\" in name:
                name = b'"%b"' % str(orjson.loads(name)).encode()
            if name in fields:
                if name in seen:
                    return True
                seen.add(name)
        at = end
    return False


def may_be_deep(body: bytes) -> bool:
    """True if values are nested as deep as TEI's parser refuses; orjson takes 1,024 levels."""
    if occurrences(body, b"[") + occurrences(body, b"{") < _DEEPEST:
        return False
    at = depth = 0
    while depth < _DEEPEST and (at := end_of_run(_LEVEL, body, at)) < len(body):
        if body[at] == _QUOTE:
            at = completed(end_of_string(body, at + 1))
            continue
        depth += 1 if body[at] in _OPENING else -1
        at += 1
    return depth >= _DEEPEST
