"""`bench holds`: how long the calls that read and write the largest bodies keep other threads from running Python.

Each case runs on a thread beside one that asks for the GIL every half millisecond. The longest wait counts for no more
than the processor time that the process used in it. Up to some 6 ms are waited for any thread that runs Python.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial as of
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orjson
from starlette.exceptions import HTTPException
from tests.support.measures import held_s

from bench.monster_inputs import ARROW, TEXTS, arrow_stream
from bench.progress import partial, say
from bench.report import publish
from teimgr.api.batches.lines import _Reader
from teimgr.api.gateway.bodies import ModelScans
from teimgr.api.rest import schemas
from teimgr.engine.job import InferOptions, Job, Lane, SparseRow
from teimgr.errors import TeimgrError
from teimgr.observability.memory import collect_garbage_rarely, map_large_buffers
from teimgr.wire import arrow_tables, frames, json_pieces
from teimgr.wire.arrow_inputs import read_inputs, read_texts
from teimgr.wire.frames import HttpRequest, Timings
from teimgr.wire.gil import free
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.quantisation import Precision
from teimgr.worker import http_inference as http
from teimgr.worker import methods
from teimgr.worker.calls import parsed
from teimgr.worker.dialects import ollama, openai, rerank, sie, tei
from teimgr.worker.dialects.openai import binary_reply

HEADER = ("call", "MiB", "longest wait, ms")
LIMIT_MS = 20.0
_MIB = 2**20
_REST, _GRPC, _LINE, _CONTROL = 32 * _MIB - 4096, 40 * _MIB - 4096, 16 * _MIB, 2 * _MIB
_TIMINGS = Timings(1, 2, 3, 4, 5, 6)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these in their name")
    parser.add_argument("--repeats", type=int, default=3, help="of each case; the shortest wait counts (3)")


@dataclass(frozen=True)
class Case:
    """A call: `prepare` makes its argument, of about `size` bytes."""

    name: str
    size: int
    prepare: Callable[[int], Any]
    work: Callable[[Any], object]


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a wait was above the limit."""
    rows: list[tuple[str, float, float]] = []
    collect_garbage_rarely()  # like daemon, mux and worker
    map_large_buffers()  # like the daemon
    with partial():
        for case in cases():
            if options.only and not any(word in case.name for word in options.only):
                continue
            given = case.prepare(case.size)
            wait_ms = held_s(lambda case=case, given=given: _done(case, given), options.repeats) * 1e3  # type: ignore[misc]
            rows.append((case.name, case.size / _MIB, wait_ms))
            say(f"  {case.name}: {wait_ms:.1f} ms")
    facts = {"limit": f"{LIMIT_MS:g} ms", "above": ", ".join(name for name, _, ms in rows if ms > LIMIT_MS) or "none"}
    publish("holds", facts, HEADER, rows, {"rows": [dict(zip(HEADER, row, strict=True)) for row in rows]})
    return int(any(ms > LIMIT_MS for _, _, ms in rows))


def _done(case: Case, given: Any) -> None:
    with suppress(TeimgrError, http.BadRequest, ValueError, HTTPException):
        found = case.work(given)
        if isinstance(found, http.Body):  # a worker frees it so too
            free(found)


def cases() -> Iterator[Case]:
    """All of them: bodies that are read, replies that are written, what a link does with both."""
    yield from _json_cases()
    yield from _ollama_cases()
    yield from _tei_cases()
    yield from _msgpack_cases()
    yield from _protobuf_cases()
    yield from _control_cases()
    yield from _reply_cases()
    yield from _link_cases()


# Bodies.


