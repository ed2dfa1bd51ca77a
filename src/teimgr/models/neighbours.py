"""Fetches models from the other hosts of a fleet, over mutual TLS into the hub's cache; every file is verified.

A worker requests the list of hosts from the agent of its host, on the agent's unix socket: {"op": "hosts"}, answered by
{"hosts": [[name, address], …], "models_from"}. Then it requests the model from one host after the other
(`cluster/host_models.py` has the messages). The first host that has it determines the commit and the files. Each file
may come from any host that has the same one, is resumed after a broken transfer, and is checked by its digests.
Snapshot and ref, in the layout of huggingface-hub, appear once all files are here. Blocking, for a thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self, get_args

from teimgr.errors import (
    InvalidConfig,
    ModelDownloadFailed,
    ModelNotFound,
    StorageFull,
    TeimgrError,
    Unauthenticated,
    Unavailable,
)
from teimgr.files import file_size, write_atomically
from teimgr.models import hub
from teimgr.models.directory import needed
from teimgr.models.source import stays_below
from teimgr.wire.fleet_tls import HANDSHAKE_LIMIT_S, FleetIdentity, FleetName, peer_of
from teimgr.wire.json_messages import LENGTH_BYTES, pack, reported_error, unpack, unpack_length

MAX_FILES = 2000
CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 60.0
SILENCE_LIMIT_S = 30.0
"""A transfer with fewer than `_MIN_BYTES` in this time is given up."""
BUSY_LIMIT_S = 900.0
"""Limit on the wait for hosts that are sending to others."""
FRUITLESS_ROUNDS = 3
PAUSE_S = 1.0
_AGENT_LIMIT_S = 15.0
_AGENT_ANSWER_BYTES = 1 << 20
_MIN_BYTES = 64 << 10
_READ_BYTES = 256 << 10
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_STAGING = ".snapshot-"
_WEIGHTS = (".safetensors", ".bin", ".pt")

log = logging.getLogger(__name__)

Hosts = Sequence[tuple[str, str]]
"""Names and service addresses."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model as a host announces it. `blob` is its name in the hub's cache: its SHA-256, or git's SHA-1 of a
    small file.
    """

    name: str
    size_bytes: int
    blob: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ValueError, TypeError and KeyError if a name leads out of the model's folder, or a value is not one of
        its kind.
        """
        file = cls(str(values["name"]), int(values["size_bytes"]), str(values["blob"]), str(values["sha256"]))
        if not stays_below(file.name):
            raise ValueError(f"{file.name[:80]!r} is not a file name")
        if file.size_bytes < 0 or not is_blob(file.blob) or not _SHA256.fullmatch(file.sha256):
            raise ValueError(f"{file.name}: no size or digest")
        return file

    def problem(self, path: Path) -> str:
        """Return the fault of the content at `path`; empty if it is this file's."""
        found = path.stat().st_size
        if found != self.size_bytes:
            return f"it has {found:,} bytes, announced were {self.size_bytes:,}"
        with path.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        if sha256 != self.sha256:
            return f"its SHA-256 is {sha256}, announced was {self.sha256}"
        if len(self.blob) == len(sha256):
            return "" if sha256 == self.blob else f"its SHA-256 is {sha256}, and {self.blob} in the hub's cache"
        oid = git_oid(path)
        return "" if oid == self.blob else f"git's digest of it is {oid}, and {self.blob} in the hub's cache"


def is_commit(text: str) -> bool:
    return bool(_COMMIT.fullmatch(text))


def is_blob(name: str) -> bool:
    """True if a file of this name in a folder of blobs has its digest as name."""
    return bool(_BLOB.fullmatch(name))


