"""Inference calls against a real multiplexer-shaped server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial

import grpc
import numpy as np
import pyarrow as pa
import pytest
from tests.support.small_servers import DIM, INSTANCE, MODEL, Multiplexer, vector_of

from teimgr.client import AsyncClient
from teimgr.errors import (
    Cancelled,
    DeadlineExceeded,
    EmptyInput,
    InstanceNotFound,
    Internal,
    InvalidInput,
    Overloaded,
    TooLarge,
    Unavailable,
    Unsupported,
    ValidationError,
)
from teimgr.wire.pb.tei.v1 import tei_pb2


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([vector_of(text) for text in texts])


async def until_failure(stream: AsyncIterator[np.ndarray]) -> tuple[list[np.ndarray], Exception | None]:
    rows: list[np.ndarray] = []
    try:
        async for row in stream:
            rows.append(row)  # noqa: PERF401  what came before the failure must be kept
    except Exception as failure:
        return rows, failure
    return rows, None


TEXTS = [f"text {number}" for number in range(300)]


async def test_embed_gives_one_float32_row_per_text_in_order(client: AsyncClient) -> None:
    vectors = await client.embed(TEXTS, instance=INSTANCE)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected(TEXTS))


async def test_embed_of_one_text_gives_one_row(client: AsyncClient) -> None:
    vectors = await client.embed("alone", model=MODEL)
    np.testing.assert_array_equal(vectors, expected(["alone"]))


async def test_embed_of_no_text_gives_no_row(client: AsyncClient) -> None:
    assert (await client.embed([], instance=INSTANCE)).shape == (0, 0)


async def test_embed_keeps_at_most_in_flight_calls_open(client: AsyncClient, multiplexer: Multiplexer) -> None:
    multiplexer.together = asyncio.Barrier(5)
    await client.embed(TEXTS, instance=INSTANCE, in_flight=5)
    assert multiplexer.seen.most_in_flight == 5


async def test_options_reach_the_server_and_absent_ones_stay_absent(
    client: AsyncClient, multiplexer: Multiplexer
) -> None:
    await client.embed("x", instance=INSTANCE)
    await client.embed(
        "x",
        instance=INSTANCE,
        truncate=False,
        normalize=False,
        truncation_left=True,
        prompt_name="query",
        dimensions=4,
    )
    plain, full = (request.request for request in multiplexer.seen.embeds)
    assert plain == tei_pb2.EmbedRequest(inputs="x", truncate=True, normalize=True)
    assert full == tei_pb2.EmbedRequest(
        inputs="x",
        normalize=False,
        truncation_direction=tei_pb2.TRUNCATION_DIRECTION_LEFT,
        prompt_name="query",
        dimensions=4,
    )


@pytest.mark.parametrize("where", [{}, {"instance": INSTANCE, "model": MODEL}])
async def test_exactly_one_target_must_be_given(client: AsyncClient, where: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="exactly one"):
        await client.embed("x", **where)


async def test_an_unknown_instance_is_not_found(client: AsyncClient) -> None:
    with pytest.raises(InstanceNotFound, match="Instance 'nope' not found"):
        await client.embed(TEXTS, instance="nope")


async def test_a_code_in_the_trailers_decides_the_exception(client: AsyncClient) -> None:
    with pytest.raises(EmptyInput, match="no such text"):
        await client.embed("refuse", instance=INSTANCE)


async def test_without_a_code_the_status_decides(client: AsyncClient) -> None:
    with pytest.raises(Overloaded):
        await client.embed("overload", instance=INSTANCE)


async def test_a_method_the_server_lacks_is_unsupported(mux_url: str) -> None:
    async with AsyncClient(grpc=mux_url) as client:
        with pytest.raises(Unsupported):
            await client._grpc.unary("EmbedSparseArrow", b"", 5)


async def test_a_call_that_is_never_answered_ends_at_the_deadline(mux_url: str) -> None:
    async with AsyncClient(grpc=mux_url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.embed("hang", instance=INSTANCE)


async def test_nobody_listening_is_unavailable_and_says_refused(unused_port: int) -> None:
    async with AsyncClient(grpc=f"http://127.0.0.1:{unused_port}", timeout_s=5) as client:
        with pytest.raises(Unavailable, match="Connection refused"):
            await client.embed("x", instance=INSTANCE)


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(Internal, match="not open"):
        await AsyncClient().embed("x", instance=INSTANCE)


async def test_embed_stream_yields_rows_in_order_while_texts_are_read(client: AsyncClient) -> None:
    answered = asyncio.Event()

    async def texts() -> AsyncIterator[str]:
        yield "first"
        await answered.wait()
        yield "second"

    rows = []
    async for row in client.embed_stream(texts(), instance=INSTANCE):
        rows.append(row)
        answered.set()
    np.testing.assert_array_equal(np.stack(rows), expected(["first", "second"]))


async def test_embed_stream_reads_a_plain_iterable_no_further_than_its_window(client: AsyncClient) -> None:
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for number in range(5000):
            read += 1
            yield f"text {number}"

    stream = client.embed_stream(texts(), instance=INSTANCE, window=10)
    first = await anext(stream)
    await asyncio.sleep(0.05)
    assert read <= 1 + 10 + 256  # answered, in flight, fetched by one hop to the thread
    await stream.aclose()
    np.testing.assert_array_equal(first, vector_of("text 0"))


async def test_embed_stream_over_many_windows_gives_every_row(client: AsyncClient) -> None:
    texts = [f"text {number}" for number in range(1500)]
    rows = [row async for row in client.embed_stream(texts, instance=INSTANCE, window=16)]
    np.testing.assert_array_equal(np.stack(rows), expected(texts))


async def test_a_failing_source_is_raised_after_what_it_gave(client: AsyncClient) -> None:
    def texts() -> Iterator[str]:
        yield "a"
        yield "b"
        raise OSError("the disk is gone")

    rows, failure = await until_failure(client.embed_stream(texts(), instance=INSTANCE))
    np.testing.assert_array_equal(np.stack(rows), expected(["a", "b"]))
    assert isinstance(failure, OSError)


async def test_a_failing_text_ends_the_stream_with_its_exception(client: AsyncClient) -> None:
    rows, failure = await until_failure(client.embed_stream(["a", "refuse", *TEXTS], instance=INSTANCE))
    assert len(rows) == 1
    assert isinstance(failure, EmptyInput)


async def test_a_stream_that_owes_a_reply_for_too_long_ends(mux_url: str) -> None:
    async with AsyncClient(grpc=mux_url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            [row async for row in client.embed_stream(["a", "hang"], instance=INSTANCE)]


async def test_a_slow_source_is_no_reason_to_end_a_stream(mux_url: str) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "a"
        await asyncio.sleep(0.4)
        yield "b"

    async with AsyncClient(grpc=mux_url, timeout_s=0.1) as client:
        rows = [row async for row in client.embed_stream(texts(), instance=INSTANCE)]
    assert len(rows) == 2


@pytest.mark.parametrize("more", [[], ["later"] * 2000], ids=["all sent", "more to come"])
async def test_a_server_that_ends_a_stream_early_is_not_taken_for_success(client: AsyncClient, more: list[str]) -> None:
    stream = client.embed_stream(["a", "enough", *more], instance=INSTANCE, window=4)
    rows, failure = await until_failure(stream)
    assert len(rows) == 1
    assert isinstance(failure, Internal)


async def test_closing_the_client_ends_its_calls_as_cancelled(mux_url: str, multiplexer: Multiplexer) -> None:
    async with AsyncClient(grpc=mux_url) as client:
        calling = asyncio.create_task(client.embed("hang", instance=INSTANCE))
        await asyncio.wait_for(multiplexer.hanging.wait(), 20)
    with pytest.raises(Cancelled):
        await calling


async def test_closing_the_client_ends_its_streams_as_cancelled(mux_url: str, multiplexer: Multiplexer) -> None:
    async with AsyncClient(grpc=mux_url) as client:
        reading = asyncio.create_task(until_failure(client.embed_stream(["hang"], instance=INSTANCE)))
        await asyncio.wait_for(multiplexer.hanging.wait(), 20)
    assert isinstance((await reading)[1], Cancelled)


async def test_embed_arrow_gives_rows_in_order_over_several_batches(
    client: AsyncClient, multiplexer: Multiplexer
) -> None:
    answer = await client.embed_arrow(TEXTS, instance=INSTANCE, batch_rows=64)
    assert len(multiplexer.seen.arrows) == 5
    assert answer.errors == {}
    np.testing.assert_array_equal(answer.checked(), expected(TEXTS))


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(TEXTS),
        pa.array(TEXTS, pa.large_utf8()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.chunked_array([TEXTS[:100], TEXTS[100:]]),
    ],
    ids=["utf8", "large", "view", "dictionary", "chunked"],
)
async def test_embed_arrow_takes_any_string_array(client: AsyncClient, texts: pa.Array) -> None:
    answer = await client.embed_arrow(texts, instance=INSTANCE, batch_rows=128)
    np.testing.assert_array_equal(answer.checked(), expected(TEXTS))


async def test_failed_rows_are_named_and_never_look_like_vectors(client: AsyncClient) -> None:
    answer = await client.embed_arrow(["a", "refuse", "b", None], instance=INSTANCE, batch_rows=3)
    assert answer.errors == {1: "no such text", 3: "no such text"}
    np.testing.assert_array_equal(np.isnan(answer.vectors).all(axis=1), [False, True, False, True])
    np.testing.assert_array_equal(answer.vectors[[0, 2]], expected(["a", "b"]))
    with pytest.raises(InvalidInput, match="2 of 4 texts failed: row 1: no such text"):
        answer.checked()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
async def test_half_precision_and_compressed_replies_come_back_as_float32(
    client: AsyncClient, compression: str | None
) -> None:
    answer = await client.embed_arrow(TEXTS, instance=INSTANCE, float16=True, lz4_reply=True, compression=compression)
    assert answer.vectors.dtype == np.float32
    np.testing.assert_allclose(answer.vectors, expected(TEXTS), atol=1e-3)


async def test_embed_arrow_of_no_text_gives_no_row(client: AsyncClient) -> None:
    assert (await client.embed_arrow([], instance=INSTANCE)).vectors.shape == (0, DIM)


@pytest.mark.parametrize("texts", ["one string", [1, 2], pa.array([1, 2])], ids=["str", "ints", "int array"])
async def test_embed_arrow_refuses_what_is_no_list_of_texts(client: AsyncClient, texts: object) -> None:
    with pytest.raises(ValidationError, match="texts"):
        await client.embed_arrow(texts, instance=INSTANCE)


async def test_a_reply_that_is_no_arrow_stream_is_an_internal_error(client: AsyncClient) -> None:
    with pytest.raises(Internal, match="no Arrow stream"):
        await client.embed_arrow(["garbage"], instance=INSTANCE)


async def test_a_request_over_the_clients_limit_is_too_large(mux_url: str) -> None:
    async with AsyncClient(grpc=mux_url, max_message_bytes=1000) as client:
        with pytest.raises(TooLarge):
            await client.embed_arrow(["long " * 1000], instance=INSTANCE)


async def test_replies_far_over_grpcs_default_limit_arrive(client: AsyncClient) -> None:
    texts = ["same"] * 200_000
    answer = await client.embed_arrow(texts, instance=INSTANCE, batch_rows=len(texts), compression="lz4")
    assert answer.vectors.nbytes > 4 * 1024 * 1024
    np.testing.assert_array_equal(answer.vectors[-1], vector_of("same"))


async def test_embed_arrow_stream_answers_batch_by_batch(client: AsyncClient) -> None:
    batches = [TEXTS[start : start + 30] for start in range(0, len(TEXTS), 30)]
    answers = [answer async for answer in client.embed_arrow_stream(iter(batches), instance=INSTANCE)]
    assert [len(answer.vectors) for answer in answers] == [30] * 10
    np.testing.assert_array_equal(np.concatenate([answer.vectors for answer in answers]), expected(TEXTS))


async def test_info_tokenize_decode_and_rerank_are_typed(client: AsyncClient) -> None:
    info = await client.info(instance=INSTANCE)
    assert (info.model_id, info.kind, info.max_input_length, info.model_sha) == (MODEL, "embedding", 256, None)
    start, word = await client.tokenize("word", instance=INSTANCE)
    assert (start.special, start.start) == (True, None)
    assert (word.start, word.stop) == (0, 4)
    assert await client.decode([1, 2], instance=INSTANCE) == "1 2"
    ranks = await client.rerank("query", ["a", "longest", "bbb"], return_text=True, instance=INSTANCE)
    assert [(rank.index, rank.text) for rank in ranks] == [(1, "longest"), (2, "bbb"), (0, "a")]


@pytest.mark.parametrize("texts", [["x"], []], ids=["a text", "no text"])
async def test_an_unknown_keyword_is_refused_with_the_nearest_known_one(
    client: AsyncClient, multiplexer: Multiplexer, texts: list[str]
) -> None:
    with pytest.raises(ValidationError, match="unknown key 'normalise'; did you mean 'normalize'"):
        await client.embed(texts, instance=INSTANCE, normalise=True)
    with pytest.raises(ValidationError, match="unknown key 'lz4_replies'; did you mean 'lz4_reply'"):
        await client.embed_arrow(texts, instance=INSTANCE, lz4_replies=True)
    with pytest.raises(ValidationError, match="'normalise'"):
        [row async for row in client.embed_stream(texts, instance=INSTANCE, normalise=True)]
    with pytest.raises(ValidationError, match="'normalise'"):
        [row async for row in client.embed_arrow_stream([texts], instance=INSTANCE, normalise=True)]
    assert (multiplexer.seen.embeds, multiplexer.seen.arrows) == ([], [])


async def test_a_keyword_of_arrow_calls_alone_is_refused_elsewhere(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="unknown key 'float16'"):
        await client.embed("x", instance=INSTANCE, float16=True)


async def test_calls_that_only_take_a_target_refuse_every_other_keyword(client: AsyncClient) -> None:
    calls = [
        client.info,
        partial(client.tokenize, "x"),
        partial(client.decode, [1]),
        partial(client.rerank, "q", ["x"]),
    ]
    for call in calls:
        with pytest.raises(ValidationError, match="unknown key 'instances'; did you mean 'instance'"):
            await call(instance=INSTANCE, instances=INSTANCE)


async def test_a_source_that_fails_at_once_is_raised_itself(client: AsyncClient) -> None:
    def texts() -> Iterator[str]:
        raise OSError("the disk is gone")
        yield "never"

    async def batches() -> AsyncIterator[list[str]]:
        raise OSError("the disk is gone")
        yield ["never"]

    with pytest.raises(OSError, match="the disk is gone"):
        [row async for row in client.embed_stream(texts(), instance=INSTANCE)]
    with pytest.raises(OSError, match="the disk is gone"):
        [answer async for answer in client.embed_arrow_stream(batches(), instance=INSTANCE)]


async def test_a_stream_of_nothing_gives_no_row(client: AsyncClient) -> None:
    assert [row async for row in client.embed_stream([], instance=INSTANCE)] == []
    assert [answer async for answer in client.embed_arrow_stream([], instance=INSTANCE)] == []


async def test_a_failure_of_grpc_in_the_source_is_raised_too(client: AsyncClient) -> None:
    trailers = grpc.aio.Metadata()
    own = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, trailers, trailers, "of the caller's own call")

    async def texts() -> AsyncIterator[str]:
        yield "a"
        raise own

    rows, failure = await until_failure(client.embed_stream(texts(), instance=INSTANCE))
    assert len(rows) == 1
    assert failure is own


async def test_a_client_closed_before_the_first_text_ends_its_stream_as_cancelled(mux_url: str) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def texts() -> AsyncIterator[str]:
        asked.set()
        await closed.wait()
        yield "late"

    async with AsyncClient(grpc=mux_url) as client:
        reading = asyncio.create_task(until_failure(client.embed_stream(texts(), instance=INSTANCE)))
        await asyncio.wait_for(asked.wait(), 20)
    closed.set()
    assert isinstance((await reading)[1], Cancelled)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (None, r"texts\[1\] must be a string, not None"),
        (1, r"texts\[1\] must be a string, not integer 1"),
        (b"b", r"texts\[1\] must be a string, not bytes"),
        ("b\ud800", r"texts\[1\] is not Unicode: its character 1 is half of a surrogate pair"),
    ],
    ids=["null", "number", "bytes", "surrogate"],
)
async def test_a_text_that_is_none_is_refused_by_its_position(client: AsyncClient, bad: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        await client.embed(["a", bad, "c"], instance=INSTANCE)
    rows, failure = await until_failure(client.embed_stream(["a", bad, "c"], instance=INSTANCE))
    assert (len(rows), type(failure)) == (1, ValidationError)
    with pytest.raises(ValidationError, match=says):
        await client.rerank("query", ["a", bad], instance=INSTANCE)


@pytest.mark.parametrize(("bad", "says"), [(1, "must be a string"), ("b\ud800", "is not Unicode")])
async def test_arrow_names_the_position_in_all_the_texts(client: AsyncClient, bad: str, says: str) -> None:
    texts = [*TEXTS[:5], None, bad, "c"]
    with pytest.raises(ValidationError, match=rf"texts\[6\] {says}"):
        await client.embed_arrow(texts, instance=INSTANCE, batch_rows=2)
    with pytest.raises(ValidationError, match=rf"batches\[1\]\[6\] {says}"):
        [answer async for answer in client.embed_arrow_stream([["a"], texts], instance=INSTANCE)]


@pytest.mark.parametrize("texts", [5, None, 1.5], ids=repr)
async def test_what_is_no_sequence_of_texts_is_refused(client: AsyncClient, texts: list[str]) -> None:
    with pytest.raises(ValidationError, match="texts must be"):
        await client.embed(texts, instance=INSTANCE)
    with pytest.raises(ValidationError, match="texts must be"):
        await client.embed_arrow(texts, instance=INSTANCE)
    with pytest.raises(ValidationError, match="texts must be"):
        [row async for row in client.embed_stream(texts, instance=INSTANCE)]
    with pytest.raises(ValidationError, match="batches must be"):
        [answer async for answer in client.embed_arrow_stream(texts, instance=INSTANCE)]
    with pytest.raises(ValidationError, match="texts must be"):
        await client.rerank("query", texts, instance=INSTANCE)


async def test_one_string_is_not_taken_for_a_stream_of_its_letters(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="texts must be"):
        [row async for row in client.embed_stream("abc", instance=INSTANCE)]
    with pytest.raises(ValidationError, match="texts must be"):
        await client.rerank("query", "abc", instance=INSTANCE)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"dimensions": -1}, "dimensions must be an integer from 0 to 4294967295, not integer -1"),
        ({"dimensions": "8"}, "dimensions must be an integer"),
        ({"normalize": "no"}, "normalize must be true or false, not text 'no'"),
        ({"truncate": None}, "truncate must be true or false, not None"),
        ({"prompt_name": 5}, "prompt_name must be a string, not integer 5"),
        ({"instance": b"mini"}, "instance must be a string"),
        ({"instance": "\ud800"}, "instance is not Unicode"),
    ],
    ids=str,
)
async def test_an_option_of_the_wrong_kind_is_refused(client: AsyncClient, option: dict[str, str], says: str) -> None:
    how = {"instance": INSTANCE} | option
    with pytest.raises(ValidationError, match=says):
        await client.embed("x", **how)
    with pytest.raises(ValidationError, match=says):
        await client.embed_arrow(["x"], **how)


async def test_options_may_be_numpys_scalars_and_an_optional_one_may_be_none(client: AsyncClient) -> None:
    how = {"dimensions": np.int64(4), "normalize": np.bool_(True), "prompt_name": None, "model": None}
    assert (await client.embed("x", instance=INSTANCE, **how)).shape == (1, 4)


async def test_wrong_texts_and_ids_of_the_small_calls_are_refused(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="text must be a string, not None"):
        await client.tokenize(None, instance=INSTANCE)
    with pytest.raises(ValidationError, match="prompt_name must be a string"):
        await client.tokenize("x", prompt_name=1, instance=INSTANCE)
    with pytest.raises(ValidationError, match=r"ids\[1\] must be an integer from 0 to 4294967295, not integer -1"):
        await client.decode([1, -1], instance=INSTANCE)
    with pytest.raises(ValidationError, match="ids must be a sequence"):
        await client.decode(5, instance=INSTANCE)
    with pytest.raises(ValidationError, match="query must be a string"):
        await client.rerank(None, ["x"], instance=INSTANCE)


@pytest.mark.parametrize("count", [0, -1, "many", None])
async def test_a_limit_below_one_is_refused_instead_of_waiting_for_ever(client: AsyncClient, count: int) -> None:
    with pytest.raises(ValidationError, match="window must be at least 1"):
        [row async for row in client.embed_stream(["x"], instance=INSTANCE, window=count)]
    with pytest.raises(ValidationError, match="in_flight must be at least 1"):
        await client.embed("x", instance=INSTANCE, in_flight=count)
    with pytest.raises(ValidationError, match="batch_rows must be at least 1"):
        await client.embed_arrow(["x"], instance=INSTANCE, batch_rows=count)


async def test_an_unknown_compression_is_refused(client: AsyncClient) -> None:
    with pytest.raises(ValidationError, match="compression must be"):
        await client.embed_arrow(["x"], instance=INSTANCE, compression="gzip")
