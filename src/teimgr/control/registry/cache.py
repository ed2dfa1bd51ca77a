"""Model files on disk: snapshots in the hub's cache, model directories, packaged weights.

The hub library's `scan_cache_dir` rejects a repository with one broken file. Here broken entries are left out.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models import bounded_json as model_json
from teimgr.models import hub
from teimgr.models.directory import (
    configuration_folder,
    files_below,
    gguf_file,
    has_configuration,
    missing_file,
    needed,
)
from teimgr.models.gguf_head import leading_facts
from teimgr.models.source import Directory, WrongSourceError, decide, file_problem, is_own_snapshot

log = logging.getLogger(__name__)

_FILES_SHOWN = 10_000
_MAX_WORD_CHARS = 255
_MAX_REF_CHARS = 256
_MAX_NUMBER = 2**53  # exact in every JSON reader
# Our key → its names in config.json.
_METADATA: Mapping[str, tuple[str, ...]] = {
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size", "d_model"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
}


@dataclass(frozen=True, slots=True)
class ModelFileInfo:
    """One file of a model."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a model at one commit; a directory outside the hub's cache has no commit.

    `complete`: a worker can load it. `fault` describes a damaged file. `refs` are the branches and tags of the commit.
    `changed_at` is in seconds since the epoch.
    """

    path: Path
    commit: str | None = None
    refs: tuple[str, ...] = ()
    files: tuple[ModelFileInfo, ...] = ()
    complete: bool = False
    fault: str | None = None
    changed_at: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def metadata(self) -> dict[str, Any] | None:
        """Some keys of config.json, or of a GGUF file's; None if it cannot be read or one of them has another type."""
        try:
            folder = configuration_folder(self.path)
            config = model_json.read_object(folder / "config.json")
            if config is None and (alone := gguf_file(folder)) is not None:
                config = leading_facts(alone)
            return None if config is None else dict(_metadata_of(config))
        except (ModelLoadFailed, ValueError, OSError):
            return None


