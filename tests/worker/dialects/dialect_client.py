"""A client of one daemon's HTTP port that keeps everything an answer consists of."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from tests.support.daemon_process import DaemonProcess

LIMIT_S = 60.0


class Told(NamedTuple):
    """An answer; header names are looked up whatever their case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def ok(self) -> Any:
        """The JSON of an answer that must be 200."""
        assert self.status == 200, (self.status, self.body[:500])
        return self.json


class Asking:
    """Client of the daemon, and of the instances' own ports to compare with."""

    def __init__(self, daemon: DaemonProcess, ports: Mapping[str, int], session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self._ports = ports
        self._session = session

    async def post(self, path: str, body: Any, **headers: str) -> Told:
        """Bytes are sent as they are, everything else as JSON; `_` in a header's name stands for `-`."""
        return await self._post(self.daemon.api + path, body, headers)

    async def get(self, path: str, port: int | None = None) -> Told:
        base = self.daemon.api if port is None else f"http://127.0.0.1:{port}"
        async with self._session.get(base + path) as reply:
            return Told(reply.status, reply.headers, await reply.read())

    async def own_port(self, instance: str, path: str, body: Any) -> Any:
        """What the instance's own port answers."""
        told = await self._post(f"http://127.0.0.1:{self._ports[instance]}{path}", body, {})
        return told.ok

    async def own_text(self, instance: str, path: str) -> str:
        """A page of the instance's own port."""
        async with self._session.get(f"http://127.0.0.1:{self._ports[instance]}{path}") as reply:
            return await reply.text()

    async def vectors(self, instance: str, texts: list[str], **options: Any) -> np.ndarray:
        """The vectors of `texts` by TEI's /embed of the instance."""
        return np.array(await self.own_port(instance, "/embed", {"inputs": texts} | options), np.float32)

    async def tokens(self, instance: str, texts: list[str]) -> int:
        """How many tokens the tokenizer makes of `texts`, special ones included."""
        return sum(map(len, await self.own_port(instance, "/tokenize", {"inputs": texts})))

    async def _post(self, url: str, body: Any, headers: Mapping[str, str]) -> Told:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        said = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(url, data=data, headers=said) as reply:
            return Told(reply.status, reply.headers, await reply.read())
