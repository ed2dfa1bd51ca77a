"""Reads the heads of weight files: the GGUF (llama.cpp) head of a Qwen3 embedding model, and the sizes of any weights.

The file is untrusted: every count, length and offset is checked before it is used.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
import sys
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, BinaryIO

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import MAX_TENSORS, MAX_VALUES, CutShort, HeadTensor, NoHead, read_head
from teimgr.models.directory import base_model_of, files_below, use_original, weight_files
from teimgr.models.json_files import ServedConfig
from teimgr.models.layout import Backbone, Layout
from teimgr.models.source import file_problem
from teimgr.spec import Kind

GGUF = "gguf"
"""Value of `Layout.weight_names`: the weights are in a GGUF file."""
ARCHITECTURE = "qwen3"
"""The supported `general.architecture`, and the prefix of its keys."""
MAX_HEAD_BYTES = 32 * 2**20
"""The most bytes of metadata and tensor list; Qwen3-Embedding has 6 MB."""
_MAX_KEYS, _MAX_DIMENSIONS = 1024, 4
_ALIGNMENT = 32  # of the first tensor, the only one that converters use
# Struct format of a metadata type by its number; texts and lists have no fixed size.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_FEW_NUMBERS = 4096  # longer lists become arrays: making millions of objects takes long
_PLAIN = ("F32", "F16", "BF16", "Q8_0")  # types of tensors that are read without the package gguf
# Types of tensors by number: name, elements of a block, bytes of a block.
_TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    14: ("Q6_K", 256, 210),
}
# GGUF's names of tensors to the library's, outside of layers and in layers.
_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER_NAMES = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"},
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    **{f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
_TENSOR = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.weight")
# Keys of the metadata to those of config.json: integers, then others.
_COUNTS = {
    **{"context_length": "max_position_embeddings", "embedding_length": "hidden_size"},
    **{"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"},
    **{"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"},
    "attention.key_length": "head_dim",
}
_REALS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last-token"}


@dataclass(frozen=True, slots=True)
class GgufHead:
    """A file's metadata by key; its tensors by the library's names, with shapes in torch's order; the equivalent
    config.json and pooling; and the token that ends every text, or None.
    """

    values: dict[str, Any]
    tensors: list[HeadTensor]
    config: ServedConfig
    end_token: str | None


def read_gguf(file: Path) -> GgufHead:
    """Read the head of a Qwen3 embedding model's GGUF file, parsed once within `HEADS.kept()`. Blocking.

    Raises:
        ModelLoadFailed: it is another model, a key is missing, it has something unsupported, or it is damaged.
        OSError: it cannot be read.
    """
    if problem := file_problem(file):
        raise ModelLoadFailed(f"{file.name} {problem}")
    found = file.stat()
    key = (file, found.st_ino, found.st_size, found.st_mtime_ns)
    if (known := HEADS.get(key)) is not None:
        return known
    try:
        with file.open("rb") as opened:
            return HEADS.keep(key, _head(_Bounded(opened), found.st_size))
    except (ValueError, OverflowError) as error:
        original = use_original(base_model_of(file.parent))
        raise ModelLoadFailed(f"{file.name} cannot be read as GGUF (llama.cpp): {error}; or {original}") from error


def leading_facts(file: Path) -> dict[str, Any]:
    """Return config.json's facts from the part of a GGUF file before the tokens, for any model. Used for lists of
    models, since reading the tokens takes long. Blocking.

    Raises:
        ValueError: it is damaged, or not GGUF.
        OSError: it cannot be read.
    """
    if problem := file_problem(file):
        raise ValueError(f"{file.name} {problem}")
    values: dict[str, Any] = {}
    with file.open("rb") as opened:
        reader = _Bounded(opened)
        for _ in range(_counts(reader)[1]):
            if (key := reader.text()).startswith("tokenizer."):
                break
            values[key] = reader.value()
    model = values.get("general.architecture")
    places = {"vocab_size": "vocab_size"} | _COUNTS
    return {"model_type": model} | {name: values.get(f"{model}.{key}") for key, name in places.items()}


class _Heads:
    """Cache of parsed heads by file identity, emptied when its last caller ends. The 300,000 texts of a Qwen3 head take
    half a second to parse and some 40 MB of memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._found: dict[tuple[object, ...], GgufHead] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep heads parsed within the block, for all threads."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._found.clear()

    def get(self, key: tuple[object, ...]) -> GgufHead | None:
        return self._found.get(key)

    def keep(self, key: tuple[object, ...], head: GgufHead) -> GgufHead:
        """Store the head, and return it."""
        with self._lock:
            if self._users:
                self._found[key] = head
        return head


