"""Clauses that take more than one request to show; `sequences.py` lists them."""

from __future__ import annotations

import json
import re
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from teimgr.wire.pb.tei.v1 import tei_pb2 as tei
from tests.conformance.case import GRPC_SURFACES, PORT, Http, Reply
from tests.conformance.grpc_mux import arrow, rows
from tests.conformance.surfaces import OWN, TEI, Surfaces, collect
from tests.conformance.words import NAN_VECTOR, POISON

SERVING = health_pb2.HealthCheckResponse.SERVING
JSON = {"content-type": "application/json"}
STREAMED = 2_000


def healthy(surfaces: Surfaces, instance: str, wanted: int = 0) -> int:
    """Wait until the daemon has started the instance again `wanted` times and it runs; how often it was."""
    found: list[int] = []

    def runs() -> bool:
        with surfaces.daemon.client() as client:
            view = client.get(instance)
        found[:] = [view.restarts]
        return (
            view.restarts >= wanted
            and view.status == "running"
            and surfaces.http(PORT, _health(instance)).status == 200
        )

    surfaces.until(runs, f"{instance} does not run")
    return found[0]


def _health(instance: str) -> Http:
    return Http("", instance, "/health", verb="GET")


def test_a_vector_with_nan_is_424(surfaces: Surfaces) -> None:
    """The text fails alone: the instance stays healthy, and is not started again."""
    restarts = healthy(surfaces, "poisoned")

    assert surfaces.http(PORT, Http("", "poisoned", "/embed", {"inputs": ["fog", "dog"]})).status == 200
    reply = surfaces.http(PORT, Http("", "poisoned", "/embed", {"inputs": ["fog", POISON]}))
    openai = surfaces.http(PORT, Http("", "poisoned", "/v1/embeddings", {"input": POISON}))
    health = surfaces.http(PORT, _health("poisoned"))
    stub = health_pb2_grpc.HealthStub(surfaces.channel(surfaces.ports["poisoned"]))
    over_grpc = stub.Check(health_pb2.HealthCheckRequest(service="tei.v1.Embed"), timeout=10).status

    assert (reply.status, reply.json) == (424, {"error": NAN_VECTOR, "error_type": "Backend"})
    assert (openai.status, openai.json) == (424, {"message": NAN_VECTOR, "code": 424, "type": "Backend"})
    assert (health.status, over_grpc) == (200, SERVING)
    assert healthy(surfaces, "poisoned") == restarts


def test_a_score_that_is_nan_is_424(surfaces: Surfaces) -> None:
    restarts = healthy(surfaces, "poisoned-classifier")

    reply = surfaces.http(PORT, Http("", "poisoned-classifier", "/predict", {"inputs": [["fog"], [POISON]]}))

    assert (reply.status, reply.json) == (424, {"error": "score is NaN", "error_type": "Backend"})
    assert healthy(surfaces, "poisoned-classifier") == restarts


@pytest.mark.parametrize("surface", GRPC_SURFACES)
def test_nan_over_grpc_is_internal(surfaces: Surfaces, surface: str) -> None:
    restarts = healthy(surfaces, "poisoned")
    texts = [tei.EmbedRequest(inputs=text) for text in ("fog", POISON, "dog")]

    replies = surfaces.call(surface, "poisoned", "EmbedStream", texts)

    assert (replies.status, replies.details, len(replies.messages)) == ("INTERNAL", NAN_VECTOR, 1)
    assert healthy(surfaces, "poisoned") == restarts


def test_nan_fails_its_own_row(surfaces: Surfaces) -> None:
    restarts = healthy(surfaces, "poisoned")
    stub = surfaces.stub(surfaces.daemon.grpc_port, OWN["EmbedArrow"])

    table = rows(collect(stub, OWN["EmbedArrow"], [arrow(["fog", POISON, "dog"], "poisoned")]))

    assert table["embeddings"].is_null().to_pylist() == [False, True, False]
    assert table["error"].to_pylist() == [None, NAN_VECTOR, None]
    assert healthy(surfaces, "poisoned") == restarts


def test_a_full_instance_is_429_at_once(surfaces: Surfaces) -> None:
    """Calls that are long enough fill it; a call that does not wait is refused."""
    stub = surfaces.stub(surfaces.daemon.grpc_port, OWN["EmbedArrow"])
    busy = [stub.future(arrow(["fog and rain " * 30] * 6000, "strict", truncate=True)) for _ in range(8)]
    asked = Http("", "strict", "/embed", {"inputs": "fog"})
    try:
        surfaces.until(lambda: surfaces.http(PORT, asked).status == 429, "it never was full")
        told = surfaces.http(PORT, asked)
        openai = surfaces.http(PORT, Http("", "strict", "/v1/embeddings", {"input": "fog"}))
        tokens = surfaces.http(PORT, Http("", "strict", "/tokenize", {"inputs": "fog"}))
        unary = surfaces.call(PORT, "strict", "Embed", [tei.EmbedRequest(inputs="fog")])
    finally:
        for call in busy:
            call.cancel()

    assert (told.status, told.json) == (429, {"error": "Model is overloaded", "error_type": "Overloaded"})
    assert openai.json == {"message": "Model is overloaded", "code": 429, "type": "Overloaded"}
    assert tokens.status == 200
    assert (unary.status, unary.details) == ("RESOURCE_EXHAUSTED", "Model is overloaded")
    surfaces.until(lambda: surfaces.http(PORT, asked).status == 200, "it stays full")


