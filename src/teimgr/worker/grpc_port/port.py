"""The gRPC half of the instance port: which RPC is served by what, and the one place for statuses."""

from __future__ import annotations

import asyncio
import hmac

from h2.exceptions import ProtocolError
from uvicorn.server import ServerState

from teimgr.errors import DeadlineExceeded, TeimgrError
from teimgr.observability.request_context import CURRENT
from teimgr.wire.rpc import RPCS, TEI_PACKAGE, Rpc
from teimgr.wire.status import STATUS, UNAUTHENTICATED, UNIMPLEMENTED
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.grpc_port.calls import Calls
from teimgr.worker.grpc_port.connection import Connection
from teimgr.worker.grpc_port.exchange import RpcStatusError, RpcStream
from teimgr.worker.grpc_port.services import Answer, Health, answers, reflection_services
from teimgr.worker.methods import Service

_BY_PATH = {rpc.path: rpc for rpc in RPCS if rpc.service.startswith(f"{TEI_PACKAGE}.")}


class GrpcPort:
    """`tei.v1`, health and reflection over one dispatcher. `protocol` makes the protocol of an accepted connection.

    Health and reflection are open; everything else asks for the API key where the instance has one.
    """

    def __init__(self, dispatcher: Dispatcher, service: Service) -> None:
        self._dispatcher = dispatcher
        self._calls = Calls(dispatcher, service)
        self._stopping = asyncio.Event()
        self._open: dict[str, Answer] = {}
        for each in (Health(dispatcher, self._stopping), *reflection_services()):
            self._open |= answers(each)

    def protocol(self, books: ServerState) -> Connection:
        """For `listening.serving`."""
        return Connection(self._serve, self._dispatcher.spec.max_message_bytes, books)

    def stop(self) -> None:
        """The worker is to end: whoever watches its health hears it."""
        self._stopping.set()

    async def _serve(self, exchange: RpcStream) -> None:
        """Answer one RPC, whatever becomes of it."""
        CURRENT.set(exchange.context)  # for this task, which serves nothing else
        if exchange.http_refusal:
            await exchange.refuse(exchange.http_refusal)
            return
        try:
            await self._in_time(exchange)
            await exchange.finish()
        except TeimgrError as error:
            await exchange.finish(STATUS[error.code].grpc, error.message, error.code.name)
        except RpcStatusError as refusal:
            await exchange.finish(refusal.status, refusal.message)
        except ProtocolError:
            raise  # of a client that left
        except Exception as error:
            known = masked(error)
            await exchange.finish(STATUS[known.code].grpc, known.message, known.code.name)

    async def _in_time(self, exchange: RpcStream) -> None:
        try:
            async with asyncio.timeout(exchange.timeout_s()) as limit:
                await self._answer(exchange)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None

    async def _answer(self, exchange: RpcStream) -> None:
        rpc: Rpc | None = _BY_PATH.get(exchange.path)
        if rpc is not None:
            self._check_key(exchange)
            await self._calls.answer(rpc, exchange)
        elif exchange.path in self._open:
            await self._open[exchange.path](exchange)
        else:
            raise RpcStatusError(UNIMPLEMENTED, "Method not found")

    def _check_key(self, exchange: RpcStream) -> None:
        key = self._dispatcher.spec.api_key
        if key is None:
            return
        given = exchange.metadata.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise RpcStatusError(UNAUTHENTICATED, "No valid auth token")
