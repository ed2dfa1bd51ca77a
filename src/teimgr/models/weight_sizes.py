"""Reads the sizes of a model's weights from the heads of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import MAX_TENSORS, CutShort, HeadTensor, NoHead, read_head
from teimgr.models.directory import files_below, weight_files
from teimgr.models.gguf_head import read_gguf
from teimgr.models.layout import Backbone, Layout
from teimgr.spec import Kind

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
        head = _head(file, found.st_size)
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


def _head(file: Path, size: int) -> list[HeadTensor]:
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
