"""tei-manager §1: what the multiplexer's own methods add to those of `tei.v1`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from teimgr.wire.pb.tei.v1 import tei_pb2 as tei
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux
from tests.conformance.case import MUX, AskGrpc, Replies, Rpc
from tests.conformance.checks import near, replied
from tests.conformance.grpc_tei import METHODS
from tests.conformance.words import EMPTY, TEXT, WIDTH

MUX_ALONE = (MUX,)
SUBJECT = {
    "Embed": "embed",
    "EmbedSparse": "embed_sparse",
    "EmbedAll": "embed_all",
    "Predict": "predict",
    "PredictPair": "predict_pair",
    "Rerank": "rerank",
    "Tokenize": "tokenize",
    "Decode": "decode",
}


def to(name: str) -> mux.Target:
    return mux.Target(instance_name=name)


def embed(target: mux.Target | None, text: str | None = "fog") -> mux.EmbedRequest:
    return mux.EmbedRequest(target=target, request=None if text is None else tei.EmbedRequest(inputs=text))


def case(clause: str, method: str, *messages: Any, **said: Any) -> Rpc:
    return Rpc(clause, "embedding", method, messages, surfaces=MUX_ALONE, **said)


def calls() -> Iterator[Rpc]:
    """§1.2, §1.5 and §1.6"""
    for method, instance, message in METHODS:
        yield Rpc("mux 1.2 every method", instance, method, [message], answers=1, surfaces=MUX_ALONE)
    clause = "mux 1.5 routing"
    for method in ("Embed", "EmbedStream"):
        for target, status, details in (
            (None, "INVALID_ARGUMENT", "Missing target"),
            (mux.Target(), "INVALID_ARGUMENT", "No routing specified"),
            (to(""), "INVALID_ARGUMENT", "Instance name cannot be empty"),
            (to("nobody"), "NOT_FOUND", "Instance 'nobody' not found"),
            (to("EMBEDDING"), "NOT_FOUND", "Instance 'EMBEDDING' not found"),
            (mux.Target(model_id="no/model"), "NOT_FOUND", "*no/model*"),
            (mux.Target(instance_index=999), "NOT_FOUND", "*999*"),
        ):
            yield case(clause, method, embed(target), status=status, details=details, answers=0)
    by_index = mux.Target(instance_index=0)
    yield case(clause, "Embed", embed(by_index), answers=1)
    clause = "mux 1.5 missing inner request"
    for method, subject in SUBJECT.items():
        message = mux.EncodeRequest if method == "Tokenize" else getattr(mux, f"{method}Request")
        said = {"status": "INVALID_ARGUMENT", "details": f"Missing {subject} request"}
        yield case(clause, method, message(target=to("embedding")), **said)
    clause = "mux 1.5 order of checks"
    yield case(clause, "Embed", embed(to("nobody"), None), status="INVALID_ARGUMENT", details="Missing embed request")
    yield case(clause, "Embed", embed(None, None), status="INVALID_ARGUMENT", details="Missing target")
    clause = "mux 1.6 metadata of unary calls"
    costs = _metadata(True)
    yield case(clause, "Embed", tei.EmbedRequest(inputs="fog"), answer=costs)
    yield case(clause, "Tokenize", tei.EncodeRequest(inputs="fog"), answer=_metadata(False))
    refused = {"status": "INVALID_ARGUMENT", "details": EMPTY}
    yield case(clause, "Embed", tei.EmbedRequest(), **refused)


def _metadata(there: bool) -> Any:
    def check(replies: Replies, ask: AskGrpc) -> None:
        assert ("x-compute-type" in replies.metadata) is there

    return check


def streams() -> Iterator[Rpc]:
    """§1.7; a message may name another instance than the one before it."""
    clause = "mux 1.7 streams"
    for method in ("EmbedStream", "RerankStream"):
        yield case(clause, method, status="INVALID_ARGUMENT", details="Empty stream", answers=0)

    def widths(replies: Replies, ask: AskGrpc) -> None:
        assert [len(message.embeddings) for message in replies.messages] == [32, 32, 384, 384, 32]

    told = [embed(to("embedding")), embed(None), embed(to("minilm")), embed(None), embed(to("embedding"))]
    yield case(clause, "EmbedStream", *told, answer=widths)
    skipped = [embed(to("embedding")), embed(None, None), embed(to("embedding"))]
    yield case(clause, "EmbedStream", *skipped, answers=2)
    failing = [embed(to("embedding")), embed(None, ""), embed(None)]
    yield case(clause, "EmbedStream", *failing, status="INVALID_ARGUMENT", details=EMPTY, answers=1)
    lost = [embed(to("embedding")), embed(to("nobody"))]
    yield case(clause, "EmbedStream", *lost, status="NOT_FOUND", details="Instance 'nobody' not found", answers=1)


def ipc(texts: Sequence[Any], kind: Any = None, compression: str | None = None, name: str = "text") -> bytes:
    """A batch of one column as an Arrow stream."""
    table = pa.record_batch({name: pa.array(texts, kind or pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(table)
    return bytes(sink.getvalue().to_pybytes())


def _schema_alone() -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})).close()
    return bytes(sink.getvalue().to_pybytes())


def arrow(texts: Sequence[Any], instance: str = "embedding", **options: Any) -> mux.EmbedArrowRequest:
    return mux.EmbedArrowRequest(target=to(instance), arrow_ipc=ipc(texts), **options)


def rows(replies: Replies) -> pa.Table:
    return pa.ipc.open_stream(replies.one.arrow_ipc).read_all()


def tables() -> Iterator[Rpc]:
    """§1.8 and §1.9, in the newer form: rows out are rows in, and a failed one is null with its reason."""
    clause = "mux 1.8 EmbedArrow"

    def whole(replies: Replies, ask: AskGrpc) -> None:
        table = rows(replies)
        assert table.column_names == ["embeddings", "error"]
        assert table["embeddings"].type.list_size == WIDTH
        assert table["embeddings"].is_null().to_pylist() == [False, True, True, False]
        assert table["error"].to_pylist()[0] is table["error"].to_pylist()[3] is None
        assert table["error"].to_pylist()[2] == EMPTY
        raw = ask("Embed", tei.EmbedRequest(inputs=TEXT, normalize=False)).one.embeddings
        near(table["embeddings"][0].as_py(), list(raw))

    yield case(clause, "EmbedArrow", arrow([TEXT, None, "", "fog"]), answer=whole)
    unit = _length_of_first(one=True)
    yield case(clause, "EmbedArrow", arrow([TEXT], normalize=True), answer=unit)
    yield case(clause, "EmbedArrow", arrow([TEXT]), answer=_length_of_first(one=False))
    for body in (ipc(["fog"], name="other"), ipc(["fog"], pa.large_string()), ipc(["fog"], None, "lz4")):
        message = mux.EmbedArrowRequest(target=to("embedding"), arrow_ipc=body)
        yield case(clause, "EmbedArrow", message, answer=lambda replies, ask: _has(replies, 1))
    yield case(clause, "EmbedArrow", arrow([]), answer=lambda replies, ask: _has(replies, 0))
    zeros = replied(lambda told: not np.any(pa.ipc.open_stream(told.arrow_ipc).read_all()["embeddings"][0].as_py()))
    yield case(clause, "EmbedArrow", arrow(["fog"], noop=True), answer=zeros)
    unknown = {"status": "NOT_FOUND", "details": "Instance 'nobody' not found"}
    yield case(clause, "EmbedArrow", arrow(["fog"], "nobody"), **unknown)
    yield case(clause, "EmbedArrow", arrow(["fog"], "nobody", noop=True), **unknown)
    nothing = mux.EmbedArrowRequest(target=to("embedding"), arrow_ipc=_schema_alone())
    yield case(clause, "EmbedArrow", nothing, status="INVALID_ARGUMENT", details="No RecordBatch in stream")
    for body in (b"", b"no arrow", ipc(["fog"])[:60]):
        message = mux.EmbedArrowRequest(target=to("embedding"), arrow_ipc=body)
        yield case(clause, "EmbedArrow", message, status="INVALID_ARGUMENT", details="*Arrow*")
    numbers = mux.EmbedArrowRequest(target=to("embedding"), arrow_ipc=ipc([1, 2], pa.int64()))
    yield case(clause, "EmbedArrow", numbers, status="INVALID_ARGUMENT", details="*")
    wrong = arrow(["fog"], "classifier")
    details = "Backend error: Model is not an embedding model"
    yield case(clause, "EmbedArrow", wrong, status="FAILED_PRECONDITION", details=details)
    clause = "mux 1.9 EmbedSparseArrow"

    def sparse(replies: Replies, ask: AskGrpc) -> None:
        table = rows(replies)
        assert table.column_names == ["sparse_embeddings", "error"]
        [entries, nothing] = table["sparse_embeddings"].to_pylist()
        assert nothing is None
        expected = ask("EmbedSparse", tei.EmbedSparseRequest(inputs=TEXT)).one.sparse_embeddings
        near(entries, [{"index": entry.index, "value": entry.value} for entry in expected])

    message = mux.EmbedSparseArrowRequest(target=to("sparse"), arrow_ipc=ipc([TEXT, None]))
    yield Rpc(clause, "sparse", "EmbedSparseArrow", [message], answer=sparse, surfaces=MUX_ALONE)
    message = mux.EmbedSparseArrowRequest(target=to("embedding"), arrow_ipc=ipc([TEXT]))
    details = "Backend error: Model is not an embedding model with SPLADE pooling"
    yield case(clause, "EmbedSparseArrow", message, status="FAILED_PRECONDITION", details=details)


def _has(replies: Replies, count: int) -> None:
    table = rows(replies)
    assert (table.num_rows, table["embeddings"].type.list_size) == (count, WIDTH)
    assert table["error"].null_count == count


def _length_of_first(one: bool) -> Any:
    def check(replies: Replies, ask: AskGrpc) -> None:
        length = np.linalg.norm(rows(replies)["embeddings"][0].as_py())
        assert bool(np.isclose(length, 1, atol=1e-5)) is one

    return check


def limits() -> Iterator[Rpc]:
    """§1.10"""
    big = embed(to("embedding"), "a" * (41 * 1024 * 1024))
    yield case("mux 1.10 oversize message", "Embed", big, status="RESOURCE_EXHAUSTED", details="*41943040*")


def cases() -> Iterator[Rpc]:
    for table in (calls, streams, tables, limits):
        yield from table()
