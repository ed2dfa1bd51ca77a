"""Finished jobs as the JSON of TEI's routes.

32-bit floats are written with the fewest digits that give the same 32 bits again: orjson does that for numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from teimgr.engine.job import Job, SparseRow
from teimgr.worker import scores

Answer = Callable[[Job], bytes]


def vectors(job: Job) -> bytes:
    """`[[0.1, …], …]`: always a list of lists, for one input too."""
    return to_json(job.vectors)


def per_token(job: Job) -> bytes:
    """`[[[0.1, …], …], …]`: input, token, value."""
    return to_json([np.ascontiguousarray(rows) for rows in _rows_per_token(job)])


def sparse(job: Job) -> bytes:
    """`[[{"index": 5, "value": 0.1}, …], …]`, ascending indices."""
    return to_json([list(_entries(vector)) for vector in job.sparse])


def predictions(labels: Sequence[str], is_batch: bool, job: Job) -> bytes:
    """`[{"score": 0.9, "label": "x"}, …]`, best first, or a list of those where a batch was asked."""
    told = [[one._asdict() for one in scores.predictions(row, labels)] for row in job.scores]
    return to_json(told if is_batch else told[0])


def ranks(texts: Sequence[str] | None, job: Job) -> bytes:
    """`[{"index": 1, "score": 0.9}, …]`, best first; with the text between the two where `texts` are given."""
    told = [
        {"index": rank.row, **({} if texts is None else {"text": texts[rank.row]}), "score": rank.score}
        for rank in scores.ranks(job.scores)
    ]
    return to_json(told)


def similarities(job: Job) -> bytes:
    """`[0.9, …]`: the cosine of the first vector with each of the others; 0 where one of the two is zero."""
    wide = job.vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    products = lengths[0] * lengths[1:]
    dots = wide[1:] @ wide[0]
    cosines = np.divide(dots, products, out=np.zeros_like(dots), where=products > 0)
    return to_json(cosines.astype(np.float32))


def values(job: Job) -> int:
    """How many numbers the answer to a job has, which is what it costs to write."""
    per_row = sum(0 if rows is None else rows.size for rows in (*job.tokens_of, *job.multi_vectors))
    entries = sum(0 if vector is None else vector.values.size for vector in job.sparse)
    return int(job.vectors.size + job.scores.size + per_row + entries)


def to_json(value: object) -> bytes:
    """`value` as JSON; numpy arrays and scalars are taken."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _rows_per_token(job: Job) -> Iterator[NDArray[np.float32]]:
    for rows in job.multi_vectors or job.tokens_of:
        assert rows is not None
        yield rows


def _entries(vector: SparseRow | None) -> Iterator[dict[str, object]]:
    assert vector is not None
    for index, value in zip(vector.indices.tolist(), vector.values, strict=True):
        yield {"index": index, "value": value}
