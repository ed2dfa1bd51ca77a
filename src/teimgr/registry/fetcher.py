"""The process that fetches one model into the hub's cache: `python -m teimgr.registry.fetcher ORDER`.

A process of its own, because a download cannot be interrupted on a thread, and ends at once by a signal here. It says
on stdout, a JSON object per line, how it gets on; the lines come also when nothing moves, so that it ends by a broken
pipe when the daemon is gone.

    {"commit": …, "bytes_total": …, "files_total": …, "gated": …}      once, when it knows
    {"bytes_done": …, "bytes_received": …, "files_done": …}            again and again
    {"path": …, "commit": …}   or   {"code": …, "message": …}          the end

Blobs are fetched here, for the hub's library starts a broken file anew: `<blob>.incomplete` is continued with a range,
its size and hash are checked, then it gets its name. Links and refs are the library's business.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from teimgr import hub
from teimgr.errors import ModelDownloadFailed, TeimgrError, Unavailable
from teimgr.registry.cache import HubCache, default_cache_folder, needed

FILES_AT_A_TIME = 4
NEWS_S = 0.25
PIECE_BYTES = 1 << 20
_HUB_ANSWER_S = 20.0
_TRIES = 5
_HASH_CHUNK_BYTES = 4 << 20
_BLOB_NAME = re.compile(r"[0-9a-f]{40,64}")
# The hub gives larger files over its own protocol only, which its library speaks.
_HTTP_FILE_LIMIT_BYTES = 50 * 10**9


@dataclass(frozen=True, slots=True)
class Order:
    """What to fetch."""

    model_id: str
    revision: str | None = None

    def to_json(self) -> str:
        """As the command line has it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository. `blob` is its name in the cache; `sha256` is known of large files."""

    name: str
    size_bytes: int
    blob: str
    sha256: str | None


class Tally:
    """Bytes and files that are there, from any thread."""

    def __init__(self) -> None:
        self._received = 0
        self._bytes: dict[str, int] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def set(self, name: str, size_bytes: int) -> None:
        """So much of a file is there."""
        with self._lock:
            self._bytes[name] = size_bytes

    def add(self, name: str, count: int) -> None:
        """So much more of a file came."""
        with self._lock:
            self._received += max(0, count)
            self._bytes[name] = self._bytes.get(name, 0) + count

    def finish(self, file: RemoteFile) -> None:
        """All of a file is there."""
        with self._lock:
            self._bytes[file.name] = file.size_bytes
            self._done.add(file.name)

    def news(self) -> dict[str, int]:
        """The sums; `bytes_received` counts what came over the network alone."""
        with self._lock:
            done = sum(self._bytes.values())
            return {"bytes_done": done, "bytes_received": self._received, "files_done": len(self._done)}


class Meter:
    """What the hub's library moves forward in place of a progress bar; it makes one per request."""

    def __init__(self, tally: Tally, name: str, *_: object, initial: int = 0, **__: object) -> None:
        self._tally = tally
        self._name = name
        tally.set(name, initial)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to close."""

    def update(self, count: float | None = 1) -> None:
        """So many bytes came; negative where the server began anew."""
        self._tally.add(self._name, int(count or 0))


class Fetch:
    """One model on its way."""

    def __init__(self, order: Order, cache: HubCache, tally: Tally) -> None:
        self._order = order
        self._cache = cache
        self._tally = tally
        self._commit = ""

    def run(self) -> Path:
        """The snapshot's folder, whole.

        Raises:
            ModelNotFound, ModelGated: the hub says no.
            Unavailable: the hub cannot be reached, or stopped answering; what came so far is kept.
            ModelDownloadFailed: what came is not what the hub promised, or there is no room for it.
        """
        from huggingface_hub import snapshot_download

        order = self._order
        with hub.hub_failures(order.model_id, order.revision):
            files = self._plan()
            self._check_room(files)
            with ThreadPoolExecutor(FILES_AT_A_TIME, "fetching") as pool:
                _all_or_first_failure(pool, (partial(self._fetch, file) for file in files))
            # By name, not by commit: only so does the cache keep a ref that an offline start finds the snapshot by.
            names = [file.name for file in files]
            path = Path(
                snapshot_download(
                    order.model_id, revision=order.revision, cache_dir=self._cache.folder, allow_patterns=names
                )
            )
        self._check_whole(path, files)
        for file in files:
            self._tally.finish(file)
        return path

    def _plan(self) -> list[RemoteFile]:
        """The files that are needed, of the commit that the revision means now."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, order = HfApi(library_name="teimgr"), self._order
        info = api.model_info(order.model_id, revision=order.revision, timeout=_HUB_ANSWER_S)
        self._commit = str(info.sha)
        tree = api.list_repo_tree(order.model_id, recursive=True, revision=self._commit)
        remote = {file.path: _remote(file) for file in tree if isinstance(file, RepoFile)}
        files = [remote[name] for name in needed(list(remote))]
        if not files:
            raise ModelDownloadFailed(order.model_id, "the repository has no files for this engine")
        size_bytes = sum(file.size_bytes for file in files)
        say(commit=self._commit, bytes_total=size_bytes, files_total=len(files), gated=bool(info.gated))
        return files

    def _check_room(self, files: Iterable[RemoteFile]) -> None:
        folder = self._blobs()
        folder.mkdir(parents=True, exist_ok=True)
        wanted = sum(file.size_bytes - _size(folder / f"{file.blob}.incomplete") for file in files if self._lacks(file))
        free = shutil.disk_usage(folder).free
        if wanted > free:
            raise ModelDownloadFailed(
                self._order.model_id, f"{wanted:,} bytes are needed and {free:,} are free in {self._cache.folder}"
            )

    def _fetch(self, file: RemoteFile) -> None:
        """Have its blob, unless it is one for the library."""
        if self._lacks(file):
            from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # it is exported lazily

            folder = self._cache.folder_of(self._order.model_id).name
            lock = self._cache.folder / ".locks" / folder / f"{file.blob}.lock"  # the library's own, for both to heed
            lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if self._lacks(file):
                    self._fetch_checked(file)
        if _is_for_us(file):
            self._tally.finish(file)

    def _lacks(self, file: RemoteFile) -> bool:
        """Whether it is to be fetched here. What has its name and not its size is removed."""
        shown = self._cache.folder_of(self._order.model_id) / "snapshots" / self._commit / file.name
        for path in (shown, self._blobs() / file.blob):  # on systems without links the snapshot has the file itself
            if path.exists() and _size(path) == file.size_bytes:
                return False
            path.unlink(missing_ok=True)
        return _is_for_us(file)

    def _fetch_checked(self, file: RemoteFile) -> None:
        """The blob, checked. What continues a broken file may be wrong, so a second try starts anew."""
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
                raise ModelDownloadFailed(self._order.model_id, f"{file.name} is not what the hub promised: {problem}")

    def _transfer(self, file: RemoteFile, target: Path) -> None:
        """Append to `target` what it lacks; a connection that breaks is taken up as long as bytes come."""
        for left in reversed(range(_TRIES)):
            before = _size(target)
            if before > file.size_bytes:
                target.unlink()
                before = 0
            try:
                self._request(file, target, before)
                break
            except Exception as error:
                if not hub.is_transport_error(error) or not (left and _size(target) > before):
                    raise

    def _request(self, file: RemoteFile, target: Path, have_bytes: int) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # it is exported lazily

        url = hf_hub_url(self._order.model_id, file.name, revision=self._commit)
        headers = build_hf_headers(library_name="teimgr") | {"Accept-Encoding": "identity"}
        meter: Any = partial(Meter, self._tally, file.name)
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

    def _check_whole(self, path: Path, files: Iterable[RemoteFile]) -> None:
        for file in files:
            found = _size(path / file.name)
            if path.name == self._commit and found != file.size_bytes:
                raise ModelDownloadFailed(
                    self._order.model_id, f"{file.name} has {found:,} bytes, the hub says {file.size_bytes:,}"
                )

    def _blobs(self) -> Path:
        return self._cache.folder_of(self._order.model_id) / "blobs"


