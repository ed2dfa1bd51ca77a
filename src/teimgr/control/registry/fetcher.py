"""The download process: fetches one model into the hub's cache. `python -m teimgr.control.registry.fetcher ORDER`.

It is a separate process because a thread cannot be cancelled. It writes messages to stdout, one JSON object per line,
periodically, so that a broken pipe ends it after the daemon:

    {"commit": …, "bytes_total": …, "files_total": …, "gated": …}      once, after listing
    {"bytes_done": …, "bytes_received": …, "files_done": …}            periodically
    {"path": …, "commit": …}   or   {"code": …, "message": …}          the result

The hub's library restarts an interrupted file from zero, so blobs are fetched here: `<blob>.incomplete` is resumed with
a range request, checked by size and hash, then renamed. The library makes the links and refs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from teimgr.control.registry.cache import HubCache
from teimgr.errors import ModelDownloadFailed, TeimgrError, Unavailable
from teimgr.files import file_size
from teimgr.models import hub
from teimgr.models.directory import needed
from teimgr.models.own_code import code_repositories_of
from teimgr.models.source import stays_below
from teimgr.wire.json_messages import line

PARALLEL_FILES = 4
MESSAGE_S = 0.25
PIECE_BYTES = 1 << 20
_HUB_TIMEOUT_S = 20.0
_TRIES = 5
_BLOB_NAME = re.compile(r"[0-9a-f]{40,64}")
# Names of commits and blobs, which become file names in the cache.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# Above the size of any known model; an endless listing would fill the memory.
_MAX_FILES = 100_000
# The hub serves larger files only over its library's own protocol.
_HTTP_FILE_LIMIT_BYTES = 50 * 10**9


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The model to fetch; `with_code`: also the code of other repositories that it names, at `code_revision`."""

    model_id: str
    revision: str | None = None
    with_code: bool = False
    code_revision: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository. `blob` is its name in the cache; only large files have a `sha256`."""

    name: str
    size_bytes: int
    blob: str
    sha256: str | None


class ProgressCounter:
    """Thread-safe counts of present bytes and files."""

    def __init__(self) -> None:
        self._received = 0
        self._bytes: dict[str, int] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def set(self, name: str, size_bytes: int) -> None:
        with self._lock:
            self._bytes[name] = size_bytes

    def add(self, name: str, count: int) -> None:
        with self._lock:
            self._received += max(0, count)
            self._bytes[name] = self._bytes.get(name, 0) + count

    def finish(self, file: RemoteFile) -> None:
        with self._lock:
            self._bytes[file.name] = file.size_bytes
            self._done.add(file.name)

    def message(self) -> dict[str, int]:
        """The sums; `bytes_received` counts only what came over the network."""
        with self._lock:
            done = sum(self._bytes.values())
            return {"bytes_done": done, "bytes_received": self._received, "files_done": len(self._done)}


class Meter:
    """Replaces the hub library's progress bar (tqdm) per request; aborts a body that is too long."""

    def __init__(
        self, tally: ProgressCounter, order: FetchRequest, file: RemoteFile, *_: object, initial: int = 0, **__: object
    ) -> None:
        self._tally = tally
        self._order = order
        self._file = file
        self._name = file.name
        self._count = initial
        tally.set(file.name, initial)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, count: float | None = 1) -> None:
        """Add received bytes; negative where the server restarts the file.

        Raises:
            ModelDownloadFailed: more came than the hub announced.
        """
        self._count += int(count or 0)
        self._tally.add(self._name, int(count or 0))
        if self._count > self._file.size_bytes:
            raise ModelDownloadFailed(
                self._order.model_id,
                f"{self._name} has more than the {self._file.size_bytes:,} bytes that the hub announced",
            )


