"""The finisher: writes results of a batch into the rows of its jobs, and delivers complete jobs.

It has its own thread. An engine thread with nothing else to do finishes its batch itself, which is faster than waking
another thread. Only one thread writes results at a time, so a job needs no lock.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from teimgr.engine import gpu
from teimgr.engine.batching.queue import BATCH_OVERHEAD_TOKENS, QueueEntry
from teimgr.engine.heads.pooling import finish
from teimgr.engine.heads.scoring import activate
from teimgr.engine.job import Job, Lane, Output, SparseRow, ZeroVector
from teimgr.engine.native_library import address, native_library
from teimgr.errors import DeadlineExceeded, InferenceFailed, OutOfDeviceMemory, TeimgrError

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]

VectorOptions = tuple[int | None, bool, bool]
"""The dimensions to which vectors are cut, whether they are scaled to length 1, and whether rounded before that."""

_BATCHES_IN_FLIGHT = 2  # a running batch and a ready one; more would only delay queries
_HANDOVER = 2  # capacity of the inbox in batches, without the one that is being finished
_CHECK_S = 0.2
_FORGET = 0.99  # decay of the slowest and the quickest batch with each later one
_KNOWN_FOR_S = 30.0  # how long after the last batch the time per token is valid
_UNIT: VectorOptions = (None, True, False)
_DENSE_ALONE = frozenset({Output.DENSE})
_POWERS = 32  # buckets by powers of two: no batch has 2^32 tokens


def vector_options(job: Job) -> VectorOptions:
    return job.cut_to, job.options.normalize, job.is_rounded


class InFlightLimit:
    """Bounds the batches of one engine thread between start and finish, and counts their tokens.

    The engine thread enters a batch, and leaves it if it did not start; otherwise the finisher leaves it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: list[BatchInFlight] = []  # in order of start
        self._abandoned = False
        self.tokens = 0
        self.departures = 0  # batches that have left: progress of the device

    @property
    def began_ns(self) -> int | None:
        """The monotonic moment when the oldest batch in flight began; None without one."""
        try:
            return self._batches[0].began_ns
        except IndexError:  # no batch is in flight, perhaps since this moment
            return None

    @property
    def batches(self) -> int:
        return len(self._batches)

    def wait_for_room(self) -> bool:
        """Wait until another batch may start; False if the finisher has ended, so that none may."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or len(self._batches) < _BATCHES_IN_FLIGHT)
            return not self._abandoned

    def enter(self, tokens: int, now_ns: int) -> BatchInFlight:
        batch = BatchInFlight(self, tokens, now_ns)
        with self._changed:
            self._batches.append(batch)
            self.tokens += tokens
        return batch

    def leave(self, batch: BatchInFlight) -> int:
        """Remove `batch`, and return the moment; its `began_ns` does not change afterwards."""
        with self._changed:
            now_ns = time.monotonic_ns()
            place = self._batches.index(batch)
            del self._batches[place]
            for around in self._batches[:place]:
                around.began_ns += now_ns - batch.began_ns
            for later in self._batches[place:]:
                later.began_ns = now_ns
            self.tokens -= batch.tokens
            self.departures += 1
            self._changed.notify()
            return now_ns

    def abandon(self) -> None:
        """Release all threads that wait for room, and let none wait again."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """A batch between start and finish, with the limit of its thread.

    `began_ns` is a monotonic time. A thread computes its batches one after the other, so `began_ns` is at least the end
    of the previous batch, and the time since then belongs to this batch. A batch that ends before an older one ran
    within it, like queries within bulk: the older one's `began_ns` moves forward by that time.
    """

    limit: InFlightLimit
    tokens: int
    began_ns: int

    def leave(self) -> int:
        """Leave the limit, and return the moment."""
        return self.limit.leave(self)


@dataclass(slots=True)  # `frozen` would cost half a microsecond per query
class HostRows:
    """`heads.Rows` on the host: `values` are float32, `offsets` and `indices` int64.

    `unit` are the vectors scaled to length 1, if the forward computed them. `are_finite` is set if the forward found no
    NaN or infinity.
    """

    values: Floats
    offsets: NDArray[np.int64] | None = None
    indices: NDArray[np.int64] | None = None
    unit: Floats | None = None
    are_finite: bool = False

    def finite(self) -> NDArray[np.bool_]:
        """Return which of the N texts have neither NaN nor infinity, bool [N]."""
        library, values = native_library(), self.values
        is_plain = values.ndim == 2 and values.flags.c_contiguous and values.dtype == np.float32
        if self.offsets is None and library is not None and is_plain:
            found = np.empty(len(values), np.bool_)
            library.finite_rows(address(values), len(values), values.shape[1], address(found))
            return found
        finite = np.isfinite(values)
        if self.offsets is None:
            return np.asarray(finite.all(axis=1))
        good = finite if finite.ndim == 1 else finite.all(axis=1)
        bad_before = np.concatenate([[0], np.cumsum(~good)])
        return np.asarray(bad_before[self.offsets[1:]] == bad_before[self.offsets[:-1]])

    def row(self, i: int) -> Floats:
        """Return a copy of the values of text i: a small job must not keep the whole batch in memory."""
        assert self.offsets is not None
        return np.array(self.values[self.offsets[i] : self.offsets[i + 1]])

    def sparse_row(self, i: int) -> SparseRow:
        assert self.offsets is not None
        assert self.indices is not None
        begin, stop = self.offsets[i], self.offsets[i + 1]
        values = self.values[begin:stop]
        kept = values != 0.0
        return SparseRow(self.indices[begin:stop][kept].astype(np.uint32), values[kept])


def nothing_to_free() -> None:
    """Do nothing: for results whose memory need not be given back."""


def keep_nothing(rows: Mapping[Output, HostRows]) -> None:
    """Do nothing: for results that no cache keeps."""


@dataclass(slots=True)  # `frozen` would cost half a microsecond per query
class StartedBatch:
    """A batch that was started on the device; it is in flight until `wait` has returned the results.

    `places` (int64 [texts]) maps the texts of all entries, in order, to those of the results; equal inputs share one.
    If `finished` is set, vectors are already cut and normalised by these options, which all jobs share. After the
    results have been written into jobs, `keep` gets them, and `free` releases their memory.
    """

    entries: Sequence[QueueEntry]
    places: NDArray[np.intp]
    wait: Callable[[], Mapping[Output, HostRows]]
    in_flight: BatchInFlight
    finished: VectorOptions | None = None
    free: Callable[[], None] = nothing_to_free
    keep: Callable[[Mapping[Output, HostRows]], None] = keep_nothing


def by_job(
    entries: Sequence[QueueEntry], places: NDArray[np.intp]
) -> Iterator[tuple[Job, list[QueueEntry], NDArray[np.intp]]]:
    """Return the jobs in order, each with its entries and their `places`."""
    if len(entries) == 1:
        yield entries[0].job, [entries[0]], places
        return
    places_of: dict[Job, list[tuple[QueueEntry, NDArray[np.intp]]]] = defaultdict(list)
    begin = 0
    for entry in entries:
        places_of[entry.job].append((entry, places[begin : begin + entry.texts]))
        begin += entry.texts
    for job, found in places_of.items():
        own = places if len(places_of) == 1 else _concatenated([each for _, each in found])
        yield job, [entry for entry, _ in found], own


def _concatenated(parts: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """Texts with known results: `places` maps the texts of all entries, in order, to those of `rows`."""

    entries: Sequence[QueueEntry]
    places: NDArray[np.intp]
    rows: Mapping[Output, HostRows]


@dataclass(frozen=True, slots=True)
class Failures:
    """Rows without a result, and jobs without rows."""

    rows: Sequence[tuple[Job, int, TeimgrError]]
    empty: Sequence[Job] = ()


Work = StartedBatch | KnownBatch | Failures


@dataclass(slots=True)
class LaneStats:
    """The counts of one lane. `queued_tokens` includes estimates for jobs that are not tokenized."""

    queued_texts: int = 0
    queued_tokens: int = 0
    batches: int = 0
    texts: int = 0
    tokens: int = 0
    expired_texts: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """The counts of an engine since its start, kept by the finisher; a snapshot also has the current state.

    `busy_s` is time with a batch on the device. `by_texts[k]` counts batches with more than 2^(k-1) and at most 2^k
    texts, `by_tokens` likewise; `lanes` are by `Lane.value`. `padding_saved_tokens` is what padding each batch to its
    longest text would have added. `known_texts` took the result of an equal input, running or cached, and are in no
    other count. `own_texts` and `own_tokens` are those of self-tests, counted otherwise only in `batches`. `full_texts`
    have as many tokens as the model takes; they include truncated ones. `repeated_texts` of the `sampled_texts`, one in
    eight, had been received before (`RepeatSample`). `device_bytes` is what the device's allocator holds for this
    process, `device_peak_bytes` the most it has given out; 0 and None on the CPU.
    """

    queued_texts: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    batches: int = 0
    texts: int = 0
    tokens: int = 0
    failed_texts: int = 0
    known_texts: int = 0
    own_texts: int = 0
    own_tokens: int = 0
    full_texts: int = 0
    sampled_texts: int = 0
    repeated_texts: int = 0
    busy_s: float = 0.0
    healthy: bool = True
    by_texts: list[int] = field(default_factory=lambda: [0] * _POWERS)
    by_tokens: list[int] = field(default_factory=lambda: [0] * _POWERS)
    lanes: dict[str, LaneStats] = field(default_factory=lambda: {lane.value: LaneStats() for lane in Lane})
    padding_saved_tokens: int = 0
    model_bytes: int = 0
    device_bytes: int = 0
    device_peak_bytes: int | None = None


class Finisher:
    """Takes batches and failures from other threads through a short queue; `run` is its own thread's body.

    `deliver` gets the jobs that a batch completed, `on_fault` the reason if results cannot be trusted any more.
    `on_bad_result` is called if the forward of a text failed or returned NaN; only that text fails. `activation` turns
    logits into scores; `max_length` is the most tokens of a text, 0 if unknown. Callers count a batch in an
    `InFlightLimit` of `new_limit` before they put it.
    """

    def __init__(
        self,
        deliver: Callable[[list[Job]], None],
        on_fault: Callable[[str], None],
        activation: str = "identity",
        on_bad_result: Callable[[], None] = lambda: None,
        max_length: int = 0,
    ) -> None:
        self._max_length = max_length or math.inf
        self._deliver = deliver
        self._on_fault = on_fault
        self._on_bad_result = on_bad_result
        self._activation = activation
        self._inbox: queue.Queue[Work | None] = queue.Queue(_HANDOVER)
        self._ended = threading.Event()
        self._finishing = threading.Lock()  # held by the thread that finishes
        self._counted_ns = 0  # monotonic time up to which `busy_s` is complete
        self._told_busy_s = 0.0
        self.limits: list[InFlightLimit] = []
        self.stats = EngineStats()
        self.fault: str | None = None  # a permanent fault of the device: all further batches fail
        self.finished_at = -math.inf  # end of the last batch, monotonic seconds
        # Time per token (with `BATCH_OVERHEAD_TOKENS`) of the slowest and the quickest recent batch.
        self.slowest_s = 0.0
        self.quickest_s = math.inf

    def new_limit(self) -> InFlightLimit:
        """Return the limit for one more thread that starts batches. Must not be called once `run` has begun."""
        self.limits.append(InFlightLimit())
        return self.limits[-1]

    @property
    def running_tokens(self) -> int:
        return sum([limit.tokens for limit in self.limits])

    def busy_s(self) -> float:
        """Seconds with a batch on the device, running ones included; never falls. Only one thread may read it."""
        done_s, counted_ns = self.stats.busy_s, self._counted_ns
        if running := [moment for limit in self.limits if (moment := limit.began_ns) is not None]:
            done_s += max(0, time.monotonic_ns() - max(counted_ns, min(running))) / 1e9
        self._told_busy_s = max(self._told_busy_s, done_s)
        return self._told_busy_s

    @property
    def is_free(self) -> bool:
        """True if no item is being finished or waits."""
        return self._inbox.empty() and not self._finishing.locked()

    def put(self, work: Work | None, timeout_s: float = math.inf) -> bool:
        """Hand over an item; waits while the finisher is `_HANDOVER` items behind. False if that timed out, or it has
        ended."""
        deadline = time.monotonic() + timeout_s
        while not self._ended.is_set() and (left_s := deadline - time.monotonic()) > 0:
            try:
                self._inbox.put(work, timeout=min(_CHECK_S, left_s))
            except queue.Full:
                continue
            return True
        return False

    def put_known(self, batch: KnownBatch) -> None:
        """Write results that need no computing: on this thread if the finisher is free, else on the finisher's."""
        if self._ended.is_set() or not self._finishing.acquire(blocking=False):
            self.put(batch)
            return
        try:
            self._finish(batch)
        finally:
            self._finishing.release()

    def finish_here(self, batch: StartedBatch) -> bool:
        """Finish a batch on the thread that started it.

        Returns False if another thread is finishing, or has yet to finish an earlier batch of this thread.
        """
        if self._ended.is_set() or batch.in_flight.limit.batches > 1 or not self._finishing.acquire(blocking=False):
            return False
        try:
            self._finish(batch)
        finally:
            self._finishing.release()
        return True

    def device_failed(self, reason: str) -> None:
        """Note that the device reported a lasting fault; may be called from any thread."""
        if self.fault is None:
            self.fault = reason
            self._on_fault(reason)

    def close(self, timeout_s: float) -> None:
        """Let `run` return after all that was handed over; abandon it if it is still behind after `timeout_s`."""
        if not self.put(None, timeout_s):
            self.abandon()

    def abandon(self) -> None:
        """Let `run` return after its current item, however long that takes, and release all waiting threads."""
        self._ended.set()
        for limit in self.limits:
            limit.abandon()

    def run(self) -> None:
        try:
            while self._finish_next() and not self._ended.is_set():
                pass
        finally:
            self.abandon()

    def _finish_next(self) -> bool:
        """Wait for the next item and finish it; False at the end.

        It is a separate call so that no variable keeps the previous job in memory while the thread waits.
        """
        if (work := self._inbox.get()) is None:
            return False
        with self._finishing:
            self._finish(work)
        return True

    def _finish(self, work: Work) -> None:
        if isinstance(work, StartedBatch):
            touched = self._write(work)
        elif isinstance(work, KnownBatch):
            now_ns = time.monotonic_ns()
            results = BatchResults(work.rows, self._activation)
            touched = self._write_jobs(results, by_job(work.entries, work.places), now_ns, 0)
            self.stats.known_texts += len(work.places)
        else:
            touched = [*self._fail(work.rows), *work.empty]
        complete = [job for job in touched if job.remaining == 0 and not job.cancelled]
        for job in complete:
            job.average_times()
        if complete:
            try:
                self._deliver(complete)
            except Exception:  # a defect of `deliver` must not stop other answers
                log.exception("delivering %d jobs failed", len(complete))

    def _write(self, batch: StartedBatch) -> list[Job]:
        """Write results into their jobs, and return each job once."""
        try:
            rows = batch.wait()
        except RuntimeError as error:  # CUDA reports faults of a launch at synchronisation
            if gpu.is_out_of_memory(error):  # of host memory, for results larger than the pinned buffers
                batch.free()
                return self._fail(failed_rows(batch.entries, OutOfDeviceMemory(f"no room for results: {error}")))
            self.device_failed(f"the device failed: {error}")
            failure = InferenceFailed(f"Backend error: {error}")
            return self._fail(failed_rows(batch.entries, failure))
        finally:
            running = [moment for limit in self.limits if (moment := limit.began_ns) is not None]
            now_ns = batch.in_flight.leave()
        began_ns = batch.in_flight.began_ns
        duration_ns = now_ns - began_ns
        self._count(batch, duration_ns, now_ns - max(self._counted_ns, min(running, default=now_ns)))
        self._counted_ns = now_ns
        results = BatchResults(rows, self._activation, batch.finished)
        jobs = self._write_jobs(results, by_job(batch.entries, batch.places), began_ns, duration_ns)
        batch.keep(rows)
        batch.free()  # the jobs have copies
        return jobs

    def _write_jobs(
        self,
        results: BatchResults,
        by_job: Iterator[tuple[Job, list[QueueEntry], NDArray[np.intp]]],
        began_ns: int,
        duration_ns: int,
    ) -> list[Job]:
        jobs: list[Job] = []
        for job, entries, places in by_job:
            jobs.append(job)
            if failed := _written(results, job, places, _concatenated([entry.rows for entry in entries])):
                self._on_bad_result()
                self.stats.failed_texts += len(failed)
                job.errors.update(failed)
            enqueued_ns = tokens = 0
            for entry in entries:
                enqueued_ns += entry.enqueued_ns * entry.texts
                tokens += entry.tokens
            job.count_served(len(places), tokens, enqueued_ns, began_ns, duration_ns)
        return jobs

    def _fail(self, rows: Sequence[tuple[Job, int, TeimgrError]]) -> list[Job]:
        for job, row, error in rows:
            job.count_failed()
            if isinstance(error, ZeroVector) and job.options.outputs == _DENSE_ALONE:  # its row is already zero
                continue
            job.errors[row] = error
            self.stats.failed_texts += 1
            self.stats.lanes[job.lane.value].expired_texts += isinstance(error, DeadlineExceeded)
        if any(isinstance(error, InferenceFailed) for _, _, error in rows):
            self._on_bad_result()
        return list(dict.fromkeys(job for job, _, _ in rows))

    def _count(self, batch: StartedBatch, duration_ns: int, busy_ns: int) -> None:
        stats, most = self.stats, self._max_length
        all_texts = own_texts = own_tokens = longest = 0
        for entry in batch.entries:
            all_texts += entry.texts
            if entry.length > longest:
                longest = entry.length
            if entry.length >= most:
                stats.full_texts += entry.texts
            if entry.job.tenant < 0:
                own_texts += entry.texts
                own_tokens += entry.tokens
        texts, tokens = all_texts - own_texts, batch.in_flight.tokens - own_tokens
        stats.batches += 1
        stats.own_texts += own_texts
        stats.own_tokens += own_tokens
        if texts:
            lane = stats.lanes[batch.entries[0].job.lane.value]  # a batch has one lane
            lane.batches += 1
            for counts in (stats, lane):
                counts.texts += texts
                counts.tokens += tokens
            stats.by_texts[(texts - 1).bit_length()] += 1
            stats.by_tokens[(tokens - 1).bit_length()] += 1
        stats.busy_s += busy_ns / 1e9
        stats.padding_saved_tokens += all_texts * longest - batch.in_flight.tokens
        token_s = duration_ns / 1e9 / (batch.in_flight.tokens + BATCH_OVERHEAD_TOKENS)
        self.slowest_s = max(token_s, self.slowest_s * _FORGET)
        self.quickest_s = min(token_s, self.quickest_s / _FORGET)
        self.finished_at = time.monotonic()

    def least_token_s(self) -> float:
        """Return the least seconds that a token takes: half of those in the quickest recent batch, 0 without one.

        Half, since a batch may get more threads or a core for itself, and without the overhead of a batch, which its
        texts share.
        """
        is_known = time.monotonic() - self.finished_at < _KNOWN_FOR_S
        return self.quickest_s / 2 if is_known else 0.0

    def forward_limit_s(self, tokens: int, floor_s: float, factor: float) -> float:
        """Return how long batches of `tokens` in flight may take: `factor` times the slowest recent batch."""
        return max(floor_s, factor * self.slowest_s * (tokens + _BATCHES_IN_FLIGHT * BATCH_OVERHEAD_TOKENS))


