"""The methods of every service as data, read from the service descriptors.

An RPC added to a proto appears here by itself; nothing else names the methods one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.frames import Flag, Method
from teimgr.wire.protobuf import TARGET_FIELD


def as_proto(file: FileDescriptor) -> FileDescriptorProto:
    """A file as the message that reflection sends."""
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def service_names(files: Iterable[FileDescriptorProto]) -> list[str]:
    """Every service of the files, in full."""
    return [f"{file.package}.{service.name}" for file in files for service in file.service]


class SymbolPool:
    """The part of a descriptor pool that reflection asks, complete: protobuf's own does not find methods and oneofs.

    A pool of its own, because the default one is shared with whatever else is loaded. Unknown names are a KeyError.
    """

    def __init__(self, files: Iterable[FileDescriptorProto]) -> None:
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


SERVICE = multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"]
FILES: tuple[FileDescriptor, ...] = (tei_pb2.DESCRIPTOR, multiplexer_pb2.DESCRIPTOR, arrow_pb2.DESCRIPTOR)


class Shape(Enum):
    """Who streams."""

    UNARY = "unary"
    BIDI = "bidi"
    CLIENT_STREAM = "client stream"


class PayloadSource(Enum):
    """What of a message the worker gets."""

    INNER = "the bytes of its field `request`"
    WHOLE = "the message as it is"
    NOTHING = "an empty payload"


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method.

    Attributes:
        service: Full name of its service.
        name: As in the proto, e.g. `EmbedSparseStream`.
        path: The HTTP/2 path.
        shape: Who streams.
        method: What the worker is asked; None where no frame exists for it.
        has_target: Whether messages say whom they are for; else the metadata of the call does.
        payload: What of a message the worker gets.
        inner_field: Number of the field `request`; 0 where the message has none.
        arrow_field: Number of the field with a whole Arrow batch; 0 where the message has none.
        missing: The refusal of a message without inner request.
        lane: `Flag.BULK` for whole batches in one message, `Flag.WAIT` for what waits for room in the worker.
        limited: Whether the configured request timeout applies: to single calls, not to batches and streams.
        tells_compute: Whether the answer's initial metadata says what it cost.
    """

    service: str
    name: str
    path: str
    shape: Shape
    method: Method | None
    has_target: bool
    payload: PayloadSource
    inner_field: int
    arrow_field: int
    missing: str
    lane: Flag
    limited: bool
    tells_compute: bool


def _rpc(service: ServiceDescriptor, descriptor: MethodDescriptor) -> Rpc:
    subject = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", descriptor.name.removesuffix("Stream")).lower()
    shape = _shape(descriptor)
    arrow_field = _number(descriptor.input_type, "arrow_ipc")
    inner_field = _number(descriptor.input_type, "request")
    return Rpc(
        service=service.full_name,
        name=descriptor.name,
        path=f"/{service.full_name}/{descriptor.name}",
        shape=shape,
        method=Method.__members__.get(_method_name(subject, shape, bool(arrow_field))),
        has_target=_number(descriptor.input_type, "target") == TARGET_FIELD,
        payload=_payload(descriptor.input_type),
        inner_field=inner_field,
        arrow_field=arrow_field,
        missing=f"Missing {subject} request",
        lane=_lane(subject, bool(arrow_field)),
        limited=shape is Shape.UNARY and not arrow_field,
        tells_compute=not descriptor.server_streaming and "metadata" in descriptor.output_type.fields_by_name,
    )


def _shape(descriptor: MethodDescriptor) -> Shape:
    if not descriptor.client_streaming:
        return Shape.UNARY
    return Shape.BIDI if descriptor.server_streaming else Shape.CLIENT_STREAM


def _method_name(subject: str, shape: Shape, is_arrow: bool) -> str:
    """The frame's name: that of the subject, and of what is not a text at a time the form as well."""
    if shape is Shape.CLIENT_STREAM:
        return f"{subject}_stream".upper()
    return (f"{subject}_arrow" if is_arrow and not subject.endswith("arrow") else subject).upper()


def _payload(message: Descriptor) -> PayloadSource:
    if "request" in message.fields_by_name:
        return PayloadSource.INNER
    says_only_whom = "target" in message.fields_by_name and len(message.fields) == 1
    return PayloadSource.NOTHING if says_only_whom else PayloadSource.WHOLE


def _lane(subject: str, is_arrow: bool) -> Flag:
    if is_arrow:
        return Flag.BULK | Flag.WAIT
    return Flag.WAIT if subject == "rerank" else Flag.NONE


def _number(message: Descriptor, field: str) -> int:
    found = message.fields_by_name.get(field)
    return found.number if found else 0


def _rows() -> Iterator[Rpc]:
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield _rpc(service, method)


RPCS: tuple[Rpc, ...] = tuple(_rows())
BY_PATH: dict[str, Rpc] = {rpc.path: rpc for rpc in RPCS}
SERVICES: tuple[str, ...] = tuple(dict.fromkeys(rpc.service for rpc in RPCS))
TEI_PACKAGE = tei_pb2.DESCRIPTOR.package
