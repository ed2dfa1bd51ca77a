"""Load of a fault run: callers on every surface, each of whose replies is compared with the reference."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from teimgr.client import AsyncClient
from teimgr.errors import TeimgrError
from tests.faults.world import CALL_LIMIT_S, World

# After its deadline, a call without any outcome is silence.
_SILENCE_S = 10.0
# Less than half of two cores: beyond that the time of a recovery is that of the queue for a processor.
_PAUSE_S = (0.05, 0.5)

SURFACES = ("grpc", "stream", "arrow", "port", "openai")
CLUSTER_SURFACES = ("grpc", "stream", "arrow", "tei", "openai")
"""Those of the head: the port of an instance is on the hosts of its workers."""

Ask = Callable[[str, Sequence[str]], Awaitable[Any]]


class Refusal(Exception):
    """A reply of an HTTP surface that is an error of its dialect: the status."""


class Callers:
    """One caller for each surface and instance.

    `replies` counts right replies by instance and surface, `failures` the other outcomes; `last_refusals` has texts.
    `longest_gap_s` is, by instance, the longest time without a right reply on any surface since `begin_gaps`.
    """

    def __init__(self, world: World, surfaces: Sequence[str] = SURFACES) -> None:
        self.replies: Counter[tuple[str, str]] = Counter()
        self.texts = 0
        self.failures: Counter[tuple[str, str, str]] = Counter()
        self.last_refusals: dict[tuple[str, str], str] = {}
        self.longest_gap_s: dict[str, float] = {}
        self._answered_at: dict[str, float] = {}
        self._surfaces = surfaces
        self._world = world
        self._stopping = asyncio.Event()
        self._awaited: defaultdict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self._answered = asyncio.Event()

    def failures_of(self, name: str) -> Counter[tuple[str, str]]:
        """Failed calls of one instance by surface and kind."""
        return Counter({(surface, kind): n for (other, surface, kind), n in self.failures.items() if other == name})

    def begin_gaps(self) -> None:
        now = time.monotonic()
        self._answered_at = dict.fromkeys(self._answered_at, now)
        self.longest_gap_s = dict.fromkeys(self._answered_at, 0.0)

    def end_gaps(self) -> None:
        """Count the gaps that no reply has ended."""
        for name in self._answered_at:
            self._note_answer(name)

    def _note_answer(self, name: str) -> None:
        now = time.monotonic()
        gap_s = now - self._answered_at.get(name, now)
        self.longest_gap_s[name] = max(self.longest_gap_s.get(name, 0.0), gap_s)
        self._answered_at[name] = now

    async def all_served(self, limit_s: float) -> None:
        """Return when every caller has had a right reply since; note a breach for those that had none in time."""
        before = self.replies.copy()
        for caller in before:
            self._awaited[caller].set()
        try:
            async with asyncio.timeout(limit_s):
                while any(self.replies[caller] == before[caller] for caller in before):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            unserved = [caller for caller in before if self.replies[caller] == before[caller]]
            self._world.breaches.append(f"no right reply within {limit_s:g} s: {unserved}")

    @asynccontextmanager
    async def calling(self, names: Sequence[str]) -> AsyncIterator[None]:
        """Call while the body runs."""
        async with (
            self._world.client() as client,
            self._world.http() as http,
        ):
            every = surfaces_of(self._world, client, http)
            surfaces = {name: every[name] for name in self._surfaces}
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    for surface, (ask, most) in surfaces.items():
                        chance = random.Random(f"{name} {surface}")
                        tasks.create_task(self._call_on(name, surface, ask, most, chance))
                try:
                    yield
                finally:
                    self._stopping.set()

    async def _call_on(self, name: str, surface: str, ask: Ask, most: int, chance: random.Random) -> None:
        world = self._world
        silence_s = CALL_LIMIT_S * world.patience + _SILENCE_S
        while not self._stopping.is_set():
            rows = chance.sample(range(len(world.texts)), chance.randint(1, most))
            allowed = set(world.allowed.get(name, ()))
            began = time.monotonic()
            try:
                async with asyncio.timeout(silence_s):
                    vectors = await ask(name, [world.texts[row] for row in rows])
            except TimeoutError as error:
                if time.monotonic() - began >= silence_s - 0.1:
                    world.breaches.append(f"{name}, {surface}: silence for {silence_s:g} s")
                self.failures[name, surface, type(error).__name__] += 1
            except TeimgrError as error:
                self.failures[name, surface, error.code.name] += 1
                self.last_refusals[name, surface] = f"{error}; again after {getattr(error, 'retry_after_s', None)} s"
                if error.code.name in ("INTERNAL_ERROR", "INFERENCE_FAILED"):
                    world.breaches.append(f"{name}, {surface}: {error!r}")
            except Refusal as error:
                self.failures[name, surface, str(error)] += 1
            except (aiohttp.ClientError, OSError) as error:
                self.failures[name, surface, type(error).__name__] += 1
            else:
                allowed |= world.allowed.get(name, set())
                if surface == "stream":  # each message is a request of its own: an update may come between two
                    for row, vector in zip(rows, vectors, strict=True):
                        world.check_vectors(f"{name}, {surface}", [row], [vector], allowed)
                else:
                    world.check_vectors(f"{name}, {surface}", rows, vectors, allowed)
                self.replies[name, surface] += 1
                self._note_answer(name)
                self._awaited[name, surface].clear()
                self._answered.set()
                self.texts += len(rows)
            with suppress(TimeoutError):  # a short pause where a reply of this caller is waited for
                async with asyncio.timeout(chance.uniform(*_PAUSE_S)):
                    await asyncio.sleep(_PAUSE_S[0])
                    await self._awaited[name, surface].wait()


def surfaces_of(world: World, client: AsyncClient, http: aiohttp.ClientSession) -> dict[str, tuple[Ask, int]]:
    """Ways to have texts embedded, with the most texts of one call."""

    async def over_grpc(name: str, texts: Sequence[str]) -> Any:
        return await client.embed(texts[0], instance=name)

    async def over_stream(name: str, texts: Sequence[str]) -> Any:
        return [vector async for vector in client.embed_stream(list(texts), instance=name)]

    async def over_arrow(name: str, texts: Sequence[str]) -> Any:
        return (await client.embed_arrow(list(texts), instance=name, normalize=True)).vectors

    async def over_port(name: str, texts: Sequence[str]) -> Any:
        return await _post(http, f"http://127.0.0.1:{world.ports[name]}/embed", {"inputs": list(texts)})

    async def over_tei(name: str, texts: Sequence[str]) -> Any:
        return await _post(http, f"{world.daemon.api}/instances/{name}/embed", {"inputs": list(texts)})

    async def over_openai(name: str, texts: Sequence[str]) -> Any:
        body = await _post(http, f"{world.daemon.api}/v1/embeddings", {"input": list(texts), "model": name})
        return [each["embedding"] for each in body["data"]]

    return {
        "grpc": (over_grpc, 1),
        "stream": (over_stream, 8),
        "arrow": (over_arrow, 24),
        "port": (over_port, 8),
        "tei": (over_tei, 8),
        "openai": (over_openai, 8),
    }


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with http.post(url, json=body) as reply:
        content = await reply.json()
        if reply.status != 200:
            if not isinstance(content, dict) or not content:
                raise AssertionError(f"{url}: {reply.status} without a typed error: {content!r}")
            raise Refusal(f"HTTP {reply.status}")
        return content
