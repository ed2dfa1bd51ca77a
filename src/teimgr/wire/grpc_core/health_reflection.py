"""The two standard services: grpc.health.v1, and grpc.reflection in v1 and v1alpha; and bounds on their calls.

Specifications: https://github.com/grpc/grpc/blob/master/doc/health-checking.md and server-reflection.md beside it. The
message classes are those of grpcio-health-checking and grpcio-reflection, which load without grpcio itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from teimgr.errors import Overloaded
from teimgr.http.byte_budget import ByteBudget, Places
from teimgr.http.http2.connection import MAX_TASKS
from teimgr.http.http2.stream import Stream
from teimgr.wire.grpc_core.rpc import RpcStream
from teimgr.wire.status import INVALID_ARGUMENT, NOT_FOUND

HEALTH_FILE: FileDescriptor = health_pb2.DESCRIPTOR
HEALTH_SERVICE: str = HEALTH_FILE.services_by_name["Health"].full_name
REFLECTION_SERVICES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
REFLECTION_METHOD = "ServerReflectionInfo"
SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """Statuses by service name, and watches of them; `poll_s` is for subclasses that do not call `notify`."""

    def __init__(self, poll_s: float | None = None) -> None:
        self.is_stopped = False
        self._poll_s = poll_s
        self._changed = asyncio.Event()

    def status_of(self, service: str) -> int | None:
        """Return the present ServingStatus of a service, None for an unknown name."""
        raise NotImplementedError

    def notify(self) -> None:
        """Make every watch look at its status."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def stop(self) -> None:
        """End every watch after its last status, so that none delays the drain."""
        self.is_stopped = True
        self.notify()

    async def watch(self, service: str, send: Callable[[Any], Awaitable[None]]) -> None:
        """Send a HealthCheckResponse now and on each change, until `stop`."""
        sent = None
        while True:
            # Read all three before `send`, during which the status may change and the service may stop.
            changed, is_last = self._changed, self.is_stopped
            status = self.status_of(service)
            if status is None:
                status = SERVICE_UNKNOWN
            if status != sent:
                await send(health_pb2.HealthCheckResponse(status=status))
                sent = status
            if is_last:
                return
            try:
                async with asyncio.timeout(self._poll_s):
                    await changed.wait()
            except TimeoutError:
                pass


class Reflection:
    """Descriptors of `files` and of reflection itself, in a separate pool: other libraries share the default one."""

    def __init__(self, files: Iterable[FileDescriptor]) -> None:
        alpha = _to_proto(reflection_pb2.DESCRIPTOR)
        protos = [*map(_to_proto, files), alpha, _v1_of(alpha)]
        self._services = sorted(f"{file.package}.{service.name}" for file in protos for service in file.service)
        self._pool = DescriptorPool()
        for proto in protos:
            self._pool.Add(proto)

    def answer(self, request: Any) -> Any:
        """Return the ServerReflectionResponse to a ServerReflectionRequest; v1 and v1alpha are the same on the wire."""
        response = reflection_pb2.ServerReflectionResponse(original_request=request)
        try:
            match request.WhichOneof("message_request"):
                case "list_services":
                    for name in self._services:
                        response.list_services_response.service.add(name=name)
                case "file_by_filename":
                    _add_file(response, self._pool.FindFileByName(request.file_by_filename))
                case "file_containing_symbol":
                    _add_file(response, self._file_of(request.file_containing_symbol))
                case "file_containing_extension":
                    wanted = request.file_containing_extension
                    message = self._pool.FindMessageTypeByName(wanted.containing_type)
                    extension = self._pool.FindExtensionByNumber(message, wanted.extension_number)
                    _add_file(response, self._pool.FindFileContainingSymbol(extension.full_name))
                case "all_extension_numbers_of_type":
                    message = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                    numbers = response.all_extension_numbers_response
                    numbers.base_type_name = message.full_name
                    numbers.extension_number.extend(sorted(e.number for e in self._pool.FindAllExtensions(message)))
                case _:
                    response.error_response.error_code = INVALID_ARGUMENT
                    response.error_response.error_message = "invalid argument"
        except KeyError:
            response.error_response.error_code = NOT_FOUND
            response.error_response.error_message = "not found"
        return response

    def _file_of(self, symbol: str) -> FileDescriptor:
        """Return the file that defines a symbol; protobuf's own search does not find methods and oneofs."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            parent, _, leaf = symbol.rpartition(".")
        try:
            service = self._pool.FindServiceByName(parent)
        except KeyError:
            return self._pool.FindMessageTypeByName(parent).oneofs_by_name[leaf].containing_type.file
        return service.methods_by_name[leaf].containing_service.file


def _add_file(response: Any, file: FileDescriptor) -> None:
    """Add the file and all that it imports, each once."""
    found: dict[str, FileDescriptor] = {}
    pending = [file]
    while pending:
        each = pending.pop()
        if each.name not in found:
            found[each.name] = each
            pending.extend(reversed(list(each.dependencies)))
    files = (_to_proto(each).SerializeToString() for each in found.values())
    response.file_descriptor_response.file_descriptor_proto.extend(files)


def _to_proto(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def _v1_of(alpha: FileDescriptorProto) -> FileDescriptorProto:
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    v1 = text_format.Parse(text, FileDescriptorProto())
    v1.name = "grpc/reflection/v1/reflection.proto"
    v1.options.CopyFrom(alpha.options)
    return v1


# Half of a server's streams, because watches do not end. An open call holds less than 20 KiB: one message and one
# unread reply; the longest replies are descriptors of a service.
MAX_OPEN = MAX_TASKS // 2
# A request has only the name of a service, symbol or file.
MAX_MESSAGE_BYTES = 4096
# Limit on the wait for each message.
MESSAGE_S = 20.0


class StandardCalls:
    """The calls of health and reflection of one server, of which at most `MAX_OPEN` wait for something (`Places`).

    A call that does not wait is always answered: its message arrived with its head, and the client's window has room
    for the reply. The budget has room for one message of each other call, so no call waits for it.
    """

    def __init__(self) -> None:
        self._budget = ByteBudget(MAX_OPEN * MAX_MESSAGE_BYTES)
        self._places = Places(MAX_OPEN)

    def call(self, stream: Stream, max_reply_bytes: int) -> RpcStream:
        """Serve the call on `stream`."""
        return RpcStream(stream, MAX_MESSAGE_BYTES, self._budget, max_reply_bytes)

    async def reflect(self, call: RpcStream, reflection: Reflection) -> None:
        """Answer the requests of a reflection stream, one in each turn of the event loop."""
        while (raw := await call.receive(MESSAGE_S)) is not None:
            request = call.parse(ServerReflectionRequest, raw)
            await call.send(reflection.answer(request).SerializeToString())
            await asyncio.sleep(0)

    @asynccontextmanager
    async def bounded(self, call: RpcStream) -> AsyncIterator[None]:
        """For the body of `call`: count it if it has not ended by the next turn of the event loop.

        Raises:
            Overloaded: too many other calls are open, or too many of its caller.
        """
        loop, caller, is_counted = asyncio.get_running_loop(), call.stream.connection.caller, False

        def count() -> None:
            nonlocal is_counted
            is_counted = self._places.take(caller)
            if not is_counted:
                limit.reschedule(loop.time())

        counting = loop.call_soon(count)
        try:
            async with asyncio.timeout(None) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded("Too many calls of health and reflection are open; try again later") from None
        finally:
            counting.cancel()
            if is_counted:
                self._places.leave(caller)
