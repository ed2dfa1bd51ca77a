"""Parts of JSON answers that several dialects share.

32-bit floats are written with the fewest digits that give the same 32 bits again: orjson does that for numpy's.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from teimgr.engine.job import Job


def to_json(value: object) -> bytes:
    """`value` as JSON; numpy arrays and scalars are accepted."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's usage object: every token that the model read, special ones and prompt included."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def new_id(prefix: str) -> str:
    """A random id of an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def unix_time() -> int:
    """Seconds since 1970."""
    return int(time.time())


def encoded_vector(values: NDArray[Any], in_base64: bool) -> NDArray[Any] | str:
    """A vector or matrix for `to_json`: as numbers, or as base64 of its little-endian bytes."""
    if not in_base64:
        return np.ascontiguousarray(values)
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def best_first(scores: NDArray[np.float32], top_n: int | None = None) -> list[int]:
    """Rows by falling score (float32 [N]), equal ones in their order; the first `top_n` of them where it is given."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n]


def number_count(job: Job) -> int:
    """How many numbers the results of a job have, a measure of the time to write them."""
    per_row = sum(0 if rows is None else rows.size for rows in (*job.tokens_of, *job.multi_vectors))
    entries = sum(0 if vector is None else vector.values.size for vector in job.sparse)
    return int(job.vectors.size + job.scores.size + per_row + entries)
