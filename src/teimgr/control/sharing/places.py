"""Places for instances that calls have made, `[on_demand] max_instances`, shared fairly between keys.

Pure: `grant` decides by the present instances whether one more is made for a key, and which one is deleted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

FAILED_KEPT = 8
"""How many failed instances stay, for the operator to read why; callers may make up the ids of their models."""


class Made(NamedTuple):
    """An instance that a call of `key` has made; `value` are its recent calls a second, None if it may not go now."""

    name: str
    key: str
    value: float | None
    has_failed: bool = False


class Grant(NamedTuple):
    """Whether one more may be made. Of `instead` the first one that can go has to; none: there is room."""

    is_given: bool
    instead: tuple[Made, ...] = ()
    reason: str = ""


def left_for_calls(size: int, of_others: int) -> int:
    """Of `size` ports or instances those that calls may have: a quarter is an operator's, whether in use or not."""
    return size - max(of_others, min(size - 1, max(1, size // 4)))


def grant(made: Sequence[Made], key: str, limit: int) -> Grant:
    """A place for one more instance of `key`, where at most `limit` are made.

    While there are free ones a key may have three quarters, and callers without a key all. Then, or where
    `FAILED_KEPT` have failed, one of those goes, whosever it is; else one of the key that has most above its share, an
    equal part for each key that has some or asks: its least valuable one first. A key that has three quarters gets
    another only in exchange for one it holds.
    """
    held = Counter(each.key for each in made)
    has_most = bool(key) and held[key] >= limit - limit // 4
    failed = tuple(each for each in made if each.has_failed and (each.key == key or not has_most))
    if len(made) < limit and not has_most and len(failed) < FAILED_KEPT:
        return Grant(True)
    if failed:
        return Grant(True, failed, "it has failed")
    share = max(1, limit // len(held.keys() | {key}))
    owners = {key: held[key]} if has_most else held
    owner, most = max(owners.items(), key=lambda each: (each[1], each[0] == key), default=(key, 0))
    if most <= share:
        return Grant(False)
    idle = [each for each in made if each.key == owner and each.value is not None]
    reason = f"its key has {most} of {limit} places, and {share} are its share"
    return Grant(bool(idle), tuple(sorted(idle, key=lambda each: each.value or 0.0)), reason)
