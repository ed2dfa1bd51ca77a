"""The models of this host for the others of the fleet: whole snapshots in its hub cache, file by file.

{"op": "model", "model_id", "revision"}      is answered by
    {"commit", "files"}, each as `neighbours.ModelFile`, or {"absent": true}, or {"busy": true}, and is followed by the
    client's {"file", "start"}, as often as it wants one, each answered by {"size"} and that many bytes; {"end": true}

Only files that the engine needs are in the list, and only files of the list are sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.cluster.host_link import HostLink
from teimgr.errors import Forbidden, InvalidInput, ModelLoadFailed, Unavailable
from teimgr.models import hub
from teimgr.models.directory import files_below, needed
from teimgr.models.neighbours import MAX_FILES, ModelFile, is_blob, is_commit

MAX_STREAMS = 4
"""Limit on the hosts that are sent files at a time; others retry."""
IDLE_LIMIT_S = 60.0
PIECE_BYTES = 256 << 10
_DIGESTS_KEPT = 10_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot: its files and their paths, by name."""

    commit: str
    files: Mapping[str, tuple[ModelFile, Path]]


class HostModels:
    """The models in the hub's cache, or in that at `cache`. `bytes_per_s` is the most that is sent at that moment."""

    def __init__(self, bytes_per_s: Callable[[], int], cache: Path | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._given_cache = cache
        self._digests: OrderedDict[tuple[str, int, int, int], str] = OrderedDict()
        self._digesting = threading.Lock()
        self._streams = 0
        self._sent_until = 0.0

    async def serve(self, link: HostLink, request: Mapping[str, Any]) -> None:
        """Answer one request, and those for files that follow it.

        Raises:
            ModelNotFound, InvalidInput: the model id, revision or file is not valid.
            Forbidden: the snapshot leads out of the cache.
            Unavailable: the client is gone or silent.
        """
        model_id, revision = request["model_id"], request["revision"]
        if not isinstance(model_id, str) or not (revision is None or isinstance(revision, str)):
            raise InvalidInput("model_id, revision: must be strings")
        offer = await asyncio.to_thread(self.find, model_id, revision)
        if offer is None:
            await link.send(absent=True)
            return
        if self._streams >= MAX_STREAMS:
            await link.send(busy=True)
            return
        self._streams += 1
        try:
            await link.send(commit=offer.commit, files=[file.to_dict() for file, _ in offer.files.values()])
            log.info("a model is sent", extra={"peer": link.host, "model": model_id, "commit": offer.commit})
            while "file" in (wanted := await link.receive(IDLE_LIMIT_S)):
                if wanted["file"] not in offer.files:
                    raise InvalidInput("file: not a file of this model")
                file, path = offer.files[wanted["file"]]
                await self._send(link, file, path, int(wanted["start"]))
        finally:
            self._streams -= 1

    def find(self, model_id: str, revision: str | None) -> Offer | None:
        """The whole snapshot of a model, if there is one. Blocking.

        Raises:
            ModelNotFound, Forbidden: as `serve`.
        """
        try:
            found = hub.find_cached(model_id, revision, self._given_cache)
            return None if found is None else self._offer(model_id, found.path)
        except (OSError, ModelLoadFailed) as error:  # broken files
            log.warning("a model is not sent", extra={"model": model_id, "reason": str(error)})
            return None

    def _offer(self, model_id: str, snapshot: Path) -> Offer | None:
        cache = (self._given_cache or hub.default_cache_folder()).resolve()
        folder = cache / hub.folder_name(model_id)
        if not is_commit(snapshot.name) or snapshot.resolve() != folder / "snapshots" / snapshot.name:
            raise Forbidden("the snapshot lies outside of the hub's cache")
        names = [path.relative_to(snapshot).as_posix() for path in files_below(snapshot)]
        return Offer(snapshot.name, dict(self._files(folder, snapshot, sorted(needed(names))[:MAX_FILES])))

    def _files(self, folder: Path, snapshot: Path, names: list[str]) -> Iterator[tuple[str, tuple[ModelFile, Path]]]:
        for name in names:
            path = (snapshot / name).resolve(strict=True)
            if not path.is_relative_to(folder):
                raise Forbidden(f"{name} leads out of the hub's cache")
            sha256 = self._digest(path)
            blob = path.name if path.parent == folder / "blobs" and is_blob(path.name) else sha256
            yield name, (ModelFile(name, path.stat().st_size, blob, sha256), path)

    def _digest(self, path: Path) -> str:
        """The SHA-256: of a large file its blob's name, which the receiver compares, else computed once."""
        if len(path.name) == 2 * hashlib.sha256().digest_size and is_blob(path.name):
            return path.name
        state = path.stat()
        key = (str(path), state.st_mtime_ns, state.st_size, state.st_ino)
        with self._digesting:
            if (known := self._digests.get(key)) is None:
                with path.open("rb") as content:
                    known = self._digests[key] = hashlib.file_digest(content, "sha256").hexdigest()
                while len(self._digests) > _DIGESTS_KEPT:
                    self._digests.popitem(last=False)
        return known

    async def _send(self, link: HostLink, file: ModelFile, path: Path, start: int) -> None:
        if not 0 <= start <= file.size_bytes:
            raise InvalidInput(f"start: must be 0 to {file.size_bytes}")
        descriptor = await asyncio.to_thread(_open, path, file.size_bytes)
        try:
            await link.send(size=file.size_bytes - start)
            try:
                await self._send_pieces(link, descriptor, start, file.size_bytes)
            except BaseException:
                await link.close()  # an error message would be taken as content
                raise
        finally:
            os.close(descriptor)

    async def _send_pieces(self, link: HostLink, descriptor: int, start: int, end: int) -> None:
        while start < end:
            piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, end - start), start)
            if not piece:
                raise Unavailable("the file became shorter")
            start += len(piece)
            await self._wait_for_turn(len(piece))
            await link.send_bytes(piece)

    async def _wait_for_turn(self, count: int) -> None:
        """Wait so that all streams together keep the rate."""
        now = asyncio.get_running_loop().time()
        begins = max(now, self._sent_until)
        self._sent_until = begins + count / max(1, self._bytes_per_s())
        if begins > now:
            await asyncio.sleep(begins - now)


def _open(path: Path, size_bytes: int) -> int:
    """A descriptor of a file that was resolved before. Raises Unavailable where it is another one now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size == size_bytes:
        return descriptor
    os.close(descriptor)
    raise Unavailable(f"{path.name} has changed")
