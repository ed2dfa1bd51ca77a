"""What scaling and recommendations keep across restarts, in a file beside the state file: sections of JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teimgr.control.delayed_json import DelayedJson


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
