"""Steady gRPC load from a thread of its own, and what became of every call."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from tests.support.daemon_process import DaemonProcess

from teimgr.errors import TeimgrError

CALLERS = 3
PAUSE_S = 0.02
"""Of a caller after each call. Callers without one would take the cores from what heals meanwhile."""


@dataclass
class Load:
    """`CALLERS` callers embed one text after another on `instance`, some 100 in a second, until the block ends.

    `done` counts answers; `failures` counts failed calls by code; `progress` waits for more answers.
    """

    daemon: DaemonProcess
    instance: str
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def calls(self) -> int:
        return self.done + self.failures.total()

    def progress(self, answers: int, limit_s: float = 30.0) -> None:
        """Wait for so many more answers."""
        with self._moved:
            wanted = self.done + answers
            assert self._moved.wait_for(lambda: self.done >= wanted, limit_s), f"no progress: {self}"

    async def _run(self) -> None:
        async with self.daemon.async_client(timeout_s=30) as client:

            async def caller(number: int) -> None:
                while not self._stopping.is_set():
                    try:
                        await client.embed(f"text {number} of the load, call {self.calls}", instance=self.instance)
                    except TeimgrError as error:
                        self._count(error)
                    else:
                        self._count(None)
                    await asyncio.sleep(PAUSE_S)

            await asyncio.gather(*(caller(number) for number in range(CALLERS)))

    def _count(self, error: TeimgrError | None) -> None:
        with self._moved:
            if error is None:
                self.done += 1
            else:
                self.failures[error.code.name] += 1
            self._moved.notify_all()