class Fetch:
    """The download of one model."""

    def __init__(self, order: FetchRequest, cache: HubCache, tally: ProgressCounter) -> None:
        self._order = order
        self._cache = cache
        self._tally = tally
        self._commit = ""

    def run(self) -> Path:
        """Fetch the model; the result is the complete snapshot's folder.

        Raises:
            ModelNotFound, ModelGated: the hub refuses.
            Unavailable: the hub cannot be reached, or stopped answering; received bytes are kept.
            ModelDownloadFailed: size or hash differs from the hub's announcement, or the disk is too small.
        """
        from huggingface_hub import snapshot_download

        order = self._order
        hub.check_id(order.model_id, order.revision)
        with hub.hub_failures(order.model_id, order.revision):
            files = self._plan()
            self._check_room(files)
            with ThreadPoolExecutor(PARALLEL_FILES, "fetching") as pool:
                list(pool.map(self._fetch, files))  # the first failure cancels files not begun
            # By revision, not by commit, so that the cache stores the ref, which an offline start needs.
            names = [file.name for file in files]
            path = Path(
                snapshot_download(
                    order.model_id, revision=order.revision, cache_dir=self._cache.folder, allow_patterns=names
                )
            )
        for file in files:
            found = file_size(path / file.name)
            if path.name == self._commit and found != file.size_bytes:
                raise ModelDownloadFailed(
                    order.model_id, f"{file.name} has {found:,} bytes, the hub announced {file.size_bytes:,}"
                )
        for file in files:
            self._tally.finish(file)
        return path

    def _plan(self) -> list[RemoteFile]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, order = HfApi(library_name="teimgr"), self._order
        info = api.model_info(order.model_id, revision=order.revision, timeout=_HUB_TIMEOUT_S)
        self._commit = self._named(str(info.sha), "commit")
        remote: dict[str, RemoteFile] = {}
        for file in api.list_repo_tree(order.model_id, recursive=True, revision=self._commit):
            if isinstance(file, RepoFile):
                remote[file.path] = self._checked(_remote(file))
            if len(remote) > _MAX_FILES:
                raise ModelDownloadFailed(order.model_id, f"the repository has more than {_MAX_FILES:,} files")
        if problem := hub.format_problem(list(remote), info):
            raise ModelDownloadFailed(order.model_id, f"the repository {problem}")
        files = [remote[name] for name in needed(list(remote))]
        if not files:
            raise ModelDownloadFailed(order.model_id, "the repository has no files for this engine")
        size_bytes = sum(file.size_bytes for file in files)
        send(commit=self._commit, bytes_total=size_bytes, files_total=len(files), gated=bool(info.gated))
        return files

    def _named(self, name: str, kind: str) -> str:
        """A name that the hub gave, which becomes one in the cache. Raises ModelDownloadFailed: it could be a path."""
        if _NAME.fullmatch(name) is None:
            raise ModelDownloadFailed(self._order.model_id, f"the hub names a {kind} {name[:80]!r}")
        return name

    def _checked(self, file: RemoteFile) -> RemoteFile:
        """A file whose name and blob stay in the cache, with a size. Raises ModelDownloadFailed for another one."""
        self._named(file.blob, "blob")
        if not stays_below(file.name) or "\0" in file.name:
            raise ModelDownloadFailed(
                self._order.model_id, f"the hub names the file {file.name[:80]!r}, which is not a name in a repository"
            )
        if type(file.size_bytes) is not int or file.size_bytes < 0:
            raise ModelDownloadFailed(self._order.model_id, f"{file.name[:80]} has no size")
        return file

    def _check_room(self, files: Iterable[RemoteFile]) -> None:
        folder = self._blobs()
        folder.mkdir(parents=True, exist_ok=True)
        wanted = sum(
            file.size_bytes - file_size(folder / f"{file.blob}.incomplete") for file in files if self._lacks(file)
        )
        free = shutil.disk_usage(folder).free
        if wanted > free:
            raise ModelDownloadFailed(
                self._order.model_id, f"{wanted:,} bytes are needed, but {free:,} are free in {self._cache.folder}"
            )

    def _fetch(self, file: RemoteFile) -> None:
        """Fetch the blob of a file, unless the library has to."""
        if self._lacks(file):
            from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # it is exported lazily

            folder = self._cache.folder_of(self._order.model_id).name
            lock = self._cache.folder / ".locks" / folder / f"{file.blob}.lock"  # the library's own lock
            lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if self._lacks(file):
                    self._fetch_checked(file)
        if _is_fetched_here(file):
            self._tally.finish(file)

    def _lacks(self, file: RemoteFile) -> bool:
        """True if it must be fetched here. A file of this name and another size is removed."""
        shown = self._cache.folder_of(self._order.model_id) / "snapshots" / self._commit / file.name
        for path in (shown, self._blobs() / file.blob):  # without symbolic links the file is in the snapshot
            if path.exists() and file_size(path) == file.size_bytes:
                return False
            path.unlink(missing_ok=True)
        return _is_fetched_here(file)

    def _fetch_checked(self, file: RemoteFile) -> None:
        """Fetch a blob and check it. The continuation of a partial file may be wrong, so a second try starts again."""
        blob = self._blobs() / file.blob
        partial_file = blob.with_name(f"{file.blob}.incomplete")
        for last in (False, True):
            self._transfer(file, partial_file)
            problem = _problem(file, partial_file)
            if problem is None:
                partial_file.replace(blob)
                return
            partial_file.unlink()
            if last:
                raise ModelDownloadFailed(
                    self._order.model_id, f"{file.name} differs from the hub's announcement: {problem}"
                )

    def _transfer(self, file: RemoteFile, target: Path) -> None:
        """Append the missing bytes to `target`; a broken connection is resumed as long as each try receives bytes."""
        for left in reversed(range(_TRIES)):
            before = file_size(target)
            if before > file.size_bytes:
                target.unlink()
                before = 0
            try:
                self._request(file, target, before)
                break
            except Exception as error:
                if not hub.is_transport_error(error) or not (left and file_size(target) > before):
                    raise

    def _request(self, file: RemoteFile, target: Path, have_bytes: int) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it is exported lazily

        url = hf_hub_url(self._order.model_id, file.name, revision=self._commit)
        headers = build_hf_headers(library_name="teimgr") | {"Accept-Encoding": "identity"}
        meter: Any = partial(Meter, self._tally, self._order, file)
        self._tally.set(file.name, have_bytes)
        with target.open("ab") as stream:
            http_get(
                url,
                stream,
                resume_size=have_bytes,
                headers=headers,
                expected_size=file.size_bytes,
                displayed_filename=file.name,
                tqdm_class=meter,
            )

    def _blobs(self) -> Path:
        return self._cache.folder_of(self._order.model_id) / "blobs"


