"""gRPC reflection under both of its names, v1 and v1alpha, over this project's own files.

grpcio-reflection ships v1alpha only. The messages of v1 are the same on the wire, so one servicer answers both, and the
v1 file that clients may ask for is made from the v1alpha one.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from teimgr.wire import rpc
from teimgr.wire.symbols import SymbolPool, as_proto, service_names

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
