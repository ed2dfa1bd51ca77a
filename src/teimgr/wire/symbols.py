"""What a reflection service is asked, over a set of proto files of its own."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool


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
