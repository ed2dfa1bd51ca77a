"""A model as the registry shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from teimgr.registry.cache import Snapshot, timestamp
from teimgr.registry.download import Progress
from teimgr.registry.records import Facts


class ModelStatus(str, Enum):
    """What of a model is there, or is being done with it."""

    AVAILABLE = "available"
    DOWNLOADING = "downloading"
    DOWNLOADED = "downloaded"
    LOADING = "loading"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """What lies on the disk of a model: what a worker would load now, or the part of it that is there.

    `commits` are all that the cache has, the newest first.
    """

    snapshot: Snapshot | None = None
    metadata: dict[str, Any] | None = None
    commits: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model at a moment. `busy` is what is being done with it, `used_by` the instances that want it.

    `download_error` is why the last download since the daemon's start failed.
    """

    model_id: str
    facts: Facts
    started_at: str
    on_disk: OnDisk
    busy: ModelStatus | None = None
    progress: Progress | None = None
    download_error: str | None = None
    used_by: tuple[str, ...] = ()

    @property
    def snapshot(self) -> Snapshot | None:
        """What a worker would load now."""
        return self.on_disk.snapshot

    @property
    def downloaded(self) -> bool:
        """Whether a worker finds all it needs on this host."""
        return self.snapshot is not None and self.snapshot.complete

    @property
    def status(self) -> ModelStatus:
        """The one word. A trial speaks of the files that it tried, not of those of another commit."""
        if self.busy is not None:
            return self.busy
        if not self.downloaded:
            return ModelStatus.AVAILABLE
        facts = self.facts
        if not self._tried_these or not (facts.last_verified or facts.verification_error):
            return ModelStatus.DOWNLOADED
        return ModelStatus.FAILED if facts.verification_error else ModelStatus.VERIFIED

    @property
    def _tried_these(self) -> bool:
        return self.snapshot is not None and self.snapshot.commit == self.facts.tried_commit

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of REST; keys without a value are left out."""
        facts, snapshot = self.facts, self.snapshot
        values: dict[str, Any] = {
            "model_id": self.model_id,
            "status": self.status.value,
            "downloaded": self.downloaded,
            "added_at": facts.added_at or (timestamp(snapshot.changed_at) if snapshot else self.started_at),
            "revision": facts.revision,
            "gated": facts.gated,
            "used_by": list(self.used_by),
            "metadata": self.on_disk.metadata,
            "last_verified": facts.last_verified,
            "verification_error": facts.verification_error,
            "verification": dict(facts.trial) or None,
            "download_error": self.download_error,
            "progress": self.progress.to_dict() if self.progress else None,
        }
        if snapshot is not None:
            values |= {
                "cache_path": str(snapshot.path),
                "cache_size_bytes": snapshot.size_bytes,
                "commit": snapshot.commit,
                "files": [{"path": file.path, "size_bytes": file.size_bytes} for file in snapshot.files],
                "commits": [commit_of(each) for each in self.on_disk.commits] or None,
            }
        return {name: value for name, value in values.items() if value is not None}


def commit_of(snapshot: Snapshot) -> dict[str, Any]:
    """One commit of a model in the cache, in short."""
    return {
        "commit": snapshot.commit,
        "refs": list(snapshot.refs),
        "size_bytes": snapshot.size_bytes,
        "complete": snapshot.complete,
    }
