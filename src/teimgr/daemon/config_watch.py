"""Watch of the configuration file: it is reloaded when its content has changed, as when a ConfigMap is swapped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from teimgr.config.sources import digest_of
from teimgr.control.background import in_background, regularly
from teimgr.errors import InvalidConfig
from teimgr.observability.request_context import ordered_by

log = logging.getLogger(__name__)

BY = "watch of the configuration file"
_LIMIT_S = 10.0  # of a look, which never ends where a file server is lost


class Reloads(Protocol):
    """What reloads the file; `tried` is the digest of the content that was read last, on whatever order."""

    @property
    def tried(self) -> str: ...

    async def reload(self) -> object: ...


class Identity(NamedTuple):
    """What of a file changes with its content; `path` has no links, so that it differs once a link was swapped."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int


class ConfigWatch:
    """Looks at `file` each `interval_s` while `running`, and has `reloads` reload it when its content is another.

    A file is taken once two looks in a row find it the same, so that one which is just being written is not.
    """

    def __init__(self, file: Path | None, interval_s: float, reloads: Reloads) -> None:
        self._file = file
        self._interval_s = interval_s
        self._reloads = reloads
        self._seen: Identity | None = None
        self._settled: Identity | None = None
        self._alarm: str | None = None

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Look while the block runs."""
        if self._interval_s and self._file is not None:
            return in_background(self._run, BY)
        if self._interval_s:
            log.warning("config_watch_secs: not used, since no configuration file was given")
        return contextlib.nullcontext()

    def alarms(self) -> list[str]:
        """Why the file cannot be looked at; faults in its content are alarms of the reload."""
        return [self._alarm] if self._alarm else []

    async def _run(self) -> None:
        await regularly(self.look, self._interval_s, "the configuration file was not looked at", log)

    async def look(self) -> None:
        """Look once, and reload a file that has changed."""
        assert self._file is not None
        try:
            found = await self._within_limit(identity, self._file)
            is_steady, self._seen = found == self._seen, found
            if is_steady and found != self._settled:
                content = await self._within_limit(Path.read_bytes, self._file)
                self._settled = found
                if digest_of(content) != self._reloads.tried:
                    with ordered_by(BY), contextlib.suppress(InvalidConfig):  # logged, an event and an alarm
                        await self._reloads.reload()
        except OSError as error:
            self._seen = None
            self._alarm = f"{self._file}: changes of the configuration are not seen: {error.strerror or error}"
        else:
            self._alarm = None

    async def _within_limit(self, work: Callable[[Path], Any], file: Path) -> Any:
        """Do blocking work on a thread; past the limit an alarm stands until it is done."""
        doing = asyncio.create_task(asyncio.to_thread(work, file))
        if not (await asyncio.wait({doing}, timeout=_LIMIT_S))[0]:
            self._alarm = f"{file}: the configuration file does not answer within {_LIMIT_S:g} s"
        return await doing


def identity(file: Path) -> Identity:
    """The identity of a file, all links followed. Blocking.

    Raises:
        OSError: it cannot be looked at, or cannot be read more than once, as a pipe.
    """
    path = file.resolve(strict=True)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return Identity(str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
