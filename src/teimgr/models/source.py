"""Decides where a model may come from: model ids, revisions, directories, names of files, links.

REST, seeds, reload, trials, downloads, imports, other hosts and workers call `decide`. A worker calls it again when it
loads the model, because an id or a link may resolve differently on its host.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from teimgr.errors import InvalidConfig
from teimgr.files import expanded

MAX_PATH_CHARS = 255
"""Limit of a file name in a repository."""
MAX_ID_CHARS = 4096
"""Limit of a model id, as of a path on Linux."""
_SHOWN_CHARS = 256
_MAX_REF_BYTES = 256
# The hub's rule: NAME or OWNER/NAME, each of letters, digits and `_ . -`, without `.` or `-` at its ends.
_HUB_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_HUB_NAME}/)?{_HUB_NAME}")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class WrongSourceError(ValueError):
    """The source is invalid. `key` is model_id or revision; `is_outside` if the directory is not allowed."""

    def __init__(self, key: str, problem: str, *, is_outside: bool = False) -> None:
        super().__init__(problem)
        self.key = key
        self.problem = problem
        self.is_outside = is_outside


@dataclass(frozen=True, slots=True)
class Directory:
    """A model id that is a directory of this host, `~` expanded; it may not exist."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model id of the hub, with a branch, tag or commit."""

    id: str
    revision: str | None


def decide(model_id: str, revision: str | None = None, roots: Sequence[str] | None = None) -> Directory | HubModel:
    """What a model id and a revision name on this host. Reads one folder; no network.

    A directory has to be below one of `roots`, where its links lead; without `roots` it may be anywhere, with empty
    ones nowhere.

    Raises:
        WrongSourceError: neither a directory nor an id of the hub, no revision, or a directory outside of `roots`.
        InvalidConfig: `~` of a user without a home directory.
    """
    if problem := revision_problem(revision):
        raise WrongSourceError("revision", problem)
    shown = model_id[:_SHOWN_CHARS]
    if not model_id or len(model_id) > MAX_ID_CHARS or not model_id.isprintable():
        raise WrongSourceError("model_id", f"{shown!r} is neither a directory nor a hub id")
    if names_a_path(model_id) or _is_there(model_id):
        if roots is not None and not _is_below(model_id, roots):
            allowed = ", ".join(roots) or "no folder"
            raise WrongSourceError(
                "model_id", f"{shown!r} is outside of local_model_roots ({allowed})", is_outside=True
            )
        return Directory(expanded(model_id))
    return hub_model(model_id, revision)


def hub_model(model_id: str, revision: str | None = None) -> HubModel:
    """Like `decide`, if only a model of the hub is allowed.

    Raises:
        WrongSourceError: no id that the hub could have, or no revision.
    """
    if problem := revision_problem(revision):
        raise WrongSourceError("revision", problem)
    if not is_hub_id(model_id):
        raise WrongSourceError("model_id", f"{model_id[:_SHOWN_CHARS]!r} is neither a directory nor a hub id")
    return HubModel(model_id, revision)


def names_a_path(model_id: str) -> bool:
    """True if a model id can only be a directory."""
    return model_id.startswith(("/", "./", "../", "~")) or model_id in (".", "..")


def is_hub_id(model_id: str) -> bool:
    """True if the hub could have a model of this id."""
    fits = len(model_id) <= MAX_PATH_CHARS and _HUB_ID.fullmatch(model_id) is not None
    return fits and "--" not in model_id and ".." not in model_id and not model_id.endswith(".git")


def shown_id(model_id: str) -> str:
    """Return a model id without the place of its folder, for callers who may not know it: the folder's name."""
    return Path(model_id).name if names_a_path(model_id) else model_id


def revision_problem(revision: str | None) -> str | None:
    """Why a text is not a revision; None for the name of a branch or tag, by git's rules, or a commit, and for None.

    The hub library joins a revision to the path of the cache's refs, and what it finds there to that of the snapshots.
    """
    if revision is None:
        return None
    parts = revision.split("/")
    wrong = not stays_below(revision) or any(part.startswith(".") or part.endswith((".", ".lock")) for part in parts)
    if wrong or revision.startswith("-") or ".." in revision or any(mark in revision for mark in " ~^:?*[@{"):
        return f"must be the name of a branch, tag or commit (got {revision[:_SHOWN_CHARS]!r})"
    return None


def stays_below(name: str) -> bool:
    """True if the name of a file in a repository is a path that stays below its folder."""
    parts = name.split("/")
    return (
        0 < len(name) <= MAX_PATH_CHARS
        and not any(part in ("", ".", "..") for part in parts)
        and name.isprintable()
        and "\\" not in name
    )


def home_of(root: Path) -> Path:
    """Return the directory that all files of a model are in: its own, or in the hub's cache that of its repository."""
    home = root.resolve()
    in_cache = home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--")
    return home.parent.parent if in_cache else home


def is_inside(path: Path, *homes: Path) -> bool:
    """True if a path leads into one of `homes`, which are resolved, or is one of them."""
    try:
        place = path.resolve()
    except (OSError, RuntimeError, ValueError):  # circular links, or a null character
        return False
    return any(place.is_relative_to(home) for home in homes)


def resolved_roots(roots: Iterable[str]) -> tuple[Path, ...]:
    """Where the directories of `local_model_roots` are; those of unknown users are left out."""
    found = []
    for root in roots:
        try:
            found.append(expanded(root).resolve())
        except (OSError, RuntimeError, InvalidConfig):
            continue
    return tuple(found)


def file_problem(path: Path) -> str | None:
    """Why a path is not a file that may be read, as the end of a sentence about it; None for a file, and for nothing.

    To open a FIFO waits for its writer, and a device has no end.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return None
    return f"is {next((kind for is_kind, kind in _KINDS if is_kind(mode)), 'something else')}, not a file"


def ref_problem(folder: Path, revision: str) -> str | None:
    """Why the hub library should not read the ref of a revision in the cache folder of a model; None if it may."""
    ref = folder / "refs" / revision
    if problem := file_problem(ref):
        return problem
    try:
        if ref.stat().st_size > _MAX_REF_BYTES:
            return "is not a ref: it is too long"
    except OSError:
        return None
    return None


def is_own_snapshot(snapshot: Path, folder: Path) -> bool:
    """True if a snapshot that a ref or a link led to is one of those in the cache folder of its model."""
    try:
        return snapshot.resolve().parent == (folder / "snapshots").resolve()
    except (OSError, RuntimeError, ValueError):
        return False


def _is_there(model_id: str) -> bool:
    try:
        return Path(model_id).is_dir()
    except OSError:  # longer than a file name can be
        return False


def _is_below(model_id: str, roots: Iterable[str]) -> bool:
    try:
        return is_inside(expanded(model_id), *resolved_roots(roots))
    except InvalidConfig:  # home of an unknown user
        return False
