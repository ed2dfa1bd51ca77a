"""A small typed client: lifecycle over REST, inference over gRPC, numpy and Arrow in and out.

    async with AsyncClient(api="http://127.0.0.1:9000", grpc="http://127.0.0.1:9001") as client:
        await client.create("mini", "sentence-transformers/all-MiniLM-L6-v2")
        await client.wait_until_running("mini", deadline_s=60)
        vectors = await client.embed(["a text", "another"], instance="mini")

`Client` has the same methods for code without an event loop. Every failure is one of `teimgr.errors`.
"""

from teimgr.client.clients import AsyncClient, Client
from teimgr.client.server_address import Tls
from teimgr.client.values import (
    Embedded,
    Health,
    Info,
    Instance,
    InstanceEvent,
    Logs,
    Prediction,
    Rank,
    SparseVector,
    Token,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Embedded",
    "Health",
    "Info",
    "Instance",
    "InstanceEvent",
    "Logs",
    "Prediction",
    "Rank",
    "SparseVector",
    "Tls",
    "Token",
]
