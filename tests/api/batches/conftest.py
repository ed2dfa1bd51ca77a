"""Batches over a real gateway and scripted workers, which answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.mux.conftest import start_worker
from tests.support.frame_worker import FrameWorker, Request, Script, pack_reply
from tests.support.mux_process import running
from tests.support.polling import eventually

from teimgr.api.batches import Batches
from teimgr.api.batches.batch_record import Batch
from teimgr.api.batches.files import BATCH, StoredFile
from teimgr.api.batches.service import BatchRequest
from teimgr.api.gateway.gateway import Gateway
from teimgr.config.settings import Settings
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.observability.metrics import DaemonMetrics
from teimgr.wire.error_bodies import OPENAI, failure
from teimgr.wire.frames import HttpReply, read_request
from teimgr.wire.routing.directory import Directory

__all__ = ["start_worker"]

EMBEDDINGS = "/v1/embeddings"
OWNER = "search"


def line(custom_id: str, text: str = "fog", model: str = "mini", **changed: Any) -> dict[str, Any]:
    """One request as a line of an input file."""
    body = {"model": model, "input": text}
    return {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": body} | changed


def lines(count: int, **how: Any) -> list[dict[str, Any]]:
    """Requests `r-0`, `r-1`, … whose inputs are `text 0`, `text 1`, …."""
    return [line(f"r-{number}", f"text {number}", **how) for number in range(count)]


def input_of(request: Request) -> Any:
    """The `input` of a request at a worker."""
    return orjson.loads(bytes(read_request(request.payload).body))["input"]


def answer(request: Request) -> None:
    """The input itself as the reply, or 400 for `refuse`."""
    text = input_of(request)
    status = 400 if text == "refuse" else 200
    request.reply(pack_reply(HttpReply(status, {"content-type": "application/json"}, orjson.dumps({"echo": text}))))


def refuse_with(request: Request, error: Any) -> None:
    """The error as the worker's own reply."""
    request.reply(pack_reply(failure(OPENAI, error)))


@dataclass
class Desk:
    """Batches with what is around them. `start` makes them anew on the same folder, as the next daemon does."""

    settings: Settings
    directory: Directory
    policy: PolicyInForce = field(default_factory=lambda: PolicyInForce(Policy()))
    metrics: DaemonMetrics = field(default_factory=DaemonMetrics)
    now: float = 1_000_000.0
    batches: Batches = None  # type: ignore[assignment]
    gateway: Gateway = None  # type: ignore[assignment]
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, *, at_work: bool = True, **limits: Any) -> Batches:
        self.settings = replace(self.settings, batches=replace(self.settings.batches, **limits))
        self.gateway = Gateway(self.settings, self.directory, DaemonMetrics())
        self._life.push_async_callback(self.gateway.close)
        self.batches = Batches(self.settings, self.gateway, self.policy, self.metrics, clock=lambda: self.now)
        self._life.callback(self.batches.close)
        await self.batches.load()
        if at_work:
            await self.work()
        return self.batches

    async def work(self) -> None:
        """Begin to work batches off."""
        await self._life.enter_async_context(self.batches.running())

    async def stop(self) -> None:
        await self._life.aclose()

    def worker(self, name: str, worker: FrameWorker) -> None:
        """Have an instance of this name with this worker."""
        self.directory.publish(running(name, worker))

    async def store(self, requests: Sequence[Any] | bytes, owner: str = OWNER, **how: Any) -> StoredFile:
        """A file of these lines."""
        data = requests if isinstance(requests, bytes) else b"".join(orjson.dumps(each) + b"\n" for each in requests)
        async with self.batches.files.upload(owner) as upload:
            await upload.write(data)
            return await upload.commit("in.jsonl", how.get("purpose", BATCH), how.get("lifetime_s"))

    async def begin(
        self, requests: Sequence[Any] | bytes, window: str = "24h", owner: str = OWNER, endpoint: str = EMBEDDINGS
    ) -> Batch:
        """A new batch of these lines."""
        file = await self.store(requests, owner)
        return await self.batches.create(owner, BatchRequest(file.id, endpoint, window))

    async def ended(self, batch: Batch) -> Batch:
        """The batch, which is found anew in whatever daemon there is now, once it has ended."""
        await eventually(lambda: self.batches.get(batch.owner, batch.id).status.is_final)
        return self.batches.get(batch.owner, batch.id)

    def results(self, id: str | None, owner: str = OWNER) -> list[dict[str, Any]]:
        """The lines of a file of results; none where there is none."""
        if id is None:
            return []
        file = self.batches.files.get(owner, id)
        data = self.batches.files.path(id).read_bytes()
        assert len(data) == file.size
        return [orjson.loads(each) for each in data.splitlines()]

    def all_results(self, batch: Batch) -> dict[str, dict[str, Any]]:
        """The results of both files by custom_id, of which each is there once."""
        found = self.results(batch.output_file_id) + self.results(batch.error_file_id)
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found)
        return by_id


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_file=tmp_path / "state.toml")


@pytest.fixture
async def desk(settings: Settings) -> AsyncIterator[Desk]:
    """Nothing is started yet."""
    desk = Desk(settings, Directory())
    yield desk
    await desk.stop()


@pytest.fixture
async def at_work(desk: Desk, start_worker: Callable[[Script], Any]) -> Desk:
    """Batches at work over an instance `mini` that answers."""
    desk.worker("mini", await start_worker(answer))
    await desk.start()
    return desk


async def next_of(worker: FrameWorker) -> Request:
    return await asyncio.wait_for(worker.requests.get(), 20)
