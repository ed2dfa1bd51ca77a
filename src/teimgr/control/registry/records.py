"""Records of models in the registry (`ModelRecord`), and their REST representation (`ModelView`).

state.models.json               beside the state file and named after it
state.models.json.corrupt-<n>   an unreadable file, set aside
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from teimgr.control.registry.cache import Snapshot
from teimgr.errors import ModelLoadFailed
from teimgr.files import failure_of, write_atomically
from teimgr.models import bounded_json as model_json
from teimgr.spec import now_rfc3339, rfc3339

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """The record of one model.

    `added_at` is set if a user added or downloaded it. `tried_commit` is the commit loaded by the last trial (None for
    a directory), `trial` its measurements, `verification_error` why it failed.
    """

    added_at: str | None = None
    revision: str | None = None
    gated: bool | None = None
    last_verified: str | None = None
    verification_error: str | None = None
    tried_commit: str | None = None
    trial: Mapping[str, Any] = field(default_factory=dict)


class ModelRecords:
    """The records in memory, and after `save` in the file at `path`. One daemon writes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, ModelRecord] = {}
        self._load_alarm: str | None = None
        self._save_alarm: str | None = None
        self._saving = asyncio.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def of(self, model_id: str) -> ModelRecord:
        """The record of a model, empty by default."""
        return self._records.get(model_id, ModelRecord())

    def note(self, model_id: str, **change: Any) -> None:
        """Change keys of a model's record; `added_at` is set once."""
        known = self.of(model_id)
        self._records[model_id] = replace(known, **{"added_at": known.added_at or now_rfc3339(), **change})

    def forget(self, model_id: str) -> None:
        self._records.pop(model_id, None)

    async def load(self) -> None:
        """Read the file. Never raises: a file that cannot be read is set aside, with an alarm."""
        self._records = await asyncio.to_thread(self._read)

    async def save(self) -> None:
        """Replace the file. Never raises: a disk that refuses is an alarm, and the registry goes on."""
        async with self._saving:
            content = render(self._records)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(write_atomically, self.path, content, durable=True)
            except OSError as error:
                self._save_alarm = f"the model registry cannot be saved: {failure_of(error)}"
                log.error("model registry not saved", extra={"reason": self._save_alarm})
            else:
                self._save_alarm = None

    def alarms(self) -> list[str]:
        return [alarm for alarm in (self._load_alarm, self._save_alarm) if alarm is not None]

    def _read(self) -> dict[str, ModelRecord]:
        try:
            return parse(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
            try:
                self.path.replace(aside)
                kept = f"it was kept as {aside}"
            except OSError as failure:
                kept = f"it could not be set aside: {failure}"
            self._load_alarm = f"the model registry {self.path} cannot be read ({error}); {kept}"
            log.error("model registry starts without its records", extra={"reason": self._load_alarm})
            return {}


def records_path(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.stem}.models.json")


def parse(content: bytes) -> dict[str, ModelRecord]:
    """The inverse of `render`; keys of a newer version are left out.

    Raises:
        ValueError: not a file of the registry.
    """
    try:
        entries = model_json.parse(content, "it")["models"].items()
    except (ModelLoadFailed, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a registry file: {getattr(error, 'message', repr(error))}") from error
    if not all(isinstance(entry, dict) for _, entry in entries):
        raise ValueError("not a registry file: a record is not an object")
    return {model_id: _record(entry) for model_id, entry in entries}


_TEXTS = ("added_at", "revision", "last_verified", "verification_error", "tried_commit")


def _record(entry: dict[str, Any]) -> ModelRecord:
    """The record of an entry; one with a value of another type is said to be broken in `verification_error`."""
    given = {name: entry[name] for name in (item.name for item in fields(ModelRecord)) if name in entry}
    texts = all(isinstance(given.get(name), str | None) for name in _TEXTS)
    is_whole = texts and isinstance(given.get("gated"), bool | None) and isinstance(given.get("trial", {}), dict)
    return ModelRecord(
        **given if is_whole else {"verification_error": "its record in the registry has a value of a wrong type"}
    )


def render(records: Mapping[str, ModelRecord]) -> bytes:
    """The content of the file; defaults are left out."""
    empty = asdict(ModelRecord())
    entries = {
        model_id: {name: value for name, value in asdict(each).items() if value != empty[name]}
        for model_id, each in sorted(records.items())
    }
    return json.dumps({"version": _VERSION, "models": entries}, indent=1).encode()


class ModelStatus(str, Enum):
    """How much of a model is on this host, or the task in progress."""

    AVAILABLE = "available"
    DOWNLOADING = "downloading"
    DOWNLOADED = "downloaded"
    LOADING = "loading"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadProgress:
    """The progress of a download; unknown values are absent."""

    # waiting: another download is running. Bytes of an earlier attempt count as done but not in the rate.
    phase: Literal["waiting", "listing", "fetching", "done"]
    bytes_done: int
    bytes_total: int | None = None
    files_done: int
    files_total: int | None = None
    rate_bytes_per_s: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The measurements of the last passed trial; missing ones are absent. Sizes in bytes, times in seconds."""

    # start_s is the time from launch to ready, load_s its part that reads the model. peak_rss_bytes and private_bytes
    # are the worker's host memory, device_bytes its GPU memory. Speed is measured with one text per call.
    device: str
    gpu_id: int | None = None
    dtype: str
    kind: str
    dimension: int
    max_input_length: int
    batching: str
    start_s: float
    load_s: float
    peak_rss_bytes: int | None = None
    private_bytes: int | None = None
    device_bytes: int | None = None
    texts_per_s: float
    tokens_per_s: float
    # compared_with: sentence-transformers or transformers with its version, or the model's own float32 forward with the
    # reason in not_compared. min_cosine and score_difference (of logits, relative if above 1) are the worst inputs.
    compared_with: str | None = None
    min_cosine: float | None = None
    score_difference: float | None = None
    inputs: int | None = None
    longest_tokens: int | None = None
    not_compared: str | None = None
    warnings: list[str] | None = None
    code: list[str] | None = None


@dataclass(frozen=True, slots=True)
class ModelCommit:
    """One commit of a model in the hub's cache."""

    commit: str
    refs: list[str]
    size_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """The current state of one model.

    `snapshot` is what a worker would load, complete or not; `commits` are all in the cache, newest first. `busy` is the
    status of the task in progress, `used_by` the instances of this model, `download_error` why the last download since
    the daemon's start failed.
    """

    model_id: str
    record: ModelRecord
    started_at: str
    snapshot: Snapshot | None = None
    metadata: dict[str, Any] | None = None
    commits: tuple[Snapshot, ...] = ()
    busy: ModelStatus | None = None
    progress: DownloadProgress | None = None
    download_error: str | None = None
    used_by: tuple[str, ...] = ()

    @property
    def downloaded(self) -> bool:
        """True if all files that a worker needs are on this host."""
        return self.snapshot is not None and self.snapshot.complete

    @property
    def status(self) -> ModelStatus:
        """The task under way, else what is on the disk, failed where a file of it cannot be read; a trial counts only
        for the commit that it tried.
        """
        if self.busy is not None:
            return self.busy
        if self.snapshot is not None and self.snapshot.fault is not None:
            return ModelStatus.FAILED
        if self.snapshot is None or not self.snapshot.complete:
            return ModelStatus.AVAILABLE
        record = self.record
        if self.snapshot.commit != record.tried_commit or not (record.last_verified or record.verification_error):
            return ModelStatus.DOWNLOADED
        return ModelStatus.FAILED if record.verification_error else ModelStatus.VERIFIED

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of REST; keys without a value are left out."""
        record, snapshot = self.record, self.snapshot
        changed_at = rfc3339(datetime.fromtimestamp(snapshot.changed_at, UTC), "auto") if snapshot else None
        values: dict[str, Any] = {
            "model_id": self.model_id,
            "status": self.status.value,
            "downloaded": self.downloaded,
            "added_at": record.added_at or changed_at or self.started_at,
            "revision": record.revision,
            "gated": record.gated,
            "used_by": list(self.used_by),
            "metadata": self.metadata,
            "last_verified": record.last_verified,
            "verification_error": (snapshot.fault if snapshot else None) or record.verification_error,
            "verification": dict(record.trial) or None,
            "download_error": self.download_error,
            "progress": known_values(self.progress) if self.progress else None,
        }
        if snapshot is not None:
            values |= {
                "cache_path": os.fsencode(snapshot.path).decode(errors="replace"),
                "cache_size_bytes": snapshot.size_bytes,
                "commit": snapshot.commit,
                "files": [asdict(file) for file in snapshot.files],
                "commits": [
                    asdict(ModelCommit(each.commit or "", list(each.refs), each.size_bytes, each.complete))
                    for each in self.commits
                ]
                or None,
            }
        return {name: value for name, value in values.items() if value is not None}


def known_values(values: DownloadProgress | Verification) -> dict[str, Any]:
    """Plain values by name, without those that are None."""
    return {name: value for name, value in asdict(values).items() if value is not None}
