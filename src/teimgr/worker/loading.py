"""Blocking work that nobody can interrupt, on a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")


def in_background(name: str, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Start `work` on a thread of its own; the future has what it returned or raised.

    `asyncio.to_thread` would not do for what may take minutes: the loop's end joins its threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def finish(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # of `work`, where there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # a thread has nobody else to tell
            error = raised
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
