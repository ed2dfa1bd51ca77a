"""Questions to a script as JSON in its argument, its answers as JSON on its output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def main(*questions: Callable[[Any], Any]) -> None:
    """Ask every question of what the test says, and print the answers under the questions' names."""
    told = SimpleNamespace(**json.loads(sys.argv[1]))
    answers = {question.__name__: question(told) for question in questions}
    print(json.dumps(answers, default=lambda value: value.tolist()))


def refusal(call: Callable[[], Any]) -> str:
    """What a call that must fail raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was answered")
