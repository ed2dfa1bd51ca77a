"""Work in the background: tasks that end with a block, commands that end even if their caller leaves, delayed writes.

`DelayedJson` and `KeptFile` write JSON files beside the state file a second after a change, on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from logging import Logger
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import orjson

from teimgr.errors import Unavailable
from teimgr.files import write_atomically

T = TypeVar("T")


class CommandTurns:
    """Commands of a manager: `carry_out` runs each as a task of its own, `of` serializes them by name."""

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
            task.exception()  # marks it as retrieved; the caller may have left


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


log = logging.getLogger(__name__)

_WRITE_AFTER_S = 1.0  # combines changes


class DelayedJson:
    """Values that can be measured again, so disk errors are only logged. Without a path nothing is read or written.

    `name` is for logs. `content`, called on a thread, returns the object to write.
    """

    def __init__(self, path: Path | None, name: str, content: Callable[[], dict[str, Any]]) -> None:
        self._path = path
        self._name = name
        self._content = content
        self._writing: asyncio.Task[None] | None = None
        self._is_changed = False  # since the current write began
        self._is_ending = asyncio.Event()

    def read(self, take: Callable[[Any], None]) -> None:
        """Give the file's content to `take`, whose errors mean that it is broken. Blocking."""
        if self._path is None:
            return
        try:
            take(orjson.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("cannot read %s; measuring again: %s", self._name, error)

    def write_soon(self) -> None:
        """The content has changed; call it on the event loop."""
        self._is_changed = True
        if self._path is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write(self._path), name=self._name)

    async def close(self) -> None:
        """Write what is not written yet."""
        self._is_ending.set()
        if self._writing is not None:
            await self._writing

    async def _write(self, path: Path) -> None:
        while self._is_changed:  # changes may come during a write
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_AFTER_S):
                    await self._is_ending.wait()
            self._is_changed = False
            await asyncio.to_thread(self._save, path)

    def _save(self, path: Path) -> None:
        try:
            write_atomically(path, orjson.dumps({"version": 1, **self._content()}), mode=0o600)
        except OSError as error:
            log.warning("cannot write %s: %s", self._name, error)


def kept_path(state_file: Path) -> Path:
    """The file, beside the state file."""
    return state_file.with_name(f"{state_file.stem}.capacity.json")


class KeptFile:
    """Sections by name, used by the event loop and written by a thread. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._sections: dict[str, Any] = {}
        self._file = DelayedJson(path, "figures of scaling", lambda: {"sections": dict(self._sections)})

    def load(self) -> None:
        """Read the file; a broken one is left out, as its figures can be measured again. Blocking."""
        self._file.read(self._take)

    def get(self, section: str) -> Any:
        """The value of a section; None without it."""
        return self._sections.get(section)

    def put(self, section: str, value: Any) -> None:
        """Keep a value, which is written soon; it must not be changed afterwards."""
        self._sections[section] = value
        self._file.write_soon()

    async def close(self) -> None:
        """Write what is not written yet."""
        await self._file.close()

    def _take(self, content: Any) -> None:
        self._sections = dict(content["sections"])