HEADS = _Heads()


class _Bounded:
    """Reads numbers and texts from the beginning of a file; raises ValueError at its end, or beyond a limit."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        self.at = 0

    def take(self, count: int) -> bytes:
        if self.at + count > MAX_HEAD_BYTES:
            raise ValueError(f"its head has more than {MAX_HEAD_BYTES:,} bytes")
        if len(content := self._opened.read(count)) < count:
            raise ValueError("it ends too soon")
        self.at += count
        return content

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode()

    def value(self) -> Any:
        """Read a number, a text, a list of texts, or a tuple of numbers (an array if there are many)."""
        kind, count = self.number("I"), None
        if kind == _LIST:
            kind, count = self.number("I"), self.number("Q")
        if count is not None and count > MAX_VALUES:
            raise ValueError(f"its metadata has a list of {count:,} values")
        if kind == _TEXT:
            return self.text() if count is None else [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata has a value of the type {kind}")
        return self.number(_NUMBERS[kind]) if count is None else self._array(_NUMBERS[kind], count)

    def _array(self, form: str, count: int) -> array[Any] | tuple[Any, ...]:
        if count <= _FEW_NUMBERS:
            return self.numbers(form, count)
        found = array("B" if form == "?" else form)
        found.frombytes(self.take(count * found.itemsize))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def shape(self) -> tuple[int, ...]:
        count = self.number("I")
        if not 0 < count <= _MAX_DIMENSIONS or 0 in (sizes := self.numbers("Q", count)):
            raise ValueError("a tensor has no elements, or too many dimensions")
        return sizes[::-1]


def _counts(reader: _Bounded) -> tuple[int, int]:
    """Read the numbers of tensors and keys at the beginning of a file."""
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, keys = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in (2, 3) or tensors > MAX_TENSORS or keys > _MAX_KEYS:
        most = f"at most version 3, {MAX_TENSORS:,} and {_MAX_KEYS:,} are read"
        raise ValueError(f"it has version {version}, {tensors:,} tensors and {keys:,} keys: {most}")
    return tensors, keys


def _head(reader: _Bounded, size: int) -> GgufHead:
    tensors, keys = _counts(reader)
    values = {reader.text(): reader.value() for _ in range(keys)}
    if (model := values.get("general.architecture")) != ARCHITECTURE:
        raise ValueError(f"it is of a {shown(model)} model, and only Qwen3 embedding models are read from it")
    if values.get("split.count", 1) not in (0, 1):
        raise ValueError(f"it is one of {shown(values['split.count'])} parts, and whole files are read")
    rows = [(reader.text(), reader.shape(), reader.number("I"), reader.number("Q")) for _ in range(tensors)]
    if values.get("general.alignment", _ALIGNMENT) != _ALIGNMENT:
        raise ValueError(f"it has general.alignment = {shown(values['general.alignment'])}, and {_ALIGNMENT} is read")
    begin = -(-reader.at // _ALIGNMENT) * _ALIGNMENT
    found = [_tensor(name, shape, kind, begin + offset) for name, shape, kind, offset in rows]
    if max((tensor.end for tensor in found), default=0) > size or sum(one.end - one.begin for one in found) > size:
        raise ValueError("it ends too soon, or tensors share its bytes")
    packed = sorted({tensor.dtype for tensor in found}.difference(_PLAIN))
    if packed and importlib.util.find_spec("gguf") is None:
        extra = f"install teimgr with the extra `gguf`, take a file in {', '.join(_PLAIN)}"
        raise ValueError(f"it has weights in {', '.join(packed)}: {extra}")
    return GgufHead(values, found, _config(values, found), _end_token(values))


def _tensor(name: str, shape: tuple[int, ...], kind: int, begin: int) -> HeadTensor:
    form, elements, size = _TYPES.get(kind, ("", 0, 0))
    if not form or shape[-1] % elements:
        raise ValueError(f"{shown(name)} has the type {kind} of ggml in rows of {shape[-1]:,}, which is not read")
    match = _TENSOR.fullmatch(name)
    named = match and (_LAYER_NAMES if match[1] else _NAMES).get(match[2])
    if match is None or named is None:
        raise ValueError(f"it has a tensor {shown(name)}, which no Qwen3 embedding model has")
    own = f"layers.{match[1]}.{named}.weight" if match[1] else f"{named}.weight"
    return HeadTensor(own, form, shape, begin, begin + math.prod(shape) // elements * size)


def _config(values: Mapping[str, Any], tensors: Sequence[HeadTensor]) -> ServedConfig:
    rows = next((tensor.shape[0] for tensor in tensors if tensor.name == "embed_tokens.weight"), None)
    if rows is None:
        raise ValueError("it has no tensor token_embd.weight")
    begin = f"{ARCHITECTURE}."
    own = {key.removeprefix(begin): value for key, value in values.items() if key.startswith(begin)}
    config: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3Model"], "vocab_size": rows}
    for key, name in (_COUNTS | _REALS).items():
        value: Any = own.get(key)
        if type(value) not in ((int,) if key in _COUNTS else (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"it has {begin}{key} = {shown(value)}, which should be a number above 0")
        config[name] = value
    width = config["head_dim"]
    only = {"attention.value_length": width, "rope.dimension_count": width, "vocab_size": rows}
    only |= {"attention.causal": True, "rope.scaling.type": "none"}
    for key, value in own.items():
        is_known = key in _COUNTS or key in _REALS or (key in only and value == only[key])
        if not is_known and not (key == "pooling_type" and value in (*_POOLINGS,)):
            raise ValueError(f"it has {begin}{key} = {shown(value)}, which is not served")
    return ServedConfig(config, is_changed=True, weight_names=GGUF, pooling=_POOLINGS[own.get("pooling_type", 0)])


def _end_token(values: Mapping[str, Any]) -> str | None:
    model, pre, begins, ends, tokens, id = (
        values.get(f"tokenizer.ggml.{key}")
        for key in ("model", "pre", "add_bos_token", "add_eos_token", "tokens", "eos_token_id")
    )
    if (model, pre) != ("gpt2", "qwen2") or begins not in (None, False) or not isinstance(tokens, list):
        raise ValueError(f"its tokenizer is {shown((model, pre))}, or puts a token before texts, unlike Qwen's")
    if ends not in (True, False):
        newer = "take one that llama.cpp has converted since August 2025"
        raise ValueError(f"it does not say whether a token ends each text (tokenizer.ggml.add_eos_token): {newer}")
    if ends and (type(id) is not int or not 0 <= id < len(tokens)):
        raise ValueError(f"it has tokenizer.ggml.eos_token_id = {shown(id)}, and {len(tokens):,} tokens")
    return str(tokens[int(id)]) if id is not None and ends else None


_NARROW = ("F16", "BF16", "F8_E4M3", "F8_E5M2", "I8", "U8")
_TABLES = ("embed", "wte", "wpe", "shared.weight", "lm_head")
"""Parts of the names of embedding tables."""
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """The sizes in the heads of a model's files.

    `tables` of the `parameters` are in embedding tables. `is_wide` if no weight has 16 or 8 bits, so that the files can
    be mapped. `tokenizer_bytes` is the size of the tokenizer's largest file, `changed_ns` the time of the last change
    of a file of weights. `architecture` is the `model_type` of the configuration.
    """

    parameters: int = 0
    tables: int = 0
    file_bytes: int = 0
    tokenizer_bytes: int = 0
    hidden: int = 0
    widest: int = 0
    is_wide: bool = True
    is_static: bool = False
    architecture: str = ""
    kind: Kind = Kind.EMBEDDING
    changed_ns: int = 0


def weight_sizes(layout: Layout) -> WeightSizes:
    """Read the heads of all files of weights that `layout` names. Blocking.

    Files of other formats count as float32 of their size, like those with less in them than their head announces.

    Raises:
        ModelLoadFailed: an index of shards is not what it should be, or there are more than `MAX_TENSORS`.
        OSError: a file cannot be read.
    """
    parameters = tables = file_bytes = newest = words = count = 0
    is_wide = True
    for file in dict.fromkeys(_files(layout)):
        found = file.stat()
        file_bytes += found.st_size
        newest = max(newest, found.st_mtime_ns)
        head = _safetensors_head(file, found.st_size)
        _check_count(count := count + len(head))
        if head and file.suffix == ".gguf":  # the tokenizer precedes the tensors; such a file is never mapped
            words, is_wide = min(tensor.begin for tensor in head), False
        if not head:
            parameters += found.st_size // 4
        for tensor in head:
            parameters += tensor.elements
            tables += tensor.elements * any(part in tensor.name for part in _TABLES)
            is_wide = is_wide and tensor.dtype not in _NARROW
    config = layout.config.get("text_config") or layout.config
    hidden = _number(config, "hidden_size", "d_model", "n_embd", "dim")
    return WeightSizes(
        parameters=parameters,
        tables=tables,
        file_bytes=file_bytes,
        tokenizer_bytes=max(_tokenizer_sizes(layout.root), default=words),
        hidden=hidden,
        widest=max(hidden, _number(config, "intermediate_size", "d_ff", "n_inner", "hidden_dim") or 4 * hidden),
        is_wide=is_wide,
        is_static=layout.backbone is Backbone.STATIC,
        architecture=str(config.get("model_type") or ""),
        kind=layout.kind,
        changed_ns=newest,
    )


def check_tensors(layout: Layout) -> None:
    """Check the number of tensors in all safetensors files of a model. Blocking.

    Files that are missing, cut short or of another format pass: the load tells what is wrong.

    Raises:
        ModelLoadFailed: there are more than `MAX_TENSORS`, or a head is not one that is read.
    """
    count = 0
    for file in dict.fromkeys(_files(layout)):
        if file.suffix == ".safetensors":
            with suppress(NoHead, CutShort, OSError):
                _check_count(count := count + len(read_head(file)))


def _check_count(tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise ModelLoadFailed(f"the files of weights have more than {MAX_TENSORS:,} tensors")


def _files(layout: Layout) -> Iterator[Path]:
    for place in layout.weights:
        if place.is_dir():
            yield from weight_files(place)
        elif place.is_file():
            yield place


def _safetensors_head(file: Path, size: int) -> list[HeadTensor]:
    """The tensors of a safetensors or GGUF file; none of another or a broken one, which is judged by its size."""
    try:
        if file.suffix == ".gguf":
            return read_gguf(file).tensors
        head = read_head(file) if file.suffix == ".safetensors" else []
        return head if sum(tensor.end - tensor.begin for tensor in head) <= size else []
    except ModelLoadFailed:  # the load reports the fault
        return []


def _number(config: Mapping[str, Any], *keys: str) -> int:
    return next((value for key in keys if isinstance(value := config.get(key), int)), 0)


def _tokenizer_sizes(root: Path) -> Iterator[int]:
    for path in files_below(root, depth=2):
        if path.name in _TOKENIZERS:
            yield path.stat().st_size
