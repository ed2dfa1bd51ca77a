"""Arrow calls to real workers of several kinds: each output is what the call for one text gives, in typed columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import (
    CORPUS,
    LABELS,
    WIDTH,
    build_classifier,
    build_cross_encoder,
    build_m3,
    build_routed_dense,
    build_routed_sparse,
    build_splade,
)
from tests.support.worker_process import Connect, WorkerLink, WorkerProcess, arrow, embed_request, table

from teimgr.errors import Code, InvalidInput
from teimgr.wire.arrow_inputs import InputKind
from teimgr.wire.frames import Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import UNCOUNTED_BYTES
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import arrow_calls
from teimgr.worker.arrow_calls import response_head

TEXTS = list(CORPUS[:6])
LIMIT_BYTES = 1 << 20

DENSE, SPARSE, MULTI_VECTOR, TOKENS, SCORES = range(1, 6)


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(build_m3(tmp_path_factory.mktemp("m")), max_message_bytes=LIMIT_BYTES) as worker:
        yield worker


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(build_splade("bert", tmp_path_factory.mktemp("m"))) as worker:
        yield worker


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(build_classifier("bert", tmp_path_factory.mktemp("m"))) as worker:
        yield worker


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with WorkerProcess(build_cross_encoder("bert", tmp_path_factory.mktemp("m"))) as worker:
        yield worker


@pytest.fixture
async def m3_link(m3: WorkerProcess, connect: Connect) -> WorkerLink:
    return await ready(m3, connect)


async def ready(worker: WorkerProcess, connect: Connect) -> WorkerLink:
    link = await connect(worker)
    await link.state(link.post(Method.WATCH), "ready")
    return link


def infer_request(given: pa.Table, *, empty: bool = False, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, given.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(given)
        if empty:
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=given.schema))
    return arrow_pb2.ArrowRequest(arrow_ipc=sink.getvalue().to_pybytes(), **options).SerializeToString()


async def infer(link: WorkerLink, given: pa.Table, **options: object) -> pa.Table:
    answer = await link.ask(Method.INFER_ARROW, infer_request(given, **options))
    found = pa.ipc.open_stream(arrow_pb2.ArrowResponse.FromString(answer.reply).arrow_ipc).read_all()
    found.validate(full=True)
    return found


async def refusal(link: WorkerLink, given: pa.Table, **options: object) -> tuple[Code, str]:
    error = (await link.ask(Method.INFER_ARROW, infer_request(given, **options))).error
    return error.code, error.message


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist())


async def one_by_one(link: WorkerLink, method: int, kind: type, reply: type, **options: object) -> list:
    requests = [kind(inputs=text, **options).SerializeToString() for text in TEXTS]
    return [reply.FromString((await link.ask(method, request)).reply) for request in requests]


async def test_a_large_table_is_read_at_any_place_of_its_message(m3_link: WorkerLink) -> None:
    given = pa.table({"text": [text * 400 for text in TEXTS]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, given.schema) as writer:
        writer.write_table(given)
    request = arrow_pb2.ArrowRequest(arrow_ipc=sink.getvalue().to_pybytes()).SerializeToString()
    assert len(request) > UNCOUNTED_BYTES
    unknown = [b"\x7a" + bytes([size]) + b"?" * size for size in range(8)]

    replies = {(await m3_link.ask(Method.INFER_ARROW, before + request)).reply for before in unknown}

    assert len(replies) == 1
    assert replies != {b""}


# Bounds.


async def test_a_message_of_some_hundred_bytes_is_no_million_rows(m3_link: WorkerLink) -> None:
    """1 MiB holds a million rows of the smallest replies, and every row becomes objects."""
    given = pa.table({"text": pa.nulls(200_000, pa.string())})
    assert len(infer_request(given)) < 1000

    for output in (SPARSE, DENSE):
        code, message = await refusal(m3_link, given, outputs=[output], dense_type=arrow_pb2.ELEMENT_TYPE_UBINARY)

        assert (code, message) == (Code.MESSAGE_TOO_LARGE, "Arrow batch has 200000 rows, the limit is 100000 rows")


# Outputs.


async def test_three_outputs_and_the_hidden_states_come_from_one_run(m3_link: WorkerLink) -> None:
    before = (await m3_link.ask(Method.STATS)).json
    given = pa.table({"text": TEXTS})

    found = await infer(m3_link, given, outputs=[TOKENS, MULTI_VECTOR, SPARSE, DENSE])

    after = (await m3_link.ask(Method.STATS)).json
    assert after["texts"] - before["texts"] == len(TEXTS)
    assert found.column_names == ["dense", "sparse", "multi_vector", "tokens", "error"]
    assert found["error"].null_count == len(TEXTS)
    dense = await one_by_one(m3_link, Method.EMBED, tei_pb2.EmbedRequest, tei_pb2.EmbedResponse)
    np.testing.assert_allclose(matrix(found["dense"]), [reply.embeddings for reply in dense], atol=1e-5)
    sparse = await one_by_one(m3_link, Method.EMBED_SPARSE, tei_pb2.EmbedSparseRequest, tei_pb2.EmbedSparseResponse)
    for row, reply in zip(found["sparse"].to_pylist(), sparse, strict=True):
        assert [entry["index"] for entry in row] == [entry.index for entry in reply.sparse_embeddings]
        values = [entry.value for entry in reply.sparse_embeddings]
        np.testing.assert_allclose([entry["value"] for entry in row], values, atol=1e-5)
    hidden = await one_by_one(m3_link, Method.EMBED_ALL, tei_pb2.EmbedAllRequest, tei_pb2.EmbedAllResponse)
    for row, kept, reply in zip(found["tokens"].to_pylist(), found["multi_vector"].to_pylist(), hidden, strict=True):
        np.testing.assert_allclose(row, [token.embeddings for token in reply.token_embeddings], atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(kept, axis=1), 1.0, atol=1e-5)
        assert 0 < len(kept) < len(row)


async def test_columns_have_the_documented_types(m3_link: WorkerLink) -> None:
    found = await infer(
        m3_link, pa.table({"text": TEXTS}), outputs=[DENSE, MULTI_VECTOR], dense_type=5, token_type=2, dimensions=20
    )

    dense, multi = found.schema.field("dense"), found.schema.field("multi_vector")
    assert dense.type == pa.list_(pa.field("item", pa.int8(), nullable=False), 3)
    assert dense.metadata == {b"precision": b"binary", b"width": b"20"}
    assert multi.type.value_type == pa.list_(pa.field("item", pa.float16(), nullable=False), WIDTH)
    assert multi.metadata == {b"precision": b"float16", b"width": str(WIDTH).encode()}


@pytest.mark.parametrize("number", range(7))
async def test_every_element_type_is_made_of_the_same_vectors(m3_link: WorkerLink, number: int) -> None:
    precision = list(Precision)[max(number - 1, 0)]
    given = pa.table({"text": TEXTS})
    plain = matrix((await infer(m3_link, given))["dense"]).astype(np.float32)

    found = matrix((await infer(m3_link, given, dense_type=number))["dense"])

    wanted = converted(plain, precision)
    assert found.shape == wanted.shape
    if precision in (Precision.BINARY, Precision.UBINARY):
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found.astype(np.float64), wanted, atol=1 if "int" in precision.value else 1e-3)


async def test_without_outputs_a_model_gives_what_it_is_for(
    m3_link: WorkerLink, splade: WorkerProcess, reranker: WorkerProcess, connect: Connect
) -> None:
    pairs = pa.table({"text": TEXTS, "query": TEXTS})

    assert (await infer(m3_link, pa.table({"text": TEXTS}))).column_names == ["dense", "error"]
    assert (await infer(await ready(splade, connect), pairs, input=1)).column_names == ["sparse", "error"]
    assert (await infer(await ready(reranker, connect), pairs)).column_names == ["scores", "error"]


# Inputs.


async def test_ids_are_the_texts_they_stand_for(m3_link: WorkerLink) -> None:
    request = [tei_pb2.EncodeRequest(inputs=text, add_special_tokens=True).SerializeToString() for text in TEXTS]
    replies = [(await m3_link.ask(Method.TOKENIZE, payload)).reply for payload in request]
    ids = [[token.id for token in tei_pb2.EncodeResponse.FromString(reply).tokens] for reply in replies]

    by_ids = await infer(m3_link, pa.table({"input_ids": pa.array(ids, pa.list_(pa.uint32()))}))
    by_text = await infer(m3_link, pa.table({"text": TEXTS}))

    np.testing.assert_allclose(matrix(by_ids["dense"]), matrix(by_text["dense"]), atol=1e-5)


async def test_bad_ids_fail_their_rows_alone(m3_link: WorkerLink) -> None:
    ids = pa.array([[0, 5, 2], [0, 10**6, 2], [-1], [], None, [None]], pa.list_(pa.int64()))

    found = await infer(m3_link, pa.table({"input_ids": ids}), outputs=[DENSE, SPARSE, MULTI_VECTOR])

    for name in ("dense", "sparse", "multi_vector"):
        assert [row is None for row in found[name].to_pylist()] == [False, True, True, True, True, True]
    errors = found["error"].to_pylist()
    assert errors[0] is None
    assert "1000000" in errors[1]
    assert "-1" in errors[2]
    assert all(errors[3:5])
    assert "a null" in errors[5]


async def test_pairs_are_scored_with_the_names_of_the_labels(classifier: WorkerProcess, connect: Connect) -> None:
    link = await ready(classifier, connect)
    seconds = TEXTS[1:] + TEXTS[:1]
    given = pa.table({"text": [*TEXTS, None], "text_pair": [*seconds, "x"]})

    found = await infer(link, given, raw_scores=True)

    field = found.schema.field("scores")
    assert json.loads(field.metadata[b"labels"]) == list(LABELS)
    assert field.type == pa.list_(pa.field("item", pa.float32(), nullable=False), len(LABELS))
    assert found["scores"].to_pylist()[-1] is None
    assert found["error"].to_pylist()[-1]
    for row, pair in zip(found["scores"].to_pylist(), zip(TEXTS, seconds, strict=True), strict=False):
        request = tei_pb2.PredictPairRequest(inputs=pair, raw_scores=True).SerializeToString()
        reply = tei_pb2.PredictResponse.FromString((await link.ask(Method.PREDICT_PAIR, request)).reply)
        by_label = {prediction.label: prediction.score for prediction in reply.predictions}
        np.testing.assert_allclose(row, [by_label[label] for label in LABELS], atol=1e-5)


async def test_a_reranker_gives_one_number_per_query_and_text(reranker: WorkerProcess, connect: Connect) -> None:
    link = await ready(reranker, connect)
    given = pa.table({"query": [TEXTS[0]] * len(TEXTS), "text": TEXTS})

    found = await infer(link, given)

    assert found.schema.field("scores").type == pa.float32()
    request = tei_pb2.RerankRequest(query=TEXTS[0], texts=TEXTS).SerializeToString()
    ranks = tei_pb2.RerankResponse.FromString((await link.ask(Method.RERANK, request)).reply).ranks
    by_row = {rank.index: rank.score for rank in ranks}
    np.testing.assert_allclose(found["scores"].to_pylist(), [by_row[row] for row in range(len(TEXTS))], atol=1e-5)


# Rows.


async def test_keys_and_batches_come_back_as_they_were_and_failed_rows_keep_their_place(m3_link: WorkerLink) -> None:
    first = pa.table({"id": [1, 2, 3], "text": ["fog", None, ""]})
    whole = pa.concat_tables([first, first.slice(0, 0), first.slice(2)])

    found = await infer(m3_link, whole, empty=True, key_columns=["id", "text", "id"], outputs=[SPARSE, DENSE])

    assert found.column_names == ["id", "text", "dense", "sparse", "error"]
    assert found.select(["id", "text"]).equals(whole)
    assert [error is None for error in found["error"].to_pylist()] == [True, False, False, False]
    assert [row is None for row in found["dense"].to_pylist()] == [False, True, True, True]


async def test_a_long_table_has_the_rows_of_short_ones(m3_link: WorkerLink) -> None:
    """Its texts are of many lengths, some not ASCII, and its reply is encoded off the finisher."""
    words = ["fog", "rain", "", "naïve", None, "harbour lamps", "東京 fog"]
    texts = [words[i % 7] and f"{words[i % 7]} {'and rain ' * (i % 5)}".strip() for i in range(700)]
    whole = pa.table({"text": pa.array(texts, pa.string())})

    found = await infer(m3_link, whole, outputs=[DENSE, SPARSE])
    parts = [await infer(m3_link, whole.slice(begin, 100), outputs=[DENSE, SPARSE]) for begin in range(0, 700, 100)]

    expected = pa.concat_tables(parts)
    assert found["error"].to_pylist() == expected["error"].to_pylist()
    failed = [not text for text in texts]
    assert [row is None for row in found["dense"].to_pylist()] == failed
    for ours, theirs, is_failed in zip(found.to_pylist(), expected.to_pylist(), failed, strict=True):
        if not is_failed:
            np.testing.assert_allclose(ours["dense"], theirs["dense"], atol=1e-5)
            assert [entry["index"] for entry in ours["sparse"]] == [entry["index"] for entry in theirs["sparse"]]


async def test_a_row_too_long_fails_alone_unless_it_may_be_cut(m3_link: WorkerLink) -> None:
    given = pa.table({"text": ["fog " * 500, "fog"]})

    refused, cut = await infer(m3_link, given), await infer(m3_link, given, truncate=True)

    assert "must have less than" in refused["error"].to_pylist()[0]
    assert refused["error"].to_pylist()[1] is None
    assert cut["error"].null_count == 2


@pytest.mark.parametrize("outputs", [[DENSE, SPARSE, MULTI_VECTOR, TOKENS], [SPARSE]])
async def test_no_rows_have_the_types_of_many(m3_link: WorkerLink, outputs: list[int]) -> None:
    empty = pa.table({"text": pa.array([], pa.string())})

    none = await infer(m3_link, empty, empty=True, outputs=outputs)

    assert none.num_rows == 0
    assert none.schema == (await infer(m3_link, pa.table({"text": ["a"]}), outputs=outputs)).schema


# What fails a whole call.


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"outputs": [SCORES]}, Code.WRONG_MODEL_KIND, "not a classifier model"),
        ({"outputs": [DENSE, SCORES]}, Code.WRONG_MODEL_KIND, "not a classifier model"),
        ({"outputs": [9]}, Code.INVALID_INPUT, "`outputs` 9 is unknown"),
        ({"outputs": [DENSE] * 101}, Code.INVALID_INPUT, "`outputs` has 101 values, more than 100"),
        ({"input": 7}, Code.INVALID_INPUT, "`input` 7 is unknown"),
        ({"input": 3}, Code.INVALID_INPUT, "No column is named `input_ids`"),
        ({"dense_type": 7}, Code.INVALID_INPUT, "`dense_type` 7 is unknown"),
        ({"token_type": 9}, Code.INVALID_INPUT, "`token_type` 9 is unknown"),
        ({"compression": 5}, Code.INVALID_INPUT, "`compression` 5 is unknown"),
        ({"truncation_direction": 5}, Code.INVALID_INPUT, "`truncation_direction` 5 is unknown"),
        ({"dense_type": 3, "normalize": False}, Code.INVALID_INPUT, "it needs `normalize`"),
        ({"token_type": 4, "outputs": [TOKENS]}, Code.INVALID_INPUT, "`tokens` are not"),
        ({"dimensions": WIDTH + 1}, Code.INVALID_INPUT, "`dimensions`"),
        ({"prompt_name": "nobody"}, Code.INVALID_INPUT, "nobody"),
        ({"key_columns": ["nobody"]}, Code.INVALID_INPUT, "No column is named `nobody`"),
        ({"key_columns": ["error"]}, Code.INVALID_INPUT, "Key columns must not be called"),
    ],
    ids=str,
)
async def test_a_bad_option_fails_the_call(
    m3_link: WorkerLink, options: dict[str, object], code: Code, says: str
) -> None:
    given = pa.table({"text": ["a"], "error": ["b"]})

    assert (await refusal(m3_link, given, **options))[0] is code
    assert says in (await refusal(m3_link, given, **options))[1]
    assert len((await m3_link.answer(m3_link.embed())).vector) == WIDTH


@pytest.mark.parametrize("output", [DENSE, SPARSE, MULTI_VECTOR, TOKENS])
async def test_a_classifier_has_no_vectors(classifier: WorkerProcess, connect: Connect, output: int) -> None:
    link = await ready(classifier, connect)

    code, message = await refusal(link, pa.table({"text": ["a"]}), outputs=[output])

    assert code is Code.WRONG_MODEL_KIND
    assert message.startswith("Backend error: Model is not")


async def test_a_reply_that_cannot_fit_is_refused_before_the_work(m3_link: WorkerLink) -> None:
    before = (await m3_link.ask(Method.STATS)).json["texts"]
    given = pa.table({"text": ["a"] * 9000})

    for outputs in ([DENSE], [TOKENS]):
        code, message = await refusal(m3_link, given, outputs=outputs)
        assert code is Code.MESSAGE_TOO_LARGE
        assert "fewer rows per batch" in message
    long = pa.table({"text": ["rain " * 100] * 1200})
    assert "Vectors per token may take" in (await refusal(m3_link, long, outputs=[TOKENS], truncate=True))[1]

    assert (await m3_link.ask(Method.STATS)).json["texts"] == before


@pytest.mark.parametrize("rows", [150, 600], ids=["on the finisher", "off it"])
async def test_a_reply_that_turns_out_too_large_is_refused_after_it(m3_link: WorkerLink, rows: int) -> None:
    given = pa.table({"text": ["rain fog " * 30] * rows})

    code, message = await refusal(m3_link, given, outputs=[TOKENS], truncate=True)

    assert code is Code.MESSAGE_TOO_LARGE
    assert message.startswith("Arrow reply of")
    assert (await infer(m3_link, given.slice(0, 20), outputs=[TOKENS], truncate=True)).num_rows == 20


async def test_keys_count_for_the_size_of_the_reply(m3_link: WorkerLink) -> None:
    given = pa.table({"text": ["a"] * 20, "key": ["k" * 60_000] * 20})

    assert (await refusal(m3_link, given, key_columns=["key"]))[0] is Code.MESSAGE_TOO_LARGE
    assert (await infer(m3_link, given, key_columns=["key"], compression=1)).num_rows == 20


@pytest.mark.parametrize("payload", [b"\x0a\xff", b"", b"\x12\x04junk"])
async def test_garbage_is_invalid(m3_link: WorkerLink, payload: bytes) -> None:
    assert (await m3_link.ask(Method.INFER_ARROW, payload)).error.code is Code.INVALID_INPUT


# The contract's sparse call.


def sparse_arrow(texts: list[str | None], **options: object) -> bytes:
    plain = multiplexer_pb2.EmbedArrowRequest.FromString(arrow(texts))
    return multiplexer_pb2.EmbedSparseArrowRequest(arrow_ipc=plain.arrow_ipc, **options).SerializeToString()


@pytest.mark.clause("M1.9-schema")
async def test_sparse_arrow_is_the_sparse_call_row_by_row(splade: WorkerProcess, connect: Connect) -> None:
    link = await ready(splade, connect)
    single = await one_by_one(link, Method.EMBED_SPARSE, tei_pb2.EmbedSparseRequest, tei_pb2.EmbedSparseResponse)

    found = table((await link.ask(Method.EMBED_SPARSE_ARROW, sparse_arrow([*TEXTS, None]))).reply)

    assert found.column_names == ["sparse_embeddings", "error"]
    *rows, last = found["sparse_embeddings"].to_pylist()
    assert last is None
    assert found["error"].to_pylist()[-1]
    for row, reply in zip(rows, single, strict=True):
        assert [entry["index"] for entry in row] == [entry.index for entry in reply.sparse_embeddings]
        values = [entry.value for entry in reply.sparse_embeddings]
        np.testing.assert_allclose([entry["value"] for entry in row], values, atol=1e-5)


async def test_every_call_of_grpc_takes_the_route_of_its_role(tmp_path: Path, connect: Connect) -> None:
    """Of a sparse and of a dense model with a Router; without a role documents are the default of both."""
    with (
        WorkerProcess(build_routed_sparse(tmp_path / "sparse")) as sparse,
        WorkerProcess(build_routed_dense(tmp_path / "dense", "behind")) as dense,
    ):
        link, found = await ready(sparse, connect), {}
        for role in ("query", "document", None):
            named = {"truncate": True, "prompt_name": role}
            single = await one_by_one(
                link, Method.EMBED_SPARSE, tei_pb2.EmbedSparseRequest, tei_pb2.EmbedSparseResponse, **named
            )
            rows = table((await link.ask(Method.EMBED_SPARSE_ARROW, sparse_arrow(TEXTS, **named))).reply)
            found[role] = [[entry["index"] for entry in row] for row in rows["sparse_embeddings"].to_pylist()]
            assert found[role] == [[entry.index for entry in reply.sparse_embeddings] for reply in single]
        assert found["query"] != found["document"] == found[None]
        link, vectors = await ready(dense, connect), {}
        for role in ("query", "document", None):
            named = {"truncate": True, "normalize": True, "prompt_name": role}
            single = await one_by_one(link, Method.EMBED, tei_pb2.EmbedRequest, tei_pb2.EmbedResponse, **named)
            rows = table((await link.ask(Method.EMBED_ARROW, arrow(TEXTS, **named))).reply)
            vectors[role] = np.array([reply.embeddings for reply in single])
            np.testing.assert_allclose(matrix(rows["embeddings"]), vectors[role], atol=1e-5)
        assert not np.allclose(vectors["query"], vectors["document"], atol=1e-3)
        np.testing.assert_allclose(vectors[None], vectors["document"], atol=1e-5)


@pytest.mark.clause("M1.9-noop")
async def test_sparse_noop_is_the_pattern_of_tei_manager_without_the_model(
    splade: WorkerProcess, connect: Connect
) -> None:
    link = await ready(splade, connect)
    before = (await link.ask(Method.STATS)).json["texts"]

    found = table((await link.ask(Method.EMBED_SPARSE_ARROW, sparse_arrow(["a", None], noop=True))).reply)

    assert found["sparse_embeddings"].to_pylist() == [
        [{"index": row + step, "value": value} for step, value in ((0, 1.0), (100, 0.5), (200, 0.25))]
        for row in range(2)
    ]
    assert found["error"].null_count == 2
    assert (await link.ask(Method.STATS)).json["texts"] == before


async def test_wrong_kinds_fail_the_contracts_calls_with_their_own_code(
    splade: WorkerProcess, classifier: WorkerProcess, connect: Connect
) -> None:
    sparse_link, classifier_link = await ready(splade, connect), await ready(classifier, connect)

    normalised = (await sparse_link.ask(Method.EMBED_ARROW, arrow(["a"], normalize=True))).error
    dense = (await classifier_link.ask(Method.EMBED_ARROW, arrow(["a"]))).error
    sparse = (await classifier_link.ask(Method.EMBED_SPARSE_ARROW, sparse_arrow(["a"], noop=True))).error

    assert {error.code for error in (normalised, dense, sparse)} == {Code.WRONG_MODEL_KIND}
    assert normalised.message == "Backend error: `normalize` is not available for SPLADE models"
    assert sparse.message == "Backend error: Model is not an embedding model with SPLADE pooling"
    assert dense.message == "Backend error: Model is not an embedding model"


async def test_a_sparse_models_weights_are_a_full_vector_too(splade: WorkerProcess, connect: Connect) -> None:
    link = await ready(splade, connect)

    found = await infer(link, pa.table({"text": TEXTS}), outputs=[DENSE, SPARSE], normalize=False)
    contract = table((await link.ask(Method.EMBED_ARROW, arrow(TEXTS))).reply)

    dense = matrix(found["dense"])
    np.testing.assert_allclose(matrix(contract["embeddings"]), dense, atol=1e-5)
    for row, vector in zip(found["sparse"].to_pylist(), dense, strict=True):
        assert np.flatnonzero(vector).tolist() == [entry["index"] for entry in row]


async def test_a_single_call_still_works_beside_a_large_table(m3_link: WorkerLink) -> None:
    request = infer_request(pa.table({"text": ["rain fog " * 30] * 1000}), outputs=[DENSE, SPARSE], truncate=True)
    table_id = m3_link.post(Method.INFER_ARROW, request)
    text_id = m3_link.post(Method.EMBED, embed_request("fog"))

    assert len((await m3_link.answer(text_id)).vector) == WIDTH
    assert (await m3_link.answer(table_id)).reply


@given(st.binary(min_size=1, max_size=300))
def test_the_head_of_a_response_is_as_protobuf_writes_it(ipc: bytes) -> None:
    assert response_head(len(ipc)) + ipc == multiplexer_pb2.EmbedArrowResponse(arrow_ipc=ipc).SerializeToString()


def test_rows_of_files_are_read_no_further_than_somebody_waits_for_them() -> None:
    read: list[bytes] = []
    engine = SimpleNamespace(info=SimpleNamespace(modalities=("image",), fused=False), picture=read.append)

    def go_on() -> None:
        if len(read) == 2:
            raise InvalidInput("nobody waits")

    rows = SimpleNamespace(kind=InputKind.IMAGE, inputs=[b"0", b"1", b"2"], refused={})
    with pytest.raises(InvalidInput, match="nobody waits"):
        arrow_calls._inputs_of(SimpleNamespace(engine=engine), rows, go_on)
    assert read == [b"0", b"1"]
