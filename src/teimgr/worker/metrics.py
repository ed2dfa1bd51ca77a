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
        self._queue_size: Callable[[], int] = lambda: 0

    def attach(self, queue_size: Callable[[], int], max_input_length: int) -> None:
        """The model is known: texts are at most `max_input_length` tokens, and `queue_size` of them wait."""
        self._queue_size = queue_size
        self._lengths = Histogram([bound for bound in LENGTH_BOUNDS if bound <= max_input_length])

    def received(self, texts: int) -> None:
        """A call for the vectors of so many texts came."""
        self._requests[_method(texts)] += 1

    def finished(self, job: Job, call: Call, error: TeimgrError | None) -> None:
        """A call's texts came back from the engine; `error` is what the whole call is answered with, if anything."""
        texts, failed = len(job.inputs), len(job.errors)
        self._texts += texts
        self._texts_done += texts - failed
        for failure in job.errors.values():
            self.failed(failure)
        if error is not None and not job.errors:
            self.failed(error)
        if error is None and texts > failed:
            self._successes[_method(texts)] += 1
            self._observe(job, call, texts - failed)

    def failed(self, error: TeimgrError) -> None:
        """A text, or a call that did not get as far as the engine, came to nothing."""
        self._failures[_FAILURES.get(error.code, "inference")] += 1

    def dropped(self) -> None:
        """A caller went away before its answer."""
        self._failures["dropped"] += 1

    def batch_too_large(self) -> None:
        """A call had more texts than a client may send at once."""
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
        for name, texts in (("te_embed_count", self._texts), ("te_embed_success", self._texts_done)):
            lines += _family(name, "counter", [f"{name} {texts}"] if texts else [])
        for prefix, durations in (("te_request", self._request_durations), ("te_embed", self._embed_durations)):
            for part, histogram in durations.items():
                name = f"{prefix}{part}_duration"
                lines += _family(name, "histogram", histogram.lines(name))
        lines += _family("te_request_input_length", "histogram", self._lengths.lines("te_request_input_length"))
        lines += _family("te_queue_size", "gauge", [f"te_queue_size {self._queue_size()}"])
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


def _method(texts: int) -> str:
    return "single" if texts == 1 else "batch"


def _family(name: str, kind: str, samples: Iterator[str] | list[str]) -> list[str]:
    found = list(samples)
    return [f"# TYPE {name} {kind}", *found, ""] if found else []
