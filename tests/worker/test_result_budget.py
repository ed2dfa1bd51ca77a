"""Results that grow with every token: who may have them made, and who waits until others are answered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from teimgr.engine.job import Input, Lane, Output, Pair
from teimgr.spec import LoadedModel
from teimgr.worker.calls import WorkerCall
from teimgr.worker.limits import ResultBudget, max_token_bytes


class Hall:
    """A room, and the calls that got into it, in order."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.room = ResultBudget(max_bytes)
        self.inside: list[WorkerCall] = []

    def enter(self, size_bytes: int, then: Callable[[WorkerCall], None] = lambda call: None) -> WorkerCall:
        call = WorkerCall(1, Lane.BULK)

        def proceed() -> None:
            self.inside.append(call)
            then(call)

        self.room.enter(call, size_bytes, proceed)
        return call


def test_what_does_not_fit_waits_by_its_order() -> None:
    hall = Hall(100)
    first, second, third = hall.enter(60), hall.enter(50), hall.enter(10)

    assert hall.inside == [first]
    hall.room.leave(first)
    assert hall.inside == [first, second, third]


def test_who_asks_for_nothing_passes_the_line() -> None:
    hall = Hall(100)
    large, _, small = hall.enter(100), hall.enter(1), hall.enter(0)

    assert hall.inside == [large, small]


def test_a_lone_call_fits_whatever_its_size() -> None:
    hall = Hall(100)
    first, second = hall.enter(10_000), hall.enter(10_000)

    assert hall.inside == [first]
    hall.room.leave(first)
    assert hall.inside == [first, second]


def test_who_gives_up_in_the_line_is_never_let_in() -> None:
    hall = Hall(100)
    first, second, third = hall.enter(100), hall.enter(100), hall.enter(100)

    hall.room.leave(second)
    hall.room.leave(first)
    assert hall.inside == [first, third]


def test_leaving_twice_gives_room_back_once() -> None:
    hall = Hall(100)
    first, second = hall.enter(50), hall.enter(50)

    hall.room.leave(first)
    hall.room.leave(first)
    third, fourth = hall.enter(50), hall.enter(1)
    assert hall.inside == [first, second, third]
    hall.room.leave(second)
    assert hall.inside[-1] is fourth


def test_a_long_line_of_calls_that_fail_at_once_is_worked_off() -> None:
    hall = Hall(100)
    first = hall.enter(100)
    for _ in range(5000):
        hall.enter(100, then=hall.room.leave)

    hall.room.leave(first)
    assert len(hall.inside) == 5001


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens", "width"),
    [
        ({Output.DENSE, Output.SPARSE}, ["fog"], 0, 0),
        ({Output.TOKENS}, ["fog"], 3 + 64, 32),
        ({Output.TOKENS, Output.MULTI_VECTOR}, ["fog", None], 3 + 2 * 64, 32 + 8),
        ({Output.MULTI_VECTOR}, ["fog" * 1000, Pair("a", "b"), np.zeros(5, np.int32)], 200 + 66 + 69, 8),
    ],
)
def test_token_vectors_are_weighed_by_the_characters_up_to_the_models_limit(
    outputs: set[Output], inputs: list[Input], tokens: int, width: int
) -> None:
    model = LoadedModel(
        model_id="m",
        model_sha=None,
        dtype="float32",
        device="cpu",
        kind="embedding",
        pooling="mean",
        batching="packed",
        dimension=32,
        max_input_length=200,
        max_batch_tokens=1024,
        token_dimension=32,
        multi_vector_dimension=8,
    )

    assert max_token_bytes(model, frozenset(outputs), inputs) == tokens * width * 4
