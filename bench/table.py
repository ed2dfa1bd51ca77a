"""One path of a contest as a line of the table and as a record of the JSON file."""

from __future__ import annotations

import statistics
from typing import Any

from bench.contest import Row

HEADER = (
    "path",
    "dtype",
    "texts/s best",
    "texts/s median",
    "tokens/s median",
    "× baseline best",
    "median",
    "cosine mean",
    "min",
    "peak RSS MiB",
    "USS MiB",
    "foreign cores",
)


def line(row: Row, baseline: Row, texts: int, tokens: int) -> list[Any]:
    """One path as a line of the table."""
    factor = ratios(row, baseline)
    return [
        row.name,
        row.dtype,
        texts / row.best_s,
        texts / row.median_s,
        tokens / row.median_s,
        factor["best"],
        factor["median"],
        f"{row.cosine_mean:.5f}",
        f"{row.cosine_min:.5f}",
        row.memory["peak_rss_mib"],
        row.memory["unique_mib"],
        statistics.median(row.foreign_cores),
    ]


def record(row: Row, baseline: Row, texts: int, tokens: int) -> dict[str, Any]:
    """One path for the JSON file."""
    return {
        "path": row.name,
        "dtype": row.dtype,
        "seconds": row.seconds,
        "foreign_cores": row.foreign_cores,
        "texts_per_s": {"best": texts / row.best_s, "median": texts / row.median_s},
        "tokens_per_s": {"best": tokens / row.best_s, "median": tokens / row.median_s},
        "ratio_to_baseline": ratios(row, baseline),
        "cosine": {"mean": row.cosine_mean, "min": row.cosine_min},
        "memory": row.memory,
    }


def ratios(row: Row, baseline: Row) -> dict[str, float]:
    """How many times as fast: best pass against best pass, and median, least and most of the rounds' own ratios."""
    paired = [theirs / ours for ours, theirs in zip(row.seconds, baseline.seconds, strict=False)]  # of whole rounds
    best = baseline.best_s / row.best_s
    return {"best": best, "median": statistics.median(paired), "least": min(paired), "most": max(paired)}
