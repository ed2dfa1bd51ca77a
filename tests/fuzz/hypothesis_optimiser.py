"""Keeps an IndexError within hypothesis' optimiser from ending a round of schemathesis.

schemathesis maximises the share of successful answers by hypothesis' hill climbing, which looks up choices by an index
of a test case that it may have replaced by one with fewer. Its IndexError would end the whole operation.
"""

from __future__ import annotations

import sys
from traceback import walk_tb
from typing import Any

from hypothesis.internal.conjecture import optimiser


def tolerate() -> None:
    """From now on, an IndexError of hypothesis' own code ends one climb; any other error still ends the round."""
    climb = optimiser.Optimiser.hill_climb

    def climb_as_far_as_possible(self: Any) -> None:
        try:
            climb(self)
        except IndexError as error:
            *_, (frame, _) = walk_tb(error.__traceback__)
            if not frame.f_globals["__name__"].startswith("hypothesis.internal."):
                raise
            print(f"hypothesis' optimiser gave up: {error!r}", file=sys.stderr)

    optimiser.Optimiser.hill_climb = climb_as_far_as_possible  # type: ignore[method-assign]
