"""What the registry must remember and no disk layout says: who was added, what was tried, and with what result.

state.models.json               beside the state file, and named after it
state.models.json.corrupt-<n>   one that could not be read, set aside
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from teimgr.clock import now_rfc3339
from teimgr.files import write_atomically

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is remembered of one model.

    `added_at` is set where a user added or downloaded it. `tried_commit` is what the last trial tried (None for a
    directory, which has no commits), `trial` its figures, `verification_error` why it failed.
    """

    added_at: str | None = None
    revision: str | None = None
    gated: bool | None = None
    last_verified: str | None = None
    verification_error: str | None = None
    tried_commit: str | None = None
    trial: Mapping[str, Any] = field(default_factory=dict)


class FactsFile:
    """The file at `path`; one writer at a time. `alarm` says what happened to it when it could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alarm: str | None = None

    def load(self) -> dict[str, Facts]:
        """Facts by model id; none where there is no file. Never raises."""
        try:
            return parse(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            kept = self._set_aside()
            self.alarm = f"the model registry's file {self.path} cannot be read ({error}); {kept}"
            log.error("model registry starts without its facts", extra={"reason": self.alarm})
            return {}

    def save(self, facts: Mapping[str, Facts]) -> None:
        """Make the disk say `facts`: the file is old or new at every moment.

        Raises:
            OSError: the disk refused; the file is what it was.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, render(facts), durable=True)

    def _set_aside(self) -> str:
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
        try:
            self.path.replace(aside)
        except OSError as error:
            return f"it could not be kept: {error}"
        return f"it was kept as {aside}"


class Remembered:
    """The facts in memory, and on the disk after `save`."""

    def __init__(self, path: Path) -> None:
        self._file = FactsFile(path)
        self._facts: dict[str, Facts] = {}
        self._save_alarm: str | None = None
        self._saving = asyncio.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def of(self, model_id: str) -> Facts:
        """What is remembered of a model; the defaults where it is nothing."""
        return self._facts.get(model_id, Facts())

    def note(self, model_id: str, **change: Any) -> None:
        """Remember this of a model, and when it was first heard of."""
        known = self.of(model_id)
        self._facts[model_id] = replace(known, **{"added_at": known.added_at or now_rfc3339(), **change})

    def forget(self, model_id: str) -> None:
        """Remember nothing of a model."""
        self._facts.pop(model_id, None)

    async def load(self) -> None:
        """Remember what the disk says. Never raises."""
        self._facts = await asyncio.to_thread(self._file.load)

    async def save(self) -> None:
        """Have the disk say it. A disk that refuses is an alarm; the registry goes on."""
        async with self._saving:
            try:
                await asyncio.to_thread(self._file.save, dict(self._facts))
            except OSError as error:
                self._save_alarm = f"the model registry's file cannot be saved: {error}"
                log.error("model registry not saved", extra={"reason": self._save_alarm})
            else:
                self._save_alarm = None

    def alarms(self) -> list[str]:
        """What people must know of the file."""
        return [alarm for alarm in (self._file.alarm, self._save_alarm) if alarm is not None]


def facts_path(state_file: Path) -> Path:
    """Where the registry of the daemon with this state file keeps its facts."""
    return state_file.with_name(f"{state_file.stem}.models.json")


def parse(content: bytes) -> dict[str, Facts]:
    """The inverse of `render`; keys of a newer version are left out.

    Raises:
        ValueError: it is no such file.
    """
    try:
        table = json.loads(content)
        known = {item.name for item in fields(Facts)}
        return {
            model_id: Facts(**{name: value for name, value in entry.items() if name in known})
            for model_id, entry in table["models"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the registry's: {error!r}") from error


def render(facts: Mapping[str, Facts]) -> bytes:
    """The bytes of the file; what is at its default is left out."""
    empty = asdict(Facts())
    entries = {
        model_id: {name: value for name, value in asdict(each).items() if value != empty[name]}
        for model_id, each in sorted(facts.items())
    }
    return json.dumps({"version": _VERSION, "models": entries}, indent=1).encode()
