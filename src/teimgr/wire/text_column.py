"""Columns of texts as UTF-8 bytes and offsets; strings are made on demand."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from teimgr.wire.gil import Rests

_COUNTED_BYTES = 2**20  # per step: counting makes temporaries of this size
_DECODED_BYTES = 2**17  # per step: at most a millisecond


class TextColumn(Sequence[str | None]):
    """N texts: text i is the bytes of `data` (uint8) from `offsets[i]` to `offsets[i + 1]` (int64 [N + 1], ascending).

    `nulls` (bool [N], or None) marks rows without a text; their length is 0. The bytes must be valid UTF-8. Immutable;
    a slice shares the bytes.
    """

    __slots__ = ("_characters", "_of_each", "data", "nulls", "offsets")

    def __init__(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64], nulls: NDArray[np.bool_] | None = None
    ) -> None:
        self.data = data
        self.offsets = offsets
        self.nulls = nulls
        self._characters: int | None = None
        self._of_each: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, texts: Sequence[str | None]) -> TextColumn:
        """Make the column of `texts`, None for a null.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """
        nulls = np.fromiter((text is None for text in texts), np.bool_, len(texts)) if None in texts else None
        given = [text or "" for text in texts]
        if (whole := "".join(given)).isascii():
            data, sizes = whole.encode(), map(len, given)
        else:
            parts = [text.encode() for text in given]
            data, sizes = b"".join(parts), map(len, parts)
        offsets = np.zeros(len(given) + 1, np.int64)
        np.fromiter(sizes, np.int64, len(given)).cumsum(out=offsets[1:])
        return cls(np.frombuffer(data, np.uint8), offsets, nulls)

    @classmethod
    def joined(cls, columns: Sequence[TextColumn]) -> TextColumn:
        """Join the rows of all `columns`, at least one, into one column; the bytes of a single one are not copied."""
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
        """Characters of all texts together, counted on first use: 2 ms for each MiB."""
        if self._characters is None:
            self._characters = _count_characters(self.data[int(self.offsets[0]) : int(self.offsets[-1])])
        return self._characters

    def characters_of_each(self) -> NDArray[np.int64]:
        """The characters of each text, int64 [N], counted on first use."""
        if self._of_each is None:
            self._of_each = np.diff(_characters_before(self.data, self.offsets))
        return self._of_each

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The bytes of each text, int64 [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str | None]:
        nulls = None if self.nulls is None else self.nulls.tolist()
        for row, (begin, stop) in enumerate(pairwise(self.offsets.tolist())):
            yield None if nulls is not None and nulls[row] else _decoded(self.data[begin:stop])

    @overload
    def __getitem__(self, at: int) -> str | None: ...

    @overload
    def __getitem__(self, at: slice) -> TextColumn: ...

    def __getitem__(self, at: int | slice) -> str | TextColumn | None:
        if isinstance(at, slice):
            begin, stop, step = at.indices(len(self))
            if step != 1:
                raise ValueError("a slice of a column of texts must not have a step")
            stop = max(begin, stop)
            return TextColumn(
                self.data, self.offsets[begin : stop + 1], None if self.nulls is None else self.nulls[begin:stop]
            )
        row = range(len(self))[at]
        if self.nulls is not None and self.nulls[row]:
            return None
        return _decoded(self.data[self.offsets[row] : self.offsets[row + 1]])


class SharedTexts(Sequence[str | None]):
    """N texts that may share bytes: text i is `data` (uint8) from `begins[i]` to `ends[i]` (int64 [N]).

    For rows of a dictionary, and views. `nulls` is bool [N]. The bytes of each text must be valid UTF-8. A slice is a
    list of strings, equal ones made once; its caller must limit its size. Immutable.
    """

    __slots__ = ("_characters", "_of_each", "begins", "data", "ends", "nulls")

    def __init__(
        self, data: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], nulls: NDArray[np.bool_]
    ) -> None:
        self.data = data
        self.begins = begins
        self.ends = ends
        self.nulls = nulls
        self._characters: int | None = None
        self._of_each: NDArray[np.int64] | None = None

    @property
    def characters(self) -> int:
        """Characters of all rows together, counted on first use."""
        if self._characters is None:
            self._characters = int(self.characters_of_each().sum())
        return self._characters

    def characters_of_each(self) -> NDArray[np.int64]:
        """The characters of each text, int64 [N], counted on first use; shared bytes are counted once."""
        if self._of_each is None:
            places, at = np.unique(np.concatenate([self.begins, self.ends]), return_inverse=True)
            before = _characters_before(self.data, places)[at]
            self._of_each = np.where(self.nulls, 0, before[len(self) :] - before[: len(self)])
        return self._of_each

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, at: int) -> str | None: ...

    @overload
    def __getitem__(self, at: slice) -> list[str | None]: ...

    def __getitem__(self, at: int | slice) -> str | list[str | None] | None:
        if isinstance(at, slice):
            made: dict[tuple[int, int], str] = {}
            return [self._text(row, made) for row in range(*at.indices(len(self)))]
        return self._text(range(len(self))[at], {})

    def _text(self, row: int, made: dict[tuple[int, int], str]) -> str | None:
        if self.nulls[row]:
            return None
        place = int(self.begins[row]), int(self.ends[row])
        if (text := made.get(place)) is None:
            text = made[place] = _decoded(self.data[place[0] : place[1]])
        return text


def _decoded(data: NDArray[np.uint8]) -> str:
    """Decode the text of some bytes; megabytes in parts, with rests: one call holds the GIL for 30 ms."""
    if len(data) <= _DECODED_BYTES:
        return data.tobytes().decode()
    decoder, rest, parts = getincrementaldecoder("utf-8")(), Rests(), []
    for at in range(0, len(data), _DECODED_BYTES):
        parts.append(decoder.decode(data[at : at + _DECODED_BYTES].tobytes()))
        rest()
    return "".join(parts)


def _count_characters(data: NDArray[np.uint8]) -> int:
    counted = 0
    for begin in range(0, len(data), _COUNTED_BYTES):
        part = data[begin : begin + _COUNTED_BYTES]
        counted += int(np.count_nonzero((part & 0xC0) != 0x80))  # counts first bytes of characters
    return counted


def _characters_before(data: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the characters that begin in `data` before each of `places` (int64 [P], ascending), from the first of them
    on."""
    counts = np.zeros(len(places), np.int64)
    if not len(places):
        return counts
    counted, first, last = 0, int(places[0]), int(places[-1])
    for begin in range(first, last, _COUNTED_BYTES):
        end = min(begin + _COUNTED_BYTES, last)
        begun = np.cumsum((data[begin:end] & 0xC0) != 0x80, dtype=np.int64)
        low, high = np.searchsorted(places, [begin + 1, end + 1])
        counts[low:high] = counted + begun[places[low:high] - begin - 1]
        counted += int(begun[-1])
    return counts
