"""Callers of a daemon with one call under way, a text each: gRPC, /v1/embeddings and /embed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import orjson

from bench.encoders import Task
from teimgr.client import AsyncClient, Client

_SILENCE_S = 60.0
_RECEIVE_BYTES = 2**16


class Caller:
    """Of an instance, whose precision is the caller's `dtype`."""

    def __init__(self, task: Task) -> None:
        self._instance = task.instance
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
        return np.array(self.post({"model": self._instance, "input": text})["data"][0]["embedding"], np.float32)


class EmbedRoute(Route):
    """TEI's route on the instance's own port."""

    path = "/embed"

    def query(self, text: str) -> Any:
        """One row."""
        return np.array(self.post({"inputs": text})[0], np.float32)