def test_thousands_of_messages_overload_nothing(surfaces: Surfaces) -> None:
    """The instance has room for one call that runs and four that wait."""
    texts = [tei.EmbedRequest(inputs="fog")] * STREAMED

    replies = surfaces.call(PORT, "strict", "EmbedStream", texts)

    assert (replies.status, len(replies.messages)) == ("OK", STREAMED), replies.details
    assert all(message.metadata.total_time_ns > 0 for message in replies.messages)


def test_an_unknown_method_is_unimplemented(surfaces: Surfaces) -> None:
    for port in (surfaces.ports["embedding"], surfaces.daemon.grpc_port):
        with pytest.raises(grpc.RpcError) as raised:
            surfaces.channel(port).unary_unary("/tei.v1.Embed/Nothing")(b"", timeout=10)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("instance", "serving"),
    [
        ("embedding", {"tei.v1.Embed"}),
        ("sparse", {"tei.v1.Embed"}),
        ("classifier", {"tei.v1.Predict"}),
        ("reranker", {"tei.v1.Predict", "tei.v1.Rerank"}),
        ("locked", {"tei.v1.Embed"}),
    ],
)
def test_health_is_that_of_the_kind(surfaces: Surfaces, instance: str, serving: set[str]) -> None:
    stub = health_pb2_grpc.HealthStub(surfaces.channel(surfaces.ports[instance]))
    always = {"", "tei.v1.Info", "tei.v1.Tokenize"}
    names = always | {"tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank"}

    told = {name: stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status for name in names}

    assert {name for name, status in told.items() if status == SERVING} == always | serving
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert raised.value.details() == "service not registered"  # type: ignore[attr-defined]


def services(surfaces: Surfaces, port: int, version: str) -> set[str]:
    """What reflection lists."""
    call = surfaces.channel(port).stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    [answer] = call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
    return {service.name for service in answer.list_services_response.service}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_needs_no_key(surfaces: Surfaces, version: str) -> None:
    listed = services(surfaces, surfaces.ports["locked"], version)

    assert listed >= {f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")}
    assert f"grpc.reflection.{version}.ServerReflection" in listed
    assert "grpc.health.v1.Health" not in listed


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_the_mux_lists_its_services(surfaces: Surfaces, version: str) -> None:
    listed = services(surfaces, surfaces.daemon.grpc_port, version)

    assert listed >= {f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")}
    assert "tei_multiplexer.v1.TeiMultiplexer" in listed


def test_the_mux_has_a_health_for_every_instance(surfaces: Surfaces) -> None:
    stub = health_pb2_grpc.HealthStub(surfaces.channel(surfaces.daemon.grpc_port))

    for name in ("", "tei_multiplexer.v1.TeiMultiplexer", "embedding", "classifier"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == SERVING
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_without_a_name_the_choices_are_told(surfaces: Surfaces) -> None:
    stub = surfaces.stub(surfaces.daemon.grpc_port, TEI["Embed"])

    replies = collect(stub, TEI["Embed"], [tei.EmbedRequest(inputs="fog")])
    stranger = collect(stub, TEI["Embed"], [tei.EmbedRequest(inputs="fog")], [("x-teimgr-instance", "nobody")])

    assert replies.status == "FAILED_PRECONDITION"
    assert "`x-teimgr-instance`" in replies.details
    assert "'embedding'" in replies.details
    assert (stranger.status, stranger.details) == ("NOT_FOUND", "Instance 'nobody' not found")


def test_a_stopped_instance_finishes_its_calls(surfaces: Surfaces) -> None:
    """SIGTERM is what a stop sends to the worker."""
    answers: list[Reply] = []
    body = json.dumps({"input": ["fog and rain " * 60] * 2048, "encoding_format": "base64"}).encode()
    port = surfaces.ports["cls"]

    def ask() -> None:
        own = Surfaces(surfaces.daemon)
        answers.append(own.request(port, "POST", "/v1/embeddings", body, JSON))
        own.close()

    thread = threading.Thread(target=ask)
    thread.start()
    page = Http("", "cls", "/metrics", verb="GET")
    surfaces.until(lambda: re.search(r"^te_queue_size \d{2}", surfaces.http(PORT, page).text, re.M), "it never came")
    with surfaces.daemon.client() as client:
        client.stop("cls")
        thread.join(60)
        surfaces.until(lambda: client.get("cls").status == "stopped", "it does not stop")
        client.start("cls")
        client.wait_until_running("cls", deadline_s=60)

    assert answers[0].status == 200
    assert len(answers[0].json["data"]) == 2048
