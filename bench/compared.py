"""One path of `bench peers` against others of the same precision and texts: ratios by round, or of medians."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.peers import LIMIT

Record = dict[str, Any]
"""A row of a result of `bench peers`."""

_OWN = "teimgr"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast `own` is as `other`; with `is_paired` the median of the rounds' own ratios, else the ratio
    of the median rates, of a result that has no seconds of each round.
    """

    own: str
    other: str
    times: float
    is_paired: bool

    @property
    def method(self) -> str:
        """How it was computed."""
        return "paired by round" if self.is_paired else "of medians"


def ratio(own: Record, other: Record) -> Ratio:
    """The ratio of two rows for the same texts."""
    rounds = list(zip(own.get("passes_s") or (), other.get("passes_s") or (), strict=False))  # of whole rounds
    if rounds:
        times = median(theirs / ours for ours, theirs in rounds)
    else:
        times = own["tokens/s median"] / other["tokens/s median"]
    return Ratio(own["path"], other["path"], times, bool(rounds))


def row(rows: Iterable[Record], texts: str, path: str) -> Record | None:
    """The row of a path for some texts."""
    return next((each for each in rows if each["texts"] == texts and each["path"] == path), None)


def best_peer(rows: Iterable[Record], texts: str, dtype: str, path: str = "") -> Record | None:
    """The fastest row that is neither ours nor a limit, of this precision, and with a name that begins with `path`."""
    peers = [
        each
        for each in rows
        if each["texts"] == texts
        and each["dtype"] == dtype
        and each["path"].startswith(path)
        and not each["path"].startswith((_OWN, LIMIT))
    ]
    return max(peers, key=lambda each: float(each["tokens/s median"]), default=None)


def of_best_peer(rows: Sequence[Record], texts: str, path: str, of: str = "") -> Ratio | None:
    """A path of ours against the fastest peer of its own precision; None where one of both was not measured."""
    own = row(rows, texts, path)
    peer = own and best_peer(rows, texts, own["dtype"], of)
    return ratio(own, peer) if own and peer else None


def of_limit(rows: Sequence[Record], texts: str, path: str) -> float | None:
    """The part of the rate of the matrix products alone in the same precision; None where that was not measured."""
    own = row(rows, texts, path)
    if own is None:
        return None
    limit = row(rows, texts, f"{LIMIT}, {own['dtype']}")
    if limit is not None and (found := ratio(own, limit)).is_paired:
        return found.times
    share = own.get("of limit")  # paired too, but rounded
    return float(share.rstrip("%")) / 100 if share else None


def corpora(rows: Iterable[Record]) -> list[str]:
    """The names of the texts, in the order of the result."""
    return list(dict.fromkeys(each["texts"] for each in rows))
