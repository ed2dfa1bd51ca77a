"""The runner of batches, on an engine thread: packs each, starts it on the device, and finishes it or passes it to the
finisher. A few queries are computed on the calling thread.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from teimgr.engine import gpu
from teimgr.engine.backbone import StaticTable
from teimgr.engine.batching.batch import Encoded, pack, pack_as_given
from teimgr.engine.batching.queue import BATCH_OVERHEAD_TOKENS, EntryQueue, QueueEntry, halves
from teimgr.engine.core_load import CoreLoad
from teimgr.engine.finisher import (
    Failures,
    Finisher,
    HostRows,
    StartedBatch,
    VectorOptions,
    failed_rows,
    keep_nothing,
    vector_options,
)
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import finish_on_device
from teimgr.engine.host_copies import HostCopies
from teimgr.engine.job import Lane, Output
from teimgr.engine.known_results import (
    OWN_TENANT,
    RECENT_BYTES,
    DistinctInputs,
    RecentBatch,
    RepeatSample,
    ResultCache,
    is_own,
    keys_of,
    known_and_rest,
    numbers_of,
)
from teimgr.engine.model import Model
from teimgr.engine.native_library import NO_MEMORY, native_library, serving
from teimgr.errors import DeadlineExceeded, InferenceFailed, OutOfDeviceMemory, TeimgrError, Unavailable
from teimgr.spec import CpuThreads

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_ASLEEP_S = 60.0
# Freed memory is returned to the system when the queue is idle, and under load at this interval: untrimmed heaps grow
# by some 2 % in half an hour of mixed batch sizes.
_RETURN_MEMORY_S = 30.0
# Limit on the results of one batch on the host: vectors of texts are far smaller, those of tokens could be larger. Four
# batches may exist at a time: two in flight, two with the finisher.
MAX_RESULT_BYTES = 128 << 20
_SHARE = 4  # limit on queries between two steps of a bulk batch, as a multiple of its computing time since the last
_TOKENS_OF_A_THREAD = 256
# A small batch is computed on the caller's thread, an event loop, if it is expected to take at most this long, like a
# short query of BERT with six small layers or a dozen of a static table, but not one of BERT-base.
_ON_CALLER_S = 0.004
_SMALL_TOKENS = 512  # batches up to this size determine the time per token
_LATEST = 0.125  # weight of the latest one in its mean
_DEFECT = "Backend error: the engine has a defect"


@dataclass(frozen=True, slots=True)
class _StartError:
    """Why a batch did not start. `traceback` is kept only for a batch of one text, or if the device `failed`
    permanently."""

    text: str
    out_of_memory: bool
    failed: str | None
    traceback: str


class Runner:
    """Serves `lanes` of the queue with one model.

    `serve_queries` computes a small batch on the calling thread. `run` is the body of the runner's own thread, until
    the queue is closed and empty, or the finisher has ended. They take turns in computing.

    A runner of all lanes has the device alone. With one runner per lane, that of bulk computes in the background: it
    gets the time that queries leave idle, and at least a fifth of the processor.

    Batches of up to `serial_tokens` are computed by one CPU thread, larger ones by `threads.own`, or by up to
    `threads.most` while the other workers of the host (`core_load`) leave cores idle.

    Equal inputs of one tenant that wait or run at the same time are computed once; `cache` keeps results for longer.
    `repeats` estimates how many inputs repeat.

    `on_defect` gets exceptions of queries that ran on a caller's thread or within a bulk batch. Only the queries fail,
    not the caller or the batch.
    """

    def __init__(
        self,
        model: Model,
        queue: EntryQueue,
        finisher: Finisher,
        threads: CpuThreads,
        serial_tokens: int = 0,
        core_load: CoreLoad | None = None,
        lanes: tuple[Lane, ...] = tuple(Lane),
        on_defect: Callable[[BaseException], None] = lambda error: None,
        cache: ResultCache | None = None,
    ) -> None:
        self.repeats = RepeatSample()
        self._recent: RecentBatch | None = None
        self._on_defect = on_defect
        self._lanes = lanes
        self._has_own_lane = lanes == (Lane.INTERACTIVE,)
        # Not on a GPU, where the next launch of a graph overwrites its results.
        self._leaves_bulk = lanes == tuple(Lane) and not gpu.is_gpu(model.backbone.device)
        self._left_until = 0.0
        self._gives_way = (library := native_library()) is not None and library.gives_way
        is_table = self._is_table = isinstance(model.backbone, StaticTable)
        self._cache = None if is_table else cache
        self._is_light = self._has_own_lane or (is_table and not gpu.is_gpu(model.backbone.device))
        self._model = model
        self._queue = queue
        self._finisher = finisher
        self._threads = threads
        self._serial_tokens = serial_tokens
        self._core_load = core_load
        self._memory_returned = True
        self._returned_at = time.monotonic()
        self._in_flight = finisher.new_limit()
        self._pack = pack_as_given if is_table else pack
        self._computing = threading.Lock()  # held by the thread that computes: the runner's, or a caller
        self._token_s = math.inf  # mean of small batches from start to delivery, with `BATCH_OVERHEAD_TOKENS` in each

    def use_threads(self, threads: CpuThreads) -> None:
        """Use these CPU threads from the next batch on."""
        self._threads = threads

    def serve_queries(self, entries: list[QueueEntry]) -> bool:
        """Compute and deliver a small batch on the calling thread.

        Returns False, with nothing done, if the batch would take longer than a few milliseconds or the model is not a
        light one: a GPU and OpenMP's threads belong to the runner's own thread.
        """
        texts, tokens = sum([entry.texts for entry in entries]), sum([entry.tokens for entry in entries])
        is_quick = self._token_s * (tokens + BATCH_OVERHEAD_TOKENS) <= _ON_CALLER_S
        if not (self._is_light and is_quick) or self._in_flight.batches or not self._queue.fits_batch(texts, tokens):
            return False
        now, token_s = time.monotonic(), self._queue.token_s()
        if any(entry.is_late(now, token_s) for entry in entries) or not self._finisher.is_free:
            return False
        if not self._computing.acquire(blocking=False):
            return False
        try:
            self._execute_queries(entries)
        finally:
            self._computing.release()
        self._queue.queries_were_served()
        return True

    def is_idle(self) -> bool:
        """True if nothing is computed and no query is in the queue."""
        return not self._in_flight.tokens and not self._queue.texts(Lane.INTERACTIVE)

    def run(self) -> None:
        if self._lanes == (Lane.BULK,) and (library := native_library()) is not None:
            library.to_background()
        while self._in_flight.wait_for_room():
            # An idle thread wakes up to return memory; afterwards only for work.
            wait_s = _ASLEEP_S if self._memory_returned else _IDLE_WAIT_S
            if (draft := self._queue.next_batch(wait_s, self._lanes)) is None:
                return
            if draft.expired:
                self._fail(draft.expired, DeadlineExceeded())
            if draft.entries:
                is_left = self._leaves_bulk and draft.entries[0].job.lane is Lane.BULK
                with self._computing, serving(self._serve_between_steps if is_left else None):
                    self._execute([draft.entries])
                self._memory_returned = False
            if not draft.entries:
                self._recent = None
            is_due = not draft.entries or time.monotonic() > self._returned_at + _RETURN_MEMORY_S
            if is_due and not self._memory_returned:
                return_freed_memory()
                self._memory_returned, self._returned_at = True, time.monotonic()

    def _serve_between_steps(self) -> None:
        """Compute waiting queries within a bulk batch, on the thread of both lanes, for at most four fifths of the
        time."""
        began = time.monotonic()
        if began < self._left_until or not self._queue.texts(Lane.INTERACTIVE) or not self._in_flight.wait_for_room():
            return
        if (draft := self._queue.next_batch(0.0, (Lane.INTERACTIVE,))) is None:
            return
        if draft.expired:
            self._fail(draft.expired, DeadlineExceeded())
        if draft.entries:
            threads = torch.get_num_threads()
            self._execute_queries(draft.entries)
            torch.set_num_threads(threads)
        now = time.monotonic()
        self._left_until = now + (now - began) / _SHARE

    def _execute_queries(self, entries: list[QueueEntry]) -> None:
        """Run a batch whose exceptions must not reach the caller: an event loop, or the forward of a bulk batch, which
        would then be repeated in halves."""
        left = [entries]
        try:
            self._execute(left)
        except BaseException as error:
            self._on_defect(error)
            self._fail([entry for batch in left for entry in batch], InferenceFailed(_DEFECT))

    def _fail(self, entries: Sequence[QueueEntry], error: TeimgrError) -> None:
        self._finisher.put(Failures(failed_rows(entries, error)))

    def _execute(self, left: list[list[QueueEntry]]) -> None:
        """Run the batches of `left`, the last one first.

        A batch is run in halves if its results would be too large or it fails, so that only bad texts fail. `left`
        keeps the batches that the finisher does not have yet, so a defect fails no text twice.
        """
        while left:
            self._execute_last(left)
            if left and not self._in_flight.wait_for_room():
                return

    def _execute_last(self, left: list[list[QueueEntry]]) -> None:
        """Run the last batch, or replace it by its halves.

        Once the device has failed for good, nothing runs: texts that did not cause it may be tried elsewhere.
        """
        entries = left[-1]
        if self._finisher.fault is not None:
            self._fail(left.pop(), Unavailable(self._finisher.fault))
            return
        texts = sum([entry.texts for entry in entries])
        if texts > 1 and self._result_bytes(entries) > MAX_RESULT_BYTES:
            left[-1:] = reversed(halves(entries))
            return
        recent, self._recent = self._recent, None
        distinct = None
        if recent is not None or self._cache is not None:
            distinct = self._distinct_inputs(entries, True)
            has_twins = recent is not None and not distinct.known.keys().isdisjoint(recent.distinct.known)
            if has_twins or self._cache is not None:
                known, rest = known_and_rest(entries, recent, self._cache)
                if known is not None:
                    left[-1] = rest
                    self._finisher.put_known(known)
                    if not rest:
                        left.pop()
                        return
                    entries, distinct = rest, None
                    texts = sum([entry.texts for entry in entries])
        fault = self._start(left, distinct)
        if fault is None:
            return
        if fault.failed is not None:
            log.error("the device failed in a batch of %d texts: %s", texts, fault.traceback)
            self._finisher.device_failed(fault.failed)
            self._fail(left.pop(), InferenceFailed(f"Backend error: {fault.text}"))
            return
        if fault.out_of_memory:
            gpu.free_cached_memory(self._model.backbone.device)
            if texts > 1:
                self._queue.token_cap.did_not_fit(sum(entry.tokens for entry in entries))
        if texts > 1:
            log.warning("a batch of %d texts failed and is run in halves: %s", texts, fault.text)
            left[-1:] = reversed(halves(entries))
        elif fault.out_of_memory:
            self._fail(left.pop(), OutOfDeviceMemory(f"A text of {entries[0].length} tokens does not fit the device"))
        else:
            log.error("the forward of a text failed: %s", fault.traceback)
            self._fail(left.pop(), InferenceFailed(f"Backend error: {fault.text}"))

    def _result_bytes(self, entries: Sequence[QueueEntry]) -> int:
        """Return the bytes of float32 results, for every output that a text requests.

        Sparse results are too few to count on the host, but a GPU also keeps the values that they are made from.
        """
        widths, wanted = self._model.widths, _wanted(entries)
        tokens, texts = sum([entry.tokens for entry in entries]), sum([entry.texts for entry in entries])
        per_token = sum(widths[output] for output in wanted & _PER_TOKEN)
        per_text = sum(widths[output] for output in wanted & _PER_TEXT)
        kept = 0
        if gpu.is_gpu(self._model.backbone.device):
            kept_by = self._model.device_bytes_per_text
            kept = texts * sum(kept_by[output] for output in wanted)
        return 4 * (tokens * per_token + texts * per_text) + kept

    def _start(self, left: list[list[QueueEntry]], distinct: DistinctInputs | None = None) -> _StartError | None:
        """Start the last batch in `left` and pass it on.

        Returns an error as text: the exception itself would keep the tensors of the forward alive through its frames.
        """
        entries = left[-1]
        distinct = distinct or self._distinct_inputs(entries, self._cache is not None)
        inputs, inputs_of, _ = distinct
        tokens = sum([each.ids.size for each in inputs])
        threads = 1 if tokens <= self._serial_tokens else self._threads_now(tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)  # here: OpenMP keeps the number per thread
        began_ns = time.monotonic_ns()
        in_flight = self._in_flight.enter(tokens, began_ns)
        try:
            batch = self._pack(inputs)
            with self._noted(threads):
                rows = self._model.run(batch, _wanted(entries))
            finished = self._common_options(entries) if self._cache is None else None  # a cache keeps uncut results
            if finished is not None:
                rows[Output.DENSE] = Rows(finish_on_device(rows[Output.DENSE].values, *finished))
            places_of = np.zeros(1, np.intp) if batch.texts == 1 else np.argsort(batch.order)
            places = inputs_of if batch.texts == 1 else places_of[inputs_of]
            copies = HostCopies(rows)
            keep = keep_nothing if self._cache is None else partial(self._keep, distinct, places_of)
            started = StartedBatch(entries, places, copies.wait, in_flight, finished, copies.free, keep)
        except Exception as error:  # of any type, such as an overflow: only the texts at fault fail
            failed = gpu.fault_of(error, self._model.backbone.device)
            in_flight.leave()
            trace = "".join(traceback.format_exception(error)) if failed or len(inputs_of) == 1 else ""
            return _StartError(str(error), _is_out_of_memory(error), failed, trace)
        if not self._is_table and entries[0].job.tenant != OWN_TENANT:
            self.repeats.count(distinct.known or [(entries[0].encoded.ids.tobytes(),)])
        if self._may_have_twins() and self._result_bytes(entries) <= RECENT_BYTES:
            distinct = distinct if distinct.known else self._distinct_inputs(entries, True)
            outputs = frozenset(rows)
            self._recent = RecentBatch(distinct, places_of, copies.wait, outputs, time.monotonic_ns())
        left.pop()
        is_small = tokens <= _SMALL_TOKENS
        finishes = self._has_own_lane or (is_small and self._is_light)
        if self._has_queries() or not (finishes and self._finisher.finish_here(started)):
            self._finisher.put(started)
        elif is_small:
            took_s = (time.monotonic_ns() - began_ns) / 1e9 / (tokens + BATCH_OVERHEAD_TOKENS)
            self._token_s = took_s if math.isinf(self._token_s) else self._token_s + _LATEST * (took_s - self._token_s)
        return None

    def _may_have_twins(self) -> bool:
        """True if inputs wait that came while the last batch ran: an equal one need not be computed.

        On a GPU the next batch begins before the results of this one are there.
        """
        if self._is_table or gpu.is_gpu(self._model.backbone.device):
            return False
        return any(self._queue.texts(lane) or self._queue.coming_tokens(lane) for lane in self._lanes)

    def _keep(self, distinct: DistinctInputs, places_of: NDArray[np.intp], rows: Mapping[Output, HostRows]) -> None:
        """Keep the results of a batch in the cache (finisher thread)."""
        assert self._cache is not None
        for key, at in distinct.known.items():
            if not is_own(key):
                place = int(places_of[at])
                self._cache.put(key, {output: numbers_of(of, place) for output, of in rows.items()})

    def _has_queries(self) -> bool:
        return bool(self._queue.texts(Lane.INTERACTIVE) or self._queue.coming_tokens(Lane.INTERACTIVE))

    def _common_options(self, entries: Sequence[QueueEntry]) -> VectorOptions | None:
        """Return the options that a GPU can apply to the vectors of a batch, if all of its jobs have the same."""
        if not gpu.is_gpu(self._model.backbone.device):
            return None
        wanted = {vector_options(job) for job in {e.job for e in entries} if Output.DENSE in job.options.outputs}
        return wanted.pop() if len(wanted) == 1 else None

    def _threads_now(self, tokens: int) -> int:
        own, most = self._threads
        if self._core_load is not None:
            own = self._core_load.threads(own, most)
        is_beside_bulk = self._has_own_lane and self._finisher.running_tokens > self._in_flight.tokens
        # Threads of a step wait for each other, so they would wait for a bulk batch that keeps the cores.
        return 1 if is_beside_bulk and tokens < _TOKENS_OF_A_THREAD * own and not self._gives_way else own

    def _noted(self, threads: int) -> AbstractContextManager[None]:
        return nullcontext() if self._core_load is None else self._core_load.computing(threads)

    def _distinct_inputs(self, entries: Sequence[QueueEntry], needs_keys: bool = False) -> DistinctInputs:
        """Find the distinct inputs of a batch, which are computed once. Inputs of different tenants count as different,
        so that response times do not reveal what others ask.

        An embedding table skips this: it would take longer than computing the vectors.
        """
        if self._is_table:
            texts = sum([entry.texts for entry in entries])
            return DistinctInputs([entry.encoded for entry in entries], np.arange(texts), {})
        if len(entries) == 1 and entries[0].texts == 1:
            known = dict.fromkeys(keys_of(entries[0].encoded, entries[0].job.tenant), 0) if needs_keys else {}
            return DistinctInputs([entries[0].encoded], np.zeros(1, np.intp), known)
        known = {}
        inputs: list[Encoded] = []
        inputs_of: list[int] = []
        for entry in entries:
            new = []
            for i, key in enumerate(keys_of(entry.encoded, entry.job.tenant)):
                following = len(known)
                inputs_of.append(known.setdefault(key, following))
                if len(known) > following:
                    new.append(i)
            if len(new) == entry.texts:
                inputs.append(entry.encoded)
            elif new:
                inputs.append(entry.encoded.part(new))
        return DistinctInputs(inputs, np.array(inputs_of), known)


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc would keep what the largest batch ever needed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


_PER_TOKEN = frozenset({Output.TOKENS, Output.MULTI_VECTOR})
_PER_TEXT = frozenset({Output.DENSE, Output.SCORES})


def _wanted(entries: Sequence[QueueEntry]) -> frozenset[Output]:
    return frozenset().union(*(job.options.outputs for job in {entry.job for entry in entries}))


def _is_out_of_memory(error: Exception) -> bool:
    return gpu.is_out_of_memory(error) or NO_MEMORY in str(error)
