"""grpc.health.v1 of an instance: what its kind of model serves, while the device gives right answers."""

from __future__ import annotations

import asyncio
from typing import Any

from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from teimgr.wire.status import NOT_FOUND
from teimgr.worker.desk import Desk
from teimgr.worker.grpc_port.refusal import Refusal

_POLL_S = 1.0
_ALWAYS = ("", "tei.v1.Info", "tei.v1.Tokenize")
_KINDS = {
    "tei.v1.Embed": ("embedding", "sparse", "multi-vector"),
    "tei.v1.Predict": ("classifier", "reranker"),
    "tei.v1.Rerank": ("reranker",),
}


class Health(HealthBase):
    """Check and Watch. `stopping` is set when the worker is to end, and ends every Watch with NOT_SERVING."""

    def __init__(self, desk: Desk, stopping: asyncio.Event) -> None:
        self._desk = desk
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
            raise Refusal(NOT_FOUND, "service not registered")
        if self._stopping.is_set():
            return HealthCheckResponse.NOT_SERVING
        if service in _ALWAYS:
            return HealthCheckResponse.SERVING
        engine = self._desk.engine
        serves = engine.info.kind in _KINDS[service] and engine.stats().healthy
        return HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING


async def _service(stream: Any) -> str:
    request: HealthCheckRequest | None = await stream.recv_message()
    return request.service if request is not None else ""
