"""A model as the registry shows it: status, files, commits, download progress, result of the last trial."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal

from teimgr.registry.cache import Snapshot, timestamp
from teimgr.registry.records import ModelRecord


class ModelStatus(str, Enum):
    """Which part of a model is on this host, or what is being done with it."""

    AVAILABLE = "available"
    DOWNLOADING = "downloading"
    DOWNLOADED = "downloaded"
    LOADING = "loading"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadProgress:
    """How far a download is; what is not known yet is absent."""

    # waiting: for another download to end. Bytes of before count as done, and not towards the rate.
    phase: Literal["waiting", "listing", "fetching", "done"]
    bytes_done: int
    bytes_total: int | None = None
    files_done: int
    files_total: int | None = None
    rate_bytes_per_s: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the last passed trial measured; what could not be measured is absent. Sizes are bytes, times seconds."""

    # start_s is from launch to ready, load_s the part of it that read the model. Memory is the worker's: peak_rss_bytes
    # and private_bytes on the host, device_bytes on its GPU. Speed is that of short and medium texts, one per call.
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


@dataclass(frozen=True, slots=True)
class ModelCommit:
    """One commit of a model in the hub's cache."""

    commit: str
    refs: list[str]
    size_bytes: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model at one moment.

    `snapshot` is what a worker would load, complete or not; `commits` all that the cache has, the newest first. `busy`
    is the status of the task under way, `used_by` the instances of this model, `download_error` why the last download
    since the daemon's start failed.
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
        """Whether a worker finds all it needs on this host."""
        return self.snapshot is not None and self.snapshot.complete

    @property
    def status(self) -> ModelStatus:
        """The task under way, else what is on the disk; a trial counts only for the commit that it tried."""
        if self.busy is not None:
            return self.busy
        if self.snapshot is None or not self.snapshot.complete:
            return ModelStatus.AVAILABLE
        record = self.record
        if self.snapshot.commit != record.tried_commit or not (record.last_verified or record.verification_error):
            return ModelStatus.DOWNLOADED
        return ModelStatus.FAILED if record.verification_error else ModelStatus.VERIFIED

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of REST; keys without a value are left out."""
        record, snapshot = self.record, self.snapshot
        values: dict[str, Any] = {
            "model_id": self.model_id,
            "status": self.status.value,
            "downloaded": self.downloaded,
            "added_at": record.added_at or (timestamp(snapshot.changed_at) if snapshot else self.started_at),
            "revision": record.revision,
            "gated": record.gated,
            "used_by": list(self.used_by),
            "metadata": self.metadata,
            "last_verified": record.last_verified,
            "verification_error": record.verification_error,
            "verification": dict(record.trial) or None,
            "download_error": self.download_error,
            "progress": known_values(self.progress) if self.progress else None,
        }
        if snapshot is not None:
            values |= {
                "cache_path": str(snapshot.path),
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
