"""A trial: a model is loaded in a throw-away worker, made to work for a second, and measured.

The worker is one as any other, made by the daemon's own launcher, and ended whatever happens. Should the daemon be
killed meanwhile, its successor ends what it does not know, and an orphan ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pynvml

from teimgr.errors import TeimgrError
from teimgr.launch.control_link import ControlLink, WorkerStatus
from teimgr.launch.launcher import Exit, Launcher, LaunchFailed, WorkerHandle
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.spec import ModelInfo, WorkerSpec
from teimgr.wire.frames import Flag, FrameType, Header, Method, split_timings

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; None where nobody says. `private_bytes` is what would be free again without the process."""

    peak_rss_bytes: int | None
    private_bytes: int | None
    device_bytes: int | None


def read_memory(pid: int, gpu_uuid: str | None, stats: Mapping[str, Any]) -> Memory:
    """The figures now. The worker's own peak on the device is taken where its `stats` have one, else the driver's."""
    status, rollup = _fields(pid, "status"), _fields(pid, "smaps_rollup")
    private = [rollup[key] for key in ("Private_Clean", "Private_Dirty") if key in rollup]
    device_bytes = stats.get("device_peak_bytes")
    if device_bytes is None and gpu_uuid is not None:
        device_bytes = driver_bytes(pid, gpu_uuid)
    return Memory(status.get("VmHWM"), sum(private) if private else None, device_bytes)


def driver_bytes(pid: int, gpu_uuid: str) -> int | None:
    """What the driver has given a process on a card; None where it does not tell, as inside some containers."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        used = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
        return used.get(pid)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _fields(pid: int, name: str) -> dict[str, int]:
    """The figures in kB of a file of /proc, as bytes; none where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if len(row) == 3 and row[2] == "kB"}


NAME = "_model-trial"
"""The worker's name: none that an instance may have."""

SPEED_S = 1.0
CALLS_AT_A_TIME = 32
_CALL_LIMIT_S = 60.0
_STATS_LIMIT_S = 5.0
_EXIT_NEWS_S = 2.0
_TEXTS = (
    "fog",
    "The quick brown fox jumps over the lazy dog.",
    "How long does a query wait while a bulk job runs? Not longer than one small batch.",
    "Rain fell on the harbour all night; by morning the boats lay in fog, their lamps still lit. " * 3,
)

ResultT = TypeVar("ResultT")


class TrialFailed(Exception):
    """The model did not pass; the text is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial found. `start_s` is from the launch to ready, `load_s` the part of it that read the model.

    Memory is the worker's: `peak_rss_bytes` and `private_bytes` on the host, `device_bytes` on its GPU. Speed is that
    of short and middling texts, `CALLS_AT_A_TIME` calls at a time, one text each.
    """

    device: str
    gpu_id: int | None
    dtype: str
    kind: str
    dimension: int
    max_input_length: int
    batching: str
    start_s: float
    load_s: float
    peak_rss_bytes: int | None
    private_bytes: int | None
    device_bytes: int | None
    texts_per_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what could not be measured is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


