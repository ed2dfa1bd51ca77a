"""A client of the gRPC reflection service, for the servers that have one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2

Reflect = Callable[..., Awaitable[Any]]


def reflection(channel: Any, version: str) -> Reflect:
    """Sends one request, given by its fields, to the service of this version; the result is the one response."""
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**fields: Any) -> Any:
        (response,) = [each async for each in method([reflection_pb2.ServerReflectionRequest(**fields)])]
        return response

    return ask
