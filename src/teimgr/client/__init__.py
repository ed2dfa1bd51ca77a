"""A small typed client: lifecycle over REST, inference over gRPC, numpy and Arrow in and out.

    async with AsyncClient(api="http://127.0.0.1:9000", grpc="http://127.0.0.1:9001") as client:
        await client.create("mini", "sentence-transformers/all-MiniLM-L6-v2")
        await client.wait_until_running("mini", deadline_s=60)
        vectors = await client.embed(["a text", "another"], instance="mini")

`Client` has the same methods for code without an event loop. `RestClient` has those that are REST calls, and needs the
standard library alone. `DaemonConnection.resolve()` finds the daemon that flags, environment or contexts name.
Every failure is one of `teimgr.errors`. Names are imported when they are used: REST alone loads neither numpy nor gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teimgr.client.clients import AsyncClient, Client
    from teimgr.client.connection import DaemonConnection
    from teimgr.client.rest_client import RestClient
    from teimgr.client.rest_values import Health, Instance, InstanceEvent, Logs
    from teimgr.client.server_address import Tls
    from teimgr.client.values import Embedded, Info, Prediction, Rank, SparseVector, Token

_MODULES = {
    "clients": ("AsyncClient", "Client"),
    "connection": ("DaemonConnection",),
    "rest_client": ("RestClient",),
    "rest_values": ("Health", "Instance", "InstanceEvent", "Logs"),
    "server_address": ("Tls",),
    "values": ("Embedded", "Info", "Prediction", "Rank", "SparseVector", "Token"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncClient",
    "Client",
    "DaemonConnection",
    "Embedded",
    "Health",
    "Info",
    "Instance",
    "InstanceEvent",
    "Logs",
    "Prediction",
    "Rank",
    "RestClient",
    "SparseVector",
    "Tls",
    "Token",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
