"""The instance port's gRPC: real workers, the official client, HTTP beside it on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.http_peers import Feed, reflection
from tests.support.worker_process import Connect, WorkerProcess

from teimgr.wire.frames import Method
from teimgr.wire.pb.tei.v1 import tei_pb2

Status = grpc.StatusCode
SERVICES = tei_pb2.DESCRIPTOR.services_by_name
MAX_MESSAGE_BYTES = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
LIMIT_S = 20


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(tiny, max_message_bytes=MAX_MESSAGE_BYTES) as one:
        yield one


@pytest.fixture
async def ready(served: WorkerProcess, connect: Connect) -> WorkerProcess:
    link = await connect(served)
    await link.state(link.post(Method.WATCH), "ready")
    return served


def client(worker: WorkerProcess) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{worker.spec.port}", options=options)


@pytest.fixture
async def channel(ready: WorkerProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with client(ready) as channel:
        yield channel


def method(channel: grpc.aio.Channel, service: str, name: str) -> Any:
    """The official client's callable for a method of tei.v1."""
    descriptor = SERVICES[service].methods_by_name[name]
    shape = "_".join(
        "stream" if each else "unary" for each in (descriptor.client_streaming, descriptor.server_streaming)
    )
    return getattr(channel, shape)(
        f"/tei.v1.{service}/{name}",
        request_serializer=descriptor.input_type._concrete_class.SerializeToString,
        response_deserializer=GetMessageClass(descriptor.output_type).FromString,
    )


def ask(text: str = "fog", **options: Any) -> tei_pb2.EmbedRequest:
    return tei_pb2.EmbedRequest(inputs=text, **options)


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(LIMIT_S):
        return await call.code(), await call.details()


async def emptied(worker: WorkerProcess, connect: Connect) -> None:
    """Return when nothing is in the worker any more."""
    await (await connect(worker)).emptied()


async def test_embed_gives_a_vector_and_tells_what_it_cost(channel: grpc.aio.Channel) -> None:
    call = method(channel, "Embed", "Embed")(ask("fog over the bay"))

    answer = await call

    assert sum(x * x for x in answer.embeddings) == pytest.approx(1, abs=1e-5)
    assert answer.metadata.compute_chars == len("fog over the bay")
    headers = {key: value for key, value in await call.initial_metadata() if key.startswith("x-")}
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-tokens"] == str(answer.metadata.compute_tokens)
    assert set(headers) == {
        "x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens",
        "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time",
        "x-teimgr-space", "x-teimgr-precision",
    }  # fmt: skip


@pytest.mark.clause("D-one-port")
async def test_http_and_grpc_take_turns_on_one_port(channel: grpc.aio.Channel, ready: WorkerProcess) -> None:
    embed = method(channel, "Embed", "Embed")
    async with aiohttp.ClientSession(ready.url) as http:

        async def by_http(text: str) -> list[float]:
            async with http.post("/embed", json={"inputs": text}) as response:
                return list((await response.json())[0])

        texts = [f"text {n}" for n in range(20)]
        pairs = await asyncio.gather(*(asyncio.gather(by_http(text), embed(ask(text))) for text in texts))

    assert all(list(answer.embeddings) == pytest.approx(vector, abs=1e-6) for vector, answer in pairs)


async def test_a_stream_is_a_conversation_too(channel: grpc.aio.Channel) -> None:
    feed = Feed()
    call = method(channel, "Tokenize", "TokenizeStream")(feed)

    for text in ("one", "two", "three"):
        feed.say(tei_pb2.EncodeRequest(inputs=text))
        assert [token.text for token in (await call.read()).tokens]
    feed.end()

    assert await call.read() is grpc.aio.EOF
    assert (await ending(call))[0] is Status.OK


async def test_a_failure_ends_the_stream_in_its_place(channel: grpc.aio.Channel) -> None:
    feed = Feed(ask("one"), ask("two"), ask("x " * 5000), ask("four"))
    call = method(channel, "Embed", "EmbedStream")(feed)

    assert (await call.read()).metadata.compute_chars == 3
    assert (await call.read()).metadata.compute_chars == 3
    status, message = await ending(call)

    assert status is Status.INVALID_ARGUMENT
    assert message.startswith("Input validation error: `inputs` must have less than")
    assert dict(await call.trailing_metadata())["x-teimgr-code"]


