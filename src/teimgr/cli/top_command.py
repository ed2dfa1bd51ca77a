"""`teimgr top`: load of every instance, from the difference of two scrapes of the metrics."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, complete_instance
from teimgr.cli.output import field, size
from teimgr.client.rest_client import RestClient
from teimgr.client.rest_values import Instance
from teimgr.observability.catalogue import DURATION_BOUNDS

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REFUSED = "refused"
_COLUMNS = (
    *("name", "status", "texts/s", "tokens/s", "busy", "queue", "in work", "p50", "p99", "failed/s", "refused/s"),
    *("workers", "memory each", "with shared", "device"),
)


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape: values by name and instance, summed over other labels, and buckets of durations.

    `_REFUSED` are the refusals among the failures.
    """

    moment: float
    values: Mapping[tuple[str, str], float]
    buckets: Mapping[str, Mapping[float, float]]

    @classmethod
    def parse(cls, text: str, moment: float) -> MetricsPage:
        values: dict[tuple[str, str], float] = defaultdict(float)
        buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for line in text.splitlines():
            if line.startswith("#") or not (found := _SAMPLE.match(line)):
                continue
            name, labels, value = found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])
            if "instance" not in labels:
                continue
            if name == "te_request_duration_bucket":
                buckets[labels["instance"]][float(labels["le"])] += value
            elif not name.endswith("_bucket"):
                values[name, labels["instance"]] += value
                if labels.get("err") == "overloaded":
                    values[_REFUSED, labels["instance"]] += value
        return cls(moment, dict(values), {name: dict(each) for name, each in buckets.items()})


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """Load of one instance between two scrapes. Rates per second, latencies in ms, memory in bytes per worker.

    `busy` is the fraction of the time with a batch on a worker's device. `errors` exclude refusals, which are in
    `refused`. None: not measured in that time.
    """

    name: str
    status: str
    texts: float | None = None
    tokens: float | None = None
    busy: float | None = None
    queue: float | None = None
    in_work: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    errors: float | None = None
    refused: float | None = None
    resident_bytes: float | None = None
    unique_bytes: float | None = None
    device_bytes: float | None = None
    workers: int = 0


def load_of(instance: Instance, before: MetricsPage, after: MetricsPage) -> InstanceLoad:
    span = after.moment - before.moment

    def now(metric: str) -> float | None:
        return after.values.get((metric, instance.name))

    def rate(metric: str) -> float | None:
        if (last := now(metric)) is None or span <= 0:
            return None
        first = before.values.get((metric, instance.name), 0.0)
        return (last - first if last >= first else last) / span  # a new worker counts from zero

    workers = instance.details.get("workers") or ()

    def per_worker(metric: str) -> float | None:
        return None if (total := now(metric)) is None else total / max(len(workers), 1)

    failed, refused = rate("te_request_failure"), rate(_REFUSED)
    bounds = _grown(before.buckets.get(instance.name, {}), after.buckets.get(instance.name, {}))
    return InstanceLoad(
        *(instance.name, instance.status.value),
        *(
            rate("teimgr_engine_texts_total"),
            rate("teimgr_engine_tokens_total"),
            None if (busy_s := rate("teimgr_engine_busy_seconds_total")) is None else busy_s / max(len(workers), 1),
        ),
        *(
            now("teimgr_engine_queue_texts"),
            now("teimgr_worker_calls"),
            _quantile(bounds, 0.5),
            _quantile(bounds, 0.99),
        ),
        None if failed is None else max(failed - (refused or 0.0), 0.0),
        refused,
        *(
            per_worker("teimgr_worker_resident_bytes"),
            per_worker("teimgr_worker_unique_bytes"),
            per_worker("teimgr_worker_device_bytes"),
        ),
        len(workers),
    )


