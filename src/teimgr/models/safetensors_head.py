"""The head of a safetensors file: names, types and shapes of its tensors, and where their bytes lie.

The library reads heads too, but maps the whole file, and refuses one that is cut short without saying so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models import bounded_json as model_json

MAX_HEAD_BYTES = 16 * 2**20
"""Known ones have 1 MB."""
MAX_TENSORS = 30_000
"""Of a model. Known ones have 19,000, with an expert's weights one by one; of 200,000 the libraries take minutes."""
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**63 - 1  # the product of more and larger ones takes long


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a file. `begin` and `end` are places in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_head(file: Path) -> list[HeadTensor]:
    """The tensors of a safetensors file in the order of its head. Blocking.

    Raises:
        NoHead: it does not begin with the length of a head.
        CutShort: it ends within the head. A file may still end before the data that the head announces.
        ModelLoadFailed: the head is not what the format says, or has more bytes or tensors than are read.
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        whole = file.stat().st_size
        size = int.from_bytes(opened.read(8), "little")
        if MAX_HEAD_BYTES < size <= whole - 8:
            raise ModelLoadFailed(
                f"the head of {file.name} has {size:,} bytes, and at most {MAX_HEAD_BYTES:,} are read"
            )
        if whole < 8 or not 0 < size <= MAX_HEAD_BYTES:
            raise NoHead(f"{file.name} is no safetensors file")
        if whole < 8 + size:
            raise CutShort(f"{file.name} ends too soon")
        content = opened.read(size)
    if content.count(b'"data_offsets"') > MAX_TENSORS:  # counted before any is made
        raise ModelLoadFailed(f"{file.name} has more than {MAX_TENSORS:,} tensors")
    head = model_json.parse(content, file.name)
    try:
        return [_tensor(name, each, 8 + size) for name, each in head.items() if name != "__metadata__"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadFailed(f"the head of {file.name} is not what it should be: {error!r}") from error


class NoHead(ModelLoadFailed):
    """The file is not of the format."""


class CutShort(ModelLoadFailed):
    """The file ends too soon."""


def _tensor(name: str, described: Any, data: int) -> HeadTensor:
    begin, end = described["data_offsets"]
    shape = tuple(described["shape"])
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {len(shape):,} dimensions")
    numbers = (begin, end, *shape)
    if any(type(each) is not int or each < 0 for each in numbers) or end < begin:
        raise ValueError(f"tensor {name}")
    if max(numbers) > _MAX_SIZE:
        raise ValueError(f"tensor {name} has a size of {max(numbers):,}")
    if math.prod(shape) > 8 * (end - begin):  # elements of one bit
        raise ValueError(f"tensor {name} of {end - begin:,} bytes has the shape {shape}")
    return HeadTensor(name, str(described["dtype"]), shape, data + begin, data + end)
