"""grpc.health.v1 and reflection on the mux port: the server as a whole, its services, and one entry per instance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from teimgr.auth.policy import PolicyInForce, Right, authenticate_call
from teimgr.directory import RoutingSnapshot
from teimgr.errors import TeimgrError
from teimgr.grpc_core import health_reflection
from teimgr.grpc_core.health_reflection import NOT_SERVING, SERVING, HealthService, Reflection
from teimgr.grpc_core.rpc_table import FILES
from teimgr.mux.handlers import STATUS_CODES
from teimgr.spec import State
from teimgr.wire.status import GrpcStatus


class MuxHealth(HealthService):
    """Health by instance name, updated from the directory: SERVING while the instance is running.

    Check and Watch need no key, as /health does: monitors have none, and must know a name to ask for it. List shows
    the names, so it requires the right to read by `policy`. `services` are served as long as the process, besides "".
    """

    def __init__(self, policy: PolicyInForce, *services: str) -> None:
        super().__init__()
        self._policy = policy
        self._services = dict.fromkeys(("", *services), SERVING)
        self._statuses: dict[str, int] = dict(self._services)

    def update(self, snapshot: RoutingSnapshot) -> None:
        """Take the statuses of a new snapshot."""
        if not self.is_stopped:
            instances = {e.name: SERVING if e.state is State.RUNNING else NOT_SERVING for e in snapshot.entries}
            self._statuses = instances | self._services
            self.notify()

    def stop(self) -> None:
        """Set everything to NOT_SERVING and end the watches."""
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        super().stop()

    def status_of(self, service: str) -> int | None:
        return self._statuses.get(service)

    def generic_handler(self) -> Any:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        read = health_pb2.HealthCheckRequest.FromString
        write = health_pb2.HealthCheckResponse.SerializeToString
        check = grpc.unary_unary_rpc_method_handler(self._check, read, write)
        watch = grpc.unary_stream_rpc_method_handler(self._watch, read, write)
        read_list = health_pb2.HealthListRequest.FromString
        write_list = health_pb2.HealthListResponse.SerializeToString
        names = grpc.unary_unary_rpc_method_handler(self._list, read_list, write_list)
        return grpc.method_handlers_generic_handler(
            health_reflection.HEALTH_SERVICE, {"Check": check, "List": names, "Watch": watch}
        )

    async def _check(self, request: Any, context: Any) -> Any:
        status = self.status_of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service '{request.service[:200]}'")
        return health_pb2.HealthCheckResponse(status=status)

    async def _list(self, request: Any, context: Any) -> Any:
        try:
            caller = authenticate_call(self._policy.now, context)
            caller.require(frozenset({Right.READ}))
        except TeimgrError as error:
            await context.abort(STATUS_CODES[GrpcStatus.of(error).number], error.message)
        shown = {name: each for name, each in self._statuses.items() if name in self._services or caller.covers(name)}
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=each) for name, each in shown.items()}
        )

    async def _watch(self, request: Any, context: Any) -> None:
        await self.watch(request.service, context.write)


def reflection_handlers() -> tuple[Any, ...]:
    """One generic handler per version, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    reflection = Reflection((*FILES, health_reflection.HEALTH_FILE))

    async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield reflection.answer(request)

    handler = grpc.stream_stream_rpc_method_handler(
        answers,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(service, {health_reflection.REFLECTION_METHOD: handler})
        for service in health_reflection.REFLECTION_SERVICES
    )