async def run_trial(launcher: Launcher, spec: WorkerSpec, gpu_id: int | None, limit_s: float) -> Trial:
    """Load what `spec` says, and see. When this returns or raises, the worker is gone.

    Raises:
        TrialFailed: the model does not load, does not work, or takes longer than `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s), _worker(launcher, spec) as (handle, began):
            return await _watched(handle, lambda watch: _examine(watch, handle, began, gpu_id))
    except TimeoutError:
        raise TrialFailed(f"Timeout after {limit_s:g}s waiting for model to load") from None
    except LaunchFailed as error:
        raise TrialFailed(f"Failed to start a worker: {error}") from error
    except TeimgrError as error:
        raise TrialFailed(error.message) from error


class TrialLink(ControlLink):
    """A control link that knows how many tokens the answers were for."""

    tokens = 0

    def frame_received(self, header: Header, payload: bytes) -> None:
        """As the base, after a look at the timings."""
        if header.type == FrameType.REPLY and header.flags & Flag.TIMINGS:
            self.tokens += split_timings(payload)[0].tokens
        super().frame_received(header, payload)


@asynccontextmanager
async def _worker(launcher: Launcher, spec: WorkerSpec) -> AsyncIterator[tuple[WorkerHandle, float]]:
    began = time.monotonic()
    handle = await launcher.launch(spec)
    try:
        yield handle, began
    finally:
        # Even if the caller is cancelled again: an unseen worker would hold its memory. It has nothing to finish.
        await asyncio.shield(handle.stop(0))


async def _watched(handle: WorkerHandle, work: Callable[[_Watch], Awaitable[ResultT]]) -> ResultT:
    """`work` on a link to the worker, given up when its process ends.

    Raises:
        TrialFailed: it ended; the text says how, which is more than a link that broke or was refused can say.
    """
    working, gone = asyncio.ensure_future(_on_link(handle, work)), asyncio.ensure_future(handle.wait())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait({gone}, timeout=_EXIT_NEWS_S)
        if gone.done() and not (working.done() and working.exception() is None):
            raise TrialFailed(_why(gone.result()))
        return await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})


async def _on_link(handle: WorkerHandle, work: Callable[[_Watch], Awaitable[ResultT]]) -> ResultT:
    watch = await _Watch.open(handle)
    try:
        return await work(watch)
    finally:
        watch.link.close()


class _Watch:
    """The link to the worker, and the news on it."""

    link: TrialLink

    def __init__(self) -> None:
        self.news: asyncio.Queue[WorkerStatus] = asyncio.Queue()

    @classmethod
    async def open(cls, handle: WorkerHandle) -> _Watch:
        watch = cls()
        watch.link = await TrialLink.open(handle.socket, watch.news.put_nowait, lambda: None)
        return watch

    async def ready(self) -> ModelInfo:
        """What the worker says of its model, once it is ready.

        Raises:
            TrialFailed: it says that it failed.
        """
        while True:
            status = await self.news.get()
            if status.state == "failed":
                raise TrialFailed(status.reason or "the worker failed")
            if status.state == "ready" and status.model is not None:
                return status.model


async def _examine(watch: _Watch, handle: WorkerHandle, began: float, gpu_id: int | None) -> Trial:
    info = await watch.ready()
    start_s = time.monotonic() - began
    texts_per_s, tokens_per_s = await _speed(watch.link, info.kind)
    memory = await _memory(watch.link, handle)
    return Trial(
        device=info.device,
        gpu_id=gpu_id,
        dtype=info.dtype,
        kind=info.kind,
        dimension=info.dimension,
        max_input_length=info.max_input_length,
        batching=info.batching,
        start_s=round(start_s, 3),
        load_s=round(info.load_s, 3),
        peak_rss_bytes=memory.peak_rss_bytes,
        private_bytes=memory.private_bytes,
        device_bytes=memory.device_bytes,
        texts_per_s=round(texts_per_s, 1),
        tokens_per_s=round(tokens_per_s, 1),
    )


async def _speed(link: TrialLink, kind: str) -> tuple[float, float]:
    """Texts and tokens per second, after one round that warms up.

    Raises:
        TrialFailed: the worker refused a text.
    """
    await _round(link, kind)
    began, texts, link.tokens = time.monotonic(), 0, 0
    while (elapsed_s := time.monotonic() - began) < SPEED_S:
        texts += await _round(link, kind)
    return texts / elapsed_s, link.tokens / elapsed_s


async def _round(link: TrialLink, kind: str) -> int:
    calls = [_request(kind, _TEXTS[number % len(_TEXTS)]) for number in range(CALLS_AT_A_TIME)]
    await asyncio.gather(*(_ask(link, method, payload) for method, payload in calls))
    return len(calls)


async def _ask(link: TrialLink, method: Method, payload: bytes) -> None:
    try:
        await link.call(method, payload, timeout_s=_CALL_LIMIT_S)
    except TeimgrError as error:
        raise TrialFailed(f"the model was loaded and does not work: {error.message}") from error


def _request(kind: str, text: str) -> tuple[Method, bytes]:
    """The call that a model of this kind is for, with one text."""
    match kind:
        case "sparse":
            return Method.EMBED_SPARSE, tei_pb2.EmbedSparseRequest(inputs=text, truncate=True).SerializeToString()
        case "multi-vector":
            return Method.EMBED_ALL, tei_pb2.EmbedAllRequest(inputs=text, truncate=True).SerializeToString()
        case "reranker":
            request = tei_pb2.RerankRequest(query=_TEXTS[0], texts=[text], truncate=True)
            return Method.RERANK, request.SerializeToString()
        case "classifier":
            return Method.PREDICT, tei_pb2.PredictRequest(inputs=text, truncate=True).SerializeToString()
        case _:
            return Method.EMBED, tei_pb2.EmbedRequest(inputs=text, truncate=True).SerializeToString()


async def _memory(link: ControlLink, handle: WorkerHandle) -> Memory:
    stats = orjson.loads(await link.call(Method.STATS, timeout_s=_STATS_LIMIT_S))
    return await asyncio.to_thread(read_memory, handle.pid, handle.spec.gpu, stats)


def _why(exit: Exit) -> str:
    if exit.report is not None:
        return exit.report.message
    said = f": {exit.log_tail}" if exit.log_tail else ""
    return f"the worker's process ended with status {exit.status}{said}"
