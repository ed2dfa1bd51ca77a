"""Cache of models' reference results in files, so that a restarted worker does not compute them again.

The fidelity gate compares every load with the library's own float32 forward of known texts, which takes a third of a
small model's load. Its results depend only on the files, so the first load of a model stores them. The comparison is
made at every load; if it fails, the reference is computed again.

A file is a line of JSON (digest, dtype, the reason of `auto`) followed by tensors in safetensors' format.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors.numpy
import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.fidelity.dtype_speed import Preference
from teimgr.engine.job import Output
from teimgr.engine.kept_files import PrivateCacheFile, files_of, identities, identity
from teimgr.engine.model import name_of
from teimgr.engine.native_library import native_library
from teimgr.models.layout import Layout

log = logging.getLogger(__name__)

MAX_FILES = 32
MAX_BYTES = 2 * 1024 * 1024
"""The most bytes of a file; larger results are not stored."""
_MAX_MODEL_FILES = 1000  # a folder with more has other things than a model, and reading all their states takes too long
_FORMAT = 3
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SUFFIX = ".reference"


@dataclass(frozen=True, slots=True)
class KnownReference:
    """The reference results, by input; `dtype` is the choice of `auto`, None if one was requested.

    `why` and `refused` are those of `fidelity_gate.Choice`.
    """

    results: list[dict[Output, Tensor]]
    dtype: torch.dtype | None
    why: Preference | None = None
    refused: dict[str, float] = field(default_factory=dict)


class ReferenceCache:
    """The file of one model in `folder`; a damaged file counts as missing."""

    def __init__(self, folder: Path, key: str) -> None:
        self._file = PrivateCacheFile(folder / f"{key}{_SUFFIX}", MAX_BYTES, MAX_FILES)

    def read(self) -> KnownReference | None:
        if (content := self._file.read()) is None:
            return None
        if (known := _parsed(content)) is None:
            log.warning("reference results are corrupt and ignored: %s", self._file.path)
        return known

    def write(self, known: KnownReference) -> None:
        self._file.write(_content(known))

    def discard(self) -> None:
        self._file.discard()


def reference_key(layout: Layout, dtype: str, inputs: Sequence[Encoded]) -> str | None:
    """A digest of all that the results depend on: the model's files, how they are read, the inputs, `dtype` as
    requested, versions of this engine, torch and transformers, and the instructions of the CPU.

    Files are identified as `make` does, by size, times and inode, as reading all weights takes longer than the results
    do. None if the results may depend on more: with code that comes with the model, or with too many files.
    """
    if layout.trust_remote_code:
        return None
    folders = {layout.root.resolve(), layout.transformer_dir.resolve(), layout.weights_dir.resolve()}
    folders |= {adapter.weights.parent.resolve() for adapter in layout.adapters}
    try:
        found = identities(folders, _MAX_MODEL_FILES)
        engine = [identity(path) for path in files_of(Path(__file__).parent.parent) if not path.endswith(".pyc")]
    except OSError as error:
        log.info("reference results are not stored: %s", error)
        return None
    library = native_library()
    facts = (
        (_FORMAT, torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()),
        None if library is None else (library.level, library.byte_sum_bits(library.level)),
        (dtype, repr(replace(layout, notes=()))),
        found,
        engine,
    )
    digest = hashlib.sha256(repr(facts).encode())
    for each in inputs:
        types = None if each.type_ids is None else each.type_ids.tolist()
        digest.update(repr((each.ids.tolist(), types, each.keys, each.prompt_tokens, each.query)).encode())
    return digest.hexdigest()


def _content(known: KnownReference) -> bytes:
    tensors = {
        f"{place}.{output.value}": rows.contiguous().numpy()
        for place, result in enumerate(known.results)
        for output, rows in result.items()
    }
    payload = safetensors.numpy.save(tensors)  # safetensors.torch refuses results that share memory
    why = None if known.why is None else [_name(known.why.dtype), known.why.reason, known.why.layer_us]
    header: dict[str, object] = {"inputs": len(known.results), "dtype": _name(known.dtype), "why": why}
    header["refused"] = known.refused
    return json.dumps(header | {"digest": _digest(header, payload)}).encode() + b"\n" + payload


def _parsed(content: bytes) -> KnownReference | None:
    """Parse a file; None if it is damaged."""
    line, _, payload = content.partition(b"\n")
    try:
        header = json.loads(line)
        if header.pop("digest") != _digest(header, payload):
            return None
        results: list[dict[Output, Tensor]] = [{} for _ in range(header["inputs"])]
        for name, rows in safetensors.torch.load(payload).items():
            place, _, output = name.partition(".")
            results[int(place)][Output(output)] = rows
        dtype = None if header["dtype"] is None else _DTYPES[header["dtype"]]
        why = None
        if header["why"] is not None:
            preferred, reason, layer_us = header["why"]
            why = Preference(_DTYPES[preferred], reason, layer_us)
        return KnownReference(results, dtype, why, header["refused"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, SafetensorError):
        return None


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else name_of(dtype)


def _digest(header: dict[str, object], payload: bytes) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + payload).hexdigest()
