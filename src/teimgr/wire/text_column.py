"""A column of texts: the UTF-8 bytes of all, one behind the other, and where each ends; strings are made on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_COUNTED_BYTES = 2**20  # at a time: counting makes temporaries of this size


class TextColumn(Sequence[str | None]):
    """N texts: `data` is uint8, and text i its bytes from `offsets[i]` to `offsets[i + 1]` (int64 [N + 1], ascending).

    `nulls` (bool [N], or None where there are none) are rows without a text; their length is 0. The bytes must be valid
    UTF-8. Immutable; a slice shares the bytes.
    """

    __slots__ = ("data", "nulls", "offsets")

    def __init__(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64], nulls: NDArray[np.bool_] | None = None
    ) -> None:
        self.data = data
        self.offsets = offsets
        self.nulls = nulls

    @classmethod
    def of(cls, texts: Sequence[str | None]) -> TextColumn:
        """The column of `texts`, None for a null.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """
        parts = [b"" if text is None else text.encode() for text in texts]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
        nulls = np.fromiter((text is None for text in texts), np.bool_, len(texts)) if None in texts else None
        return cls(np.frombuffer(b"".join(parts), np.uint8), offsets, nulls)

    @classmethod
    def joined(cls, columns: Sequence[TextColumn]) -> TextColumn:
        """The rows of all `columns`, at least one, in one column; the bytes of a single one are not copied."""
        if len(columns) == 1:
            return columns[0]
        bounds = [(int(column.offsets[0]), int(column.offsets[-1])) for column in columns]
        starts = np.cumsum([0, *(stop - begin for begin, stop in bounds)])
        shifted = [column.offsets[1:] - column.offsets[0] + at for column, at in zip(columns, starts, strict=False)]
        nulls = None
        if any(column.nulls is not None for column in columns):
            each = [np.zeros(len(column), np.bool_) if column.nulls is None else column.nulls for column in columns]
            nulls = np.concatenate(each)
        data = np.concatenate([column.data[begin:stop] for column, (begin, stop) in zip(columns, bounds, strict=True)])
        return cls(data, np.concatenate([np.zeros(1, np.int64), *shifted]), nulls)

    @property
    def characters(self) -> int:
        """Characters of all texts together."""
        counted = 0
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        for begin in range(first, last, _COUNTED_BYTES):
            part = self.data[begin : min(begin + _COUNTED_BYTES, last)]
            counted += int(np.count_nonzero((part & 0xC0) != 0x80))  # every byte but those that continue a character
        return counted

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The bytes of each text, int64 [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str | None]:
        nulls = None if self.nulls is None else self.nulls.tolist()
        for row, (begin, stop) in enumerate(pairwise(self.offsets.tolist())):
            yield None if nulls is not None and nulls[row] else self.data[begin:stop].tobytes().decode()

    @overload
    def __getitem__(self, at: int) -> str | None: ...

    @overload
    def __getitem__(self, at: slice) -> TextColumn: ...

    def __getitem__(self, at: int | slice) -> str | TextColumn | None:
        if isinstance(at, slice):
            begin, stop, step = at.indices(len(self))
            if step != 1:
                raise ValueError("a slice of a column of texts has no step")
            stop = max(begin, stop)
            return TextColumn(
                self.data, self.offsets[begin : stop + 1], None if self.nulls is None else self.nulls[begin:stop]
            )
        row = range(len(self))[at]
        if self.nulls is not None and self.nulls[row]:
            return None
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()
