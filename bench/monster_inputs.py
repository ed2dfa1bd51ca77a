"""Inputs that cost a server more than their bytes suggest, of any size: texts, JSON, protobuf and Arrow.

`bench monsters` and the fuzzing with a second client (`tests/fuzz/victim/`) send them. All sizes are bytes, and what is
made has about that many.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

MUX_SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"
_SEED = 27
# What the sender must hold in memory is bounded too.
_MAX_ROWS = 2**25
_MAX_EXPANDED = 2**29


def _repeated(piece: str, size: int) -> str:
    return piece * (size // len(piece.encode()))


def _drawn(low: int, high: int, size: int) -> str:
    """Characters of a range by chance, no spaces."""
    chance = random.Random(_SEED)
    width = len(chr(high).encode())
    return "".join(chr(point) for point in chance.choices(range(low, high), k=size // width))


def _base64(size: int) -> str:
    return base64.b64encode(random.Random(_SEED).randbytes(size * 3 // 4)).decode()


TEXTS: Mapping[str, Callable[[int], str]] = {
    "words": partial(_repeated, "rain on the harbour "),
    "one long word": partial(_repeated, "a"),
    "dots": partial(_repeated, "."),
    "base64": _base64,
    "Chinese": partial(_drawn, 0x4E00, 0x9FA5),
    "emoji": partial(_drawn, 0x1F600, 0x1F64F),
    "emoji joined": partial(_repeated, "\U0001f469\u200d\U0001f469\u200d\U0001f467"),
    "combining marks": partial(_repeated, "\u0301\u0323"),
    "Hangul letters": partial(_repeated, "\u1100\u1161\u11a8"),
    "newlines": partial(_repeated, "\n"),
    "spaces": partial(_repeated, " "),
    "no-break spaces": partial(_repeated, "\u00a0"),
    "brackets": partial(_repeated, "[SEP]"),
    "quotes": partial(_repeated, '"'),
    "nul": partial(_repeated, "\0"),
    "ligatures": partial(_repeated, "\ufdfa"),  # 18 characters each, once normalised
    "digits": partial(_repeated, "0123456789"),
    "apostrophes": partial(_repeated, "'s"),
    "tabs": partial(_repeated, "\t"),
    "line separators": partial(_repeated, "\u2028"),
    "Thai": partial(_drawn, 0x0E01, 0x0E2E),
    "Devanagari joined": partial(_repeated, "\u0915\u094d\u200d"),
    "variation selectors": partial(_repeated, "a\ufe0f"),
    "emoji tags": partial(_repeated, "\U0001f3f4\U000e0067\U000e0062\U000e007f"),
    "mathematical letters": partial(_drawn, 0x1D400, 0x1D433),
    "private use": partial(_drawn, 0xE000, 0xF8FF),
    "right to left": partial(_repeated, "\u0639\u202e"),
    "accents composed": partial(_repeated, "\u1e69\u0323"),
}
"""One text of about a size: the long and the short of every script, without spaces where a tokenizer would cut."""

_MODEL = b'{"model": "%s", "input": '


BROKEN_JSON: Mapping[str, Callable[[int], bytes]] = {
    "quotes unended": lambda size: b'{"input": "' + b'\\"' * (size // 2),
    "backslashes": lambda size: b'{"input": "' + b"\\\\" * (size // 2),
    "backslash odd": lambda size: b'{"input": "' + b"\\" * (size | 1) + b'", "model": "x"}',
    "escapes": lambda size: b'{"input": "' + b"\\u00e9" * (size // 6),
    "surrogates": lambda size: b'{"input": "' + b"\\ud800" * (size // 6) + b'"}',
    "opening brackets": lambda size: b'{"input": ' + b"[" * size,
    "opening braces": lambda size: b'{"a":' * (size // 5),
    "closing brackets": lambda size: b'{"input": ' + b"]" * size,
    "commas": lambda size: b'{"input": [' + b"," * size,
    "colons": lambda size: b"{" + b":" * size,
    "spaces": lambda size: b'{"input"' + b" " * size,
    "quotes alone": lambda size: b'"' * size,
    "digits": lambda size: b'{"input": ' + b"9" * size + b"}",
    "exponent": lambda size: b'{"input": 1e' + b"9" * size + b"}",
    "not UTF-8": lambda size: b'{"input": "' + b"\xff" * size + b'"}',
    "literals": lambda size: b'{"input": [' + b"true," * (size // 5),
    "strings unended": lambda size: b'{"input": [' + b'"a","' * (size // 5),
}
"""Bodies that are no JSON, or end too soon."""

ODD_JSON: Mapping[str, Callable[[str, int], bytes]] = {
    "many keys": lambda model, size: (
        b"{" + b"".join(b'"k%d":0,' % n for n in range(size // 11)) + b'"input":"rain","model":"%s"}' % model.encode()
    ),
    "one key again and again": lambda model, size: (
        b"{" + b'"model":"nobody",' * (size // 17) + b'"input":"rain","model":"%s"}' % model.encode()
    ),
    "deep list": lambda model, size: _MODEL % model.encode() + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
    "deep object": lambda model, size: (
        _MODEL % model.encode() + b'{"a":' * (size // 6) + b"0" + b"}" * (size // 6) + b"}"
    ),
    "lists [0]": lambda model, size: _MODEL % model.encode() + b"[" + b"[0]," * (size // 4) + b"[0]]}",
    "empty texts": lambda model, size: _MODEL % model.encode() + b"[" + b'"",' * (size // 3) + b'""]}',
    "short texts": lambda model, size: _MODEL % model.encode() + b"[" + b'"a b",' * (size // 6) + b'"a"]}',
    "ids": lambda model, size: _MODEL % model.encode() + b"[" + b"7," * (size // 2) + b"7]}",
    "spaces inside": lambda model, size: _MODEL % model.encode() + b" " * size + b'"rain"}',
    "user field": lambda model, size: _MODEL % model.encode() + b'"rain", "user": "' + b"u" * size + b'"}',
    "long name": lambda model, size: b'{"input": "rain", "model": "' + b"m" * size + b'"}',
    "escaped text": lambda model, size: _MODEL % model.encode() + b'"' + b"\\u6f22" * (size // 6) + b'"}',
}
"""Whole JSON of the model that is named, for /v1/embeddings; most of it is refused."""


def json_bodies(model: str, text: str) -> dict[str, tuple[str, bytes]]:
    """Path and body of a call of each dialect on the REST port with `text`, by what it does."""
    bodies: dict[str, tuple[str, Any]] = {
        "/v1/embeddings": ("/v1/embeddings", {"model": model, "input": text}),
        "/v1/embeddings, list": ("/v1/embeddings", {"model": model, "input": ["rain", text, "fog"]}),
        "/v2/embed": ("/v2/embed", {"model": model, "texts": [text], "input_type": "search_document"}),
        "/vllm/tokenize": ("/vllm/tokenize", {"model": model, "prompt": text}),
        "/pooling": ("/pooling", {"model": model, "input": text}),
        "/embeddings": ("/embeddings", {"model": model, "input": [text]}),
        "/instances/…/embed": (f"/instances/{model}/embed", {"inputs": text, "truncate": True}),
        "/instances/…/embed_all": (f"/instances/{model}/embed_all", {"inputs": text, "truncate": True}),
        "/instances/…/tokenize": (f"/instances/{model}/tokenize", {"inputs": text}),
        "/instances/…/similarity": (
            f"/instances/{model}/similarity",
            {"inputs": {"source_sentence": text, "sentences": [text]}},
        ),
    }
    return {name: (path, json.dumps(body, ensure_ascii=False).encode()) for name, (path, body) in bodies.items()}


def rerank_bodies(model: str, text: str) -> dict[str, tuple[str, bytes]]:
    """As `json_bodies`, of a reranker: the monster is a document, or the query."""
    bodies: dict[str, tuple[str, Any]] = {
        "/v1/rerank, document": ("/v1/rerank", {"model": model, "query": "rain", "documents": [text, "fog"]}),
        "/v1/rerank, query": ("/v1/rerank", {"model": model, "query": text, "documents": ["fog", "sun"]}),
        "/v2/rerank": ("/v2/rerank", {"model": model, "query": "rain", "documents": [text]}),
        "/score": ("/score", {"model": model, "text_1": "rain", "text_2": [text]}),
        "/instances/…/rerank": (
            f"/instances/{model}/rerank",
            {"query": "rain", "texts": [text], "truncate": True},
        ),
    }
    return {name: (path, json.dumps(body, ensure_ascii=False).encode()) for name, (path, body) in bodies.items()}


def port_bodies(text: str) -> dict[str, tuple[str, bytes]]:
    """Path and body of calls of an embedding instance's own port with `text`."""
    bodies: dict[str, tuple[str, Any]] = {
        "/embed": ("/embed", {"inputs": text, "truncate": True}),
        "/embed_all": ("/embed_all", {"inputs": text, "truncate": True}),
        "/tokenize": ("/tokenize", {"inputs": text}),
        "/v1/embeddings": ("/v1/embeddings", {"input": text, "model": "x"}),
    }
    return {name: (path, json.dumps(body, ensure_ascii=False).encode()) for name, (path, body) in bodies.items()}


