"""Decides which files of a model directory are needed: the weights of each module, and the files read with them.

The same rules decide what is downloaded (`needed`), what makes a copy complete (`missing_file`), what `/models` shows
and which weights are opened (`weight_files`), for each directory separately: safetensors before pickled files, one file
before an index of shards, as in the transformers library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models import bounded_json as model_json
from teimgr.models.bounded_json import CutShort, read_head
from teimgr.models.source import MAX_PATH_CHARS, file_problem, home_of, is_inside, resolved_roots, stays_below

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_ONNX = ("onnx/model.onnx", "model.onnx")  # full-precision exports
_CONFIGURATIONS = ("config.json", "modules.json", _ADAPTER, "gliner_config.json")  # the last is refused later, by name
_CARD_CHARACTERS = 10_000  # read of a model card
_GGUF = "GGUF (llama.cpp)"
_FORMATS = {
    ".gguf": _GGUF,
    ".onnx": "ONNX, optimised or quantised",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    "openvino_model.xml": "OpenVINO",
    ".mlmodel": "Core ML",
    ".tflite": "TensorFlow Lite",
    ".ot": "Rust",
}
_WEIGHTS = (SINGLE, INDEX, PICKLED, PICKLED_INDEX)  # in order of preference
_OTHER_ENDINGS = ("onnx", "onnx_data", "h5", "msgpack", "ot", "tflite", "gguf", "pth", "ckpt", "mlmodel")
_OTHER_RUNTIMES = (
    *("onnx/*", "openvino/*", "coreml/*", "checkpoint-*/*", "*/checkpoint-*/*"),
    *(f"*.{ending}" for ending in _OTHER_ENDINGS),
)
# Compiled at import for forked workers: it takes longer than reading a small model's config.json.
_OF_OTHER_RUNTIMES = re.compile("|".join(map(translate, _OTHER_RUNTIMES)))
_TRAINING = ("training_args.bin", "optimizer.bin", "scheduler.bin")
OPTIONAL = [*_OTHER_RUNTIMES, "*.bin"]
"""Patterns of files that the engine does not need."""

# Module classes, without package: transformers, others with weights, and all that need a config.json.
_READERS = ("Transformer", "MLMTransformer", "CLIPModel")
_WEIGHTED = ("SparseStaticEmbedding", "Dense", "LayerNorm", "WeightedLayerPooling", "CNN", "LSTM")
_CONFIGURED = (*_READERS, *_WEIGHTED, "Pooling", "SpladePooling", "LogitScore")

TASK_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
"""Name of a task, and of the folder with its adapter."""

# Folders that are read although they belong to no module.
_READ_BESIDE = ("1_Pooling", "additional_chat_templates")
_MAX_FILES = 10_000
_MAX_POINTER_BYTES = 1024  # git-lfs accepts no larger pointer


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """A module of a model: its class, and its directory."""

    type: str
    path: Path

    @property
    def name(self) -> str:
        """The class name without the package."""
        return self.type.rsplit(".", 1)[-1]


def onnx_file(folder: Path) -> Path | None:
    """Return the ONNX graph from which weights are read; None without one, or if the directory has other weights."""
    if weight_files(folder):
        return None
    return next((folder / name for name in _ONNX if (folder / name).is_file()), None)


def sole_gguf(names: Iterable[str]) -> str | None:
    """Return the only .gguf file among names without a configuration or other weights; else None."""
    given = list(names)
    found = [name for name in given if name.endswith(".gguf")]
    is_alone = len(found) == 1 and "/" not in found[0]
    return found[0] if is_alone and not {*_CONFIGURATIONS, *_WEIGHTS, *_ONNX}.intersection(given) else None


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file that stands for all files of a model; None without one, or with several."""
    try:
        with os.scandir(folder) as entries:
            name = sole_gguf(entry.name for entry in islice(entries, _MAX_FILES))
    except OSError:
        return None
    return None if name is None else folder / name


