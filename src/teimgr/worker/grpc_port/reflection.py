"""Reflection of the instance port under both of its names, v1 and v1alpha: `tei.v1`, and reflection itself."""

from __future__ import annotations

from typing import Any

from grpclib.reflection.service import ServerReflection
from grpclib.reflection.v1 import reflection_pb2 as v1
from grpclib.reflection.v1alpha import reflection_pb2 as v1alpha

from teimgr.pb.tei.v1 import tei_pb2
from teimgr.wire.symbols import SymbolPool, as_proto, service_names


class _Named:
    """The name of a service, in the only way grpclib takes it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __mapping__(self) -> dict[str, Any]:
        return {f"/{self._name}/": None}


def reflection_services() -> list[Any]:
    """The two services, as grpclib's own servicer makes them."""
    files = [as_proto(file.DESCRIPTOR) for file in (tei_pb2, v1, v1alpha)]
    names = service_names(files)
    return ServerReflection.extend([_Named(name) for name in names], pool=SymbolPool(files))[len(names) :]
