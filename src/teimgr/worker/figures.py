"""What a worker says of itself for the daemon's page of metrics, TEI's names and ours."""

from __future__ import annotations

import time
from pathlib import Path

from teimgr import catalogue
from teimgr.catalogue import Family
from teimgr.engine.engine import EngineStats
from teimgr.exposition import Page, Sample

_KIB = 1024
_PROC = Path("/proc/self")


def engine_page(stats: EngineStats) -> Page:
    """The engine's lanes, queue, device and memory."""
    page: Page = {
        catalogue.BATCHES: [Sample("", {"lane": lane}, of.batches) for lane, of in stats.lanes.items()],
        catalogue.TEXTS: [Sample("", {"lane": lane}, of.texts) for lane, of in stats.lanes.items()],
        catalogue.TOKENS: [Sample("", {"lane": lane}, of.tokens) for lane, of in stats.lanes.items()],
        catalogue.EXPIRED_TEXTS: [Sample("", {"lane": lane}, of.expired_texts) for lane, of in stats.lanes.items()],
        catalogue.QUEUED_TEXTS: [Sample("", {"lane": lane}, of.queued_texts) for lane, of in stats.lanes.items()],
        catalogue.QUEUED_TOKENS: [Sample("", {"lane": lane}, of.queued_tokens) for lane, of in stats.lanes.items()],
    }
    return page | _singles(
        (catalogue.PADDING_SAVED, stats.padding_saved_tokens),
        (catalogue.FAILED_TEXTS, stats.failed_texts),
        (catalogue.BUSY, stats.busy_s),
        (catalogue.RUNNING_TOKENS, stats.running_tokens),
        (catalogue.HEALTHY, int(stats.healthy)),
        (catalogue.MODEL_BYTES, stats.model_bytes),
        (catalogue.DEVICE_BYTES, stats.device_bytes),
    )


def process_page(calls: int) -> Page:
    """The process: its unanswered calls, memory and processor time. Blocks while the kernel adds the memory up."""
    rollup = _rollup()
    return _singles(
        (catalogue.WORKER_CALLS, calls),
        (catalogue.RESIDENT, rollup.get("Rss", 0)),
        (catalogue.UNIQUE, rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0)),
        (catalogue.CPU_SECONDS, time.process_time()),
    )


def _rollup() -> dict[str, int]:
    """The kernel's sums over all mappings, as bytes; none where it keeps no such file."""
    try:
        lines = (_PROC / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows}


def _singles(*numbers: tuple[Family, float]) -> Page:
    return {family: [Sample("", {}, number)] for family, number in numbers}
