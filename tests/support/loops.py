"""The event loop of a test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop of our processes, whose transports differ from asyncio's."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        uvloop.run(test(*arguments, **named))

    return run
