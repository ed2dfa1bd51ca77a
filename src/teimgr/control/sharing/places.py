"""Places for instances that calls have made, `[on_demand] max_instances`, shared fairly between keys.

Pure: `grant` decides by the present instances whether one more is made for a key, and which one is deleted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


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


def grant(made: Sequence[Made], key: str, limit: int) -> Grant:
    """A place for one more instance of `key`, where at most `limit` are made.

    While there are free ones a key may have all. Then one that has failed goes, whosever it is; else one of the key
    that has most above its share, an equal part for each key that has some or asks: its least valuable one first.
    """
    if len(made) < limit:
        return Grant(True)
    if failed := tuple(each for each in made if each.has_failed):
        return Grant(True, failed, "it has failed")
    held = Counter(each.key for each in made)
    share = max(1, limit // len(held.keys() | {key}))
    owner, most = max(held.items(), key=lambda each: (each[1], each[0] == key))
    if most <= share:
        return Grant(False)
    idle = [each for each in made if each.key == owner and each.value is not None]
    reason = f"its key has {most} of {limit} places, and {share} are its share"
    return Grant(bool(idle), tuple(sorted(idle, key=lambda each: each.value or 0.0)), reason)
