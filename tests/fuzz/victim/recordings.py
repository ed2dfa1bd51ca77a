"""Attacks by the recordings of the other surfaces, with the attacker's key in them, mutated and sent many at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from tests.fuzz import h2c, http1, http2
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Address, Report, flooded
from tests.fuzz.victim.attack import ADDRESS, Attack, Strike
from tests.fuzz.victim.target import ATTACKER, KEYS, SHARED, Target

_KEY = f"\r\nauthorization: Bearer {KEYS[ATTACKER]}\r\nhost:".encode()


def attacks() -> Iterator[Attack]:
    """One for each protocol."""
    for name, recordings in (("http1", _http1), ("http2", _http2), ("h2c", _h2c)):
        yield Attack("mutated", name, partial(_mutated, name, recordings), 100, 20_000, "cases")


def _http1(chance: random.Random) -> Mutator:
    known = [_renamed(each.replace(b"\r\nhost:", _KEY, 1)) for each in http1.RECORDINGS]
    return Mutator(chance.randrange(2**32), known, http1.TOKENS)


def _http2(chance: random.Random) -> Mutator:
    return Mutator(chance.randrange(2**32), http2.recordings(), http2.TOKENS, http2.changed_frames)


def _h2c(chance: random.Random) -> Mutator:
    seed = chance.randrange(2**32)
    return Mutator(seed, h2c.recordings(random.Random(seed), 100), h2c.TOKENS, http2.changed_frames)


def _renamed(raw: bytes) -> bytes:
    """With the attacker's instances; lengths of bodies are then wrong here and there, which is one more mutation."""
    return raw.replace(b"fuzz-embedding", SHARED.encode()).replace(b"fuzz-reranker", b"a-ranker")


def _mutated(name: str, recordings: object, target: Target, chance: random.Random, count: int) -> Strike:
    assert callable(recordings)
    cases = list(recordings(chance).cases(count))
    first = target.daemon.grpc_port if name == "http2" else target.daemon.api_port
    addresses = [Address(port, source=ADDRESS[0]) for port in (first, target.ports[SHARED])]

    async def strike() -> str:
        report = Report(name)
        await flooded(addresses, iter(cases), lambda received: "answered" if received else "closed", report)
        assert not report.failures, report.failures[0]
        return ", ".join(report.outcomes)

    return strike
