"""What the client gives of models of other kinds than dense ones, and tables in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pyarrow as pa
import pytest
from tests.support.small_servers import INSTANCE, MODEL, Multiplexer, vector_of

from teimgr.client import AsyncClient, Client, Prediction, Rank
from teimgr.errors import DeadlineExceeded, InstanceNotFound, Internal, InvalidInput, Overloaded, ValidationError
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2

LEFT = tei_pb2.TRUNCATION_DIRECTION_LEFT


# Sparse vectors, vectors per token, predictions.


async def test_sparse_vectors_are_indices_and_values(client: AsyncClient) -> None:
    one, none = await client.embed_sparse(["AB", ""], instance=INSTANCE)

    assert (one.indices.dtype, one.values.dtype) == (np.uint32, np.float32)
    assert (one.indices.tolist(), one.values.tolist()) == ([0, 1], [65.0, 66.0])
    assert none.indices.shape == none.values.shape == (0,)


async def test_vectors_per_token_are_a_matrix_per_text(client: AsyncClient) -> None:
    two, none = await client.embed_all(["a b", ""], model=MODEL)

    np.testing.assert_array_equal(two, [vector_of("a"), vector_of("b")])
    assert none.shape == (0, 0)


async def test_predictions_are_those_of_each_text_or_pair(client: AsyncClient) -> None:
    assert await client.predict("a", instance=INSTANCE) == [[Prediction("a", 0.5)]]
    assert await client.predict(["a", "b"], instance=INSTANCE) == [[Prediction("a", 0.5)], [Prediction("b", 0.5)]]
    assert await client.predict_pair([("a", "b")], instance=INSTANCE) == [[Prediction("a+b", 0.25)]]


async def test_options_reach_the_server(client: AsyncClient, multiplexer: Multiplexer) -> None:
    text = {"instance": INSTANCE, "truncate": False, "truncation_left": True}
    await client.embed_sparse("x", prompt_name="query", **text)
    await client.embed_all("x", prompt_name="query", **text)
    await client.predict("x", raw_scores=True, **text)
    await client.predict_pair([("x", "y")], raw_scores=True, **text)

    sparse, per_token, predict, pair = (request.request for request in multiplexer.seen.others)
    assert sparse == tei_pb2.EmbedSparseRequest(inputs="x", truncation_direction=LEFT, prompt_name="query")
    assert per_token == tei_pb2.EmbedAllRequest(inputs="x", truncation_direction=LEFT, prompt_name="query")
    assert predict == tei_pb2.PredictRequest(inputs="x", truncation_direction=LEFT, raw_scores=True)
    assert pair == tei_pb2.PredictPairRequest(inputs=["x", "y"], truncation_direction=LEFT, raw_scores=True)


async def test_what_is_no_pair_is_refused_by_its_position(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match=r"pairs\[1\] must be two texts, not 3"):
        await client.predict_pair([("a", "b"), ("a", "b", "c")], instance=INSTANCE)
    with pytest.raises(ValidationError, match=r"pairs\[0\] must be a sequence"):
        await client.predict_pair(["ab"], instance=INSTANCE)
    with pytest.raises(ValidationError, match=r"pairs\[0\]\[1\] must be a string"):
        await client.predict_pair([("a", 5)], instance=INSTANCE)


@pytest.mark.parametrize("method", ["embed_sparse", "embed_all", "predict"])
async def test_an_unknown_option_or_instance_is_refused(client: AsyncClient, method: str) -> None:
    with pytest.raises(ValidationError, match="normalize"):
        await getattr(client, method)("x", instance=INSTANCE, normalize=True)
    with pytest.raises(InstanceNotFound):
        await getattr(client, method)(["x"] * 5, instance="nope")
    with pytest.raises(ValidationError, match="in_flight must be at least 1"):
        await getattr(client, method)("x", instance=INSTANCE, in_flight=0)


# A rerank as a stream.


async def test_a_streamed_rerank_is_the_rerank_of_its_texts(client: AsyncClient, multiplexer: Multiplexer) -> None:
    def texts() -> Iterator[str]:
        yield from ("a", "ccc", "bb")

    ranks = await client.rerank_stream("q", texts(), instance=INSTANCE, return_text=True, raw_scores=True)

    assert ranks == [Rank(1, 3.0, "ccc"), Rank(2, 2.0, "bb"), Rank(0, 1.0, "a")]
    sent = multiplexer.seen.others[0].request
    assert sent == tei_pb2.RerankStreamRequest(query="q", text="a", truncate=True, raw_scores=True, return_text=True)


async def test_a_streamed_rerank_that_is_refused_early_says_why(client: AsyncClient) -> None:
    with pytest.raises(Overloaded, match="Model is overloaded"):
        await client.rerank_stream("q", ["a", "overload", *["later" * 100] * 5000], instance=INSTANCE)
    with pytest.raises(InstanceNotFound):
        await client.rerank_stream("q", ["a"] * 5000, instance="nope")
    with pytest.raises(InvalidInput, match="Empty stream"):
        await client.rerank_stream("q", [], instance=INSTANCE)


async def test_a_streamed_rerank_ends_with_the_failure_of_its_source(client: AsyncClient) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "a"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        await client.rerank_stream("q", texts(), instance=INSTANCE)
    with pytest.raises(ValidationError, match=r"texts\[1\] must be a string"):
        await client.rerank_stream("q", ["a", None], instance=INSTANCE)


async def test_a_streamed_rerank_without_an_answer_ends_at_the_deadline(mux_url: str) -> None:
    async with AsyncClient(grpc=mux_url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.rerank_stream("q", ["hang"], instance=INSTANCE)


# Tables.


TABLE = pa.table({"id": list(range(10)), "text": ["x" * length for length in range(10)], "unused": ["u"] * 10})


async def test_a_table_comes_back_with_its_keys_row_by_row(client: AsyncClient, multiplexer: Multiplexer) -> None:
    answer = await client.infer(TABLE, instance=INSTANCE, keys=["id"], batch_rows=3)

    assert answer.to_pydict() == {"id": list(range(10)), "length": list(range(10))}
    sent = [pa.ipc.open_stream(request.arrow_ipc).read_all() for request in multiplexer.seen.others]
    assert sorted(table.num_rows for table in sent) == [1, 3, 3, 3]
    assert {tuple(table.column_names) for table in sent} == {("id", "text")}


async def test_a_table_without_rows_and_a_batch_are_answered_too(client: AsyncClient) -> None:
    assert (await client.infer(TABLE.slice(10), instance=INSTANCE, keys=["id"])).num_rows == 0
    assert (await client.infer(TABLE.to_batches()[0], instance=INSTANCE)).num_rows == 10


async def test_options_of_a_table_reach_the_server_and_absent_ones_stay_absent(
    client: AsyncClient, multiplexer: Multiplexer
) -> None:
    await client.infer(TABLE, instance=INSTANCE)
    await client.infer(
        TABLE,
        instance=INSTANCE,
        outputs=["dense", "multi_vector"],
        input="pair",
        keys=["id", "unused"],
        truncate=False,
        truncation_left=True,
        prompt_name="query",
        normalize=False,
        dimensions=4,
        raw_scores=True,
        dense_type="ubinary",
        token_type="float16",
        lz4_reply=True,
    )

    plain, full = multiplexer.seen.others
    for request in (plain, full):
        request.ClearField("target")
        request.ClearField("arrow_ipc")
    assert plain == arrow_pb2.ArrowRequest(truncate=True, normalize=True)
    assert full == arrow_pb2.ArrowRequest(
        outputs=[arrow_pb2.OUTPUT_DENSE, arrow_pb2.OUTPUT_MULTI_VECTOR],
        input=arrow_pb2.INPUT_PAIR,
        key_columns=["id", "unused"],
        truncation_direction=LEFT,
        prompt_name="query",
        normalize=False,
        dimensions=4,
        raw_scores=True,
        dense_type=arrow_pb2.ELEMENT_TYPE_UBINARY,
        token_type=arrow_pb2.ELEMENT_TYPE_FLOAT16,
        compression=1,
    )


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"outputs": ["dense", "sparce"]}, r"outputs\[1\] must be one of dense, sparse, multi_vector, tokens, scores"),
        ({"outputs": "dense"}, "outputs must be a sequence"),
        ({"outputs": ["unspecified"]}, "must be one of"),
        ({"input": "texts"}, "input must be one of text, pair, ids, not text 'texts'"),
        ({"dense_type": "int4"}, "dense_type must be one of float32, float16, int8, uint8, binary, ubinary"),
        ({"keys": ["id", 5]}, r"keys\[1\] must be a string"),
        ({"keys": ["nobody"]}, "table has no column 'nobody'"),
        ({"compression": "gzip"}, "compression must be"),
        ({"batch_rows": 0}, "batch_rows must be at least 1"),
        ({"window": 3}, "window"),
    ],
    ids=str,
)
async def test_a_wrong_option_of_a_table_is_refused(client: AsyncClient, option: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        await client.infer(TABLE, **({"instance": INSTANCE} | option))


async def test_what_is_no_table_is_refused(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="table must be a pyarrow Table or RecordBatch"):
        await client.infer({"text": ["a"]}, instance=INSTANCE)
    with pytest.raises(ValidationError, match=r"tables\[1\] must be a pyarrow Table"):
        [answer async for answer in client.infer_stream([TABLE, 5], instance=INSTANCE)]


async def test_replies_that_are_no_answer_are_internal(client: AsyncClient) -> None:
    with pytest.raises(Internal, match="not an Arrow stream"):
        await client.infer(pa.table({"text": ["garbage"]}), instance=INSTANCE)
    with pytest.raises(Internal, match="answered 1 rows for 2"):
        await client.infer(pa.table({"text": ["enough", "x"]}), instance=INSTANCE)


async def test_tables_are_answered_while_they_are_read_and_no_further_than_the_window(client: AsyncClient) -> None:
    given = 0

    async def tables() -> AsyncIterator[pa.Table]:
        nonlocal given
        for number in range(100):
            given += 1
            yield pa.table({"text": ["x" * number], "id": [number]})

    async for number, answer in counted(client.infer_stream(tables(), instance=INSTANCE, keys=["id"], window=3)):
        assert answer.to_pydict() == {"id": [number], "length": [number]}
        assert given <= number + 1 + 3 + 1  # answered, in flight, waiting to be sent
    assert given == 100


async def test_a_plain_iterable_of_tables_is_read_no_further_than_the_window_either(client: AsyncClient) -> None:
    given = 0

    def tables() -> Iterator[pa.Table]:
        nonlocal given
        for number in range(100):
            given += 1
            yield pa.table({"text": ["x" * number]})

    async for number, _ in counted(client.infer_stream(tables(), instance=INSTANCE, window=3)):
        assert given <= number + 1 + 3 + 1


async def counted(stream: AsyncIterator[pa.Table]) -> AsyncIterator[tuple[int, pa.Table]]:
    number = 0
    async for item in stream:
        yield number, item
        number += 1


async def test_the_blocking_face_has_tables_and_streams_of_them(mux_url: str) -> None:
    def body() -> None:
        with Client(grpc=mux_url) as client:
            assert client.infer(TABLE, instance=INSTANCE).num_rows == 10
            answers = list(client.infer_stream(iter([TABLE] * 5), instance=INSTANCE, keys=["id"]))
            assert [answer.num_rows for answer in answers] == [10] * 5
            assert client.predict("a", instance=INSTANCE) == [[Prediction("a", 0.5)]]
            assert [rank.index for rank in client.rerank_stream("q", iter(["a", "bb"]), instance=INSTANCE)] == [1, 0]

    await asyncio.to_thread(body)
