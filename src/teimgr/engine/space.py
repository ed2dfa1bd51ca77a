"""The space of a model's vectors: one SHA-256 over everything that determines the meaning of a vector.

It covers the weights' tensors, the tokenizer, config.json and the modules, pooling, prompts, lengths, truncation,
dimensions and head, as the engine has read them: every field of `Layout` that is not in `_NOT_OF_THE_SPACE`. Names and
shards of files, host, device, batch and element type are not part of it; the element type has a precision class.

Threads hash the weights while the model loads. A file keeps the digests for the next load of the same files: hashing
takes 0.1 s for 90 MB, a check for changes some 0.2 ms.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from teimgr.engine.heads.projections import read_tensors
from teimgr.engine.kept_files import PrivateCacheFile, identities
from teimgr.engine.text.tokenizer import Prompts, TextTokenizer
from teimgr.engine.weights.onnx import onnx_weights
from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_head
from teimgr.models.directory import onnx_file, weight_files
from teimgr.models.gguf_head import read_gguf
from teimgr.models.layout import Layout, OwnModule

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the hash: raised, with a line in CHANGELOG.md, if the engine's own vectors change their meaning."""
_KEPT_FORMAT = 2  # of kept digests; raised if they change for the same files
MAX_KEPT = 4096
_MAX_KEPT_BYTES = 64 * 1024
_MAX_FILES = 10_000
_PIECE_BYTES = 4 * 2**20
_MAX_THREADS = 4
_SUFFIX = ".space"
# Fields of `Layout` that are not hashed: paths and formats of files, notes, and what is hashed in the engine's form.
_NOT_OF_THE_SPACE = frozenset(
    (
        *("root", "transformer_dir", "weights_dir", "safetensors_only", "config_is_changed", "weight_names"),
        *("notes", "warnings", "prompts", "default_prompt_name", "max_length"),
        *("lower_case", "end_token", "own_tokenizer", "trust_remote_code", "code_revision", "query_route"),
    )
)
# Fields of parts of a layout that are not hashed: the place of own code, which is hashed itself, the layout's route,
# and an adapter's rank, which is that of its weights.
_BY_WEIGHTS = ("root", "route", "revision", "rank", "ranks")
# Fields of `Layout` and its parts added since FORMAT was last raised: hashed only if set.
_LATER_FIELDS = frozenset(("dual", "pages", "sound", "chat", "reader", "strips", "cuts_prefix"))
# Keys of config.json that are not hashed: origin and format of the file.
_ORIGIN = frozenset(("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache"))
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PRECISIONS = {"float32": "fp32", "bfloat16": "16-bit", "float16": "16-bit", "int8": "int8"}


def precision_class(dtype: str) -> str:
    """The class of a dtype of weights: fp32, 16-bit or int8."""
    return _PRECISIONS.get(dtype, dtype)


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """Digests of the contents of a model's files: tensors by the index of their place in `_places`, tokenizers, and the
    model's own code.
    """

    weights: list[str]
    tokenizers: list[str]
    code: str = ""