async def test_a_message_over_the_limit_is_refused_naming_both_sizes(channel: grpc.aio.Channel) -> None:
    big = ask("x" * MAX_MESSAGE_BYTES)
    says = f"Request message larger than max ({big.ByteSize()} vs. {MAX_MESSAGE_BYTES} bytes)"

    assert await ending(method(channel, "Embed", "Embed")(big)) == (Status.RESOURCE_EXHAUSTED, says)
    stream = method(channel, "Embed", "EmbedStream")(Feed(ask("one"), big))
    assert (await stream.read()).metadata.compute_chars == 3
    assert await ending(stream) == (Status.RESOURCE_EXHAUSTED, says)
    assert (await method(channel, "Embed", "Embed")(ask())).embeddings


async def test_a_rerank_stream_over_the_limit_is_refused_naming_both_sizes(channel: grpc.aio.Channel) -> None:
    half = tei_pb2.RerankStreamRequest(query="q", text="x" * (MAX_MESSAGE_BYTES // 2))

    status, message = await ending(method(channel, "Rerank", "RerankStream")(Feed(half, half)))

    assert status is Status.RESOURCE_EXHAUSTED
    assert f"vs. {MAX_MESSAGE_BYTES} bytes" in message


async def test_a_deadline_ends_the_call_and_takes_it_out_of_the_worker(
    channel: grpc.aio.Channel, ready: WorkerProcess, connect: Connect
) -> None:
    feed = Feed(ask())

    call = method(channel, "Embed", "EmbedStream")(feed, timeout=0.5)

    assert (await call.read()).embeddings
    assert (await ending(call))[0] is Status.DEADLINE_EXCEEDED
    call = method(channel, "Embed", "Embed")(ask(), timeout=1e-6)
    assert (await ending(call))[0] is Status.DEADLINE_EXCEEDED
    await emptied(ready, connect)


async def test_a_cancelled_stream_leaves_nothing_behind(
    channel: grpc.aio.Channel, ready: WorkerProcess, connect: Connect
) -> None:
    call = method(channel, "Embed", "EmbedStream")(Feed(*[ask("x " * 60)] * 2000))
    await call.read()

    call.cancel()

    await emptied(ready, connect)
    assert (await method(channel, "Embed", "Embed")(ask())).embeddings


async def test_many_calls_share_one_connection(channel: grpc.aio.Channel) -> None:
    tokenize = method(channel, "Tokenize", "Tokenize")

    answers = await asyncio.gather(*(tokenize(tei_pb2.EncodeRequest(inputs="x " * n)) for n in range(1, 300)))

    assert [len(answer.tokens) for answer in answers] == list(range(1, 300))


async def test_what_is_no_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    for path in ("/tei.v1.Embed/Nothing", "/tei_multiplexer.v1.TeiMultiplexer/Embed", "/"):
        assert await ending(channel.unary_unary(path)(b"")) == (Status.UNIMPLEMENTED, "Method not found")


async def test_a_compressed_message_is_unimplemented(channel: grpc.aio.Channel) -> None:
    call = method(channel, "Embed", "Embed")(ask("x" * 1000), compression=grpc.Compression.Gzip)

    says = "Content is compressed with `gzip` which isn't supported"
    assert await ending(call) == (Status.UNIMPLEMENTED, says)


async def test_bytes_that_are_no_message_are_invalid(channel: grpc.aio.Channel) -> None:
    status, message = await ending(channel.unary_unary("/tei.v1.Embed/Embed")(b"\xff\xff"))

    assert status is Status.INVALID_ARGUMENT
    assert message.startswith("Malformed tei.v1.EmbedRequest")


@pytest.fixture(params=["v1", "v1alpha"])
def reflect(request: Any, channel: grpc.aio.Channel) -> Any:
    return reflection(channel, request.param)


async def test_reflection_lists_tei_and_itself(reflect: Any) -> None:
    answer = await reflect(list_services="")

    assert {service.name for service in answer.list_services_response.service} == {
        *(f"tei.v1.{name}" for name in SERVICES),
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize(
    "symbol", ["tei.v1.Embed", "tei.v1.Embed.EmbedStream", "tei.v1.EmbedRequest.inputs", "tei.v1.MODEL_TYPE_EMBEDDING"]
)
async def test_a_client_can_build_tei_from_reflection(reflect: Any, symbol: str) -> None:
    answer = (await reflect(file_containing_symbol=symbol)).file_descriptor_response
    pool = DescriptorPool()
    pool.Add(FileDescriptorProto.FromString(answer.file_descriptor_proto[0]))

    methods = [each.name for each in pool.FindServiceByName("tei.v1.Embed").methods]

    assert methods == [each.name for each in SERVICES["Embed"].methods]


async def test_reflection_does_not_know_what_does_not_exist(reflect: Any) -> None:
    answer = await reflect(file_containing_symbol="no.Such")

    assert answer.error_response.error_code == Status.NOT_FOUND.value[0]


async def test_health_is_that_of_the_kind(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    names = ("", "tei.v1.Info", "tei.v1.Tokenize", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank")

    checked = {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert checked == dict.fromkeys(names[:4], serving) | dict.fromkeys(names[4:], not_serving)
    for call in (stub.Check, stub.Watch):
        answer = call(health_pb2.HealthCheckRequest(service="tei.v1.Nothing"))
        assert await ending(answer) == (Status.NOT_FOUND, "service not registered")


def test_a_worker_has_its_grpc_from_the_nursery_and_does_without_grpcio() -> None:
    program = """
import sys
import teimgr.worker.process
assert {"hpack", "teimgr.worker.grpc_port"} <= set(sys.modules), "each worker would import it"
assert "grpc" not in sys.modules, "two gRPC libraries in one worker"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S * 3)


async def test_the_end_of_a_worker_lets_calls_finish_and_watches_hear_of_it(tiny: Path, connect: Connect) -> None:
    with WorkerProcess(tiny) as worker:
        link = await connect(worker)
        await link.state(link.post(Method.WATCH), "ready")
        async with client(worker) as channel, asyncio.timeout(LIMIT_S):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tei.v1.Embed"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            idle = method(channel, "Embed", "EmbedStream")(Feed(ask()))
            assert (await idle.read()).embeddings
            texts = [ask("x " * 60)] * 400
            busy = method(channel, "Embed", "EmbedStream")(texts)
            assert (await busy.read()).embeddings
            asked = link.post(Method.DRAIN, b'{"grace_s": 30}')
            assert (await link.answer(asked)).reply == b""

            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            assert (await ending(idle))[0] is Status.UNAVAILABLE
            # Every message that was let in is answered; one that came after the door was closed ends the stream.
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (answer := await busy.read()) is not grpc.aio.EOF:
                    assert answer.embeddings
            status, details = await ending(busy)
            # grpcio's own words where its write meets the end before the status is read.
            assert status in {Status.OK, Status.UNAVAILABLE} or details == "Internal error from Core"
        assert await worker.exit() == 0
        assert "error" not in worker.log.lower(), worker.log


async def talk(worker: WorkerProcess, *parts: bytes, hang_up: bool = False) -> bytes:
    """Send `parts`, each as a segment of its own, and read until the worker closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.spec.port)
    answer = bytearray()
    try:
        async with asyncio.timeout(LIMIT_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if hang_up:
                writer.write_eof()
            while data := await reader.read(65536):
                answer += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    "parts",
    [
        [PREFACE + b"\x00" * 200],
        [PREFACE, SETTINGS, b"\xff" * 5000],
        [PREFACE + SETTINGS + b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\xff\xff\xff\xff"],  # headers that are no HPACK
        [PREFACE + SETTINGS + b"\x00\x00\x01\x00\x00\x00\x00\x00\x01x"],  # data of a stream that was not opened
        [PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"],  # a frame of 16 MiB
        [b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + b"\x00" * 100],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300],  # a TLS hello
        [b"\x00" * 100],
    ],
)
async def test_garbage_ends_its_own_connection_and_nothing_else(
    channel: grpc.aio.Channel, ready: WorkerProcess, parts: list[bytes]
) -> None:
    embed = method(channel, "Embed", "Embed")
    first = await embed(ask())

    assert not (await talk(ready, *parts, hang_up=True)).startswith(b"HTTP/1.1 200")

    assert (await embed(ask())).embeddings == first.embeddings
    assert "Traceback" not in ready.log


async def test_an_unknown_frame_is_ignored(ready: WorkerProcess) -> None:
    unknown = b"\x00\x00\x03\xee\x00\x00\x00\x00\x00abc"
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingpong"
    reader, writer = await asyncio.open_connection("127.0.0.1", ready.spec.port)

    writer.write(PREFACE + SETTINGS + unknown + ping)
    async with asyncio.timeout(LIMIT_S):
        await reader.readuntil(b"pingpong")

    writer.close()


@pytest.mark.parametrize("cut", [1, 3, 5, 16])
async def test_http_in_pieces_is_still_http(ready: WorkerProcess, cut: int) -> None:
    request = b"PROPFIND /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

    answer = await talk(ready, *(request[at : at + cut] for at in range(0, len(request), cut)))

    assert answer.startswith(b"HTTP/1.1 405")


async def test_a_preface_in_pieces_is_still_http2(ready: WorkerProcess) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", ready.spec.port)
    async with asyncio.timeout(LIMIT_S):
        for byte in PREFACE:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(SETTINGS)
        head = await reader.readexactly(9)

    assert head[3] in {4, 8}  # a SETTINGS or a WINDOW_UPDATE frame
    writer.close()