def _json_cases() -> Iterator[Case]:
    for name in ("words", "Chinese", "emoji", "nul"):
        yield Case(f"JSON, one text: {name}", _REST, of(_text_body, name), _openai)
        yield Case(f"JSON of TEI, one text: {name}", _REST, of(_text_body, name), _tei)
    one_emoji = lambda size: _body("a" * (size - 8) + "\U0001f600")  # noqa: E731
    yield Case("JSON, one text with one emoji", _REST, one_emoji, _openai)
    yield Case("JSON, escapes", _REST, lambda size: b'{"input":"' + b"\\u00e9" * (size // 6) + b'"}', _openai)
    for name, ids in (("one list of ids", 1), ("2,048 lists of ids", 2048), ("32 lists of ids", 32)):
        yield Case(f"JSON, {name}", _REST, of(_ids, ids), _openai)
        yield Case(f"JSON of TEI, {name}", _REST, of(_ids, ids), _tei)
    yield Case("JSON, short texts", _REST, lambda size: _body(["rain on the harbour"] * (size // 22)), _openai)
    most = lambda size: _body([f"rain {n}" for n in range(990_000)])  # noqa: E731
    yield Case("JSON, as many short texts as are read", 14 * _MIB, most, _parsed_openai)
    yield Case("JSON, other short texts", _REST, lambda size: _body([f"rain {n}" for n in range(size // 15)]), _openai)
    yield Case("JSON, literals", _REST, lambda size: _body([None] * (size // 5)), _openai)
    yield Case("JSON, many keys", _REST, _many_keys, _openai)
    yield Case("JSON, one key again and again", _REST, lambda size: b"{" + b'"a":0,' * (size // 6) + b'"b":0}', _openai)
    yield Case("JSON, object in a list", _REST, lambda size: b'{"input":[' + _many_keys(size) + b"]}", _openai)
    yield Case("JSON, lists", _REST, lambda size: b'{"input":[' + b"[0]," * (size // 4) + b"[0]]}", _openai)
    yield Case("JSON, not UTF-8", _REST, lambda size: b'{"input":"' + b"\xff" * size + b'"}', _openai)
    yield Case("JSON, half a pair at the end", _REST, lambda size: b'{"input":"' + b"a" * size + b'\\ud800"}', _openai)
    yield Case("JSON, digits", _REST, lambda size: b'{"input":' + b"9" * size + b"}", _openai)
    yield Case("JSON, documents", _REST, _documents, _rerank)
    yield Case("JSON, one document", _REST, _document, _rerank)
    yield Case("finding the model behind many keys", _REST, _many_keys, _model)


def _ollama_cases() -> Iterator[Case]:
    read = of(http.parse, ollama.OllamaEmbedRequest)
    texts = lambda size: b'{"input":[' + b'"rain",' * 990_000 + b"1]}"  # noqa: E731
    yield Case("JSON of Ollama, short texts and a number", 7 * _MIB, texts, read)
    options = b'{"input":"a","options":' + _many_keys(49_000 * 12) + b"}"
    yield Case("JSON of Ollama, many options", len(options), lambda _: options, read)
    kept = b'{"input":"a","keep_alive":[' + b"1," * 990_000 + b"1]}"
    yield Case("JSON of Ollama, a list to keep alive", len(kept), lambda _: kept, read)


def _tei_cases() -> Iterator[Case]:
    """Bodies that TEI's own parser decides about, or that only look so."""
    escaped, few = b'{"inputs":"\\u005f",', _MIB
    spaces = lambda size: escaped + b" " * size + b'"truncate":true}'  # noqa: E731
    yield Case("TEI's parser, spaces beside an escape", _REST, spaces, _embed_of_tei)
    ids = lambda size: b'{"input":[' + b"100000," * (size // 7) + b'1],"user":"\\u005f"}'  # noqa: E731
    yield Case("TEI's parser, ids beside an escape", 6 * _MIB, ids, _tei)
    zero = lambda size: b'{"inputs":"a -0 ","truncate":true,' + b" " * size + b'"x":1}'  # noqa: E731
    yield Case("TEI's parser, spaces beside a zero", _REST, zero, _embed_of_tei)
    twice = lambda size: b'{"inputs":"a","inputs":"' + b"a" * (size // 4) + b'"}'  # noqa: E731
    yield Case("TEI's parser, a long text twice", _REST, twice, _embed_of_tei)
    for name, text in (("words", b"rain on "), ("emoji", b"\xf0\x9f\x98\x80"), ("escapes", b"\\u00e9")):
        each = b'"' + text * (8 * _MIB // len(text) - 1) + b'"'
        many = of(_texts_and_a_number, each)
        yield Case(f"TEI's parser, long texts and a number: {name}", _REST, many, _embed_of_tei)
        for place, before in (("of a wrong type", b'"truncate":'), ("of another field", b'"x":')):
            body = b'{"inputs":"a",' + before + each + b',"truncate":1}'
            yield Case(f"TEI's parser, a long text {place}: {name}", 8 * _MIB, lambda _, body=body: body, _embed_of_tei)
    for name, start in (("digits", b""), ("a fraction", b"0."), ("an exponent", b"1e")):
        for place, before in (("", b'"inputs":'), (" of another field", b'"inputs":"a","x":')):
            head = b"{" + before + start
            number = lambda size, head=head: head + b"9" * size + b"}"  # noqa: E731
            yield Case(f"TEI's parser, a number{place}: {name}", _REST // 2, number, _embed_of_tei)
    yield Case("TEI's parser, many keys", _REST, lambda size: _many_keys(size)[:-1] + b',"inputs":1}', _embed_of_tei)
    deep = lambda size: b'{"instances":[' + b"[[0]]," * 20_000 + b'{"inputs":"a"}]}'  # noqa: E731
    keys = b",".join(b'"k%d":0' % n for n in range(19))
    yield Case("TEI's parser, keys beside a zero", _REST, of(_around, keys), _embed_of_tei)
    keys = keys.replace(b"k", b"\\u006b")
    yield Case("TEI's parser, keys in escapes beside a zero", _REST, of(_around, keys), _embed_of_tei)
    short = lambda size: b'{"inputs":[' + b'"rain on",' * 990_000 + b'"a"],"prompt_name":"\\u005f"}'  # noqa: E731
    yield Case("TEI's parser, short texts beside an escape", 10 * _MIB, short, _embed_of_tei)
    yield Case("TEI's parser, lists of Vertex", few, deep, of(_read_tei, tei.TeiVertexRequest))
    many = lambda size: b'{"instances":[' + b"1," * 990_000 + b'"' + b"[" * 200 + b'"]}'  # noqa: E731
    yield Case("TEI's parser, numbers of Vertex", 2 * _MIB, many, of(_read_tei, tei.TeiVertexRequest))


def _texts_and_a_number(each: bytes, size: int) -> bytes:
    return b'{"inputs":[' + b",".join([each] * (size // len(each))) + b",1]}"


def _around(text: bytes, size: int) -> bytes:
    """A body that may be ambiguous, with about as many objects of `text` as a body may have."""
    return b'{"inputs":"a -0 ","x":[' + b",".join([b"{%b}" % text] * min(size // len(text), 48_000)) + b"]}"


def _read_tei(kind: type[http.Body], body: bytes) -> object:
    return http.parse(kind, body, tei.TEI_BODY)


def _embed_of_tei(body: bytes) -> object:
    return _read_tei(tei.TeiEmbedRequest, body)


def _text_body(name: str, size: int) -> bytes:
    return _body(TEXTS[name](size))


def _body(given: Any) -> bytes:
    return orjson.dumps({"model": "m", "input": given})


def _ids(lists: int, size: int) -> bytes:
    each = b"[" + b",".join(b"%d" % (300 + n % 20_000) for n in range(size // lists // 6)) + b"]"
    given = each if lists == 1 else b"[" + b",".join([each] * lists) + b"]"
    return b'{"input":%b,"model":"m"}' % given


def _many_keys(size: int) -> bytes:
    return b"{" + b",".join(b'"k%d":0' % n for n in range(size // 12)) + b"}"


def _documents(size: int) -> bytes:
    return orjson.dumps({"query": "a", "documents": [{"text": f"rain {n}"} for n in range(size // 24)]})


def _document(size: int) -> bytes:
    return orjson.dumps({"query": "a", "documents": ["word " * (size // 5)]})


def _parsed_openai(body: bytes) -> object:
    return http.parse(openai.OpenAIEmbeddingsRequest, body)


def _openai(body: bytes) -> object:
    found = http.parse(openai.OpenAIEmbeddingsRequest, body)
    return http.engine_inputs(found.input, openai.BATCH_LIMIT)


def _tei(body: bytes) -> object:
    return http.parse(tei.OpenAICompatRequest, body, tei.TEI_BODY)


def _rerank(body: bytes) -> object:
    return http.parse(rerank.RerankRequest, body)


def _model(body: bytes) -> object:
    scans = ModelScans()
    try:
        return asyncio.run(scans.model_of(body))
    finally:
        scans.close()


def _msgpack_cases() -> Iterator[Case]:
    yield Case("msgpack, one text", _REST, lambda size: _packed(TEXTS["words"](size)), _sie)
    yield Case("msgpack, Chinese", _REST, lambda size: _packed(TEXTS["Chinese"](size)), _sie)
    yield Case("msgpack, bytes", _REST, lambda size: _packed(b"a" * size), _sie)
    items = [{"text": f"rain {n}", "id": str(n)} for n in range(49_000)]
    yield Case("msgpack, 49,000 items", 2 * _MIB, lambda size: msgpack.packb({"items": items}), _sie)
    yield Case("JSON of SIE, 49,000 items", 2 * _MIB, lambda size: orjson.dumps({"items": items}), _sie_json)
    ids_of_items = [{"text": "a", "images": [300] * 90_000}] * 11
    yield Case("JSON of SIE, ids of items", 4 * _MIB, lambda size: orjson.dumps({"items": ids_of_items}), _sie_json)
    yield Case("msgpack, ids of items", 3 * _MIB, lambda size: msgpack.packb({"items": ids_of_items}), _sie)
    for size in (60 * 1024, 140 * 1024):
        yield Case(f"msgpack, nested announced lists, {size} bytes", size, _announced, _sie)
    ids = [[300] * 90_000]
    yield Case("msgpack, ids", _REST, lambda size: msgpack.packb({"items": ids * (size // 270_000)}), _sie)
    yield Case("msgpack, many keys", _REST, lambda size: msgpack.packb({f"k{n}": n for n in range(size // 16)}), _sie)


def _packed(text: str | bytes) -> bytes:
    return bytes(msgpack.packb({"items": [{"text": text}]}))


def _announced(size: int) -> bytes:
    return b"\x81\xa5items" + b"\xdd\x00\x01\x00\x00" * 900 + b"\x00" * (size - 4600)


def _sie_json(body: bytes) -> object:
    return http.parse(sie.SieEncodeRequest, body)


def _sie(body: bytes) -> object:
    return http.parse(sie.SieEncodeRequest, body, sie._MSGPACK_BODY)


def _protobuf_cases() -> Iterator[Case]:
    for name in ("words", "Chinese", "emoji"):
        yield Case(f"protobuf, one text: {name}", _GRPC, of(_embed_message, name), _embed)
    yield Case("protobuf, a table", 16 * _MIB, lambda size: _table_message(ARROW["one long text"](size)), _table)
    yield Case("Arrow, one text", 16 * _MIB, ARROW["one long text"], _read_table)
    yield Case("Arrow, short texts", 16 * _MIB, lambda size: arrow_stream(_rows(size)), _read_table)
    for count, each in ((1, 3_900_000), (90_000, 40)):
        make = of(_id_table, count, each)
        yield Case(f"Arrow, {count:,} lists of ids", 16 * _MIB, make, _read_ids)
    yield Case("protobuf, rerank of many texts", _GRPC, _rerank_message, _rerank_parsed)
    yield Case("protobuf, rerank of long texts", _GRPC, _long_rerank_message, _rerank_parsed)
    yield Case("protobuf, a long pair", 16 * _MIB - 4096, _pair_message, _pair)


def _id_table(count: int, each: int, size: int) -> bytes:
    import pyarrow as pa

    return arrow_stream(pa.record_batch({"input_ids": pa.array([[300] * each] * count, pa.list_(pa.int32()))}))


def _read_ids(stream: bytes) -> object:
    return read_inputs(stream, 1 << 30)


def _rows(size: int) -> Any:
    import pyarrow as pa

    return pa.record_batch({"text": [f"rain {n}" for n in range(size // 14)]})


def _embed_message(name: str, size: int) -> bytes:
    return tei_pb2.EmbedRequest(inputs=TEXTS[name](size)).SerializeToString()


def _embed(payload: bytes) -> object:
    return parsed(tei_pb2.EmbedRequest, payload).inputs


def _table_message(stream: bytes) -> bytes:
    return multiplexer_pb2.EmbedArrowRequest(arrow_ipc=stream).SerializeToString()


def _table(payload: bytes) -> object:
    message = parsed(multiplexer_pb2.EmbedArrowRequest, payload)
    return message.arrow_ipc


def _read_table(stream: bytes) -> object:
    return read_texts(stream, 1 << 30, lambda rows: None, lambda: None)


def _rerank_message(size: int) -> bytes:
    return tei_pb2.RerankRequest(query="a", texts=["b" * (size // 60_000)] * 60_000).SerializeToString()


def _long_rerank_message(size: int) -> bytes:
    return tei_pb2.RerankRequest(query="a", texts=["\U0001f600" * (size // 128)] * 32).SerializeToString()


def _pair_message(size: int) -> bytes:
    return tei_pb2.PredictPairRequest(inputs=["\U0001f600" * (size // 8)] * 2).SerializeToString()


def _pair(payload: bytes) -> object:
    return list(parsed(tei_pb2.PredictPairRequest, payload).inputs)


def _rerank_parsed(payload: bytes) -> object:
    return [text for text in parsed(tei_pb2.RerankRequest, payload, 2**16).texts]  # noqa: C416


def _control_cases() -> Iterator[Case]:
    head = b'{"name":"a","model_id":"b",'
    yield Case("control body: unknown keys", _CONTROL, _many_keys, _create)
    yield Case("control body: tags", _CONTROL, lambda size: head + b'"tags":' + _many_keys(size) + b"}", _create)
    for name, element in (("arguments", b"1,"), ("lists", b"[],")):
        make = of(_elements, head, element)
        yield Case(f"control body: {name}", _CONTROL, make, _create)
    yield Case("control body: a long text", _CONTROL, lambda size: b'{"name":"' + b"a" * (size - 40) + b'"}', _create)
    yield Case("batch line: one text", _LINE, lambda size: _line("word " * (size // 5 - 40)), _read_lines)
    yield Case("batch line: ids", _LINE, lambda size: _line([300] * (size // 4 - 40)), _read_lines)
    yield Case("batch line: lists", _LINE, lambda size: _line([[0]] * (size // 4 - 100)), _read_lines)
    yield Case("batch line: many keys", _LINE, lambda size: _line({f"k{n}": 0 for n in range(size // 14)}), _read_lines)


def _elements(head: bytes, element: bytes, size: int) -> bytes:
    return head + b'"extra_args":[' + element * (size // len(element) - 40) + b"1]}"


def _create(text: bytes) -> object:
    return schemas.parsed_json(text, schemas.CreateInstance)


def _line(given: Any) -> Path:
    folder = Path(tempfile.mkdtemp())
    body = {"model": "m", "input": given}
    (folder / "in").write_bytes(
        orjson.dumps({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}) + b"\n"
    )
    return folder / "in"


def _read_lines(path: Path) -> object:
    with path.open("rb") as file:
        return _Reader(file, "/v1/embeddings", _LINE).chunk()


# Replies.


def _reply_cases() -> Iterator[Case]:
    yield Case("reply: base64, many vectors", 30 * _MIB, _job, lambda job: _listed(job, True))
    yield Case("reply: base64 of one matrix", 30 * _MIB, _matrix, lambda rows: http.to_json([_base64(rows)]))
    yield Case("reply: floats", 30 * _MIB, _job, lambda job: _listed(job, False))
    pieces = lambda size: [bytes(2**18)] * (size // 2**18)  # noqa: E731
    yield Case("reply: pieces", 120 * _MIB, pieces, json_pieces.joined)
    yield Case("reply: vectors per token, msgpack", 120 * _MIB, of(_sie_job, "multivector"), _sie_reply)
    yield Case("reply: bytes", 30 * _MIB, _job, lambda job: binary_reply(list(job.vectors), {}, "bytes_only"))
    yield Case("reply: vectors per token", 30 * _MIB, _matrix, lambda rows: http.to_json([rows]))
    yield Case("reply: sparse JSON", 30 * _MIB, _sparse_job, tei.sparse)
    yield Case("reply: one sparse JSON", 4 * _MIB, _one_sparse, tei.sparse)
    for output in ("dense", "sparse", "multivector"):
        yield Case(f"reply: msgpack, {output}", 30 * _MIB, of(_sie_job, output), _sie_reply)
    yield Case("reply: EmbedAll", _GRPC, _matrix, lambda rows: methods.embed_all_response(rows, _TIMINGS))
    yield Case("reply: EmbedSparse", 4 * _MIB, _one_sparse, _sparse_response)
    for lz4 in (False, True):
        how = ", LZ4" if lz4 else ""
        for precision in (Precision.FLOAT32, Precision.FLOAT16, Precision.INT8):
            yield Case(f"reply: Arrow, {precision.value}{how}", _GRPC, _job, of(_arrow, precision, lz4))
        yield Case(f"reply: Arrow, sparse{how}", _GRPC, _sparse_job, of(_arrow_sparse, lz4))
    yield Case("reply: tokens of a long text", 4 * _MIB, _tokens, _tokens_reply)


def _base64(rows: Any) -> Any:
    return http.encoded_vector(rows, in_base64=True)


def _sparse_response(job: Job) -> bytes:
    row = job.sparse[0]
    assert row is not None
    return methods.embed_sparse_response(row.indices, row.values, _TIMINGS)


def _arrow(precision: Precision, lz4: bool, job: Job) -> memoryview:
    return arrow_tables.write_vectors(job.vectors, {}, [len(job.vectors)], precision, lz4=lz4)


def _arrow_sparse(lz4: bool, job: Job) -> memoryview:
    return arrow_tables.write_sparse(job.sparse, {}, [len(job.sparse)], lz4=lz4)


def _job(size: int) -> Job:
    job = Job([], InferOptions(), Lane.BULK)
    job.vectors = np.random.default_rng(1).random((size // 4 // 1024, 1024), np.float32)
    return job


def _matrix(size: int) -> Any:
    return np.random.default_rng(1).random((size // 4 // 1024, 1024), np.float32)


def _sparse_row(count: int) -> SparseRow:
    return SparseRow(np.arange(count, dtype=np.uint32), np.random.default_rng(1).random(count, np.float32))


def _sparse_job(size: int) -> Job:
    job = Job([], InferOptions(), Lane.BULK)
    job.sparse = [_sparse_row(300)] * (size // 2400)
    return job


def _one_sparse(size: int) -> Job:
    job = Job([], InferOptions(), Lane.BULK)
    job.sparse = [_sparse_row(250_000)]
    return job


def _listed(job: Job, in_base64: bool) -> bytes:
    return openai.embedding_list("m", in_base64, Precision.FLOAT32, job)


def _sie_job(output: str, size: int) -> dict[str, Any]:
    if output == "sparse":
        rows: list[Any] = [{"indices": one.indices, "values": one.values} for one in _sparse_job(size).sparse if one]
    elif output == "dense":
        rows = [{"values": row} for row in _job(size).vectors]
    else:
        rows = [{"values": _matrix(size)}]
    return {"items": rows}


def _sie_reply(answer: dict[str, Any]) -> object:
    return sie._reply(HttpRequest("sie", "POST", "/v1/encode", headers={"accept": sie.MSGPACK}), answer)


def _tokens(size: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": "word", "special": False, "start": n, "stop": n + 1} for n in range(size // 60)]


def _tokens_reply(tokens: list[dict[str, Any]]) -> bytes:
    return b"[" + b",".join(http.to_json(tokens[at : at + 10_000])[1:-1] for at in range(0, len(tokens), 10_000)) + b"]"


# Links.


class _Link(frames.FrameProtocol):
    def frame_received(self, header: frames.Header, payload: Any) -> None:
        self.found = payload


def _link_cases() -> Iterator[Case]:
    yield Case("link: a frame received", _GRPC, _frame, _received)
    yield Case("link: a reply with timings received", _GRPC, lambda size: b"a" * size, frames.split_timings)
    yield Case("link: a body that grows", 60 * _MIB, lambda size: size, _grown)
    yield Case("link: a body held", 16 * _MIB, lambda size: b"a" * size, _held)


def _held(body: bytes) -> bytearray:
    payload = bytearray(b"head")
    payload += body
    return payload


def _grown(size: int) -> int:
    """A request's body as the daemon reads it; the length, as it is freed here."""
    body, part = bytearray(), bytes(2**16)
    for _ in range(0, size, len(part)):
        body += part
    return len(body)


def _frame(size: int) -> bytes:
    return frames.pack_header(size, frames.FrameType.REPLY, 1, 1) + b"a" * size


def _received(frame: bytes) -> None:
    async def receive() -> None:
        link = _Link(2**30)
        view, at = memoryview(frame), 0
        while at < len(view):
            buffer = link.get_buffer(0)
            count = min(len(buffer), 256 * 1024, len(view) - at)
            buffer[:count] = view[at : at + count]
            at += count
            link.buffer_updated(count)
            del buffer

    asyncio.run(receive())