def git_oid(path: Path) -> str:
    """Return the name that git, and so the hub, gives a small file's content."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(slots=True)
class FetchProgress:
    """Progress of a fetch, and its current host; written by its thread, read by others."""

    host: str = ""
    bytes_done: int = 0
    bytes_total: int = 0


class FleetNeighbours:
    """`hub.Neighbours` of the host with `identity` and an agent at `agent_socket`; `cache` is the hub's."""

    def __init__(self, agent_socket: Path, identity: FleetIdentity, cache: Path | None = None) -> None:
        self.progress = FetchProgress()
        self._agent_socket = agent_socket
        self._identity = identity
        self._cache = cache

    def order(self) -> hub.ModelsFrom:
        """As the agent has it; hub-first where it does not answer."""
        try:
            return self._ask()[0]
        except Unavailable as error:
            log.warning("%s", error.message)
            return "hub-first"

    def fetch(self, model_id: str, revision: str | None) -> hub.ModelSource:
        """Like `hub.Neighbours`."""
        cache = self._cache or hub.default_cache_folder()
        fetch = _Fetch(model_id, revision, cache, self._other_hosts, self._identity, self.progress)
        try:
            return fetch.run()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StorageFull(f"{error.filename or cache}: {error.strerror}") from error
            if problem := hub.cache_problem(error):
                raise problem from error
            raise Unavailable(f"the hub's cache cannot be written: {error}") from error
        finally:
            self.progress.host = ""

    def _other_hosts(self) -> Hosts:
        return self._ask()[1]

    def _ask(self) -> tuple[hub.ModelsFrom, Hosts]:
        """Raises Unavailable."""
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(_AGENT_LIMIT_S)
                link.connect(str(self._agent_socket))
                link.sendall(b'{"op": "hosts"}\n')
                with link.makefile("rb") as lines:
                    answer = json.loads(lines.readline(_AGENT_ANSWER_BYTES))
            if "error" in answer:
                raise ValueError(answer["error"])
            order, hosts = answer["models_from"], [(str(name), str(address)) for name, address in answer["hosts"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"this host's agent does not list the other hosts: {error}") from error
        if order not in get_args(hub.ModelsFrom):
            raise Unavailable(f"this host's agent runs another version: models_from is {order!r}")
        return order, [each for each in hosts if each[0] != self._identity.node]


class _HostConnection:
    """A connection to the service of another host, whose name is verified. All methods raise Unavailable."""

    def __init__(self, host: str, address: str, identity: FleetIdentity) -> None:
        self.host = host
        name, _, port = address.rpartition(":")
        try:
            raw = socket.create_connection((name.strip("[]"), int(port)), CONNECT_LIMIT_S)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{host}: no connection: {error}") from error
        self._socket: socket.socket = raw
        try:
            raw.settimeout(HANDSHAKE_LIMIT_S)
            self._socket = identity.client_context().wrap_socket(raw)
            identity.check(peer := peer_of(self._socket))
            if peer.name != FleetName(host):
                raise Unauthenticated(f"the certificate there is that of {peer.name.uri}")
        except (OSError, ValueError, Unauthenticated, InvalidConfig) as error:
            self._socket.close()
            raise Unavailable(f"{host}: no connection: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, **values: Any) -> None:
        try:
            self._socket.settimeout(SILENCE_LIMIT_S)
            self._socket.sendall(pack(values))
        except OSError as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error}") from error

    def receive(self, limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
        """The next message; an error that the host reports is raised as Unavailable too."""
        ends = time.monotonic() + limit_s
        try:
            message = unpack(self._read(unpack_length(self._read(LENGTH_BYTES, ends)), ends))
            reported = reported_error(message)
        except (OSError, ValueError, TypeError) as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error}") from error
        if reported is not None:
            raise Unavailable(f"{self.host}: {reported.message}")
        return message

    def receive_bytes(self, size: int) -> Iterator[bytes]:
        """So many bytes, in pieces."""
        began, before = time.monotonic(), size
        try:
            while size:
                self._socket.settimeout(SILENCE_LIMIT_S)
                piece = self._socket.recv(min(size, _READ_BYTES))
                if not piece:
                    raise ConnectionError("it closed within a file")
                size -= len(piece)
                yield piece
                if (now := time.monotonic()) - began > SILENCE_LIMIT_S:
                    if before - size < _MIN_BYTES:
                        raise TimeoutError(f"fewer than {_MIN_BYTES:,} bytes came in {SILENCE_LIMIT_S:g} s")
                    began, before = now, size
        except OSError as error:
            raise Unavailable(f"{self.host}: the connection was lost: {error}") from error

    def _read(self, size: int, ends: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(0.001, ends - time.monotonic()))
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("it was closed")
            data += piece
        return bytes(data)


class _Fetch:
    """The copy of one model, by `run`. A round tries every host once."""

    def __init__(
        self,
        model_id: str,
        revision: str | None,
        cache: Path,
        hosts: Callable[[], Hosts],
        identity: FleetIdentity,
        progress: FetchProgress,
    ) -> None:
        self._model_id = model_id
        self._revision = revision
        self._cache = cache
        self._folder = cache / hub.folder_name(model_id)
        self._blobs = self._folder / "blobs"
        self._locks = cache / ".locks" / hub.folder_name(model_id)
        self._hosts = hosts
        self._identity = identity
        self._progress = progress
        self._known_hosts: Hosts = ()
        self._commit = ""
        self._files: Sequence[ModelFile] = ()
        self._wrong: set[tuple[str, str]] = set()
        """Hosts, each with a blob for which it sent other content."""
        self._absent: set[str] = set()
        self._busy = False
        self._transient = False
        self._reasons: dict[str, str] = {}

    def run(self) -> hub.ModelSource:
        """Like `FleetNeighbours.fetch`; raises OSError besides."""
        hub.check_id(self._model_id, self._revision)
        if not self._hosts():
            raise ModelNotFound(f"the fleet has no other host that could have model '{self._model_id}'")
        self._locks.mkdir(parents=True, exist_ok=True)
        with _locked(self._locks / "neighbours.lock"):  # several workers of a host may fetch the same files
            found = hub.find_cached(self._model_id, self._revision, self._cache)
            return found or self._fetch_all()

    def _fetch_all(self) -> hub.ModelSource:
        fruitless, waited_until = 0, time.monotonic() + BUSY_LIMIT_S
        for leftover in self._folder.glob(f"{_STAGING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        while True:
            before = self._progress.bytes_done, self._commit
            if self._ask_all_hosts():
                return self._publish()
            if (self._progress.bytes_done, self._commit) != before:
                fruitless, waited_until = 0, time.monotonic() + BUSY_LIMIT_S
            elif not self._busy:
                fruitless += 1
            if fruitless >= FRUITLESS_ROUNDS or time.monotonic() > waited_until or not (self._busy or self._transient):
                raise self._failure()
            time.sleep(random.uniform(1, 3) * PAUSE_S if self._busy else PAUSE_S)

    def _ask_all_hosts(self) -> bool:
        """One round; whether all files are here."""
        self._busy = self._transient = False
        self._absent = set()
        with suppress(Unavailable):  # the agent restarts: keep the former hosts
            self._known_hosts = self._hosts()
        for host, address in self._known_hosts:
            try:
                with _HostConnection(host, address, self._identity) as link:
                    self._progress.host = host
                    offer = self._offer_of(link)
                    self._take(link, offer)
                    if self._files and all(map(self._has, self._files)):
                        link.send(end=True)
                        return True
            except Unavailable as error:
                self._transient = True
                self._reasons[host] = error.message
                log.info("model not fetched from a host", extra={"model": self._model_id, "reason": error.message})
        return False

    def _offer_of(self, link: _HostConnection) -> Mapping[str, ModelFile]:
        """Return the files that a host has of the model, by name; empty if it has none, or sends to others."""
        link.send(op="model", model_id=self._model_id, revision=self._commit or self._revision)
        answer = link.receive()
        if "absent" in answer:
            self._absent.add(link.host)
            self._reasons[link.host] = f"{link.host} does not have it"
            return {}
        if "busy" in answer:
            self._busy = True
            self._reasons[link.host] = f"{link.host} sends models to others"
            return {}
        try:
            commit, files = _offer(answer)
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"{link.host}: its list of files is malformed: {error}") from error
        if not self._commit:
            self._begin(commit, [files[name] for name in needed(list(files))])
        if commit == self._commit:
            return files
        self._reasons[link.host] = f"{link.host} has another commit, {commit}"
        return {}

    def _begin(self, commit: str, files: Sequence[ModelFile]) -> None:
        """Decide on commit and files. Raises StorageFull if these do not fit."""
        self._commit, self._files = commit, files
        self._blobs.mkdir(parents=True, exist_ok=True)
        blobs = {file.blob: file for file in files}.values()
        present = sum(file.size_bytes if self._has(file) else file_size(self._partial(file)) for file in blobs)
        self._progress.bytes_total = sum(file.size_bytes for file in blobs)
        self._progress.bytes_done = present
        missing, free = self._progress.bytes_total - present, shutil.disk_usage(self._blobs).free
        if missing > free:
            raise StorageFull(
                f"{self._blobs}: model '{self._model_id}' needs {missing:,} more bytes, and {free:,} are free"
            )

    def _take(self, link: _HostConnection, offer: Mapping[str, ModelFile]) -> None:
        """Fetch what is missing and this host has; after wrong content the others are still fetched."""
        for file in self._files:
            if self._has(file) or (link.host, file.blob) in self._wrong:
                continue
            theirs = offer.get(file.name)
            if theirs is None or (theirs.blob, theirs.size_bytes) != (file.blob, file.size_bytes):
                self._reasons[link.host] = f"{link.host} has another {file.name}"
                continue
            with _locked(self._locks / f"{file.blob}.lock"):  # the hub library uses the same lock
                if not self._has(file):
                    self._fetch(link, theirs)

    def _fetch(self, link: _HostConnection, file: ModelFile) -> None:
        """Download and verify a blob. If a resumed download fails verification, restart once from zero."""
        partial = self._partial(file)
        for _ in range(2):
            have = file_size(partial)
            if have > file.size_bytes:
                self._discard(partial)
                have = 0
            self._receive(link, file, partial, have)
            problem = file.problem(partial)
            if not problem:
                partial.replace(self._blobs / file.blob)
                return
            self._discard(partial)
            if not have:
                break
        self._wrong.add((link.host, file.blob))
        self._reasons[link.host] = f"{file.name} of host '{link.host}' is not what it announced: {problem}"
        log.error("corrupt file from another host", extra={"model": self._model_id, "reason": self._reasons[link.host]})

    def _receive(self, link: _HostConnection, file: ModelFile, partial: Path, start: int) -> None:
        link.send(file=file.name, start=start)
        answer = link.receive()
        if answer.get("size") != file.size_bytes - start:
            raise Unavailable(f"{link.host}: {file.name} changed there")
        with FileIO(partial, "a") as stream:
            partial_bytes = start
            for piece in link.receive_bytes(file.size_bytes - start):
                try:
                    _write_all(stream, piece)
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    partial.unlink(missing_ok=True)  # free the disk for other processes
                    raise StorageFull(
                        f"{partial}: {error.strerror}; {file.size_bytes - partial_bytes:,} bytes of {file.name} are "
                        "still missing"
                    ) from error
                partial_bytes += len(piece)
                self._progress.bytes_done += len(piece)

    def _discard(self, partial: Path) -> None:
        self._progress.bytes_done -= file_size(partial)
        partial.unlink(missing_ok=True)

    def _has(self, file: ModelFile) -> bool:
        """True if the blob is here; nothing but whole files has such a name."""
        path = self._blobs / file.blob
        return path.exists() and file_size(path) == file.size_bytes

    def _partial(self, file: ModelFile) -> Path:
        return self._blobs / f"{file.blob}.incomplete"

    def _publish(self) -> hub.ModelSource:
        """Make the snapshot and the ref, by which workers find the model."""
        snapshot = self._folder / "snapshots" / self._commit
        snapshot.parent.mkdir(exist_ok=True)
        if not snapshot.exists():
            staging = self._folder / f"{_STAGING}{os.getpid()}"
            self._link_files(staging, snapshot)
            try:
                staging.rename(snapshot)
            except OSError as error:  # the hub library may have made it meanwhile
                shutil.rmtree(staging, ignore_errors=True)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        self._link_files(snapshot, snapshot)
        revision = self._revision or hub.DEFAULT_REVISION
        if not is_commit(revision):
            ref = self._folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, self._commit.encode())
        found = hub.find_cached(self._model_id, self._revision, self._cache)
        if found is None:
            raise ModelDownloadFailed(self._model_id, "the files of other hosts are not a complete model")
        log.info("model fetched from another host", extra={"model": self._model_id, "host": self._progress.host})
        return found

    def _link_files(self, folder: Path, snapshot: Path) -> None:
        """Make `folder`, which is or becomes `snapshot`, show the blobs by their names: weights last, by which a
        snapshot counts as whole.
        """
        for file in sorted(self._files, key=lambda each: each.name.endswith(_WEIGHTS)):
            link, shown = folder / file.name, snapshot / file.name
            if link.exists() and file_size(link) == file.size_bytes:
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(self._blobs / file.blob, shown.parent))

    def _failure(self) -> TeimgrError:
        """Why no host gave the model."""
        asked, reasons = [host for host, _ in self._known_hosts], "; ".join(sorted(self._reasons.values()))
        if asked and self._absent == set(asked):
            return ModelNotFound(f"no other host of the fleet has model '{self._model_id}' (asked: {', '.join(asked)})")
        if self._wrong and not (self._busy or self._transient):
            return ModelDownloadFailed(self._model_id, reasons)
        return Unavailable(f"Model '{self._model_id}' cannot be fetched from other hosts: {reasons}")


def _offer(answer: Mapping[str, Any]) -> tuple[str, dict[str, ModelFile]]:
    """Return the commit, and the files by name. Raises ValueError, TypeError and KeyError if the answer lacks them."""
    commit, files = str(answer["commit"]), [ModelFile.from_dict(each) for each in answer["files"]]
    if not is_commit(commit) or not 0 < len(files) <= MAX_FILES:
        raise ValueError(f"{len(files)} files of the commit {commit[:80]!r}")
    return commit, {file.name: file for file in files}


def _locked(path: Path) -> Any:
    """Return the hub library's lock of a file, as a context manager."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported lazily

    return WeakFileLock(path)


def _write_all(stream: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]