def mux_messages(instance: str, text: str) -> dict[str, tuple[str, bytes]]:
    """Path and message of RPCs of the mux with `text`, by the name of the method."""
    to = multiplexer_pb2.Target(instance_name=instance)
    messages: dict[str, Any] = {
        "Embed": multiplexer_pb2.EmbedRequest(target=to, request=tei_pb2.EmbedRequest(inputs=text, truncate=True)),
        "EmbedAll": multiplexer_pb2.EmbedAllRequest(
            target=to, request=tei_pb2.EmbedAllRequest(inputs=text, truncate=True)
        ),
        "Tokenize": multiplexer_pb2.EncodeRequest(target=to, request=tei_pb2.EncodeRequest(inputs=text)),
        "EmbedArrow": arrow_message(instance, arrow_stream(pa.record_batch({"text": pa.array([text], pa.string())}))),
    }
    return {name: (MUX_SERVICE + name, _raw(message)) for name, message in messages.items()}


def rerank_message(instance: str, text: str) -> tuple[str, bytes]:
    """Path and message of a Rerank whose one document is `text`."""
    request = tei_pb2.RerankRequest(query="rain", texts=[text, "fog"], truncate=True)
    to = multiplexer_pb2.Target(instance_name=instance)
    return MUX_SERVICE + "Rerank", multiplexer_pb2.RerankRequest(target=to, request=request).SerializeToString()


