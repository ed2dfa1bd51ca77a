"""Listening Unix sockets: binding, replacing the file of a dead process, removing the own file.

A lock, `.teimgr-UID.lock` in the socket's folder, protects each change of the file. So only one process replaces the
file of a dead one, and none removes another's file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from teimgr.errors import InvalidConfig, PortConflict

SOCKET_PATH_BYTES = 107
"""Maximum bytes of a socket's path: 108 in the kernel, with a final zero."""

_BACKLOG = 2048
_CREDENTIALS = struct.Struct("3i")  # pid, user and group of the process that called listen()
_LOCK_LIMIT_S = 2.0
_LOCK_POLL_S = 0.005


class SocketFile:
    """The file of a socket on which this process listens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = _identity(path)

    def remove(self) -> None:
        """Remove the file, unless another process has replaced it. To be called before the socket is closed, after
        which another file could have the same inode."""
        if self._identity is None:
            return
        with suppress(OSError), _locked(self.path.parent):
            if _identity(self.path) == self._identity:
                self.path.unlink()
        self._identity = None

    def keep(self) -> None:
        """Leave the file to a process that has the socket too: `remove` has no effect from now on."""
        self._identity = None


class UnixListener:
    """A listening socket and its file."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock = sock
        self.file = SocketFile(path)

    def publish(self, path: Path) -> None:
        """Move the file to `path`, like the function `publish`; raises OSError."""
        self.file = publish(self.file.path, path)

    def close(self) -> None:
        """Remove the file and close the socket."""
        self.file.remove()
        self.sock.close()


def bind_unix(path: Path, mode: int, setting: str) -> UnixListener:
    """Return a socket that listens at `path` with these permissions; the file of a dead process is replaced.

    Connections wait in the backlog until they are accepted. `setting` is the key of the path, for messages.

    Raises:
        PortConflict: a process listens there.
        InvalidConfig: there is a file of another kind, or the folder is missing or not writable.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _failures(path, setting), _locked(path.parent):
            _free(path, setting)
            sock.bind(str(path))
            path.chmod(mode)  # before listen(), so no client connects with wrong permissions
            sock.listen(_BACKLOG)
            return UnixListener(sock, path)
    except BaseException:
        sock.close()
        raise


def check_free(path: Path, setting: str) -> None:
    """Return if a process may listen at `path`; the file of a dead process is removed.

    Raises:
        PortConflict, InvalidConfig: see `bind_unix`.
    """
    with _failures(path, setting), _locked(path.parent):
        _free(path, setting)


def remove_stale(path: Path) -> None:
    """Remove the file of a socket on which no process listens any more; leave everything else."""
    with suppress(OSError), _locked(path.parent):
        if stat.S_ISSOCK(path.lstat().st_mode) and _listening_pid(path) is None:
            path.unlink()


def publish(temporary: Path, path: Path) -> SocketFile:
    """Move the file of a listening socket to `path`, in the same folder, atomically over the existing one.

    New connections come to that socket from then on; existing connections continue.

    Raises:
        OSError: it cannot be moved.
    """
    with _locked(path.parent):
        temporary.replace(path)
        return SocketFile(path)


@contextmanager
def _failures(path: Path, setting: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{setting}: cannot listen on {path}: {error.strerror or error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; OSError if another process holds it for longer than such changes take.

    The lock is a file of this user, which stays: anyone who may read a folder could lock the folder itself, and so
    prevent every start.
    """
    path = folder / f".teimgr-{os.geteuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{path} belongs to another user")
        end = time.monotonic() + _LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise OSError(errno.EAGAIN, f"{path} is locked by another process") from error
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _free(path: Path, setting: str) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InvalidConfig(f"{setting}: cannot listen on {path}: a file that is not a socket exists there")
    if (pid := _listening_pid(path)) is not None:
        raise PortConflict(path, f"{f'process {pid}' if pid else 'another process'}; choose another `{setting}`")
    path.unlink()


def _listening_pid(path: Path) -> int | None:
    """Return the process that listens at `path`, 0 for an unknown one; None if none does.

    Raises:
        OSError: this user may not connect, or it is a socket of another type.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its backlog is full
            return 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
