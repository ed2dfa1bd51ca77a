"""Seeded mutation of recordings: many thousand cases a second, where a generator of hypothesis makes some hundred."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

_LONGEST_PART = 24
_MAX_STEPS = 5
_EDGES = (b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f")


class Mutator:
    """Cases from `recordings`: bytes changed, cut, repeated, spliced from another one, or with one of `tokens` put in.

    The same seed makes the same cases. `structured` is a change that uses the format, tried for half of the cases.
    """

    def __init__(
        self,
        seed: int,
        recordings: Sequence[bytes],
        tokens: Sequence[bytes] = (),
        structured: Callable[[random.Random, bytes], bytes] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self._recordings = recordings
        self._tokens = (*_EDGES, *tokens)
        self._structured = structured

    def cases(self, count: int) -> Iterator[bytes]:
        return (self.case() for _ in range(count))

    def case(self) -> bytes:
        """The next one; one in twenty is a recording as it is, which shows that good input is still served."""
        chance = self.random
        raw = chance.choice(self._recordings)
        if chance.random() < 0.05:
            return raw
        if self._structured is not None and chance.random() < 0.5:
            raw = self._structured(chance, raw)
            if chance.random() < 0.5:
                return raw
        found = bytearray(raw)
        for _ in range(chance.randint(1, _MAX_STEPS)):
            self._change(found)
        return bytes(found)

    def _change(self, raw: bytearray) -> None:
        chance = self.random
        at = chance.randint(0, len(raw))
        until = min(len(raw), at + chance.randint(1, _LONGEST_PART))
        match chance.randrange(8):
            case 0 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(raw):
                raw[at] = chance.randrange(256)
            case 2:
                del raw[at:until]
            case 3:
                raw[at:at] = raw[at:until] * chance.randint(1, 6)
            case 4:
                raw[at:until] = chance.choice(self._tokens)
            case 5:
                raw[at:at] = chance.choice(self._tokens)
            case 6:
                other = chance.choice(self._recordings)
                raw[at:] = other[chance.randint(0, len(other)) :]
            case 7 if chance.random() < 0.3:
                del raw[at:]
            case _:
                raw[at:at] = chance.randbytes(chance.randint(1, 6))
