"""grpc.health.v1: the server as a whole, the mux service, and one entry per instance name."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from teimgr.auth.callers import authenticate_call
from teimgr.auth.policy import PolicyInForce, Right
from teimgr.directory import RoutingSnapshot
from teimgr.errors import TeimgrError
from teimgr.spec import State
from teimgr.wire import rpc
from teimgr.wire.rpc import SymbolPool, as_proto, service_names
from teimgr.wire.status import STATUS

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def grpc_status(error: TeimgrError) -> grpc.StatusCode:
    """The gRPC status of a failure."""
    return _STATUS_BY_NUMBER[STATUS[error.code].grpc]


class Health:
    """Answers Check, List and Watch; follows the directory. An instance serves when it is running.

    Check and Watch are for everybody whom the handshake let in, as /health is: those who watch have no keys, and have
    to know a name to ask for it. List tells the names, so it asks `policy` for the right to read. `own` are the service
    names that are up as long as the process is, besides "".
    """

    def __init__(self, policy: PolicyInForce, *own: str) -> None:
        self._policy = policy
        self._own = dict.fromkeys(("", *own), _SERVING)
        self._statuses = dict(self._own)
        self._changed = asyncio.Event()
        self._stopped = False

    def update(self, snapshot: RoutingSnapshot) -> None:
        """Follow the directory."""
        if not self._stopped:
            instances = {e.name: _SERVING if e.state is State.RUNNING else _NOT_SERVING for e in snapshot.entries}
            self._publish(instances | self._own)

    def stop(self) -> None:
        """Say NOT_SERVING of everything, then end every Watch, so that none holds up the drain."""
        self._stopped = True
        self._publish(dict.fromkeys(self._statuses, _NOT_SERVING))

    def generic_handler(self) -> Any:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        request = health_pb2.HealthCheckRequest.FromString
        answer = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, request, answer),
                "List": grpc.unary_unary_rpc_method_handler(
                    self._list,
                    health_pb2.HealthListRequest.FromString,
                    health_pb2.HealthListResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request, answer),
            },
        )

    def _publish(self, statuses: dict[str, Any]) -> None:
        self._statuses = statuses
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service '{request.service[:200]}'")
        return health_pb2.HealthCheckResponse(status=status)

    async def _list(self, request: Any, context: Any) -> Any:
        try:
            caller = authenticate_call(self._policy.now, context)
            caller.require(frozenset({Right.READ}))
        except TeimgrError as error:
            await context.abort(grpc_status(error), error.message)
        shown = {name: each for name, each in self._statuses.items() if name in self._own or caller.covers(name)}
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=each) for name, each in shown.items()}
        )

    async def _watch(self, request: Any, context: Any) -> None:
        said = None
        while True:
            # All three of one moment: the end may come while the answer is being written.
            changed, last = self._changed, self._stopped
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != said:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                said = status
            if last:
                return
            await changed.wait()


_FILES: tuple[FileDescriptor, ...] = (*rpc.FILES, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
_METHOD = "ServerReflectionInfo"
_LIBRARY: Any = reflection  # untyped, and its stubs do not know the asyncio half


def reflection_handlers() -> tuple[Any, ...]:
    """A generic handler per version, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    files = [as_proto(file) for file in _FILES]
    files.append(_renamed_v1(files[-1]))
    servicer = _LIBRARY.aio.ReflectionServicer(service_names(files), SymbolPool(files))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(f"{file.package}.{file.service[0].name}", {_METHOD: handler})
        for file in files[-2:]
    )


def _renamed_v1(alpha: FileDescriptorProto) -> FileDescriptorProto:
    v1 = FileDescriptorProto()
    v1.CopyFrom(alpha)
    v1.name = "grpc/reflection/v1/reflection.proto"
    v1.package = "grpc.reflection.v1"
    for message in v1.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in v1.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return v1
