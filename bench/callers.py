"""Callers of a daemon with one call under way, a text each: gRPC with and without its library, and HTTP routes."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import orjson

from bench.encoders import Task
from bench.load import DATA, GrpcConnection, LoadTask
from teimgr.client import AsyncClient, Client

_SILENCE_S = 60.0
_EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed"
_PREFIX_BYTES = 5  # of a message of gRPC
_RECEIVE_BYTES = 2**16


class Caller:
    """Of an instance, whose precision is the caller's `dtype`, where its gRPC address is known."""

    def __init__(self, task: Task) -> None:
        self._instance, self.dtype = task.instance, ""
        if not task.grpc:
            return
        with Client(grpc=task.grpc, timeout_s=_SILENCE_S) as client:
            self.dtype = client.info(instance=task.instance).dtype

    def query(self, text: str) -> Any:
        """The vector of a text."""
        raise NotImplementedError

    def encode(self, texts: list[str]) -> Any:
        """A call for each text."""
        return np.array([self.query(text) for text in texts], np.float32)

    def close(self) -> None:
        """End the connection."""
        raise NotImplementedError


class OverGrpc(Caller):
    """`Embed` through the mux, by teimgr's own client."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(AsyncClient(grpc=task.grpc).__aenter__())

    def query(self, text: str) -> Any:
        """One row."""
        return self._loop.run_until_complete(self._client.embed(text, instance=self._instance))[0]

    def close(self) -> None:
        """End the connection and the event loop."""
        self._loop.run_until_complete(self._client.__aexit__(None, None, None))
        self._loop.close()


class _Collecting(GrpcConnection):
    """A connection of the load generator that keeps the replies."""

    def __init__(self, port: int) -> None:
        self.waiting: deque[bytes] = deque()
        self.reply = bytearray()
        super().__init__(LoadTask("grpc", port, _EMBED), iter(self._next, None), 1)

    def _next(self) -> bytes | None:
        return self.waiting.popleft() if self.waiting else None

    def _call(self) -> bytes:
        self._bodies = iter(self._next, None)  # one that has ended stays so
        return super()._call()

    def _frame_received(
        self, kind: int, flags: int, stream: int, buffer: bytearray, at: int, size: int, *rest: Any
    ) -> None:
        if kind == DATA:
            self.reply += buffer[at : at + size]
        super()._frame_received(kind, flags, stream, buffer, at, size, *rest)


class OverHttp2(Caller):
    """`Embed` through the mux by frames of HTTP/2 on a blocking socket, without gRPC's library."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        from teimgr.client import payloads  # here: other checkouts have not all of it

        self._payloads = payloads
        self._connection = _Collecting(int(task.grpc.rpartition(":")[2]))

    def query(self, text: str) -> Any:
        """One row."""
        connection, replies = self._connection, []
        connection.waiting.append(self._payloads.embed_request(text, {"instance": self._instance}))
        connection.reply.clear()
        connection.start()
        while not replies:
            if not connection.received(lambda began, ended: replies.append(ended)):
                raise RuntimeError("Embed: the connection ended")
        return self._payloads.vector(bytes(connection.reply[_PREFIX_BYTES:]))

    def close(self) -> None:
        """End the connection."""
        self._connection.sock.close()


class Route(Caller):
    """A route over HTTP/1.1, by a blocking socket that stays open."""

    path = ""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        host, _, port = task.http.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _SILENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"POST {self.path} HTTP/1.1\r\nhost: {task.http}\r\ncontent-type: application/json\r\n"

    def post(self, body: Any) -> Any:
        """The decoded answer.

        Raises:
            RuntimeError: it is no success, or the connection ended.
        """
        content = orjson.dumps(body)
        self._socket.sendall(f"{self._head}content-length: {len(content)}\r\n\r\n".encode() + content)
        head, _, received = self._received(b"", b"\r\n\r\n").partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        missing = int(fields[b"content-length"]) - len(received)
        while missing > 0:
            part = self._receive()
            received, missing = received + part, missing - len(part)
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"{self.path}: {head[:100]!r} {received[:300]!r}")
        return orjson.loads(received)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _received(self, so_far: bytes, until: bytes) -> bytes:
        while until not in so_far:
            so_far += self._receive()
        return so_far

    def _receive(self) -> bytes:
        part = self._socket.recv(_RECEIVE_BYTES)
        if not part:
            raise RuntimeError(f"{self.path}: the connection ended")
        return part


class OpenAiRoute(Route):
    """OpenAI's route on the REST port, with numbers as text."""

    path = "/v1/embeddings"

    def query(self, text: str) -> Any:
        """One row."""
        return np.array(self.query_all(text)[0]["embedding"], np.float32)

    def query_all(self, texts: str | list[str]) -> list[Any]:
        """The rows of a call, as it answers them."""
        rows: list[Any] = self.post({"model": self._instance, "input": texts, "encoding_format": "float"})["data"]
        return rows


class OpenAiBulk:
    """A bulk job over OpenAI's route of any server: four callers, each with 32 texts in the call under way."""

    dtype = ""
    _CALLERS, _TEXTS = 4, 32  # of texts a call, what TEI takes by default

    def __init__(self, task: Task) -> None:
        self._routes = [OpenAiRoute(task) for _ in range(self._CALLERS)]

    def encode(self, texts: list[str]) -> Any:
        """Nothing of the vectors is kept."""
        batches = iter([texts[at : at + self._TEXTS] for at in range(0, len(texts), self._TEXTS)])
        with ThreadPoolExecutor(self._CALLERS) as pool:
            return np.zeros((sum(pool.map(partial(self._send, batches), self._routes)), 1), np.float32)

    @staticmethod
    def _send(batches: Iterator[list[str]], route: OpenAiRoute) -> int:
        return sum(len(route.query_all(batch)) for batch in batches)


class EmbedRoute(Route):
    """TEI's route on the instance's own port."""

    path = "/embed"

    def query(self, text: str) -> Any:
        """One row."""
        return np.array(self.post({"inputs": text})[0], np.float32)
