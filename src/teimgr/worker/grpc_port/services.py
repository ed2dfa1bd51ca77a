"""grpc.health.v1 of an instance: what its kind of model serves, while the device gives right answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from google.protobuf.message import DecodeError, Message
from grpclib.const import Handler
from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.reflection.service import ServerReflection
from grpclib.reflection.v1 import reflection_pb2 as v1
from grpclib.reflection.v1alpha import reflection_pb2 as v1alpha

from teimgr.errors import InvalidInput
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.rpc import SymbolPool, as_proto, service_names
from teimgr.wire.status import NOT_FOUND
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.grpc_port.exchange import RpcStatusError, RpcStream

Answer = Callable[[RpcStream], Awaitable[None]]


class TypedStream:
    """The part of `grpclib.server.Stream` that its health and reflection services use."""

    def __init__(self, exchange: RpcStream, request_type: type[Message]) -> None:
        self._exchange = exchange
        self._request_type = request_type

    async def recv_message(self) -> Any:
        """The next message, None after the last; errors as `Exchange.receive`."""
        raw = await self._exchange.receive()
        if raw is None:
            return None
        try:
            return self._request_type.FromString(raw)
        except DecodeError as error:
            raise InvalidInput(f"Malformed {self._request_type.DESCRIPTOR.full_name}: {error}") from error

    async def send_message(self, message: Message) -> None:
        """Send one message."""
        await self._exchange.send(message.SerializeToString())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message


def answers(service: Any) -> dict[str, Answer]:
    """What answers each path of a service that was made for grpclib."""
    mapping: dict[str, Handler] = service.__mapping__()
    return {path: _answer(handler) for path, handler in mapping.items()}


def _answer(handler: Handler) -> Answer:
    async def answer(exchange: RpcStream) -> None:
        await handler.func(TypedStream(exchange, handler.request_type))

    return answer


class _Named:
    """The name of a service, in the only way grpclib takes it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __mapping__(self) -> dict[str, Any]:
        return {f"/{self._name}/": None}


def reflection_services() -> list[Any]:
    """The two services, as grpclib's own servicer makes them."""
    files = [as_proto(file.DESCRIPTOR) for file in (tei_pb2, v1, v1alpha)]
    names = service_names(files)
    return ServerReflection.extend([_Named(name) for name in names], pool=SymbolPool(files))[len(names) :]


_POLL_S = 1.0
_ALWAYS = ("", "tei.v1.Info", "tei.v1.Tokenize")
_KINDS = {
    "tei.v1.Embed": ("embedding", "sparse", "multi-vector"),
    "tei.v1.Predict": ("classifier", "reranker"),
    "tei.v1.Rerank": ("reranker",),
}


class Health(HealthBase):
    """Check and Watch. `stopping` is set when the worker is to end, and ends every Watch with NOT_SERVING."""

    def __init__(self, dispatcher: Dispatcher, stopping: asyncio.Event) -> None:
        self._dispatcher = dispatcher
        self._stopping = stopping

    async def Check(self, stream: Any) -> None:  # noqa: N802  the service's name
        """How it is now."""
        await stream.send_message(HealthCheckResponse(status=self._status(await _service(stream))))

    async def Watch(self, stream: Any) -> None:  # noqa: N802  the service's name
        """How it is now, and again whenever that changes."""
        service = await _service(stream)
        said = None
        while True:
            last = self._stopping.is_set()
            status = self._status(service)
            if status != said:
                await stream.send_message(HealthCheckResponse(status=status))
                said = status
            if last:
                return
            await self._next_look()

    async def _next_look(self) -> None:
        """The engine tells nobody when it falls sick: a flag is looked at while somebody watches."""
        try:
            async with asyncio.timeout(_POLL_S):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus.ValueType:
        if service not in _ALWAYS and service not in _KINDS:
            raise RpcStatusError(NOT_FOUND, "service not registered")
        if self._stopping.is_set():
            return HealthCheckResponse.NOT_SERVING
        if service in _ALWAYS:
            return HealthCheckResponse.SERVING
        engine = self._dispatcher.engine
        serves = engine.info.kind in _KINDS[service] and engine.stats().healthy
        return HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING


async def _service(stream: Any) -> str:
    request: HealthCheckRequest | None = await stream.recv_message()
    return request.service if request is not None else ""
