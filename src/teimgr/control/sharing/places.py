"""Shares the places for instances created by calls (`[on_demand] max_instances`) fairly between keys.

Pure: `grant` decides whether another instance is created for a key and which one is deleted for it. `Tries` limits
attempts with models that cannot be loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from teimgr.errors import Code, Overloaded, error_from_code

FAILED_KEPT = 8
"""Failed instances that stay, so the operator can read why; callers may invent model ids."""

REFUSED_S = 60.0
"""How long calls do not retry a model that could not be loaded, and how long it counts as a try of its key."""
MAX_TRIES = 32
"""Limit of a key's models tried within `REFUSED_S` and not loaded since."""
_REFUSED_KEPT = 1024


class Made(NamedTuple):
    """An instance created by a call of `key`; `value` is its recent calls per second, None if it cannot be deleted."""

    name: str
    key: str
    value: float | None
    has_failed: bool = False


class Grant(NamedTuple):
    """Whether another instance may be created. The first deletable one of `instead` is deleted first; empty: none."""

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


class Tries:
    """Models that calls have recently tried, and why some cannot be loaded; each try reads the disk or the hub."""

    def __init__(self) -> None:
        self._begun: dict[str, dict[str, float]] = {}  # times by key and model, oldest first
        self._refused: dict[str, tuple[float, Code, str]] = {}

    def check(self, model_id: str, key: str, now: float) -> None:
        """Whether a model may be tried for a key.

        Raises:
            TeimgrError: it was refused within `REFUSED_S`, and why.
            Overloaded: too many models that the key has had tried were not loaded.
        """
        at, code, reason = self._refused.get(model_id, (-REFUSED_S, Code.MODEL_LOAD_FAILED, ""))
        if now - at < REFUSED_S:
            raise error_from_code(code, reason)
        begun = {model: at for model, at in self._begun.pop(key, {}).items() if now - at < REFUSED_S}
        if begun:
            self._begun[key] = begun
        if len(begun) >= MAX_TRIES and model_id not in begun:
            left_s = min(begun.values()) + REFUSED_S - now
            text = f"{len(begun)} models tried by calls of this key in the last {REFUSED_S:.0f} s are not loaded yet"
            raise Overloaded(f"{text}; '{model_id}' is not tried now", left_s)

    def begin(self, model_id: str, key: str, now: float) -> None:
        """A model is tried for a key."""
        self._begun.setdefault(key, {})[model_id] = now

    def loaded(self, model_id: str) -> None:
        """A model was loaded: it does not count among the tries, and can be loaded."""
        self._refused.pop(model_id, None)
        for begun in self._begun.values():
            begun.pop(model_id, None)

    def refuse(self, model_id: str, code: Code | None, reason: str, now: float) -> None:
        """A model cannot be loaded; `code` is that of the error for its calls."""
        self._refused.pop(model_id, None)
        self._refused[model_id] = (now, code or Code.MODEL_LOAD_FAILED, reason)
        if len(self._refused) > _REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]