def other_format(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the format of weights that this engine cannot read, such as "GGUF (llama.cpp)", and the first such file;
    None if the files have readable weights, or none.
    """
    given = list(names)
    if any(PurePosixPath(name).name in (*_WEIGHTS, *_ADAPTER_WEIGHTS) or name in _ONNX for name in given):
        return None
    found = ((form, name) for ending, form in _FORMATS.items() for name in given if name.lower().endswith(ending))
    return next(found, None)


def base_model_of(root: Path) -> str | None:
    """Return the base model that the card of a repository names, or None."""
    card = root / "README.md"
    if not card.is_file():
        return None
    with card.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(_CARD_CHARACTERS).splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line, following in zip(lines[1:], [*lines[2:], ""], strict=True):
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key == "base_model":
            named = value.strip() or following.strip().removeprefix("-")
            return named.strip().strip("\"'") or None
    return None


def use_original(named: str | None) -> str:
    """End a refusal of files in another form: use the original model, by its name if that is known."""
    return "use the original model" + (f", {named}" if named else "")


def only_in(found: tuple[str, str], original: str | None) -> str:
    """End a refusal, after "weights", of weights in another format (`other_format`); `original` is the name of the
    original model.
    """
    form, file = found
    why = "which is not read: "
    if form == _GGUF:
        why = "read of Qwen3 embedding models as the one .gguf file of a directory, without config.json: name such a "
        why += "directory as model_id, or "
    return f"in {form} alone ({file}), {why}{use_original(original)}"


def has_configuration(path: Path) -> bool:
    """True if a directory may be that of a model or of an adapter."""
    return any((path / name).exists() for name in _CONFIGURATIONS) or gguf_file(path) is not None


def adapter_weights(folder: Path) -> Path | None:
    """Return the file of an adapter's weights, or None."""
    return next((folder / name for name in _ADAPTER_WEIGHTS if (folder / name).is_file()), None)


def adapter_base(folder: Path) -> tuple[str, str | None] | None:
    """Return the base model that an adapter names, and its revision; None without an adapter, or if it names none."""
    config = model_json.read_object(folder / _ADAPTER) or {}
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(named, str) or not named:
        return None
    return named, revision if isinstance(revision, str) else None


def module_places(root: Path) -> list[ModulePlace]:
    """Return the modules of modules.json, with those of a Router in its place; a bare transformer is one module, at
    `root`.

    Raises:
        ModelLoadFailed: a file cannot be read, or names a directory outside the model's.
    """
    rows = model_json.read_list(root / "modules.json")
    if not rows:
        return [ModulePlace("sentence_transformers.Transformer", root)]
    places = []
    for row in rows:
        place = ModulePlace(str(row.get("type", "")), folder_in(root, str(row.get("path", ""))))
        places += _routed(root, place.path) if place.name in ROUTERS else [place]
    return places


ROUTERS = ("Router", "Asym")
"""Class of a module with routes, now and before sentence-transformers 5."""


def router_file(folder: Path) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the file of routes in a Router's directory, and its content, None if it does not exist.

    Raises:
        ModelLoadFailed: it cannot be read.
    """
    own = model_json.read_object(folder / "router_config.json")
    if own is None and "structure" in (old := model_json.read_object(folder / "config.json") or {}):  # an Asym's
        return "config.json", old
    return "router_config.json", own


def _routed(root: Path, path: Path) -> list[ModulePlace]:
    types = (router_file(path)[1] or {}).get("types")
    if not isinstance(types, dict):
        return []
    below = path.relative_to(root).as_posix()
    return [ModulePlace(str(kind), folder_in(root, f"{below}/{key}")) for key, kind in types.items()]


def configuration_folder(root: Path) -> Path:
    """Return the directory with the transformer's config.json; raises ModelLoadFailed as `module_places`."""
    places = module_places(root)
    return next((place.path for place in places if place.name in _READERS), places[0].path if places else root)


def folder_in(root: Path, path: str) -> Path:
    """Return the directory that a model's files name, relative to `root`.

    In the hub's cache a module's directory may be a link to that of another snapshot of the same model.

    Raises:
        ModelLoadFailed: it is outside the model's directory.
    """
    place = root / path
    if not is_inside(place, home_of(root) if stays_below(path.rstrip("/") or "x") else root.resolve()):
        raise ModelLoadFailed(f"modules.json points out of the model's directory: {path[:MAX_PATH_CHARS]}")
    return place


def check_links(root: Path, roots: Iterable[str]) -> None:
    """Check that the files read of a model lead, after links, to its own directory or below one of `roots`.

    Raises:
        InvalidConfig: one leads elsewhere, or a directory of the model has more than 10,000 entries.
        ModelLoadFailed: as `module_places`.
    """
    homes = (home_of(root), *resolved_roots(roots))
    folders = [root, *(place.path for place in module_places(root)), *(root / name for name in _READ_BESIDE)]
    folders += task_folders(root)
    for folder in dict.fromkeys(folders):
        try:
            files = list(islice(folder.iterdir(), _MAX_FILES + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if len(files) > _MAX_FILES:
            raise InvalidConfig(f"model_id: {_shown(root, folder)} has more than {_MAX_FILES:,} files")
        for path in (folder, *files):
            if path.is_symlink() and not is_inside(path, *homes):
                raise InvalidConfig(f"model_id: {_shown(root, path)} is a link out of the model's directory")


def check_safetensors(root: Path, opened: Iterable[Path]) -> None:
    """Check that only safetensors of this model would be loaded from `opened`, which are directories and weight files.

    Raises:
        InvalidConfig: another kind of file would be opened, or one outside the model.
        ModelLoadFailed: as `weight_files`.
    """
    home = home_of(root)
    for place in opened:
        for file in weight_files(place) if place.is_dir() else (place,):
            name = _shown(root, file)
            if file.suffix not in (".safetensors", ".gguf"):
                raise InvalidConfig(f"model_id: {name} has pickled weights, and only safetensors are allowed")
            if not is_inside(file, home):
                raise InvalidConfig(f"model_id: {name} is a link out of the model's directory")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files that are loaded from a directory, sharded or not, whether they exist or an index names
    them; () without any.

    Raises:
        ModelLoadFailed: an index of shards is malformed.
    """
    shards = {name: shards_of(folder / name) for name in (INDEX, PICKLED_INDEX)}  # also of indexes that are not chosen
    for name in _WEIGHTS:
        if name in shards and (named := shards[name]) is not None:
            return tuple(folder / shard for shard in named)
        if name not in shards and ((folder / name).is_file() or file_problem(folder / name)):
            return (folder / name,)
    return () if (alone := gguf_file(folder)) is None else (alone,)


def missing_file(root: Path) -> str | None:
    """Return the first file that a model directory lacks, relative to it; None if it is complete.

    A truncated file, or one that is only a git-lfs pointer, counts as missing.

    Raises:
        ModelLoadFailed: a file that names others is malformed.
    """
    if (lost := lost_file(root)) is not None:
        return lost
    if (alone := gguf_file(root)) is not None:
        return alone.name if fault_of(alone) else None
    if not has_configuration(root):
        return "config.json"
    for first, place in enumerate(module_places(root)):
        if (lacking := _missing_of(place, is_first=first == 0)) is not None:
            return _shown(root, place.path / lacking)
    for folder in task_folders(root):
        if not (folder / _ADAPTER).is_file() or adapter_weights(folder) is None:
            return _shown(root, folder / (_ADAPTER if adapter_weights(folder) else _ADAPTER_WEIGHTS[0]))
    return None


def task_folders(root: Path) -> list[Path]:
    """Return the folders of jina-embeddings-v5's adapters, one per task in config.json; none for other models."""
    config = model_json.read_object(root / "config.json") or {}
    names = config.get("task_names")
    if config.get("model_type") != "jina_embeddings_v5" or not isinstance(names, list):
        return []
    return [root / "adapters" / name for name in names if isinstance(name, str) and TASK_NAME.fullmatch(name)]


def _missing_of(place: ModulePlace, *, is_first: bool) -> str | None:
    folder = place.path
    static = place.name == "StaticEmbedding"
    if (folder / _ADAPTER).is_file() and place.name in _READERS:
        return None if adapter_weights(folder) else _ADAPTER_WEIGHTS[0]
    if place.name in _CONFIGURED and not (folder / "config.json").is_file():
        if problem := file_problem(folder / "config.json"):  # a download would not replace it
            raise ModelLoadFailed(f"config.json {problem}")
        return "config.json"
    if static or is_first or place.name in (*_READERS, *_WEIGHTED):
        weights = weight_files(folder)
        if not weights and is_first and onnx_file(folder) is not None:
            return None
        if not weights:
            return SINGLE
        if lacking := next((file for file in weights if fault_of(file) or not file.is_file()), None):
            return lacking.name
    return None


def needed(names: Sequence[str]) -> list[str]:
    """Return those names of a repository's files that the engine needs."""
    present = set(names)
    kept = [name for name in names if not _is_unused(name, present)]
    if any(PurePosixPath(name).name in (*_WEIGHTS, *_ADAPTER_WEIGHTS) for name in kept):
        return kept
    graph = next((name for name in _ONNX if name in present), None)  # the repository has only ONNX weights
    alone = {sole_gguf(names), *([graph, f"{graph}_data", f"{graph}.data"] if graph else ())}
    return [name for name in names if name in kept or name in alone]


def _is_unused(name: str, present: set[str]) -> bool:
    if _OF_OTHER_RUNTIMES.fullmatch(name):
        return True
    path = PurePosixPath(name)
    if path.suffix != ".bin" and path.name != PICKLED_INDEX:
        return False
    beside = {(path.parent / other).as_posix() for other in (SINGLE, INDEX)}
    return path.name in _TRAINING or not present.isdisjoint(beside)


def shards_of(index: Path) -> list[str] | None:
    """Return the files that an index of shards names, in the index's own folder; None without an index.

    Raises:
        ModelLoadFailed: the index cannot be read, or names a file outside its folder.
    """
    content = model_json.read_object(index)
    if content is None:
        return None
    named = content.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelLoadFailed(f"{index.name} has no weight_map")
    shards = {shard if isinstance(shard, str) else "" for shard in named.values()}
    if wrong := [shard for shard in shards if not stays_below(shard)]:
        raise ModelLoadFailed(f"{index.name} names the file {wrong[0][:MAX_PATH_CHARS]!r}, which is not in its folder")
    return sorted(shards)


def broken_file(root: Path) -> str | None:
    """Return the first needed file that is not whole, with the reason, such as "2_Dense/model.safetensors ends too
    soon"; None if all are whole.
    """
    return next((f"{name} {fault}" for name, path in _needed_below(root) if (fault := fault_of(path))), None)


def lost_file(root: Path) -> str | None:
    """Return the first JSON or Jinja file below a model directory that is a dangling link, relative to it, as in a
    cache that lost a blob. Reading it as missing would drop prompts, lengths or modules.
    """
    for folder in (root, *_folders_in(root)):
        try:
            links = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_symlink())
        except OSError:
            continue
        for path in links:
            name = _shown(root, path)
            if path.suffix in (".json", ".jinja") and _leads_nowhere(path) and not _is_unused(name, set()):
                return name
    return None


def _leads_nowhere(path: Path) -> bool:
    """True if a link's target does not exist; False for circular links, which are broken files."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


_ABSENT = ".no_exist"
"""Folder of the hub's cache with the names of files that a repository lacks at a commit."""


def may_lack_modules(root: Path) -> bool:
    """True if a snapshot in the hub's cache may be incomplete: it has no modules.json, and the cache has no note that
    the repository lacks it. The transformers library, used alone, does not fetch modules.json.
    """
    if root.parent.name != "snapshots" or (root / "modules.json").exists() or gguf_file(root) is not None:
        return False
    return not (root.parent.parent / _ABSENT / root.name / "modules.json").exists()


def note_without_modules(snapshot: Path) -> None:
    """Note in the hub's cache that a snapshot's repository has no modules.json; failures are ignored."""
    marker = snapshot.parent.parent / _ABSENT / snapshot.name / "modules.json"
    with suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _folders_in(root: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in islice(os.scandir(root), _MAX_FILES) if entry.is_dir()]
    except OSError:
        return []


def check_fetched(root: Path) -> None:
    """Check that the files of a model directory exist, and are neither git-lfs pointers nor dangling links. Reads small
    files only.

    Raises:
        ModelLoadFailed: a needed file fails this check.
    """
    if (lost := lost_file(root)) is not None:
        raise ModelLoadFailed(f"{lost} is a link to a file that is not there: fetch the model again")
    for _, path in _needed_below(root):
        if is_pointer(path):
            raise ModelLoadFailed(f"{path} {model_json.IS_POINTER}")


def _needed_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the needed files of a model directory by name; those of a Router's modules are two levels deep."""
    found = {_shown(root, path): path for path in files_below(root, depth=2)}
    return ((name, found[name]) for name in needed(list(found)))


def fault_of(path: Path) -> str | None:
    """Return why a file's content does not match its name, as the end of a sentence; None if it does."""
    if problem := file_problem(path):
        return problem
    if is_pointer(path):
        return model_json.IS_POINTER
    return "ends too soon" if is_cut_short(path) else None


def is_pointer(path: Path) -> bool:
    """True if a file is a git-lfs pointer instead of the file."""
    try:
        if path.stat().st_size > _MAX_POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(model_json.POINTER)) == model_json.POINTER
    except OSError:
        return False


def is_cut_short(weights: Path) -> bool:
    """True if a safetensors file ends before the data that its head announces; other files are not read."""
    if weights.suffix != ".safetensors":
        return False
    try:
        ends = [tensor.end for tensor in read_head(weights)]
        return weights.stat().st_size < max(ends, default=0)
    except CutShort:
        return True
    except (OSError, ModelLoadFailed):
        return False


def files_below(root: Path, depth: int = 8) -> Iterator[Path]:
    """Yield the files in a directory and up to `depth` levels below it, in order, following links to directories.

    At most 10,000; dangling links and unreadable directories are left out.
    """
    left = [_MAX_FILES]

    def walk(folder: Path, levels: int, above: tuple[Path, ...]) -> Iterator[Path]:
        try:
            here, entries = folder.resolve(), sorted(os.scandir(folder), key=lambda entry: entry.name)
        except (OSError, RuntimeError):
            return
        if here in above:
            return
        for entry in entries:
            path = Path(entry.path)
            try:
                is_file, is_folder = entry.is_file(), entry.is_dir()
            except OSError:
                continue
            if is_file and left[0] > 0:
                left[0] -= 1
                yield path
            elif is_folder and levels and left[0] > 0:
                yield from walk(path, levels - 1, (*above, here))

    yield from walk(root, depth, ())


def _shown(root: Path, path: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.name
