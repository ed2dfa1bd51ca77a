"""Metrics of a worker: the `te_*` metrics of Text Embeddings Inference (TEI), and pages of the engine and process."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.engine import EngineStats
from teimgr.engine.job import Job, Output
from teimgr.errors import Code, TeimgrError
from teimgr.observability import catalogue, exposition
from teimgr.observability.catalogue import Family
from teimgr.observability.exposition import Page, Sample
from teimgr.observability.memory import PrivateMemory, resident_bytes
from teimgr.wire.frames import Timings
from teimgr.worker.calls import WorkerCall

_FAILURES = {
    Code.EMPTY_INPUT: "tokenization",
    Code.INVALID_INPUT: "tokenization",
    Code.TOKENIZER_ERROR: "tokenization",
    Code.VALIDATION_ERROR: "validation",
    Code.MESSAGE_TOO_LARGE: "validation",
    Code.WRONG_MODEL_KIND: "model_type",
    Code.UNIMPLEMENTED: "model_type",
    Code.OVERLOADED: "overloaded",
    Code.BACKEND_UNAVAILABLE: "overloaded",
    Code.TIMEOUT: "dropped",
    Code.CANCELLED: "dropped",
}


class Histogram:
    """Counts of values per bucket with fixed bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def observe_all(self, values: NDArray[np.float64], times: NDArray[np.int64]) -> None:
        """`observe` of each value (float64 [N]) with its times (int64 [N])."""
        found = np.bincount(np.searchsorted(self._bounds, values), times, len(self._counts)).astype(np.int64)
        self._counts = [count + more for count, more in zip(self._counts, found.tolist(), strict=True)]
        self._sum += float(values @ times)

    @classmethod
    def of_powers(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Make a histogram from counts by power of two: `counts[k]` values in (2^(k-1), 2^k], whose sum is `total`."""
        histogram = cls(bounds)
        histogram._counts = [*counts[: len(bounds)], sum(counts[len(bounds) :])]
        histogram._sum = float(total)
        return histogram

    @property
    def counts(self) -> list[int]:
        """Per bucket, the last one above all bounds."""
        return [*self._counts]

    def samples(self) -> list[Sample]:
        return [*exposition.histogram(self._bounds, self._counts, self._sum)] if any(self._counts) else []


_MAX_UNCOUNTED = 256


class DurationHistograms:
    """Durations of calls: total, tokenization, queue and inference.

    Calls are added when the histograms are read, or in bulk, which saves time per call.
    """

    def __init__(self, families: catalogue.Durations) -> None:
        self._histograms = {family: Histogram(family.bounds) for family in families}
        self._uncounted: list[tuple[Timings, int]] = []

    def observe(self, timings: Timings, times: int = 1) -> None:
        self._uncounted.append((timings, times))
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        if not self._uncounted:
            return
        durations_ns = [
            (each.total_ns, each.tokenization_ns, each.queue_ns, each.inference_ns) for each, _ in self._uncounted
        ]
        times = np.array([count for _, count in self._uncounted], np.int64)
        for histogram, seconds in zip(self._histograms.values(), np.array(durations_ns).T / 1e9, strict=True):
            histogram.observe_all(seconds, times)
        self._uncounted.clear()

    def counts(self, family: Family) -> list[int]:
        self._count()
        return self._histograms[family].counts

    def page(self) -> Page:
        self._count()
        return {family: histogram.samples() for family, histogram in self._histograms.items()}


class InputCounters:
    """The inputs of one family of calls, `te_embed_*` or `te_predict_*`."""

    def __init__(self, families: catalogue.ItemFamilies) -> None:
        self._families = families
        self._count = 0
        self._success = 0
        self._durations = DurationHistograms(families.durations)

    def finished(self, timings: Timings | None, count: int, served: int) -> None:
        """Count `served` of `count` inputs as computed; `timings` is None if their call failed."""
        self._count += count
        self._success += served
        if timings is not None:
            self._durations.observe(timings, served)

    def page(self) -> Page:
        numbers = ((self._families.count, self._count), (self._families.success, self._success))
        return {family: _one(number) for family, number in numbers if number} | self._durations.page()


class TeiMetrics:
    """TEI's counters of requests and inputs. Loop thread only.

    TEI does not count a message of a stream as a request: only its duration and inputs are counted.
    """

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._durations = DurationHistograms(catalogue.REQUEST_DURATIONS)
        self._embeddings = InputCounters(catalogue.EMBEDDINGS)
        self._predictions = InputCounters(catalogue.PREDICTIONS)
        self._lengths = Histogram(catalogue.LENGTH_BOUNDS)
        self._stats: Callable[[], EngineStats] | None = None

    def attach(self, stats: Callable[[], EngineStats], max_input_length: int) -> None:
        self._stats = stats
        self._lengths = Histogram([bound for bound in catalogue.LENGTH_BOUNDS if bound <= max_input_length])

    def received(self, inputs: int) -> None:
        """Count a request with that many inputs, unless it is a message of a stream."""
        self._requests[_method(inputs)] += 1

    def finished(self, job: Job, call: WorkerCall, error: TeimgrError | None) -> None:
        """Count a call whose job the engine finished; `error` is the reply of the whole call, if it failed."""
        count = len(job.inputs)
        served = count - len(job.errors)
        for failure in job.errors.values():
            self.failed(failure)
        if error is not None and not job.errors:
            self.failed(error)
        timings = call.timings(job) if error is None and served else None
        items = self._predictions if Output.SCORES in job.options.outputs else self._embeddings
        items.finished(timings, count, served)
        if timings is not None:
            if not call.streamed:
                self._successes[_method(count)] += 1
            self._durations.observe(timings)
            self._lengths.observe(timings.tokens / served, served)

    def failed(self, error: TeimgrError) -> None:
        self._failures[_FAILURES.get(error.code, "inference")] += 1

    def dropped(self) -> None:
        self._failures["dropped"] += 1

    def batch_too_large(self, inputs: int) -> None:
        """Count a request that is refused for its number of inputs."""
        self.received(inputs)
        self._failures["batch_size"] += 1

    def counts(self) -> dict[str, Any]:
        """Requests, failures, refusals, and calls by duration: one count per bucket of `DURATION_BOUNDS`, one above.

        Refusals are of a full worker, and are among the failures.
        """
        whole = self._durations.counts(catalogue.REQUEST_DURATIONS[0])
        failures, refused = self._failures.total(), self._failures["overloaded"]
        return {"requests": self._requests.total(), "failures": failures, "refused": refused, "by_duration": whole}

    def page(self) -> Page:
        """All metrics; a series appears with its first count."""
        page: Page = {
            catalogue.REQUESTS: _by("method", self._requests),
            catalogue.REQUEST_SUCCESS: _by("method", self._successes),
            catalogue.REQUEST_FAILURE: _by("err", self._failures),
        }
        for part in (self._durations, self._embeddings, self._predictions):
            page |= part.page()
        page[catalogue.INPUT_LENGTH] = self._lengths.samples()
        page |= _engine_page(self._stats() if self._stats is not None else None)
        return page

    def render(self) -> str:
        return exposition.text(self.page(), helps=False)


def _engine_page(stats: EngineStats | None) -> Page:
    """Queue and batch sizes. TEI also counts a batch of 0 whenever its queue is empty, a defect not repeated here."""
    page: Page = {catalogue.QUEUE_SIZE: _one(stats.queued_texts if stats else 0)}
    if stats is not None:
        for family, counts, total in (
            (catalogue.BATCH_SIZE, stats.by_texts, stats.texts),
            (catalogue.BATCH_TOKENS, stats.by_tokens, stats.tokens),
        ):
            page[family] = Histogram.of_powers(family.bounds, counts, total).samples()
    return page


def _one(value: float) -> list[Sample]:
    return [Sample("", {}, value)]


def _by(label: str, counter: Counter[str]) -> list[Sample]:
    return [Sample("", {label: key}, number) for key, number in sorted(counter.items())]


def _method(inputs: int) -> str:
    return "single" if inputs == 1 else "batch"


def engine_page(stats: EngineStats) -> Page:
    page: Page = {
        catalogue.BATCHES: [Sample("", {"lane": lane}, of.batches) for lane, of in stats.lanes.items()],
        catalogue.TEXTS: [Sample("", {"lane": lane}, of.texts) for lane, of in stats.lanes.items()],
        catalogue.TOKENS: [Sample("", {"lane": lane}, of.tokens) for lane, of in stats.lanes.items()],
        catalogue.EXPIRED_TEXTS: [Sample("", {"lane": lane}, of.expired_texts) for lane, of in stats.lanes.items()],
        catalogue.QUEUED_TEXTS: [Sample("", {"lane": lane}, of.queued_texts) for lane, of in stats.lanes.items()],
        catalogue.QUEUED_TOKENS: [Sample("", {"lane": lane}, of.queued_tokens) for lane, of in stats.lanes.items()],
    }
    singles = {
        catalogue.PADDING_SAVED: stats.padding_saved_tokens,
        catalogue.OWN_TEXTS: stats.own_texts,
        catalogue.OWN_TOKENS: stats.own_tokens,
        catalogue.FAILED_TEXTS: stats.failed_texts,
        catalogue.BUSY: stats.busy_s,
        catalogue.RUNNING_TOKENS: stats.running_tokens,
        catalogue.HEALTHY: int(stats.healthy),
        catalogue.MODEL_BYTES: stats.model_bytes,
        catalogue.DEVICE_BYTES: stats.device_bytes,
    }
    return page | {family: _one(number) for family, number in singles.items()}


def process_page(memory: PrivateMemory, calls: int, loop_held: int = 0) -> Page:
    """Metrics of the process: unanswered calls, memory, processor time. Blocks at the first reading of the memory."""
    return {
        catalogue.WORKER_CALLS: _one(calls),
        catalogue.WORKER_LOOP_HELD: _one(loop_held),
        catalogue.RESIDENT: _one(resident_bytes()),
        catalogue.UNIQUE: _one(memory.read() or 0),
        catalogue.CPU_SECONDS: _one(time.process_time()),
    }