def failed_rows(entries: Sequence[QueueEntry], error: TeimgrError) -> list[tuple[Job, int, TeimgrError]]:
    """Return all rows of `entries`, each with `error`."""
    return [(entry.job, row, error) for entry in entries for row in entry.rows.tolist()]


def _written(
    results: BatchResults, job: Job, texts: NDArray[np.intp], rows: NDArray[np.intp]
) -> dict[int, InferenceFailed]:
    """Write like `BatchResults.write`; if that raises, for example by an overflow, only the texts at fault fail."""
    try:
        return results.write(job, texts, rows)
    except Exception as error:
        if len(texts) > 1:
            each = (_written(results, job, texts[i : i + 1], rows[i : i + 1]) for i in range(len(texts)))
            return {row: failure for failed in each for row, failure in failed.items()}
        log.exception("writing a result into its job failed")
        return {int(rows[0]): InferenceFailed(f"Backend error: {error}")}


class BatchResults:
    """The results of one batch of N texts, post-processed once for all jobs with the same options."""

    def __init__(self, rows: Mapping[Output, HostRows], activation: str, finished: VectorOptions | None = None) -> None:
        self._rows = rows
        self._finished = finished
        self._activation = activation
        self._bad: dict[Output, set[int]] = {}  # texts with NaN or infinity
        self._vectors: dict[VectorOptions, Floats] = {}
        self._scores: Floats | None = None

    def write(self, job: Job, texts: NDArray[np.intp], rows: NDArray[np.intp]) -> dict[int, InferenceFailed]:
        """Write the batch's `texts` into `rows` of the job; returns the errors of rows that failed and stay unwritten.

        Outputs that the job did not request are not examined.
        """
        failed: dict[int, InferenceFailed] = {}
        for output in sorted(job.options.outputs, key=_ORDER.index):
            if output not in self._bad and self._rows[output].are_finite:
                self._bad[output] = set()
            if output not in self._bad:
                finite = self._rows[output].finite()
                are_all = np.count_nonzero(finite) == len(finite)  # four times as fast as `finite.all()`
                self._bad[output] = set() if are_all else set(np.flatnonzero(~finite).tolist())
            if self._bad[output]:
                for text, row in zip(texts.tolist(), rows.tolist(), strict=True):
                    if text in self._bad[output] and row not in failed:
                        failed[row] = InferenceFailed(self._error_text(output, text))
        if failed:
            good = ~np.isin(rows, list(failed))
            texts, rows = texts[good], rows[good]
        if len(rows):
            for output in job.options.outputs:
                self._write_output(output, job, texts, rows)
        return failed

    def _error_text(self, output: Output, text: int) -> str:
        if output is not Output.SCORES:
            return "Backend error: the vector has NaN or infinity in it"
        nan = np.isnan(self._rows[output].values[text]).any()
        return "score is NaN" if nan else "Backend error: a score is infinite"

    def _write_output(self, output: Output, job: Job, texts: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
        source = self._rows[output]
        if output is Output.DENSE:
            key = vector_options(job)
            if key not in self._vectors and key == _UNIT and source.unit is not None:
                self._vectors[key] = source.unit
            if key not in self._vectors:
                self._vectors[key] = source.values if key == self._finished else finish(source.values, *key)
            _assign(job.vectors, rows, self._vectors[key], texts)
        elif output is Output.SCORES:
            if not job.options.raw_scores and self._scores is None:
                self._scores = activate(source.values, self._activation)
            scores = source.values if job.options.raw_scores or self._scores is None else self._scores
            _assign(job.scores, rows, scores, texts)
        elif output is Output.SPARSE:
            for text, row in zip(texts.tolist(), rows.tolist(), strict=True):
                job.sparse[row] = source.sparse_row(text)
        else:
            target = job.tokens_of if output is Output.TOKENS else job.multi_vectors
            for text, row in zip(texts.tolist(), rows.tolist(), strict=True):
                target[row] = source.row(text)


def _assign(results: Floats, rows: NDArray[np.intp], values: Floats, texts: NDArray[np.intp]) -> None:
    """Set `results[rows]` to `values[texts]`; for one row without the cost of indexing by arrays."""
    if len(rows) == 1:
        results[rows[0]] = values[texts[0]]
    else:
        results[rows] = values[texts]


_ORDER = list(Output)