def _raw(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _with_fields(field: bytes, instance: str, size: int) -> bytes:
    """An Embed of one short text with one unknown field again and again, outside and inside of its request."""
    many = field * (size // 2 // len(field))
    inner = tei_pb2.EmbedRequest(inputs="rain").SerializeToString() + many
    outer = multiplexer_pb2.EmbedRequest(target=multiplexer_pb2.Target(instance_name=instance))
    length, left = b"", len(inner)
    while left > 127:
        length, left = length + bytes((left & 127 | 128,)), left >> 7
    return outer.SerializeToString() + many + b"\x12" + length + bytes((left,)) + inner


FIELDS: Mapping[str, Callable[[str, int], bytes]] = {
    "unknown numbers": partial(_with_fields, b"\x78\x00"),
    "unknown empty strings": partial(_with_fields, b"\x7a\x00"),
    "unknown groups": partial(_with_fields, b"\x7b\x7c"),
    "unknown fixed": partial(_with_fields, b"\x7d\0\0\0\0"),
    "unknown long tags": partial(_with_fields, b"\x80\x80\x80\x80\x08\x00"),
    "nested groups": lambda instance, size: _with_fields(b"\x7b", instance, size),
    "targets again": lambda instance, size: _with_fields(b"\x0a\x00", instance, size),
}
"""Messages of Embed of an instance with very many fields."""


def arrow_stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    """An IPC stream of batches."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def arrow_message(instance: str, stream: bytes) -> bytes:
    """The message of an EmbedArrow."""
    message = multiplexer_pb2.EmbedArrowRequest(arrow_ipc=stream, truncate=True)
    message.target.instance_name = instance
    return bytes(message.SerializeToString())


def _texts_batch(texts: Sequence[str]) -> pa.RecordBatch:
    return pa.record_batch({"text": pa.array(texts, pa.string())})


def _columns(size: int) -> bytes:
    names = [f"c{number}" for number in range(max(1, size // 130))]  # a field and its buffers have some 130 bytes
    empty = pa.array([], pa.int8())
    return arrow_stream(pa.record_batch([empty] * len(names) + [pa.array([], pa.string())], [*names, "text"]))


def _dictionary(value: str, rows: int, compression: str | None) -> bytes:
    indices = pa.array(np.zeros(min(rows, _MAX_ROWS), np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([value]))
    return arrow_stream(pa.record_batch({"text": column}), compression=compression)


def _nested(size: int) -> bytes:
    kind = pa.string()
    for _ in range(min(size // 300, 60)):
        kind = pa.struct([("a", kind)])
    return arrow_stream(pa.record_batch({"text": pa.array(["rain"]), "b": pa.array([None], kind)}))


def _metadata(size: int) -> bytes:
    batch = pa.record_batch({"text": pa.array(["rain"])})
    return arrow_stream(batch.replace_schema_metadata({f"k{n}": "v" for n in range(size // 40)}))


ARROW: Mapping[str, Callable[[int], bytes]] = {
    "many columns": _columns,
    "dictionary of one emoji, LZ4": lambda size: _dictionary("\U0001f642", size * 60, "lz4"),
    "dictionary of one long text, LZ4": lambda size: _dictionary("rain " * 13_000, size * 8, "lz4"),
    "dictionary of one long text": lambda size: _dictionary("rain " * 13_000, size // 4, None),
    "equal rows, LZ4": lambda size: arrow_stream(_texts_batch(["a"] * (size // 4)), compression="lz4"),
    "equal rows, ZSTD": lambda size: arrow_stream(_texts_batch(["a"] * (size // 4)), compression="zstd"),
    "empty rows": lambda size: arrow_stream(_texts_batch([""] * (size // 4))),
    "many batches": lambda size: arrow_stream(*[_texts_batch(["a"])] * max(1, size // 250)),
    "nested column": _nested,
    "metadata": _metadata,
    "one long metadata": lambda size: arrow_stream(
        pa.record_batch({"text": pa.array(["rain"])}).replace_schema_metadata({"k": "v" * size})
    ),
    "one long name": lambda size: arrow_stream(pa.record_batch({"text": pa.array(["rain"]), "n" * size: [1]})),
    "runs": lambda size: arrow_stream(
        pa.record_batch({"text": pa.RunEndEncodedArray.from_arrays(pa.array([size], pa.int32()), pa.array(["rain"]))})
    ),
    "lists of texts": lambda size: arrow_stream(pa.record_batch({"text": pa.array([["a"] * (size // 5)])})),
    "views": lambda size: arrow_stream(
        pa.record_batch({"text": pa.array(["rain on the harbour"] * (size // 36), pa.string_view())})
    ),
    "null rows": lambda size: arrow_stream(pa.record_batch({"text": pa.array([None] * (size // 4), pa.string())})),
    "one long text": lambda size: arrow_stream(_texts_batch(["." * size])),
    "one long text, LZ4": lambda size: arrow_stream(
        _texts_batch(["." * min(size * 100, _MAX_EXPANDED)]), compression="lz4"
    ),
}
"""IPC streams of about a size; those that are compressed expand to far more."""
