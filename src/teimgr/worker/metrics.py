"""The `te_*` metrics of Text Embeddings Inference, with its names, labels and buckets.

TEI's counters carry no `_total`, which prometheus-client would add; hence the text is written here. Format:
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from teimgr.engine.engine import EngineStats
from teimgr.engine.job import Job, Output
from teimgr.errors import Code, TeimgrError
from teimgr.wire.frames import Timings
from teimgr.worker.calls import Call

DURATION_BOUNDS = tuple(1e-5 * 1.5**power for power in range(1, 36))
LENGTH_BOUNDS = tuple(float(2**power) for power in range(20))
BATCH_SIZE_BOUNDS = tuple(float(2**power) for power in range(13))
BATCH_TOKENS_BOUNDS = tuple(float(2**power) for power in range(21))

_PARTS = ("", "_tokenization", "_queue", "_inference")

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
    """Cumulative counts under fixed bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @classmethod
    def of_powers(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Of values that were counted by the power of two they do not exceed, and add up to `total`."""
        histogram = cls(bounds)
        histogram._counts = [*counts[: len(bounds)], sum(counts[len(bounds) :])]
        histogram._sum = float(total)
        return histogram

    def lines(self, name: str) -> Iterator[str]:
        """The exposition lines under `name`; none before the first observation."""
        if not any(self._counts):
            return
        running = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            running += count
            label = "+Inf" if bound == float("inf") else repr(bound)
            yield f'{name}_bucket{{le="{label}"}} {running}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {running}"


class Items:
    """The inputs of one family of calls, `te_embed_*` or `te_predict_*`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._success = 0
        self._durations = Durations(name)

    def finished(self, timings: Timings | None, count: int, served: int) -> None:
        """`served` of `count` inputs came out of the engine; `timings` where their call could be answered."""
        self._count += count
        self._success += served
        if timings is not None:
            self._durations.observe(timings, served)

    def lines(self) -> Iterator[str]:
        """The exposition lines."""
        for name, number in ((f"{self._name}_count", self._count), (f"{self._name}_success", self._success)):
            yield from _family(name, "counter", [f"{name} {number}"] if number else [])
        yield from self._durations.lines()


class Durations:
    """Where the time went: in all, and the three parts of it."""

    def __init__(self, name: str) -> None:
        self._histograms = {f"{name}{part}_duration": Histogram(DURATION_BOUNDS) for part in _PARTS}

    def observe(self, timings: Timings, times: int = 1) -> None:
        """Count `timings`, `times` over."""
        spent_ns = (timings.total_ns, timings.tokenization_ns, timings.queue_ns, timings.inference_ns)
        for histogram, nanoseconds in zip(self._histograms.values(), spent_ns, strict=True):
            histogram.observe(nanoseconds / 1e9, times)

    def lines(self) -> Iterator[str]:
        """The exposition lines."""
        for name, histogram in self._histograms.items():
            yield from _family(name, "histogram", histogram.lines(name))


class TeiMetrics:
    """Counts what callers were given. Loop thread only.

    A message of a stream is no request to TEI: it shows among the durations and the items alone.
    """

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._durations = Durations("te_request")
        self._embeddings = Items("te_embed")
        self._predictions = Items("te_predict")
        self._lengths = Histogram(LENGTH_BOUNDS)
        self._stats: Callable[[], EngineStats] | None = None

    def attach(self, stats: Callable[[], EngineStats], max_input_length: int) -> None:
        """The model is known: inputs are at most `max_input_length` tokens, and `stats` tells of its queue."""
        self._stats = stats
        self._lengths = Histogram([bound for bound in LENGTH_BOUNDS if bound <= max_input_length])

    def received(self, inputs: int) -> None:
        """A call about so many inputs came, and is no message of a stream."""
        self._requests[_method(inputs)] += 1

    def finished(self, job: Job, call: Call, error: TeimgrError | None) -> None:
        """A call's inputs came back from the engine; `error` is what the whole call is answered with, if anything."""
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
        """An input, or a call that did not get as far as the engine, came to nothing."""
        self._failures[_FAILURES.get(error.code, "inference")] += 1

    def dropped(self) -> None:
        """A caller went away before its answer."""
        self._failures["dropped"] += 1

    def batch_too_large(self) -> None:
        """A call had more inputs than a client may send at once."""
        self._failures["batch_size"] += 1

    def render(self) -> str:
        """The exposition text. A series appears once something was counted."""
        lines: list[str] = []
        for name, label, counter in (
            ("te_request_count", "method", self._requests),
            ("te_request_success", "method", self._successes),
            ("te_request_failure", "err", self._failures),
        ):
            lines += _family(name, "counter", (f'{name}{{{label}="{key}"}} {n}' for key, n in sorted(counter.items())))
        for part in (self._durations, self._embeddings, self._predictions):
            lines += part.lines()
        lines += _family("te_request_input_length", "histogram", self._lengths.lines("te_request_input_length"))
        lines += _engine_lines(self._stats() if self._stats is not None else None)
        return "\n".join(lines) + "\n"


def _engine_lines(stats: EngineStats | None) -> Iterator[str]:
    """The queue and the batches formed of it; TEI counts a batch of 0 whenever it looks in vain, which is a defect."""
    yield from _family("te_queue_size", "gauge", [f"te_queue_size {stats.queued_texts if stats else 0}"])
    if stats is None:
        return
    sizes = Histogram.of_powers(BATCH_SIZE_BOUNDS, stats.by_texts, stats.texts)
    tokens = Histogram.of_powers(BATCH_TOKENS_BOUNDS, stats.by_tokens, stats.tokens)
    for name, histogram in (("te_batch_next_size", sizes), ("te_batch_next_tokens", tokens)):
        yield from _family(name, "histogram", histogram.lines(name))


def _method(inputs: int) -> str:
    return "single" if inputs == 1 else "batch"


def _family(name: str, kind: str, samples: Iterator[str] | list[str]) -> list[str]:
    found = list(samples)
    return [f"# TYPE {name} {kind}", *found, ""] if found else []
