"""Health watches and reflection answers, without a transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from teimgr.wire.grpc_core.health_reflection import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthService, Reflection
from teimgr.wire.grpc_core.rpc_table import FILES


class Health(HealthService):
    """Statuses that the test sets."""

    def __init__(self, poll_s: float | None = None) -> None:
        super().__init__(poll_s)
        self.statuses: dict[str, int] = {"": SERVING}
        self.sent: asyncio.Queue[int] = asyncio.Queue()

    def status_of(self, service: str) -> int | None:
        return self.statuses.get(service)

    async def send(self, response: health_pb2.HealthCheckResponse) -> None:
        self.sent.put_nowait(response.status)


async def test_a_watch_sends_each_change_once_until_the_stop() -> None:
    health = Health()
    watch = asyncio.create_task(health.watch("a", health.send))

    assert await health.sent.get() == SERVICE_UNKNOWN
    for status in (SERVING, NOT_SERVING):
        health.statuses["a"] = status
        health.notify()
        health.notify()
        assert await health.sent.get() == status
    health.stop()
    await watch

    assert health.sent.empty()


async def test_a_stop_during_the_send_of_a_status_is_not_missed() -> None:
    health = Health()

    async def send(response: health_pb2.HealthCheckResponse) -> None:
        await health.send(response)
        health.statuses[""] = NOT_SERVING
        health.stop()

    await health.watch("", send)

    assert [health.sent.get_nowait() for _ in range(2)] == [SERVING, NOT_SERVING]


async def test_a_polled_service_needs_no_notification() -> None:
    health = Health(poll_s=0.01)
    watch = asyncio.create_task(health.watch("", health.send))
    assert await health.sent.get() == SERVING

    health.statuses[""] = NOT_SERVING

    assert await asyncio.wait_for(health.sent.get(), 10) == NOT_SERVING
    health.stop()
    await watch


@pytest.mark.parametrize(
    ("question", "code", "message"),
    [
        ({}, 3, "invalid argument"),
        ({"file_containing_symbol": "no.Such"}, 5, "not found"),
        ({"file_containing_symbol": "tei.v1.Embed.Nothing"}, 5, "not found"),
        ({"file_by_filename": "no.proto"}, 5, "not found"),
        ({"all_extension_numbers_of_type": "no.Such"}, 5, "not found"),
        (
            {"file_containing_extension": {"containing_type": "tei.v1.EmbedRequest", "extension_number": 9}},
            5,
            "not found",
        ),
    ],
)
def test_what_does_not_exist_is_an_error_with_the_request(question: Any, code: int, message: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(host="h", **question)

    answer = Reflection(FILES).answer(request)

    assert (answer.error_response.error_code, answer.error_response.error_message) == (code, message)
    assert answer.original_request == request


def test_a_file_comes_with_its_imports_each_once_and_a_message_has_its_extensions() -> None:
    reflection = Reflection(FILES)

    answer = reflection.answer(reflection_pb2.ServerReflectionRequest(file_by_filename=FILES[1].name))
    extensions = reflection.answer(
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="tei.v1.EmbedRequest")
    )

    files = answer.file_descriptor_response.file_descriptor_proto
    assert len(files) == 1 + len(FILES[1].dependencies)
    assert len(set(files)) == len(files)
    assert extensions.all_extension_numbers_response.base_type_name == "tei.v1.EmbedRequest"
    assert list(extensions.all_extension_numbers_response.extension_number) == []
