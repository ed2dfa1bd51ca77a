"""Which errors of a climb end a round, and which do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.internal.conjecture.optimiser import Optimiser

from tests.fuzz import hypothesis_optimiser

NODE = SimpleNamespace(index=0, type="integer", was_forced=False, value=1, constraints={})


class Shrinking:
    """A test case whose choices vanish while hypothesis looks at them."""

    choices = (1,)

    def __init__(self) -> None:
        self._left = [(NODE,), (NODE,), ()]

    @property
    def nodes(self) -> tuple[Any, ...]:
        return self._left.pop(0)


def climb(data: object) -> None:
    Optimiser(None, data, "a").run()  # type: ignore[arg-type]


@pytest.fixture
def tolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimiser, "hill_climb", Optimiser.hill_climb)
    hypothesis_optimiser.tolerate()


def test_hypothesis_own_error_ends_a_climb() -> None:
    with pytest.raises(IndexError):
        climb(Shrinking())


def test_hypothesis_own_error_is_reported_and_tolerated(tolerant: None, capsys: pytest.CaptureFixture[str]) -> None:
    climb(Shrinking())

    assert "optimiser gave up: IndexError" in capsys.readouterr().err


def test_the_same_error_of_other_code_is_not(tolerant: None) -> None:
    class Faulty:
        @property
        def nodes(self) -> tuple[Any, ...]:
            return ((),)[1]

    with pytest.raises(IndexError):
        climb(Faulty())