def main(arguments: list[str]) -> int:
    from huggingface_hub import constants

    # Bytes are written and counted in pieces of this size; a kill loses less than one piece.
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    order, tally, ended = FetchRequest(**json.loads(arguments[0])), ProgressCounter(), threading.Event()

    def keep_sending() -> None:
        while not ended.wait(MESSAGE_S):
            send(**tally.message())

    sender = threading.Thread(target=keep_sending, name="messages", daemon=True)
    sender.start()
    result: dict[str, object]
    try:
        cache = HubCache(hub.default_cache_folder())
        path = Fetch(order, cache, tally).run()
        hub.follow_bases(path, lambda base, at: Fetch(FetchRequest(base, at), cache, tally).run())
        if order.with_code:
            fetch_code(path, order.code_revision)
        result = {"path": str(path), "commit": path.name}
    except TeimgrError as error:
        result = {"code": int(error.code), "message": error.message}
    except OSError as error:
        failure = hub.cache_problem(error) or Unavailable(f"the cache cannot be written: {error}")
        result = {"code": int(failure.code), "message": failure.message}
    ended.set()
    sender.join()
    send(**tally.message())
    send(**result)
    return 0 if "path" in result else 1


def fetch_code(model: Path, revision: str | None) -> None:
    """Fetch the code of other repositories that a model names, as `hub.resolve_code`, which raises."""
    for repository in code_repositories_of(model):
        hub.resolve_code(repository, revision)


def send(**message: object) -> None:
    """Write one message to stdout; a broken pipe ends this process, whatever its threads do."""
    try:
        sys.stdout.write(line(message).decode())
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


def _remote(file: Any) -> RemoteFile:
    """A file of the hub's listing; the blob's name is the ETag that the hub sends."""
    sha256 = file.lfs.sha256 if file.lfs is not None else None
    return RemoteFile(file.path, file.lfs.size if file.lfs is not None else file.size, sha256 or file.blob_id, sha256)


def _is_fetched_here(file: RemoteFile) -> bool:
    return bool(_BLOB_NAME.fullmatch(file.blob)) and file.size_bytes <= _HTTP_FILE_LIMIT_BYTES


def _problem(file: RemoteFile, path: Path) -> str | None:
    if file_size(path) != file.size_bytes:
        return f"{file_size(path):,} bytes came, {file.size_bytes:,} were announced"
    if file.sha256 is None:
        return None
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    return None if found == file.sha256 else f"its SHA-256 is {found}, {file.sha256} was announced"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
