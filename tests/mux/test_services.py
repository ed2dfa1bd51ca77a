"""Reflection under both names, and health that follows the directory."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tests.support.mux_process import Control, client, running

from teimgr.auth.policy import Policy, PolicyInForce
from teimgr.directory import RouteEntry
from teimgr.mux.services import MuxHealth
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.spec import State

MUX = "tei_multiplexer.v1.TeiMultiplexer"
TEI = ("tei.v1.Info", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", "tei.v1.Tokenize")
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture(params=["v1", "v1alpha"])
def reflect(request: Any, channel: Any) -> Any:
    """Ask the reflection service of one version one thing."""
    method = channel.stream_stream(
        f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**question: Any) -> Any:
        (answer,) = [each async for each in method([reflection_pb2.ServerReflectionRequest(**question)])]
        return answer

    return ask


def files(answer: Any) -> dict[str, FileDescriptorProto]:
    protos = (FileDescriptorProto.FromString(raw) for raw in answer.file_descriptor_response.file_descriptor_proto)
    return {proto.name: proto for proto in protos}


@pytest.mark.clause("M1.10-reflection")
async def test_every_service_is_listed(reflect: Any) -> None:
    answer = await reflect(list_services="")

    assert {service.name for service in answer.list_services_response.service} == {
        *TEI, MUX, "teimgr.v1.Arrow",
        "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip


@pytest.mark.clause("M1.10-reflection")
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (MUX, "tei_multiplexer/v1/multiplexer.proto"),
        (f"{MUX}.EmbedArrowStream", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei_multiplexer.v1.Target", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei.v1.EmbedRequest.inputs", "tei/v1/tei.proto"),
        ("tei.v1.Embed", "tei/v1/tei.proto"),
        ("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto"),
        ("tei_multiplexer.v1.Target.routing", "tei_multiplexer/v1/multiplexer.proto"),
        ("tei.v1.MODEL_TYPE_EMBEDDING", "tei/v1/tei.proto"),
        ("grpc.health.v1.Health", "grpc_health/v1/health.proto"),
        ("teimgr.v1.Arrow.InferStream", "teimgr/v1/arrow.proto"),
    ],
)
async def test_a_symbol_leads_to_its_file_under_its_original_name(reflect: Any, symbol: str, file: str) -> None:
    assert file in files(await reflect(file_containing_symbol=symbol))


async def test_a_client_can_build_the_service_from_what_reflection_says(reflect: Any) -> None:
    pool = DescriptorPool()
    for name in ("tei/v1/tei.proto", "tei_multiplexer/v1/multiplexer.proto"):
        pool.Add(files(await reflect(file_by_filename=name))[name])

    methods = [method.name for method in pool.FindServiceByName(MUX).methods]

    assert methods == [method.name for method in multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"].methods]


@pytest.mark.clause("M1.10-reflection")
async def test_what_does_not_exist_is_not_found(reflect: Any) -> None:
    for question in (
        {"file_containing_symbol": "no.Such"},
        {"file_containing_symbol": f"{MUX}.No"},
        {"file_by_filename": "no.proto"},
    ):
        assert (await reflect(**question)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def ask(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.clause("D-health-service")
async def test_health_knows_the_server_the_service_and_every_instance(
    control: Control, channel: Any, start_worker: Any
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    await control.push(running("up", await start_worker()), RouteEntry("down", "m", State.FAILED))

    own = ("", *TEI, MUX, "teimgr.v1.Arrow")
    statuses = {name: (await stub.Check(ask(name))).status for name in (*own, "up", "down")}
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses

    assert statuses == {**dict.fromkeys(own, SERVING), "up": SERVING, "down": NOT_SERVING}
    assert {name: each.status for name, each in listed.items()} == statuses
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(ask("nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_tells_every_change_of_an_instance(control: Control, channel: Any, start_worker: Any) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(ask("a"))
    worker = await start_worker()

    seen = [(await watch.read()).status]
    for entries in ([RouteEntry("a", "m", State.STARTING)], [running("a", worker)], []):
        await control.push(*entries)
        seen.append((await watch.read()).status)
    watch.cancel()

    assert seen == [UNKNOWN, NOT_SERVING, SERVING, UNKNOWN]


async def test_a_watch_hears_of_the_end_and_does_not_hold_it_up(start_mux: Any) -> None:
    mux = start_mux()
    control = await Control.connect(mux)
    async with client(await control.push()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(ask(""))
        assert (await watch.read()).status == SERVING

        control.say({"stop": 3600})

        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
    assert await asyncio.to_thread(mux.process.wait, 20) == 0
    await control.close()


async def test_a_watch_hears_of_an_end_that_comes_while_it_speaks() -> None:
    health = MuxHealth(PolicyInForce(Policy()))
    said = []

    class StoppedMeanwhile:
        async def write(self, answer: health_pb2.HealthCheckResponse) -> None:
            said.append(answer.status)
            health.stop()

    await health._watch(ask(""), StoppedMeanwhile())

    assert said == [SERVING, NOT_SERVING]
