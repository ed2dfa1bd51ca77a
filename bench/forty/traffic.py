"""Callers that call random models over random interfaces, one call at a time each, until their time is over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.fleet import Fleet
from bench.forty.calls import CALLS, TEXTS, Refused, is_right
from bench.forty.catalogue import Model
from bench.forty.residence import Answered

_WANTED = 6
"""So many models get half of the calls."""
RIGHT, REFUSED, WRONG, BROKEN = "right", "refused", "wrong", "broken"


@dataclass(frozen=True)
class Outcome:
    """What became of one call. `why` is the reason of one that was not right."""

    model: str
    surface: str
    began: float
    ended: float
    result: str
    why: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def answered(self) -> Answered:
        return Answered(self.model, self.began, self.ended)


def drive(
    fleet: Fleet, made: Sequence[Model], alone: Mapping[str, Sequence[np.ndarray]], seconds: float, callers: int
) -> list[Outcome]:
    """The outcomes of all calls, in the order in which they ended. What comes is decided by the number of a caller."""
    found: list[Outcome] = []
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        wanted = made[:: max(1, len(made) // _WANTED)]
        while not over.is_set():
            model = chance.choice(wanted if chance.random() < 0.5 else made)
            surface = chance.choice([*CALLS[model.kind]])
            found.append(_outcome(fleet, model, surface, chance.randrange(len(TEXTS)), alone[model.name]))

    try:
        with ThreadPoolExecutor(callers) as pool:
            for each in [pool.submit(work, seed) for seed in range(callers)]:
                each.result()
    finally:
        timer.cancel()
        over.set()
    return found


def _outcome(fleet: Fleet, model: Model, surface: str, number: int, alone: Sequence[np.ndarray]) -> Outcome:
    began, why = time.time(), ""
    try:
        answer = CALLS[model.kind][surface](fleet, model.name, number)
        result = RIGHT if is_right(answer, alone[number]) else WRONG
        why = "" if result is RIGHT else f"another answer: {answer[:4]} in place of {alone[number][:4]}"
    except Refused as refused:
        result, why = REFUSED, str(refused)
    except Exception as error:  # a finding, whatever it is
        result, why = BROKEN, f"{type(error).__name__}: {error}"
    return Outcome(model.name, surface, began, time.time(), result, why)