def main(arguments: list[str]) -> int:
    """Fetch what the order says; the result is the exit status."""
    from huggingface_hub import constants

    # Bytes reach the file, and the figures, in pieces of this size: what is less is lost when the process is killed.
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    order, tally, ended = Order(**json.loads(arguments[0])), Tally(), threading.Event()
    ticker = threading.Thread(target=_keep_telling, args=(tally, ended), name="news", daemon=True)
    ticker.start()
    try:
        path = Fetch(order, HubCache(default_cache_folder()), tally).run()
    except TeimgrError as error:
        return _end(ticker, ended, tally, code=int(error.code), message=error.message)
    except OSError as error:
        failure = Unavailable(f"the cache cannot be written: {error}")
        return _end(ticker, ended, tally, code=int(failure.code), message=failure.message)
    return _end(ticker, ended, tally, path=str(path), commit=path.name)


def say(**news: object) -> None:
    """One line on stdout. Nobody listening any more is the end of this process."""
    try:
        sys.stdout.write(json.dumps(news) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _vanish()


def _keep_telling(tally: Tally, ended: threading.Event) -> None:
    while not ended.wait(NEWS_S):
        say(**tally.news())


def _end(ticker: threading.Thread, ended: threading.Event, tally: Tally, **verdict: object) -> int:
    ended.set()
    ticker.join()
    say(**tally.news())
    say(**verdict)
    return 0 if "path" in verdict else 1


def _vanish() -> NoReturn:
    os._exit(1)  # from any thread, and with downloads on others


def _all_or_first_failure(pool: ThreadPoolExecutor, work: Iterable[partial[None]]) -> None:
    futures = [pool.submit(each) for each in work]
    try:
        for future in futures:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _remote(file: Any) -> RemoteFile:
    """What the hub's listing says of a file; the blob's name is what the hub sends as its ETag."""
    sha256 = file.lfs.sha256 if file.lfs is not None else None
    return RemoteFile(file.path, file.lfs.size if file.lfs is not None else file.size, sha256 or file.blob_id, sha256)


def _is_for_us(file: RemoteFile) -> bool:
    return bool(_BLOB_NAME.fullmatch(file.blob)) and file.size_bytes <= _HTTP_FILE_LIMIT_BYTES


def _problem(file: RemoteFile, path: Path) -> str | None:
    if _size(path) != file.size_bytes:
        return f"{_size(path):,} bytes came, {file.size_bytes:,} were promised"
    if file.sha256 is not None and (found := _sha256(path)) != file.sha256:
        return f"its SHA-256 is {found}, {file.sha256} was promised"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