class HubCache:
    """The cache of the hub's library at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model_ids(self) -> list[str]:
        """The models that have a folder, complete or not."""
        try:
            names = [entry.name for entry in self.folder.iterdir() if entry.is_dir() and entry.name.isprintable()]
        except OSError:
            return []
        return sorted(id for id in map(hub.id_of_folder, names) if id is not None)

    def folder_of(self, model_id: str) -> Path:
        """The folder of a model's blobs, refs and snapshots."""
        return self.folder / hub.folder_name(model_id)

    def snapshots(self, model_id: str) -> list[Snapshot]:
        """The snapshots of a model that have at least a configuration, the newest first. Never raises."""
        found = []
        try:
            folder = self.folder_of(model_id)
            refs = dict(_refs(folder / "refs"))
            for path in sorted((folder / "snapshots").glob("*/")):
                if is_own_snapshot(path, folder) and has_configuration(path):
                    names = tuple(sorted(name for name, commit in refs.items() if commit == path.name))
                    found.append(self._snapshot(model_id, path, names))
        except (OSError, ValueError) as error:  # an invalid name or a failing disk
            log.warning("unreadable model in the hub cache", extra={"model": model_id, "reason": str(error)})
            return []
        return sorted(found, key=lambda snapshot: snapshot.changed_at, reverse=True)

    def has_folder(self, model_id: str) -> bool:
        """True if anything of a model is here, if only a part of a file."""
        try:
            return self.folder_of(model_id).is_dir()
        except OSError:  # a name too long for a file
            return False

    def find(self, model_id: str, revision: str | None = None) -> Snapshot | None:
        """The snapshot of a branch, tag or commit; without one `main`, else the newest, complete ones first."""
        found = self.snapshots(model_id)
        wanted = revision or hub.DEFAULT_REVISION
        for snapshot in found:
            if wanted in (*snapshot.refs, snapshot.commit):
                return snapshot
        return max(found, key=lambda snapshot: snapshot.complete, default=None) if revision is None else None

    def delete(self, model_id: str) -> None:
        """Remove everything of a model.

        Raises:
            OSError: some of it cannot be removed.
        """
        shutil.rmtree(self.folder_of(model_id))
        shutil.rmtree(self.folder / ".locks" / self.folder_of(model_id).name, ignore_errors=True)

    def _snapshot(self, model_id: str, path: Path, refs: tuple[str, ...]) -> Snapshot:
        files = tuple(_files(path, files_below(path)))
        is_loadable, fault = _loadable(path)
        return Snapshot(
            path=path,
            commit=path.name,
            refs=refs,
            files=files,
            complete=is_loadable and not self._missing(model_id, path.name, {file.path for file in files}),
            fault=fault,
            changed_at=_changed_at(path),
        )

    def _missing(self, model_id: str, commit: str, present: set[str]) -> set[str]:
        """Needed files that are in the repository's cached listing and not in the snapshot; none without a listing."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError

        try:
            tree = get_cached_repo_tree(model_id, revision=commit, cache_dir=self.folder)
        except (CachedRepoTreeNotFoundError, HFValidationError):
            return set()
        return set(needed([file.path for file in tree])) - present


def is_directory(model_id: str) -> bool:
    """True if a model id is a directory of this host, there or not, rather than a repository of the hub."""
    try:
        return isinstance(decide(model_id), Directory)
    except (WrongSourceError, InvalidConfig):
        return False


def find_directory(model_id: str) -> Snapshot | None:
    """The model in a directory, or None.

    Only the directory and its direct subfolders are read: anything may be below.
    """
    try:
        path = Path(model_id).expanduser()
        if not has_configuration(path):
            return None
        files = tuple(_files(path, files_below(path, depth=1)))
        is_loadable, fault = _loadable(path)
        where, changed_at = path.resolve(), _changed_at(path)
        return Snapshot(path=where, files=files, complete=is_loadable, fault=fault, changed_at=changed_at)
    except (OSError, ValueError, RuntimeError):  # an invalid name, an unknown user, or a failing disk
        return None


def _loadable(path: Path) -> tuple[bool, str | None]:
    """Whether a worker can load the model in a directory, and the fault of a file that cannot be read."""
    try:
        model_json.read_object(configuration_folder(path) / "config.json")
        return missing_file(path) is None, None
    except ModelLoadFailed as error:
        return False, error.message
    except OSError as error:
        return False, f"it cannot be read: {error.strerror or error}"


def _metadata_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, places in _METADATA.items():
        value = next((config[place] for place in places if config.get(place) is not None), None)
        if value is None:
            continue
        fits = _is_word(value) if name == "model_type" else _is_number(value)
        if not fits:
            raise ValueError(f"{name} is {value!r}")
        yield name, value


def _is_word(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_WORD_CHARS and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _shown(name: str) -> str:
    """A file's name as text; bytes that are no UTF-8 are replaced."""
    return os.fsencode(name).decode(errors="replace")


def _refs(folder: Path) -> Iterator[tuple[str, str]]:
    """Branches and tags with their commits; names may contain slashes."""
    for path in (Path(parent) / name for parent, _, names in os.walk(folder) for name in names):
        try:
            if (problem := file_problem(path)) is not None:
                raise OSError(problem)
            with path.open(encoding="utf-8") as ref:
                yield _shown(path.relative_to(folder).as_posix()), ref.read(_MAX_REF_CHARS).strip()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("unreadable ref in the hub cache", extra={"path": str(path), "reason": str(error)})


def _files(folder: Path, paths: Iterable[Path]) -> Iterator[ModelFileInfo]:
    """The files among `paths`, without dangling links."""
    for path in sorted(islice(paths, _FILES_SHOWN)):
        try:
            if path.is_file():
                yield ModelFileInfo(_shown(path.relative_to(folder).as_posix()), path.stat().st_size)
        except OSError:
            continue


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
