"""Inference calls against a real multiplexer-shaped server."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models.dual_encoders import (
    build_clip,
    build_colqwen2,
    build_qwen3_vl_embedding,
    file_of,
    noise,
    pdf_of,
)
from tests.support.small_servers import DIM, INSTANCE, MODEL, Multiplexer, vector_of

from teimgr.client import AsyncClient
from teimgr.client.corpus import embed_file
from teimgr.client.payloads import unpack_vectors
from teimgr.errors import (
    Cancelled,
    DeadlineExceeded,
    EmptyInput,
    InstanceNotFound,
    Internal,
    InvalidConfig,
    InvalidInput,
    Overloaded,
    TeimgrError,
    TooLarge,
    Unavailable,
    Unsupported,
    ValidationError,
)
from teimgr.wire import pdf_pages
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2


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
    with pytest.raises(Internal, match="not an Arrow stream"):
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


pytestmark = pytest.mark.slow
_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "images.md"


@pytest.fixture(scope="module")
def image_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        client.create("clip", str(build_clip(tmp_path_factory.mktemp("clip") / "clip")), dtype="float32")
        chat = build_qwen3_vl_embedding(tmp_path_factory.mktemp("chat") / "chat")
        client.create("chat", str(chat), dtype="float32")
        client.create("pages", str(build_colqwen2(tmp_path_factory.mktemp("pages") / "pages")), dtype="float32")
        for name in ("clip", "chat", "pages"):
            client.wait_until_running(name, deadline_s=100)
        yield daemon


def test_an_image_has_one_vector_however_it_is_given(image_daemon: DaemonProcess, tmp_path: Path) -> None:
    pictures = [noise(40, 30, seed) for seed in range(11)]
    paths = [tmp_path / f"{place}.png" for place in range(len(pictures))]
    for path, picture in zip(paths, pictures, strict=True):
        path.write_bytes(file_of(picture))
    with image_daemon.client() as client:
        given = [*pictures[:4], *(path.read_bytes() for path in paths[4:8]), *paths[8:]]
        vectors = client.embed_images(given, instance="clip")
        assert vectors.shape == (11, 24)
        assert vectors.dtype == np.float32
        assert np.allclose(client.embed_images(paths, instance="clip", in_flight=1), vectors, atol=1e-6)
        assert np.allclose(client.embed_images(str(paths[5]), instance="clip"), vectors[5:6], atol=1e-6)
        assert client.embed_images([], instance="clip").shape == (0, 0)
        assert client.embed_images(paths[0], instance="clip", dimensions=8).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_an_image_of_pillow_has_the_vector_of_its_file(image_daemon: DaemonProcess, tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    noise(90, 60).save(tmp_path / "turned.jpg", exif=turned)
    noise(90, 60).save(tmp_path / "turned.png", exif=turned)
    noise(90, 60).convert("CMYK").save(tmp_path / "cmyk.jpg")
    noise(1600, 1500).save(tmp_path / "photograph.jpg")  # 7.2 MB as PNG
    with image_daemon.client() as client:
        for path in tmp_path.iterdir():
            expected = client.embed_images(path, instance="clip")
            with Image.open(path) as image:
                assert np.array_equal(client.embed_images(image, instance="clip"), expected), path
                if "photograph" not in path.name:
                    image.load()
                    assert np.array_equal(client.embed_images(image, instance="clip"), expected), path
        for mode in ("YCbCr", "LAB", "HSV", "RGBX", "RGBa", "PA"):
            image = noise(20, 20).convert("RGBA").convert("RGBa") if mode == "RGBa" else Image.new(mode, (20, 20))
            expected = client.embed_images(image.convert("RGBA" if mode in ("RGBa", "PA") else "RGB"), instance="clip")
            assert np.array_equal(client.embed_images(image, instance="clip"), expected), mode
        with Image.open(tmp_path / "photograph.jpg") as image:
            image.draft("RGB", (400, 400))
            assert image.size == (800, 750)
            drafted = client.embed_images(image, instance="clip")
            assert np.array_equal(client.embed_images(image.copy(), instance="clip"), drafted)


def test_an_image_that_cannot_be_sent_is_named_with_the_way_out(image_daemon: DaemonProcess, tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(file_of(noise(90, 60))[:-600])
    wide = noise(1600, 1500)
    with image_daemon.client() as client, Image.open(cut) as broken:
        for image, said in (
            (broken, "truncated"),
            (Image.new("F", (9, 9)), "cannot write mode F as PNG"),
            (wide, r"has 7,2\d\d,\d{3} bytes as PNG, and 6,291,456 are allowed .* send a JPEG file"),
            (file_of(wide), r"has 7,2\d\d,\d{3} bytes, and 6,291,456 are allowed"),
        ):
            with pytest.raises(ValidationError, match=rf"images\[1\]: .*{said}"):
                client.embed_images([noise(4, 4), image], instance="clip")


def test_info_tells_what_a_model_embeds(image_daemon: DaemonProcess) -> None:
    with image_daemon.client() as client:
        told = {name: client.info(instance=name) for name in ("clip", "chat")}
    assert {name: info.modalities for name, info in told.items()} == dict.fromkeys(told, ("text", "image"))
    assert {name: info.fused for name, info in told.items()} == {"clip": False, "chat": True}


def test_refusals_name_the_image(image_daemon: DaemonProcess, tmp_path: Path) -> None:
    with image_daemon.client() as client:
        with pytest.raises(ValidationError, match=r"images\[1\]: .*no such file"):
            client.embed_images([noise(4, 4), tmp_path / "no such file"], instance="clip")
        with pytest.raises(ValidationError, match=r"images\[0\]: must be bytes"):
            client.embed_images([3], instance="clip")  # type: ignore[list-item]
        with pytest.raises(TeimgrError) as refused:
            client.embed_images([*[noise(4, 4)] * 8, b"no image"], instance="clip")
        assert refused.value.message.startswith("images[8] to images[8]: ")
        assert "`inputs.0.data`: the bytes are not an image of an allowed format" in refused.value.message


def test_the_search_of_the_how_to(
    image_daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", _HOW_TO.read_text(), re.DOTALL)
    (tmp_path / "pictures").mkdir()
    for colour in ("red", "lime", "blue"):
        Image.new("RGB", (20, 20), colour).save(tmp_path / "pictures" / f"{colour}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("teimgr.client.Client", lambda: image_daemon.client())
    exec(compile(code, str(_HOW_TO), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_a_table_with_images_and_texts_has_the_same_vectors(image_daemon: DaemonProcess) -> None:
    files = [file_of(noise(40, 30)), None, file_of(noise(40, 30))[:-300], b"none", file_of(noise(40, 30)), None]
    texts = [None, "a dog", None, None, "both", None]
    with image_daemon.client() as client:
        vectors = client.embed_images([files[0]], instance="clip")
        query = client.embed("a dog", instance="clip")
        for kind in (pa.binary(), pa.large_binary()):
            table = pa.table({"image": pa.array(files, kind), "text": pa.array(texts, pa.string())})
            found = client.infer(table, instance="clip")
            assert np.array_equal(np.array(found["dense"][0].as_py(), np.float32), vectors[0])
            assert np.allclose(found["dense"][1].as_py(), query[0], atol=1e-6)
            assert [row is None for row in found["dense"].to_pylist()] == [False, False, True, True, True, True]
            errors = found["error"].to_pylist()
            assert errors[:2] == [None, None]
            for error, said in zip(errors[2:], ("truncated", "send JPEG", "`image` and `text`", "null"), strict=True):
                assert said in error
        structs = pa.array([{"bytes": files[0], "path": None}, {"bytes": None, "path": "/etc/passwd"}])
        found = client.infer(pa.table({"image": structs}), instance="clip")
        assert np.array_equal(np.array(found["dense"][0].as_py(), np.float32), vectors[0])
        assert "a `path` is not opened" in found["error"][1].as_py()


def test_a_row_with_image_and_text_is_one_input_of_a_model_that_reads_both(image_daemon: DaemonProcess) -> None:
    file = file_of(noise(60, 40))
    table = pa.table({"image": pa.array([file, file, None]), "text": pa.array([None, "a fox", "a fox"])})
    content = {"content": [{"type": "image", "data": base64.b64encode(file).decode()}, "a fox"]}
    with image_daemon.client() as client:
        found = client.infer(table, instance="chat")
        port = client.get("chat").port
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed",
        json.dumps({"inputs": [content]}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        expected = np.array(json.load(reply)[0], np.float32)
    rows = [np.array(row, np.float32) for row in found["dense"].to_pylist()]
    assert found["error"].to_pylist() == [None] * 3
    assert np.allclose(rows[1], expected, atol=1e-6)
    assert all(np.abs(rows[1] - row).max() > 1e-3 for row in (rows[0], rows[2]))


def test_embed_arrow_takes_a_column_of_images_with_an_error_for_each_row(image_daemon: DaemonProcess) -> None:
    good = file_of(noise(40, 30))
    structs = pa.array([{"bytes": good, "path": None}, {"bytes": None, "path": "/etc/passwd"}, None, None])
    table = pa.table({"image": structs, "text": pa.array([None, None, "a dog", None], pa.string())})
    with image_daemon.client() as client, grpc.insecure_channel(image_daemon.grpc.removeprefix("http://")) as channel:
        expected = [client.embed_images([good], instance="clip")[0], client.embed("a dog", instance="clip")[0]]
        call = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
        target = mux_pb2.Target(instance_name="clip")
        asked = mux_pb2.EmbedArrowRequest(target=target, arrow_ipc=_stream(table), normalize=True)
        found = unpack_vectors(call(asked.SerializeToString(), timeout=60))
    assert np.array_equal(found.vectors[0], expected[0])
    assert np.allclose(found.vectors[2], expected[1], atol=1e-6)
    assert sorted(found.errors) == [1, 3]
    assert "a `path` is not opened" in found.errors[1]


def test_the_images_of_a_folder_and_of_a_column_are_embedded_into_a_file(
    image_daemon: DaemonProcess, tmp_path: Path
) -> None:
    folder, files = tmp_path / "pictures", [file_of(noise(40, 30, seed)) for seed in range(3)]
    (folder / "b").mkdir(parents=True)
    names = ["a.png", "b/c.png", "z.jpg"]
    for name, content in zip(names, [*files[:2], b"none"], strict=True):
        (folder / name).write_bytes(content)
    rows = [{"bytes": files[2], "path": None}, {"bytes": None, "path": "/etc/passwd"}]
    pq.write_table(pa.table({"id": [7, 8], "image": rows}), tmp_path / "a.parquet")
    with image_daemon.client() as client:
        expected = client.embed_images(files, instance="clip")
        done = embed_file(client, folder, tmp_path / "v.parquet", instance="clip")
        of_table = embed_file(client, tmp_path / "a.parquet", tmp_path / "w.parquet", instance="clip")
        embed_file(client, folder / "b" / "c.png", tmp_path / "x.parquet", instance="clip")
    found, column = (pq.read_table(tmp_path / name) for name in ("v.parquet", "w.parquet"))
    alone = pq.read_table(tmp_path / "x.parquet")
    assert alone["path"].to_pylist() == ["c.png"]
    assert np.allclose(alone["embedding"].to_pylist(), expected[1:2], atol=1e-6)
    assert found["path"].to_pylist() == names
    assert np.allclose(found["embedding"].to_pylist()[:2], expected[:2], atol=1e-6)
    assert found["embedding"][2].as_py() is None
    assert done.failures is not None
    told = json.loads(done.failures.read_text())
    assert (told["row"], told["path"]) == (2, "z.jpg")
    assert "send JPEG" in told["error"]
    assert column["id"].to_pylist() == [7, 8]
    assert np.allclose(column["embedding"][0].as_py(), expected[2], atol=1e-6)
    assert of_table.failures is not None
    assert json.loads(of_table.failures.read_text()) == {
        "row": 1,
        "error": "the row has no `bytes`: a `path` is not opened",
    }


BLUE = (72, 36, "0 0 1 rg 0 0 72 36 re f")


def test_pages_of_documents_are_embedded_into_a_file(image_daemon: DaemonProcess, tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(pdf_of(BLUE, (72, 72, "1 0 0 rg 0 0 30 72 re f")))
    (folder / "b.pdf").write_bytes(b"no document")
    (folder / "c.png").write_bytes(file_of(noise(40, 30)))
    images = [*pdf_pages.pages(folder / "a.pdf"), (folder / "c.png").read_bytes()]
    with image_daemon.client() as client:
        expected = client.embed_images(images, instance="clip")
        of_pages = client.infer(pa.table({"image": images}), instance="pages", outputs=["multi_vector"])
        done = embed_file(client, folder, tmp_path / "v.parquet", instance="clip")
        embed_file(client, folder / "a.pdf", tmp_path / "w.parquet", instance="pages", per_token=True)
        embed_file(
            client, folder, tmp_path / "x.arrow", instance="pages", per_token=True, float16=True, pool_factor=2.0
        )
        with pytest.raises(InvalidConfig, match=r"one vector a row, and this model gives several: use \.parquet"):
            embed_file(client, folder, tmp_path / "v.npy", instance="pages", per_token=True)
    found = pq.read_table(tmp_path / "v.parquet")
    assert found.select(["path", "page"]).to_pylist() == [
        {"path": path, "page": page} for path, page in (("a.pdf", 1), ("a.pdf", 2), ("b.pdf", None), ("c.png", None))
    ]
    assert np.allclose(found["embedding"].take([0, 1, 3]).to_pylist(), expected, atol=1e-6)
    assert done.failures is not None
    failure = {"row": 2, "error": "the PDF is broken, or no PDF", "path": "b.pdf", "page": None}
    assert json.loads(done.failures.read_text()) == failure
    alone = pq.read_table(tmp_path / "w.parquet")["embedding"]
    assert [np.shape(one) for one in alone.to_pylist()] == [
        np.shape(one) for one in of_pages["multi_vector"][:2].to_pylist()
    ]
    assert all(
        np.allclose(one, other, atol=1e-5)
        for one, other in zip(alone.to_pylist(), of_pages["multi_vector"].to_pylist(), strict=False)
    )
    with pa.memory_map(str(tmp_path / "x.arrow")) as mapped:
        pooled = pa.ipc.open_file(mapped).read_all()["embedding"]
    assert pooled.type.value_type.value_type == pa.float16()
    assert pooled[2].as_py() is None
    assert 0 < len(pooled[0]) < len(alone[0])


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
