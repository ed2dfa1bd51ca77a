"""vLLM's `encoding_format: bytes` and `bytes_only`: the vectors of all inputs one after another, without JSON.

With `bytes` the header `metadata` has a JSON object with `id`, `created`, `model`, `usage` and, per input, `index`,
`embed_dtype`, `endianness`, `start`, `end` (bytes in the body) and `shape`. `bytes_only` omits this header.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.wire.frames import HttpReply
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference as http

EmbedDtype = Annotated[
    Literal["float32", "float16"], Field(description="element type of encoding_format bytes and base64")
]
Endianness = Annotated[Literal["native", "little", "big"], Field(description="of encoding_format bytes and base64")]
BINARY_FORMATS = ("bytes", "bytes_only")

# Inputs in the header `metadata`, since clients limit a header to some kilobytes.
MAX_DESCRIBED = 64


def binary_reply(
    rows: Sequence[NDArray[np.float32]],
    head: dict[str, Any],
    encoding_format: str,
    embed_dtype: EmbedDtype = "float32",
    endianness: Endianness = "native",
) -> HttpReply:
    """The reply with `rows`, float32 of any shape; `head` is what the metadata begins with. Blocking.

    Raises:
        BadRequest: `bytes` with more than `MAX_DESCRIBED` rows.
    """
    if encoding_format == "bytes" and len(rows) > MAX_DESCRIBED:
        message = f"encoding_format: bytes describes at most {MAX_DESCRIBED} inputs in a header; use bytes_only"
        raise http.BadRequest(400, message, "encoding_format")
    precision = Precision(embed_dtype)
    dtype = precision.dtype.newbyteorder(endianness)
    written = [converted(row, precision).astype(dtype, copy=False) for row in rows]
    body = b"".join(row.tobytes() for row in written)
    headers = {"content-type": "application/octet-stream"}
    if encoding_format == "bytes":
        shown = sys.byteorder if endianness == "native" else endianness
        ends = np.cumsum([row.nbytes for row in written]).tolist()
        data = [
            {
                "index": index,
                "embed_dtype": embed_dtype,
                "endianness": shown,
                "start": end - row.nbytes,
                "end": end,
                "shape": row.shape,
            }
            for index, (row, end) in enumerate(zip(written, ends, strict=True))
        ]
        headers["metadata"] = http.to_json(head | {"data": data}).decode()
    return HttpReply(200, headers, body)
