"""Freeing of large values in parts: to free the million texts of a list in one call holds the GIL for 30 ms."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from sys import getrefcount
from typing import Any

from teimgr.wire.gil_interval import Rests

# Values that one call frees: a millisecond or two.
_AT_ONCE = 2**15
_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))
# References to a value that only its list has, as `_alone` counts them: the list's, its own and that of the count.
_ONE_OWNER = 3


def free(*values: Any) -> None:
    """Empty lists, dicts and objects that are of no more use, and those in them that nothing else refers to.

    For a thread: others get the GIL between two parts.
    """
    rest = Rests()
    for value in values:
        for _ in freed(value):
            rest()


def freed(value: Any) -> Generator[None, None, None]:
    """`free` of one value in steps."""
    waiting = [taken] if (taken := _members(value)) else []
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        few = waiting[-1][-_AT_ONCE:]
        del waiting[-1][-_AT_ONCE:]
        nested = _alone(few)
        few.clear()
        while nested:
            if members := _members(nested.pop()):
                waiting.append(members)
        yield


def _alone(values: list[Any]) -> list[Any]:
    """Those that may have others in them, and that nothing but the list refers to."""
    return [one for one in values if type(one) not in _LEAVES and getrefcount(one) <= _ONE_OWNER]


def _members(value: Any) -> list[Any]:
    """The values in a list, dict or object, which is emptied unless it is a list."""
    if type(value) is list:
        return value
    holder = value if type(value) is dict else getattr(value, "__dict__", None)
    if type(holder) is not dict:
        return []
    taken = list(holder.values())
    with suppress(RuntimeError):  # another thread has put something into it
        holder.clear()
    return taken
