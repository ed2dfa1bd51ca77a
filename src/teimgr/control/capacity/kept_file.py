"""What scaling and recommendations keep across restarts, in a file beside the state file: sections of JSON values."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import orjson

from teimgr.files import write_atomically

log = logging.getLogger(__name__)

_WRITE_AFTER_S = 1.0


def kept_path(state_file: Path) -> Path:
    """The file, beside the state file."""
    return state_file.with_name(f"{state_file.stem}.capacity.json")


class KeptFile:
    """Sections by name; used by the event loop, written on a thread. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sections: dict[str, Any] = {}
        self._writing: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read the file; a broken one is left out, as its figures can be measured again. Blocking."""
        if self._path is None:
            return
        try:
            self._sections = dict(orjson.loads(self._path.read_bytes())["sections"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("figures of scaling cannot be read, and are measured again: %s", error)

    def get(self, section: str) -> Any:
        """The value of a section; None without it."""
        return self._sections.get(section)

    def put(self, section: str, value: Any) -> None:
        """Keep a value, which is written soon; it must not be changed afterwards."""
        self._sections[section] = value
        if self._path is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="figures of scaling")

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
            await asyncio.to_thread(self._save, dict(self._sections))

    async def _write(self) -> None:
        await asyncio.sleep(_WRITE_AFTER_S)
        await asyncio.to_thread(self._save, dict(self._sections))

    def _save(self, sections: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            write_atomically(self._path, orjson.dumps({"version": 1, "sections": sections}), mode=0o600)
        except OSError as error:
            log.warning("figures of scaling cannot be written: %s", error)
