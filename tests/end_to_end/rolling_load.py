"""A steady rate of calls, over the gRPC multiplexer and the instance's own HTTP and gRPC port, and every failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
import grpc
from tests.support.daemon_process import DaemonProcess
from tests.support.polling import until

from teimgr.errors import TeimgrError
from teimgr.wire.pb.tei.v1 import tei_pb2

CALL_LIMIT_S = 30


@dataclass
class SteadyLoad:
    """`rate` calls per second on `instance`, a third over each way, until the block ends.

    `done` counts answers by way and dimension, `failures` what went wrong, by way;
    `in_flight` those without an outcome.
    """

    daemon: DaemonProcess
    instance: str
    port: int
    rate: float = 30.0
    host: str = "127.0.0.1"
    """Of the port."""
    done: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        self.progress(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def progress(self, answers: int, limit_s: float = 60.0) -> None:
        """Wait for so many more answers over each way."""
        before = Counter({way: self._answers(way) for way in ("mux", "http", "grpc")})
        until(
            lambda: all(self._answers(way) - before[way] >= answers for way in before),
            f"progress beyond {self.done} {self.failures}",
            limit_s,
        )

    def dimensions(self) -> dict[str, set[int]]:
        """The dimensions of the answers over each way."""
        return {way: {dimension for other, dimension in self.done if other == way} for way, _ in self.done}

    def _answers(self, way: str) -> int:
        return sum(count for (other, _), count in self.done.copy().items() if other == way)

    async def _run(self) -> None:
        async with (
            self.daemon.async_client(timeout_s=CALL_LIMIT_S) as client,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CALL_LIMIT_S)) as http,
            grpc.aio.insecure_channel(f"{self.host}:{self.port}") as channel,
        ):
            embed = channel.unary_unary(
                "/tei.v1.Embed/Embed",
                request_serializer=tei_pb2.EmbedRequest.SerializeToString,
                response_deserializer=tei_pb2.EmbedResponse.FromString,
            )

            async def over_mux(text: str) -> int:
                return int((await client.embed(text, instance=self.instance)).shape[1])

            async def over_http(text: str) -> int:
                async with http.post(f"http://{self.host}:{self.port}/embed", json={"inputs": text}) as reply:
                    reply.raise_for_status()
                    return len((await reply.json())[0])

            async def over_grpc(text: str) -> int:
                return len((await embed(tei_pb2.EmbedRequest(inputs=text), timeout=CALL_LIMIT_S)).embeddings)

            await self._pace({"mux": over_mux, "http": over_http, "grpc": over_grpc})

    async def _pace(self, ways: dict[str, Callable[[str], Awaitable[int]]]) -> None:
        """Calls begin on time whatever became of those before, so an answer that takes long hides no gap."""
        calls: set[asyncio.Task[None]] = set()
        number, began = 0, time.monotonic()
        while not self._stopping.is_set():
            way = list(ways)[number % len(ways)]
            calls.add(asyncio.create_task(self._call(way, ways[way], f"text {number} of the load")))
            calls = {call for call in calls if not call.done()}
            number += 1
            await asyncio.sleep(max(0.0, began + number / self.rate - time.monotonic()))
        if calls:
            await asyncio.wait(calls)

    async def _call(self, way: str, ask: Callable[[str], Awaitable[int]], text: str) -> None:
        self.in_flight += 1
        try:
            self.done[way, await ask(text)] += 1
        except (TeimgrError, aiohttp.ClientError, grpc.aio.AioRpcError, TimeoutError) as error:
            self.failures[way, f"{getattr(error, 'status', '')} {error!r}"[:300]] += 1
        finally:
            self.in_flight -= 1
