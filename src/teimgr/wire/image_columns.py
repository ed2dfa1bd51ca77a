"""Columns of image files in Arrow tables: binary, or the struct of Hugging Face datasets with `bytes` and `path`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import pyarrow as pa

from teimgr.errors import InvalidInput

ImageRow = bytes | str | tuple[bytes, str] | None


def is_images(kind: pa.DataType) -> bool:
    """Whether a column of this type holds files: binary, or a struct with binary `bytes`."""
    if pa.types.is_struct(kind):
        position = kind.get_field_index("bytes")
        return bool(position >= 0 and _is_binary(kind.field(position).type))
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def images_of(
    columns: Sequence[pa.Array], texts: Sequence[str | None] | None
) -> tuple[list[ImageRow], dict[int, InvalidInput]]:
    """The rows of columns of images, where one has none its text, else both; and why rows are refused.

    `texts` has a text or None for each row. A path is never opened.
    """
    rows: list[ImageRow] = []
    refused: dict[int, InvalidInput] = {}
    others = iter(texts) if texts is not None else repeat(None)
    for column in columns:
        is_struct = pa.types.is_struct(column.type)
        files = column.field("bytes") if is_struct else column
        for at in range(len(column)):
            file = files[at].as_py() if column[at].is_valid else None
            text = next(others)
            if file is None and is_struct and text is None and column[at].is_valid:
                refused[len(rows)] = InvalidInput(
                    "Input validation error: the row of `image` has no `bytes`: a `path` is not opened, send the file"
                )
            rows.append(text if file is None else file if text is None else (file, text))
    return rows, refused
