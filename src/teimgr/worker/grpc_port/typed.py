"""Services with typed messages, health and reflection, over exchanges of bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self

from google.protobuf.message import DecodeError, Message
from grpclib.const import Handler

from teimgr.errors import InvalidInput
from teimgr.worker.grpc_port.exchange import Exchange

Answer = Callable[[Exchange], Awaitable[None]]


class TypedStream:
    """The part of `grpclib.server.Stream` that its health and reflection services use."""

    def __init__(self, exchange: Exchange, request_type: type[Message]) -> None:
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
    async def answer(exchange: Exchange) -> None:
        await handler.func(TypedStream(exchange, handler.request_type))

    return answer
