"""A client of an instance port that keeps everything an answer consists of."""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDictProxy
from tests.conformance.case import COST_HEADERS as COST_HEADERS
from tests.support.worker_process import LIMIT_S, WorkerProcess


class Told(NamedTuple):
    """An answer."""

    status: int
    media_type: str
    headers: CIMultiDictProxy[str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> tuple[int, dict[str, Any]]:
        """The status and body of a failure in JSON."""
        assert self.media_type == "application/json", self
        return self.status, self.json

    @property
    def cost(self) -> dict[str, int]:
        """The cost headers of an answer, as numbers."""
        assert self.headers["x-compute-type"] == "gpu+optimized"
        return {name: int(self.headers[name]) for name in COST_HEADERS if name != "x-compute-type"}


class TeiClient:
    """Client of one worker's instance port."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.session = aiohttp.ClientSession(worker.url, timeout=aiohttp.ClientTimeout(LIMIT_S))

    async def ask(self, verb: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Told:
        """Bytes are sent as they are, everything else as JSON; without a body there is no content type."""
        data = None if body is None else io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        said = {} if body is None else {"content-type": "application/json"}
        async with self.session.request(verb, path, data=data, headers=said | (headers or {})) as reply:
            return Told(reply.status, reply.content_type, reply.headers, await reply.text())

    async def post(self, path: str, body: Any) -> Told:
        return await self.ask("POST", path, body)

    async def ok(self, path: str, body: Any) -> Any:
        """What a POST gives that succeeds."""
        told = await self.post(path, body)
        assert told.status == 200, told
        return told.json
