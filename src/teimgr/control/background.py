"""Tasks in the background: those that end with a block, and commands that end even if their caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from logging import Logger
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from teimgr.errors import Unavailable

T = TypeVar("T")


class CommandTurns:
    """Commands of a manager: `carry_out` owns each as a task, `of` has them take turns by name."""

    def __init__(self) -> None:
        self._is_over = False
        self._commands: set[asyncio.Task[Any]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def carry_out(self, command: Coroutine[Any, Any, T], name: str) -> T:
        """Run `command` as a task named `name`: a caller who leaves does not leave it half done."""
        task = asyncio.create_task(command, name=name)
        self._commands.add(task)
        task.add_done_callback(self._on_ended)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """The turn of one command on the instance `name`.

        Raises:
            Unavailable: the daemon is ending.
        """
        async with self._turns.setdefault(name, asyncio.Lock()):
            self.require_open()
            yield

    def require_open(self) -> None:
        """Raises Unavailable: the daemon is ending."""
        if self._is_over:
            raise Unavailable("the daemon is ending")

    def close(self) -> None:
        """Refuse what still waits for its turn."""
        self._is_over = True

    async def ended(self, limit_s: float) -> None:
        """Return when the commands under way are over, or after `limit_s`."""
        if self._commands:
            await asyncio.wait(self._commands, timeout=limit_s)

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the caller may have left


@asynccontextmanager
async def in_background(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> AsyncIterator[None]:
    """Run `work` as a task while the block runs; at the end cancel it, and wait until it has ended."""
    task = asyncio.create_task(work(), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def regularly(work: Callable[[], Awaitable[object]], interval_s: float, failure: str, log: Logger) -> None:
    """Do `work` every `interval_s` until cancelled. An exception of it is a defect: it is logged with the text
    `failure`, nothing changes, and the next time may be good."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            log.exception(failure)
