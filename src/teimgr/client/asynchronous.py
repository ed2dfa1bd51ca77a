"""The client for code with an event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from teimgr.client.calls import Calls
from teimgr.client.inference import Inference
from teimgr.client.lifecycle import Lifecycle
from teimgr.client.rest import Rest
from teimgr.client.scoring import Scoring
from teimgr.client.tables import Tables
from teimgr.client.tls import Endpoint, Tls

API = "http://127.0.0.1:9000"
GRPC = "http://127.0.0.1:9001"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class AsyncClient(Lifecycle, Inference, Scoring, Tables):
    """One daemon: `api` is its REST side, `grpc` its multiplexer; `https://` speaks TLS as `tls` says, and
    `api_key` goes with every call.

    Used as `async with`; nothing is sent before the first call. `timeout_s` bounds every call, stop and restart
    with their grace included. `max_message_bytes` bounds one gRPC message, either way.
    """

    def __init__(
        self,
        api: str = API,
        grpc: str = GRPC,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        tls = tls or Tls()
        self._rest = Rest(Endpoint.parse(api), tls, api_key)
        self._calls = Calls(Endpoint.parse(grpc), tls, max_message_bytes, api_key)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        await self._rest.open()
        try:
            await self._calls.open()
        except BaseException:
            await self._rest.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is under way and close both connections."""
        try:
            await self._calls.close()
        finally:
            await self._rest.close()
