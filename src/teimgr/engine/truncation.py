"""What is kept of an input that has too many tokens.

The library would truncate as well, but it also makes every piece of what it cuts off, and of a pair every combination
of the pieces of both: two texts of a megabyte would take all memory there is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding


class Cut(NamedTuple):
    """Keep `limit` tokens, special ones included; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool

    def kept(self, encoding: Encoding) -> NDArray[np.intp] | None:
        """Where the tokens are that stay, special ones always; None where all do."""
        if len(encoding) <= self.limit:
            return None
        half_of = halves(encoding)
        stays = half_of < 0
        for half, count in enumerate(self.counts(half_of)):
            tokens = np.flatnonzero(half_of == half)
            stays[tokens[len(tokens) - count :] if self.left else tokens[:count]] = True
        return np.flatnonzero(stays)

    def counts(self, half_of: NDArray[np.int8]) -> tuple[int, int]:
        """How many tokens of the first and of the second half stay; a single text is a first half."""
        first, second = (int((half_of == half).sum()) for half in (0, 1))
        room = self.room(half_of)
        if first + second <= room:
            return first, second
        if min(first, second) * 2 <= room:  # the shorter one stays whole
            return (first, room - first) if first <= second else (room - second, second)
        less = room // 2
        return (less, room - less) if first <= second else (room - less, less)

    def room(self, half_of: NDArray[np.int8]) -> int:
        """How many tokens may stay beside the special ones."""
        return max(0, self.limit - int((half_of < 0).sum()))


def halves(encoding: Encoding) -> NDArray[np.int8]:
    """Which half each token is of, 0 or 1; -1 for special ones."""
    return np.array([-1 if half is None else half for half in encoding.sequence_ids], dtype=np.int8)
