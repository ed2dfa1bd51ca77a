"""gRPC reflection under both of its names, v1 and v1alpha, over this project's own files.

grpcio-reflection ships v1alpha only. The messages of v1 are the same on the wire, so one servicer answers both, and the
v1 file that clients may ask for is made from the v1alpha one.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2

_FILES: tuple[FileDescriptor, ...] = (
    tei_pb2.DESCRIPTOR,
    multiplexer_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
_METHOD = "ServerReflectionInfo"
_LIBRARY: Any = reflection  # untyped, and its stubs do not know the asyncio half


def reflection_handlers() -> tuple[Any, ...]:
    """A generic handler per version, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    files = [_proto(file) for file in _FILES]
    files.append(_renamed_v1(files[-1]))
    servicer = _LIBRARY.aio.ReflectionServicer(service_names(files), _Pool(files))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(f"{file.package}.{file.service[0].name}", {_METHOD: handler})
        for file in files[-2:]
    )


def service_names(files: list[FileDescriptorProto]) -> list[str]:
    """Every service of the files, in full."""
    return [f"{file.package}.{service.name}" for file in files for service in file.service]


def _proto(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


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


class _Pool:
    """The part of a descriptor pool that reflection asks, complete: protobuf's own does not find methods and oneofs.

    A pool of its own, because the default one is shared with whatever else is loaded. Unknown names are a KeyError.
    """

    def __init__(self, files: list[FileDescriptorProto]) -> None:
        self._pool = DescriptorPool()
        for file in files:
            self._pool.Add(file)
        self.FindFileByName = self._pool.FindFileByName
        self.FindMessageTypeByName = self._pool.FindMessageTypeByName
        self.FindExtensionByNumber = self._pool.FindExtensionByNumber
        self.FindAllExtensions = self._pool.FindAllExtensions

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802  the library's name
        """The file that defines the service, method, message, field, oneof, enum or enum value of that full name."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            parent, _, leaf = symbol.rpartition(".")
            return self._members(parent)[leaf]

    def _members(self, parent: str) -> dict[str, FileDescriptor]:
        try:
            service = self._pool.FindServiceByName(parent)
        except KeyError:
            message = self._pool.FindMessageTypeByName(parent)
            return dict.fromkeys(message.oneofs_by_name, message.file)
        return dict.fromkeys(service.methods_by_name, service.file)
