"""JSON files beside the state file that are written a second after a change, on a thread: `DelayedJson`, `KeptFile`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from teimgr.files import write_atomically

log = logging.getLogger(__name__)

_WRITE_AFTER_S = 1.0  # many changes come together


class DelayedJson:
    """Figures that can be measured again, so disk errors are only logged. Without a path nothing is read or written.

    `name` is for logs; `content`, called on a thread, gives the object to write.
    """

    def __init__(self, path: Path | None, name: str, content: Callable[[], dict[str, Any]]) -> None:
        self._path = path
        self._name = name
        self._content = content
        self._writing: asyncio.Task[None] | None = None
        self._is_changed = False  # since the last write began
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
            log.warning("%s cannot be read and will be measured again: %s", self._name, error)

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
        while self._is_changed:  # a change may come while the one before is written
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_AFTER_S):
                    await self._is_ending.wait()
            self._is_changed = False
            await asyncio.to_thread(self._save, path)

    def _save(self, path: Path) -> None:
        try:
            write_atomically(path, orjson.dumps({"version": 1, **self._content()}), mode=0o600)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._name, error)


def kept_path(state_file: Path) -> Path:
    """The file, beside the state file."""
    return state_file.with_name(f"{state_file.stem}.capacity.json")


class KeptFile:
    """Sections by name; used by the event loop, written on a thread. Without a path nothing is kept."""

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
