"""Samples of metrics, and the text that Prometheus reads of them.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. prometheus-client would not
do for TEI's names: it gives every counter the ending `_total`, which TEI's have not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from teimgr.observability.catalogue import FAMILIES, Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Sample(NamedTuple):
    """One number of a family; `suffix` is `_bucket`, `_sum`, `_count` or empty."""

    suffix: str
    labels: Mapping[str, str]
    value: float


Page = dict[Family, list[Sample]]
"""What a page of metrics says, in the order in which it says it. A family without samples is not on it."""


def histogram(
    bounds: Sequence[float], counts: Sequence[int], total: float, labels: Mapping[str, str] | None = None
) -> Iterator[Sample]:
    """A histogram of values that add up to `total`; `counts` are those under each bound alone, the last beyond all."""
    labels = labels or {}
    limits = (*(repr(float(bound)) for bound in bounds), "+Inf")
    running = list(accumulate(counts))
    for limit, count in zip(limits, running, strict=True):
        yield Sample("_bucket", {**labels, "le": limit}, count)
    yield Sample("_sum", labels, total)
    yield Sample("_count", labels, running[-1])


def text(page: Page, *, helps: bool = True) -> str:
    """The page as Prometheus reads it; TEI's own has no HELP lines."""
    return "".join(line for family, samples in page.items() if samples for line in _block(family, samples, helps))


def to_json(page: Page) -> list[dict[str, Any]]:
    """The page as plain values: a list of families, each with its samples."""
    return [
        {
            "name": family.name,
            "type": family.kind,
            "help": family.help,
            "samples": [
                {"name": family.name + suffix, "labels": dict(labels), "value": value}
                for suffix, labels, value in samples
            ],
        }
        for family, samples in page.items()
        if samples
    ]


def pack(page: Page) -> dict[str, list[list[Any]]]:
    """The page for another process, where `unpack` makes one of it again."""
    return {family.name: [list(sample) for sample in samples] for family, samples in page.items() if samples}


def unpack(values: Mapping[str, Iterable[Sequence[Any]]], **more: str) -> Page:
    """A page of what `pack` made, with more labels on each sample; families nobody here knows are left out."""
    return {
        FAMILIES[name]: [Sample(suffix, {**more, **labels}, value) for suffix, labels, value in samples]
        for name, samples in values.items()
        if name in FAMILIES
    }


def added(pages: Iterable[Page]) -> Page:
    """One page of several: samples of the same labels are added up."""
    whole: dict[Family, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = defaultdict(dict)
    for page in pages:
        for family, samples in page.items():
            known = whole[family]
            for sample in samples:
                key = (sample.suffix, frozenset(sample.labels.items()))
                before = known.get(key)
                known[key] = sample if before is None else sample._replace(value=before.value + sample.value)
    return {family: list(known.values()) for family, known in whole.items()}


def _block(family: Family, samples: Sequence[Sample], helps: bool) -> Iterator[str]:
    if helps:
        yield f"# HELP {family.name} {family.help}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for suffix, labels, value in samples:
        inner = ",".join(f'{name}="{word.translate(_ESCAPED)}"' for name, word in labels.items())
        yield f"{family.name}{suffix}{{{inner}}} {value!r}\n" if inner else f"{family.name}{suffix} {value!r}\n"
    yield "\n"
