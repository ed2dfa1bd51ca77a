"""Pages of metric samples: Prometheus text format, JSON, and packing for another process.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. prometheus_client's renderer gives every
counter the ending `_total`, which TEI's counters do not have, and writes other numbers and no empty lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from teimgr.observability.catalogue import EMBEDDINGS, FAMILIES, PREDICTIONS, Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Sample(NamedTuple):
    """One value of a family; `suffix` is `_bucket`, `_sum`, `_count` or empty."""

    suffix: str
    labels: Mapping[str, str]
    value: float


Page = dict[Family, list[Sample]]
"""The samples of a page by family, in the order of the page. A family without samples is left out."""


def add(page: Page, family: Family, value: float, **labels: str) -> None:
    page.setdefault(family, []).append(Sample("", labels, value))


def histogram(
    bounds: Sequence[float], counts: Sequence[int], total: float, labels: Mapping[str, str] | None = None
) -> Iterator[Sample]:
    """Return the samples of a histogram; `counts` are per bucket, the last one above all bounds; `total` is the sum."""
    labels = labels or {}
    limits = (*(repr(float(bound)) for bound in bounds), "+Inf")
    running = list(accumulate(counts))
    for limit, count in zip(limits, running, strict=True):
        yield Sample("_bucket", {**labels, "le": limit}, count)
    yield Sample("_sum", labels, total)
    yield Sample("_count", labels, running[-1])


def text(page: Page, *, helps: bool = True) -> str:
    """Return the page in Prometheus' text format; TEI's pages have no HELP lines."""
    return "".join(text_lines(page, helps=helps))


def text_lines(page: Page, *, helps: bool = True) -> Iterator[str]:
    """Yield the lines of `text`."""
    written: dict[int, str] = {}  # families of thousands of instances share labels, which are rendered once
    for family, samples in page.items():
        if not samples:
            continue
        if helps:
            yield f"# HELP {family.name} {family.help}\n"
        yield f"# TYPE {family.name} {family.kind}\n"
        for suffix, labels, value in samples:
            shown = written.get(id(labels))
            if shown is None:
                inner = ",".join(f'{name}="{word.translate(_ESCAPED)}"' for name, word in labels.items())
                shown = written[id(labels)] = f"{{{inner}}}" if inner else ""
            yield f"{family.name}{suffix}{shown} {value!r}\n"
        yield "\n"


MAY_BE_ABSENT = frozenset((*EMBEDDINGS.durations, *PREDICTIONS.durations))
MAX_BUCKETS = 15
_KEPT_EVERY = 3


def condensed(page: Page) -> Page:
    """Return the page with fewer series, since Prometheus stores each bucket of each instance as a series.

    Worker histograms with more than `MAX_BUCKETS` buckets keep every third bucket and +Inf. Empty histograms of
    embedded and of classified inputs are left out.
    """
    return {family: list(_condensed(family, samples)) for family, samples in page.items()}


def _condensed(family: Family, samples: Sequence[Sample]) -> Iterator[Sample]:
    if family.kind != "histogram" or family.source != "worker":
        yield from samples
        return
    kept = _kept_limits(family)
    counts = {_series(sample): sample.value for sample in samples if sample.suffix == "_count"}
    for sample in samples:
        is_kept = sample.suffix != "_bucket" or sample.labels["le"] in kept
        if is_kept and (family not in MAY_BE_ABSENT or counts.get(_series(sample))):
            yield sample


def _kept_limits(family: Family) -> frozenset[str]:
    step = _KEPT_EVERY if len(family.bounds) > MAX_BUCKETS else 1
    return frozenset(repr(float(bound)) for bound in family.bounds[step - 1 :: step]) | {"+Inf"}


def _series(sample: Sample) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in sample.labels.items() if name != "le")


def to_json(page: Page) -> Iterator[dict[str, Any]]:
    for family, samples in page.items():
        if samples:
            yield {
                "name": family.name,
                "type": family.kind,
                "help": family.help,
                "samples": [
                    {"name": family.name + suffix, "labels": dict(labels), "value": value}
                    for suffix, labels, value in samples
                ],
            }


def pack(page: Page) -> dict[str, list[list[Any]]]:
    """Return the page as plain values for another process; the inverse is `unpack`."""
    return {family.name: [list(sample) for sample in samples] for family, samples in page.items() if samples}


def unpack(values: Mapping[str, Iterable[Sequence[Any]]], **more: str) -> Page:
    """The inverse of `pack`, with more labels on each sample; families that are not in the catalogue are dropped."""
    return {
        FAMILIES[name]: [Sample(suffix, {**more, **labels}, value) for suffix, labels, value in samples]
        for name, samples in values.items()
        if name in FAMILIES
    }


def added(pages: Iterable[Page]) -> Page:
    """Return the sum of pages: samples with the same labels are added."""
    whole: dict[Family, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = defaultdict(dict)
    for page in pages:
        for family, samples in page.items():
            known = whole[family]
            for sample in samples:
                key = (sample.suffix, frozenset(sample.labels.items()))
                before = known.get(key)
                known[key] = sample if before is None else sample._replace(value=before.value + sample.value)
    return {family: list(known.values()) for family, known in whole.items()}
