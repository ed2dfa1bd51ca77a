"""Trial of a model: load it in a temporary worker, send requests for a second, measure memory and speed.

The worker runs on the daemon's host, also in a cluster. If the daemon is killed during a trial, its successor ends the
unknown worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, assert_never

import orjson
import pynvml

from teimgr.control.launch.control_link import ControlLink, WorkerStatus
from teimgr.control.launch.launcher import LocalLauncher, WorkerHandle
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.ledger.system_memory import free_memory_bytes
from teimgr.control.registry.records import Verification
from teimgr.errors import DeadlineExceeded, TeimgrError
from teimgr.observability.memory import private_bytes, proc_sizes
from teimgr.spec import OWN_FORWARD, Kind, LoadedModel, WorkerSpec
from teimgr.wire.frames import Flag, FrameType, Header, HttpRequest, Method, Received, request_head, split_timings
from teimgr.wire.pb.tei.v1 import tei_pb2

SPEED_S = 1.0
CALLS_AT_A_TIME = 32
_CALL_LIMIT_S = 60.0
_STATS_LIMIT_S = 5.0
COMPARE_LIMIT_S = 120.0
"""Limit of the comparison with a library; a trial passes without it."""
_SPARED_S = 2.0  # reserved for the end of a trial
_EXIT_REPORT_S = 2.0
_TEXTS = (
    "fog",
    "The quick brown fox jumps over the lazy dog.",
    "How long does a query wait while a bulk job runs? Not longer than one small batch.",
    "Rain fell on the harbour all night; by morning the boats lay in fog, their lamps still lit. " * 3,
)


class TrialFailed(Exception):
    """The model did not pass; the text is the reason."""


async def run_trial(launcher: LocalLauncher, spec: WorkerSpec, gpu_id: int | None, limit_s: float) -> Verification:
    """Start a worker with `spec`, and measure it. When this returns or raises, the worker is gone.

    Raises:
        TrialFailed: the model does not load, does not work, or takes longer than `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s), _worker(launcher, spec) as (handle, began):
            return await _until_exit(handle, _examine(handle, began, gpu_id, began + limit_s - _SPARED_S))
    except TimeoutError:
        raise TrialFailed(f"Timeout after {limit_s:g}s waiting for model to load") from None
    except LaunchFailed as error:
        raise TrialFailed(f"Failed to start a worker: {error}") from error
    except TeimgrError as error:
        raise TrialFailed(error.message) from error


class TrialLink(ControlLink):
    """A control link that counts the tokens of replies."""

    tokens = 0

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.REPLY and header.flags & Flag.TIMINGS:
            self.tokens += split_timings(payload)[0].tokens
        super().frame_received(header, payload)


@asynccontextmanager
async def _worker(launcher: LocalLauncher, spec: WorkerSpec) -> AsyncIterator[tuple[WorkerHandle, float]]:
    began = time.monotonic()
    handle = await launcher.launch(spec)
    try:
        yield handle, began
    finally:
        # Shielded from a second cancellation: the worker would keep its memory. It has no calls to finish.
        await asyncio.shield(handle.stop(0))


async def _until_exit(handle: WorkerHandle, examination: Coroutine[Any, Any, Verification]) -> Verification:
    """The result of `examination`, which is cancelled when the worker's process ends.

    Raises:
        TrialFailed: it ended; the exit report has more detail than the error of a broken link.
    """
    working, gone = asyncio.ensure_future(examination), asyncio.ensure_future(handle.wait())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait({gone}, timeout=_EXIT_REPORT_S)
        if gone.done() and not (working.done() and working.exception() is None):
            exit = gone.result()
            tail = f": {exit.log_tail}" if exit.log_tail else ""
            raise TrialFailed(
                exit.report.message if exit.report else f"the worker's process ended with status {exit.status}{tail}"
            )
        return await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})


async def _examine(handle: WorkerHandle, began: float, gpu_id: int | None, deadline: float) -> Verification:
    statuses: asyncio.Queue[WorkerStatus] = asyncio.Queue()
    link = await TrialLink.open(handle.socket, statuses.put_nowait, lambda: None)
    try:
        info = None
        while info is None:
            status = await statuses.get()
            if status.state == "failed":
                raise TrialFailed(status.reason or "the worker failed")
            info = status.model if status.state == "ready" else None
        start_s = time.monotonic() - began
        texts_per_s, tokens_per_s = await _speed(link, _kind_of(info))
        stats = orjson.loads(await link.call(Method.STATS, timeout_s=_STATS_LIMIT_S))
        resident = await asyncio.to_thread(proc_sizes, handle.pid, "status")
        rollup = await asyncio.to_thread(proc_sizes, handle.pid, "smaps_rollup")
        device_bytes = stats.get("device_peak_bytes")
        if device_bytes is None and handle.spec.gpu is not None:
            device_bytes = await asyncio.to_thread(driver_bytes, handle.pid, handle.spec.gpu)
        compared = await _compared(link, info, deadline)  # last, since it takes memory
    finally:
        link.close()
    return Verification(
        device=info.device,
        gpu_id=gpu_id,
        dtype=info.dtype,
        kind=info.kind,
        dimension=info.dimension,
        max_input_length=info.max_input_length,
        batching=info.batching,
        start_s=round(start_s, 3),
        load_s=round(info.load_s, 3),
        peak_rss_bytes=resident.get("VmHWM"),
        private_bytes=private_bytes(rollup),
        device_bytes=device_bytes,
        texts_per_s=round(texts_per_s, 1),
        tokens_per_s=round(tokens_per_s, 1),
        warnings=list(info.warnings) or None,
        code=list(info.code) or None,
        **compared,
    )


async def _compared(link: TrialLink, info: LoadedModel, deadline: float) -> dict[str, Any]:
    """What the model was compared with, by the names of `Verification`.

    Raises:
        TrialFailed: its results differ from the library's.
    """
    limit_s = min(COMPARE_LIMIT_S, deadline - time.monotonic())
    room = await asyncio.to_thread(free_memory_bytes)
    try:
        if limit_s <= 0:
            raise DeadlineExceeded("the trial's time limit is reached")
        answer = await link.call(Method.COMPARE, orjson.dumps({"room_bytes": room}), timeout_s=limit_s)
    except TeimgrError as error:
        why = "the library took too long" if isinstance(error, DeadlineExceeded) else error.message
        return {"compared_with": OWN_FORWARD, "min_cosine": info.min_cosine, "not_compared": why}
    found = orjson.loads(answer)
    if not found.pop("agrees"):
        raise TrialFailed(f"its results differ from {found['compared_with']}: {_distance(found)}")
    return {name: value for name, value in found.items() if value is not None}


def _distance(found: dict[str, Any]) -> str:
    cosine, difference = found.get("min_cosine"), found.get("score_difference")
    how_far = f"lowest cosine {cosine:.7f}" if cosine is not None else f"scores off by up to {difference:.1e}"
    return f"{how_far} on {found['inputs']} known texts of up to {found['longest_tokens']} tokens"


def driver_bytes(pid: int, gpu_uuid: str) -> int | None:
    """GPU memory that the driver reports for a process; None if it cannot, as inside some containers."""
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


def _kind_of(info: LoadedModel) -> Kind:
    try:
        return Kind(info.kind)
    except ValueError:
        raise TrialFailed(f"trials do not support models of the kind {info.kind!r}") from None


async def _speed(link: TrialLink, kind: Kind) -> tuple[float, float]:
    """Texts and tokens per second, after one round of warm-up.

    Raises:
        TrialFailed: the worker rejected a text.
    """
    await _round(link, kind)
    began, texts, link.tokens = time.monotonic(), 0, 0
    while (elapsed_s := time.monotonic() - began) < SPEED_S:
        texts += await _round(link, kind)
    return texts / elapsed_s, link.tokens / elapsed_s


async def _round(link: TrialLink, kind: Kind) -> int:
    calls = [_request(kind, _TEXTS[number % len(_TEXTS)]) for number in range(CALLS_AT_A_TIME)]
    try:
        await asyncio.gather(*(link.call(method, payload, timeout_s=_CALL_LIMIT_S) for method, payload in calls))
    except TeimgrError as error:
        raise TrialFailed(f"the model was loaded but does not work: {error.message}") from error
    return len(calls)


def _request(kind: Kind, text: str) -> tuple[Method, bytes]:
    match kind:
        case Kind.SPARSE:
            return Method.EMBED_SPARSE, tei_pb2.EmbedSparseRequest(inputs=text, truncate=True).SerializeToString()
        case Kind.MULTI_VECTOR:
            return Method.EMBED_ALL, tei_pb2.EmbedAllRequest(inputs=text, truncate=True).SerializeToString()
        case Kind.RERANKER:
            request = tei_pb2.RerankRequest(query=_TEXTS[0], texts=[text], truncate=True)
            return Method.RERANK, request.SerializeToString()
        case Kind.CLASSIFIER:
            return Method.PREDICT, tei_pb2.PredictRequest(inputs=text, truncate=True).SerializeToString()
        case Kind.TOKEN_CLASSIFIER:
            body = orjson.dumps({"inputs": text, "truncate": True})
            head = request_head(HttpRequest("tei", "POST", "/predict", headers={"content-type": "application/json"}))
            return Method.HTTP, head + body
        case Kind.EMBEDDING:
            return Method.EMBED, tei_pb2.EmbedRequest(inputs=text, truncate=True).SerializeToString()
        case _:
            assert_never(kind)