@dataclass
class SpaceDigest:
    """The computation of a model's space: `begin` when its files are read, `result` after the load."""

    layout: Layout
    tokenizer: TextTokenizer
    prompts: Prompts
    code: tuple[str, ...] = ()
    threads: int = 1
    folder: Path | None = None
    _found: ContentDigests | None = field(default=None, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def begin(self) -> None:
        """Take what an earlier load has kept, or begin to hash the files on a thread."""
        kept = self._kept()
        self._found = None if kept is None else _parsed(kept.read())
        if self._found is not None:
            return
        self._thread = threading.Thread(target=self._hash, args=(kept,), name="teimgr-space", daemon=True)
        self._thread.start()

    def result(self) -> str:
        """The space, 64 hex digits; waits for the end of the hashing.

        Raises:
            ModelLoadFailed: a file cannot be read.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._found is not None
        return space_of(self.layout, self.tokenizer, self.prompts, self._found)

    def _hash(self, kept: PrivateCacheFile | None) -> None:
        try:
            self._found = found = digests_of(self.layout, self.tokenizer, self.code, min(self.threads, _MAX_THREADS))
            if kept is not None and self._kept() == kept:  # no file changed meanwhile
                kept.write(json.dumps([found.weights, found.tokenizers, found.code]).encode())
        except BaseException as error:  # `result` raises it
            self._failure = error

    def _kept(self) -> PrivateCacheFile | None:
        """The file for digests of exactly these files; None if none may be kept."""
        if self.folder is None:
            return None
        layout = self.layout
        folders = {
            layout.root,
            layout.transformer_dir,
            layout.weights_dir,
            *(_folder(path) for path in _places(layout)),
        }
        try:
            found = identities({folder.resolve() for folder in folders}, _MAX_FILES)
        except OSError as error:
            log.info("digests of the model's files are not stored: %s", error)
            return None
        versions = (FORMAT, _KEPT_FORMAT, tokenizers.__version__, transformers.__version__)
        facts = (versions, repr(replace(layout, notes=(), warnings=())), self.code, found)
        key = hashlib.sha256(repr(facts).encode()).hexdigest()
        return PrivateCacheFile(self.folder / f"{key}{_SUFFIX}", _MAX_KEPT_BYTES, MAX_KEPT)


def space_of(layout: Layout, tokenizer: TextTokenizer, prompts: Prompts, found: ContentDigests) -> str:
    """The SHA-256 of a loaded model's space, 64 hex digits."""
    weights = dict(zip(_places(layout), found.weights, strict=True))
    route = layout.query_route
    facts = {
        "format": FORMAT,
        "layout": _of_layout(layout, weights),
        **(
            {} if route is None else {"queries": [_of_layout(route.layout, weights), weights[route.layout.weights_dir]]}
        ),
        "weights": weights[layout.weights_dir],
        "tokenizers": found.tokenizers,
        "max_length": tokenizer.max_length,
        "prompts": prompts.facts(),
        "code": found.code,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _of_layout(layout: Layout, weights: Mapping[Path, str]) -> dict[str, Any]:
    return {
        item.name: _plain(getattr(layout, item.name), weights)
        for item in fields(layout)
        if item.name not in _NOT_OF_THE_SPACE
        if item.name not in _LATER_FIELDS or getattr(layout, item.name) is not None
    }


def digests_of(layout: Layout, tokenizer: TextTokenizer, code: Sequence[str], threads: int) -> ContentDigests:
    """Read and hash a model's files; raises ModelLoadFailed: one cannot be read."""
    texts = [one.library.to_str() for one in tokenizer.all()]
    named = str(layout.config.get("transformers_weights") or "")
    with ThreadPoolExecutor(threads, "space") as pool:
        weights = []
        for place in _places(layout):
            is_named = named and place == layout.weights_dir
            lines = _lines(place / named if is_named else place, pool)
            weights.append(_sha256(sorted(lines)))
    return ContentDigests(weights, [_sha256([text]) for text in texts], _code_digest(layout, code))


def _places(layout: Layout) -> list[Path]:
    """The folders and files of weights, in the order in which the layout names them, each once."""
    own = (layout.weights_dir, *_paths(layout))
    others = [] if layout.query_route is None else _places(layout.query_route.layout)
    return list(dict.fromkeys((*own, *others)))


def _paths(layout: Layout) -> Iterator[Path]:
    for item in fields(layout):
        if item.name not in _NOT_OF_THE_SPACE:
            yield from _paths_in(getattr(layout, item.name))


def _paths_in(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif is_dataclass(value):
        for item in fields(value):
            if item.name != "root":  # the directory of own code, which is hashed itself
                yield from _paths_in(getattr(value, item.name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _paths_in(each)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _plain(value: Any, weights: Mapping[Path, str]) -> Any:
    """`value` as JSON has it; a path is what is in its weights."""
    if isinstance(value, Path):
        return weights[value]
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        named = ((one.name, getattr(value, one.name)) for one in fields(value) if one.name not in _BY_WEIGHTS)
        return {name: _plain(each, weights) for name, each in named if each or name not in _LATER_FIELDS}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, weights) for key, each in value.items() if key not in _ORIGIN}
    if isinstance(value, (list, tuple)):
        return [_plain(each, weights) for each in value]
    return value


def _lines(place: Path, pool: ThreadPoolExecutor) -> list[str]:
    """A line for every tensor in a file or a folder of weights: its name, dtype, shape and the hash of its bytes."""
    files = [place] if place.is_file() else weight_files(place)
    if not files and (graph := onnx_file(place)) is not None:
        return [_of_tensor(name, tensor) for name, tensor in onnx_weights(graph).items()]
    if not files:  # own code may have weights in its own format
        files = [path for path in sorted(place.iterdir()) if path.is_file()]
        return [f"{path.name} {_of_range(path, 0, path.stat().st_size)}" for path in files]
    return [line for file in files for line in _of_file(file, pool)]


def _of_file(file: Path, pool: ThreadPoolExecutor) -> list[str]:
    if file.suffix not in (".safetensors", ".gguf"):
        return [_of_tensor(name, tensor) for name, tensor in read_tensors(file).items() if isinstance(tensor, Tensor)]
    try:
        pending = []
        for tensor in read_gguf(file).tensors if file.suffix == ".gguf" else read_head(file):
            described = json.dumps([tensor.name, tensor.dtype, tensor.shape])
            pending.append((described, pool.submit(_of_range, file, tensor.begin, tensor.end)))
        return [f"{described} {digest.result()}" for described, digest in pending]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ModelLoadFailed(f"the weights {file.parent.name}/{file.name} cannot be read: {error}") from error


def _of_range(file: Path, begin: int, end: int) -> str:
    """The hash of a part of a file, which is read and not mapped: mapped pages would count as the worker's memory."""
    digest, buffer = hashlib.sha256(), bytearray(min(_PIECE_BYTES, max(1, end - begin)))
    with file.open("rb", buffering=0) as opened:
        while begin < end:
            view = memoryview(buffer)[: min(len(buffer), end - begin)]
            if not (count := os.preadv(opened.fileno(), [view], begin)):
                raise OSError(f"{file.name} ends too soon")
            digest.update(view[:count])
            begin += count
    return digest.hexdigest()


def _of_tensor(name: str, tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1)
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
    content = plain.view(torch.uint8).numpy().data if plain.numel() else b""
    digest = hashlib.sha256(content).hexdigest()
    return f"{json.dumps([name, dtype, list(tensor.shape)])} {digest}"


def _code_digest(layout: Layout, code: Sequence[str]) -> str:
    """Digest of a trusted model's own code; "" if it runs none, whatever *.py files are there."""
    if not layout.trust_remote_code or not (code or _has_own_code(layout)):
        return ""
    files = sorted({*layout.root.glob("*.py"), *layout.root.glob("*/*.py")})
    lines = [f"{file.relative_to(layout.root)} {_of_range(file, 0, file.stat().st_size)}" for file in files]
    return _sha256([*lines, *sorted(code)])


def _has_own_code(layout: Layout) -> bool:
    """True if the model, the tokenizer or a module is code of the model's own."""
    route = layout.query_route
    if layout.config.get("auto_map") or layout.own_tokenizer or layout.reader is not None:
        return True
    return any(isinstance(one, OwnModule) for one in layout.projections) or bool(route and _has_own_code(route.layout))


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parsed(content: bytes | None) -> ContentDigests | None:
    """None for a damaged file."""
    try:
        weights, texts, code = json.loads(content or b"")
        return ContentDigests([str(each) for each in weights], [str(each) for each in texts], str(code))
    except (ValueError, TypeError):
        return None
