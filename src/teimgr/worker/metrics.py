"""The `te_*` metrics of Text Embeddings Inference, with its names, labels and buckets.

TEI's counters carry no `_total`, which prometheus-client would add; hence the text is written here. Format:
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from teimgr.engine.job import Job
from teimgr.errors import Code, TeimgrError
from teimgr.worker.calls import Call

DURATION_BOUNDS = tuple(1e-5 * 1.5**power for power in range(1, 36))
LENGTH_BOUNDS = tuple(float(2**power) for power in range(20))

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

    def lines(self, name: str) -> Iterator[str]:
        """The exposition lines under `name`."""
        running = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            running += count
            label = "+Inf" if bound == float("inf") else repr(bound)
            yield f'{name}_bucket{{le="{label}"}} {running}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {running}"


class TeiMetrics:
    """Counts what callers were given. Loop thread only."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._successes: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._texts = 0
        self._texts_done = 0
        durations = ("", "_tokenization", "_queue", "_inference")
        self._request_durations = {part: Histogram(DURATION_BOUNDS) for part in durations}
        self._embed_durations = {part: Histogram(DURATION_BOUNDS) for part in durations}
        self._lengths = Histogram(LENGTH_BOUNDS)
        self.queue_size: Callable[[], int] = lambda: 0

    def finished(self, job: Job, call: Call, error: TeimgrError | None) -> None:
        """A call's texts came back from the engine."""
        method = "single" if len(job.texts) == 1 else "batch"
        texts, failed = len(job.texts), len(job.errors)
        self._requests[method] += 1
        self._texts += texts
        self._texts_done += texts - failed
        for failure in job.errors.values():
            self._failures[_FAILURES.get(failure.code, "inference")] += 1
        if error is not None or texts == failed:
            return
        self._successes[method] += 1
        self._observe(job, call, texts - failed)

    def refused(self, error: TeimgrError) -> None:
        """A call did not get as far as the engine."""
        self._requests["single"] += 1
        self._failures[_FAILURES.get(error.code, "inference")] += 1

    def render(self) -> str:
        """The exposition text. A series appears once something was counted."""
        lines: list[str] = []
        for name, label, counter in (
            ("te_request_count", "method", self._requests),
            ("te_request_success", "method", self._successes),
            ("te_request_failure", "err", self._failures),
        ):
            lines += _family(name, "counter", (f'{name}{{{label}="{key}"}} {n}' for key, n in sorted(counter.items())))
        lines += _family("te_embed_count", "counter", [f"te_embed_count {self._texts}"])
        lines += _family("te_embed_success", "counter", [f"te_embed_success {self._texts_done}"])
        for prefix, durations in (("te_request", self._request_durations), ("te_embed", self._embed_durations)):
            for part, histogram in durations.items():
                name = f"{prefix}{part}_duration"
                lines += _family(name, "histogram", histogram.lines(name))
        lines += _family("te_request_input_length", "histogram", self._lengths.lines("te_request_input_length"))
        lines += _family("te_queue_size", "gauge", [f"te_queue_size {self.queue_size()}"])
        return "\n".join(lines) + "\n"

    def _observe(self, job: Job, call: Call, texts: int) -> None:
        timings = call.timings(job)
        spent_ns = {
            "": timings.total_ns,
            "_tokenization": timings.tokenization_ns,
            "_queue": timings.queue_ns,
            "_inference": timings.inference_ns,
        }
        for part, nanoseconds in spent_ns.items():
            self._request_durations[part].observe(nanoseconds / 1e9)
            self._embed_durations[part].observe(nanoseconds / 1e9, texts)
        self._lengths.observe(timings.tokens / texts, texts)


def _family(name: str, kind: str, samples: Iterator[str] | list[str]) -> list[str]:
    found = list(samples)
    return [f"# TYPE {name} {kind}", *found, ""] if found else []
