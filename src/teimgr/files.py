"""Files of the host: atomic replacement, locks, and the home directory of this process's user."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from teimgr import __version__
from teimgr.errors import InvalidConfig

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of this user's quota of it."""
# What `getpass.getuser` reads before it looks for the user's entry.
_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")


@cache
def code_id() -> str:
    """The version with a digest of this package's Python files, as they are at the first call.

    Call it when a process has imported what it uses: files that are replaced later are not its code.
    """
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def expanded(path: str | Path) -> Path:
    """The path with `~` or `~user` replaced.

    Raises:
        InvalidConfig: that user has no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        who = str(path).split("/", 1)[0]
        raise InvalidConfig(
            f"{path}: there is no home directory for `{who}`; set HOME, or give the whole path"
        ) from None


def ensure_home(folder: Path) -> bool:
    """Set HOME to `folder`, and LOGNAME to the user id, if neither the environment nor the system's users have them.

    Containers run under user ids without an entry in /etc/passwd; libraries that look for their caches, and for the
    user's name, then fail. Returns whether HOME was set; it holds for child processes too.
    """
    try:
        pwd.getpwuid(os.getuid())
        return False
    except KeyError:
        pass
    if not any(os.environ.get(name) for name in _USER_VARIABLES):
        os.environ["LOGNAME"] = str(os.getuid())
    if os.environ.get("HOME"):
        return False
    os.environ["HOME"] = str(folder.absolute())
    return True


def failure_of(error: OSError) -> str:
    """Return the path and the reason of a disk's refusal, such as `/var/lib/teimgr/state.toml: No space left on
    device`."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def write_atomically(
    path: Path, content: bytes, *, mode: int = 0o666, durable: bool = False, previous: Path | None = None
) -> None:
    """Replace the file at `path`, by way of `<path>.tmp`.

    Args:
        path: What to write; its folder exists.
        content: All of the new file.
        mode: Permissions of the new file, before the umask.
        durable: Sync file and folder, so that a power failure after the return does not lose the content.
        previous: Keep the replaced file under this second name.

    Raises:
        OSError: The disk refused, and the error names a path; the file at `path` is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    _write(temporary, content, mode, durable)
    if previous is not None:
        with suppress(FileNotFoundError):
            duplicate(path, previous)
    temporary.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def duplicate(path: Path, name: Path) -> None:
    """Make `name`, in the same folder, a hard link to `path`, or a copy where the file system has no links."""
    link = path.with_name(f".{path.name}.link")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # the error of a missing feature differs between file systems; a broken disk fails the copy too
        _write(link, path.read_bytes(), stat.S_IMODE(path.stat().st_mode), durable=True)
    link.replace(name)


def file_size(path: Path) -> int:
    """Bytes of a file; 0 where it is missing or cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def lock_file(path: Path) -> int | None:
    """Lock `path` until this process ends or closes the descriptor, which is the result.

    None if another process holds the lock.

    Raises:
        OSError: The file cannot be opened for writing.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _write(path: Path, content: bytes, mode: int, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # a failed write, as on a full disk, has none
        raise
