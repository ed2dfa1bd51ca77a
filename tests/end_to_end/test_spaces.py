"""The space in every reply; calls that expect another one are refused before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pyarrow as pa
import pytest
from tests.support.daemon_process import DaemonProcess

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.spaces import EXPECT_KEY, PRECISION_KEY, SPACE_KEY

MUX = "/tei_multiplexer.v1.TeiMultiplexer/"
OTHER = "0" * 64
TARGET = multiplexer_pb2.Target(instance_name="exact")
EMBED = tei_pb2.EmbedRequest(inputs="fog", truncate=True)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "fog"},
    "/v2/embed": {"texts": ["fog"], "input_type": "search_query", "embedding_types": ["float"]},
    "/instances/exact/embed": {"inputs": "fog"},
    "/pooling": {"input": "fog"},
}
FIELDS = ("/v1/embeddings", "/v2/embed", "/pooling")


@pytest.fixture(scope="module")
def space(daemon: DaemonProcess) -> str:
    model = json.load(urlopen(f"{daemon.api}/instances/exact"))["model"]
    assert model["precision"] == "fp32"
    return str(model["space"])


@pytest.fixture(scope="module")
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as opened:
        yield opened


@pytest.fixture(scope="module")
def port(daemon: DaemonProcess) -> int:
    return int(json.load(urlopen(f"{daemon.api}/instances/exact"))["port"])


def post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        with urlopen(Request(url, json.dumps(body).encode(), named)) as reply:
            return reply.status, dict(reply.headers), reply.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def table() -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": ["fog", "rain"]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def calls(channel: grpc.Channel) -> dict[str, Any]:
    """Calls of the mux, which give the call object once it is answered."""
    arrow = multiplexer_pb2.EmbedArrowRequest(target=TARGET, arrow_ipc=table()).SerializeToString()
    embed = multiplexer_pb2.EmbedRequest(target=TARGET, request=EMBED).SerializeToString()
    info = multiplexer_pb2.InfoRequest(target=TARGET).SerializeToString()

    def unary(name: str, message: bytes) -> Any:
        return lambda metadata=(): channel.unary_unary(MUX + name).with_call(message, metadata=metadata)

    def stream(metadata: Any = ()) -> Any:
        call = channel.stream_stream(MUX + "EmbedStream")(iter([embed] * 3), metadata=metadata)
        return list(call), call

    return {
        "Embed": unary("Embed", embed),
        "EmbedArrow": unary("EmbedArrow", arrow),
        "Info": unary("Info", info),
        "EmbedStream": stream,
    }


@pytest.mark.parametrize("name", ["Embed", "EmbedArrow", "Info", "EmbedStream"])
def test_the_multiplexer_tells_the_space_and_refuses_another(channel: grpc.Channel, space: str, name: str) -> None:
    call = calls(channel)[name]
    _, told = call()
    assert dict(told.initial_metadata())[SPACE_KEY] == space
    assert dict(told.initial_metadata())[PRECISION_KEY] == "fp32"

    call(((EXPECT_KEY, space),))
    call(((EXPECT_KEY, f"{space}/fp32"),))
    with pytest.raises(grpc.RpcError) as refused:
        call(((EXPECT_KEY, OTHER),))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert space in refused.value.details()
    assert OTHER in refused.value.details()
    with pytest.raises(grpc.RpcError) as malformed:
        call(((EXPECT_KEY, space[:12]),))
    assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_table_tells_the_space_in_its_schema(channel: grpc.Channel, space: str) -> None:
    reply, _ = calls(channel)["EmbedArrow"]()
    schema = pa.ipc.open_stream(multiplexer_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc).schema
    assert schema.metadata == {SPACE_KEY.encode(): space.encode(), PRECISION_KEY.encode(): b"fp32"}


@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_tells_the_space_and_refuses_another(daemon: DaemonProcess, space: str, path: str) -> None:
    url, body = daemon.api + path, BODIES[path] | {"model": "exact"}
    status, headers, _ = post(url, body)
    assert (status, headers[SPACE_KEY], headers[PRECISION_KEY]) == (200, space, "fp32")

    assert post(url, body, **{EXPECT_KEY: space})[0] == 200
    status, _, said = post(url, body, **{EXPECT_KEY: OTHER})
    assert status == 412
    assert space.encode() in said
    assert OTHER.encode() in said


@pytest.mark.parametrize("path", FIELDS)
def test_a_body_may_expect_a_space_too(daemon: DaemonProcess, space: str, path: str) -> None:
    url, body = daemon.api + path, BODIES[path] | {"model": "exact"}
    assert post(url, body | {"expect_fingerprint": space})[0] == 200
    assert post(url, body | {"expect_fingerprint": OTHER})[0] == 412
    assert post(url, body | {"expect_fingerprint": "abc"})[0] == 400


def test_the_instance_port_tells_the_space_and_refuses_another(port: int, space: str) -> None:
    url = f"http://127.0.0.1:{port}"
    assert post(f"{url}/embed", {"inputs": "fog"})[1][SPACE_KEY] == space
    assert post(f"{url}/embed", {"inputs": "fog"}, **{EXPECT_KEY: OTHER})[0] == 412
    with urlopen(f"{url}/info") as reply:
        assert reply.headers[SPACE_KEY] == json.load(reply)["space"] == space

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        embed = channel.unary_unary("/tei.v1.Embed/Embed")
        _, call = embed.with_call(EMBED.SerializeToString())
        assert dict(call.initial_metadata())[SPACE_KEY] == space
        with pytest.raises(grpc.RpcError) as refused:
            embed(EMBED.SerializeToString(), metadata=((EXPECT_KEY, OTHER),))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_both_precisions_of_a_model_are_one_space_and_a_request_may_demand_the_finer(
    daemon: DaemonProcess, space: str
) -> None:
    fast = json.load(urlopen(f"{daemon.api}/instances/fast"))["model"]
    assert fast["space"] == space
    body = {"input": "fog", "model": "fast"}
    status = post(f"{daemon.api}/v1/embeddings", body, **{EXPECT_KEY: f"{space}/fp32"})[0]
    assert status == (200 if fast["precision"] == "fp32" else 412)
    assert post(f"{daemon.api}/v1/embeddings", body, **{EXPECT_KEY: f"{space}/16-bit"})[0] == 200


def test_what_is_refused_computes_nothing(daemon: DaemonProcess, channel: grpc.Channel, port: int) -> None:
    def computed() -> list[str]:
        metrics = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        return [line for line in metrics.splitlines() if line.startswith("te_request_inference_duration_count")]

    post(f"{daemon.api}/v1/embeddings", {"input": "fog", "model": "exact"})
    before = computed()
    assert before
    with pytest.raises(grpc.RpcError):
        calls(channel)["Embed"](((EXPECT_KEY, OTHER),))
    post(f"{daemon.api}/v1/embeddings", {"input": "fog", "model": "exact"}, **{EXPECT_KEY: OTHER})
    assert computed() == before


def test_a_model_id_means_the_space_of_its_first_instance(daemon: DaemonProcess, channel: grpc.Channel) -> None:
    first = json.load(urlopen(f"{daemon.api}/instances/exact"))
    model_id, space = first["model_id"], first["model"]["space"]
    pooling = "cls" if first["model"]["pooling"] != "cls" else "mean"
    assert post(f"{daemon.api}/instances", {"name": "another", "model_id": model_id, "pooling": pooling})[0] == 201
    try:
        with daemon.client() as client:
            client.wait_until_running("another", deadline_s=120)
        own = json.load(urlopen(f"{daemon.api}/instances/another"))["model"]["space"]
        assert own != space
        by_id = multiplexer_pb2.EmbedRequest(target=multiplexer_pb2.Target(model_id=model_id), request=EMBED)
        for _ in range(6):
            for path in FIELDS:
                status, headers, _ = post(daemon.api + path, BODIES[path] | {"model": model_id})
                assert (status, headers[SPACE_KEY]) == (200, space), path
            _, told = channel.unary_unary(MUX + "Embed").with_call(by_id.SerializeToString())
            assert dict(told.initial_metadata())[SPACE_KEY] == space
        _, headers, _ = post(f"{daemon.api}/v1/embeddings", {"input": "fog", "model": "another"})
        assert headers[SPACE_KEY] == own
    finally:
        urlopen(Request(f"{daemon.api}/instances/another", method="DELETE"))