def _grown(before: Mapping[float, float], after: Mapping[float, float]) -> list[tuple[float, float]]:
    """Cumulative counts by upper bound of what came between two pages."""
    return [(bound, max(count - before.get(bound, 0.0), 0.0)) for bound, count in sorted(after.items())]


def _quantile(bounds: Sequence[tuple[float, float]], share: float) -> float | None:
    """A quantile in milliseconds, linear within its bucket as Prometheus computes it; None without samples."""
    if not bounds or not (total := bounds[-1][1]):
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted:
            if bound == float("inf"):
                return low * 1e3
            return (low + (bound - low) * (wanted - below) / ((count - below) or 1.0)) * 1e3
        low, below = bound, count
    return low * 1e3


def top(
    server: DaemonOptions,
    output: CommandOutput,
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these instances.", autocompletion=complete_instance)
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="S", help="Seconds between samples.", min=0.1)
    ] = 2.0,
    count: Annotated[
        int | None, typer.Option("--count", "-n", help="Samples; 0: until Ctrl-C.  [default: 0, in a pipe 1]", min=0)
    ] = None,
) -> None:
    """Show the load of each instance.

    Texts and tokens per second, queue, latency, and memory of its workers.

    On a terminal it is live; in a pipe it prints one sample. With --json each sample is a line.
    """
    live = output.is_terminal and not output.as_json
    wanted = count if count is not None else (0 if live else 1)
    samples = _samples(server.rest, set(names or ()), interval, wanted)
    if output.as_json:
        for loads in samples:
            output.line({"instances": [_plain(each) for each in loads]})
    elif not live:
        for loads in samples:
            output.table(_COLUMNS, [_row(each, "") for each in loads])
            sys.stdout.flush()
    else:
        _show_live(samples, server.connection.url)


def _show_live(samples: Iterator[list[InstanceLoad]], url: str) -> None:
    from rich.live import Live
    from rich.table import Table

    with Live(f"{url}: measuring …", auto_refresh=False) as screen:
        for loads in samples:
            table = Table(*(each.upper() for each in _COLUMNS), box=None, pad_edge=False, header_style="dim")
            for load in loads:
                table.add_row(*map(field, _row(load)))
            table.caption = f"{url}, {time.strftime('%H:%M:%S')}, Ctrl-C ends"
            screen.update(table, refresh=True)


def _samples(rest: RestClient, names: set[str], interval_s: float, count: int) -> Iterator[list[InstanceLoad]]:
    for name in sorted(names):
        rest.get(name)  # an unknown name fails at once
    before = MetricsPage.parse(rest.metrics(), time.monotonic())
    taken = 0
    while not count or taken < count:
        time.sleep(interval_s)
        after = MetricsPage.parse(rest.metrics(), time.monotonic())
        yield [load_of(each, before, after) for each in rest.list() if not names or each.name in names]
        before, taken = after, taken + 1


def _row(load: InstanceLoad, comma: str = ",") -> Sequence[str]:
    def number(value: float | None, form: str = f"{comma}.0f") -> str:
        return "" if value is None else format(value, form)

    def latency(value: float | None) -> str:
        more = "> " if value is not None and value >= DURATION_BOUNDS[-1] * 1e3 else ""
        return "" if value is None else f"{value:.1f} ms" if value < 100 else f"{more}{value:{comma}.0f} ms"

    return (
        *(load.name, load.status, number(load.texts, f"{comma}.1f"), number(load.tokens), number(load.busy, ".0%")),
        *(
            number(load.queue),
            number(load.in_work),
            latency(load.p50_ms),
            latency(load.p99_ms),
            number(load.errors, f"{comma}.1f"),
            number(load.refused, f"{comma}.1f"),
        ),
        *(str(load.workers), size(load.unique_bytes), size(load.resident_bytes)),
        size(load.device_bytes) if load.device_bytes else "",
    )


def _plain(load: InstanceLoad) -> dict[str, Any]:
    return {item: getattr(load, item) for item in InstanceLoad.__dataclass_fields__}
