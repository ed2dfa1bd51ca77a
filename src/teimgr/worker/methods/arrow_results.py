"""Finished jobs as columns of an Arrow reply, and the size of those columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import InferOptions, Job, Output, SparseRow
from teimgr.errors import TeimgrError
from teimgr.spec import LoadedModel
from teimgr.wire.arrow_tables import (
    ENTRY_BYTES,
    Column,
    error_column,
    failed_rows,
    matrix_column,
    number_column,
    sparse_column,
    vector_column,
)
from teimgr.wire.element_types import Precision
from teimgr.worker.limits import token_width
from teimgr.worker.scores import RERANKER

_ORDER = (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKENS, Output.SCORES)
_OFFSET_BYTES = _NUMBER_BYTES = 4
# tei-manager's; each row adds one to the indices.
_NOOP_INDICES = np.array([0, 100, 200], np.uint32)
_NOOP_VALUES = np.array([1.0, 0.5, 0.25], np.float32)


@dataclass(frozen=True, slots=True)
class ArrowReplyForm:
    """Encoding of a reply: element types of dense vectors and of vectors per token, compression of bodies."""

    lz4: bool
    dense: Precision = Precision.FLOAT32
    token: Precision = Precision.FLOAT32


def names(outputs: Iterable[Output]) -> list[str]:
    """Names of a reply's columns, in order, after the key columns."""
    wanted = frozenset(outputs)
    return [_name(output) for output in _ORDER if output in wanted] + ["error"]


def least_row_bytes(model: LoadedModel, options: InferOptions, form: ArrowReplyForm) -> int:
    """Bytes of the smallest possible row of the reply: a single token, no sparse entries."""
    least = {
        Output.DENSE: form.dense.size_bytes(options.dimensions or model.dimension),
        Output.SPARSE: _OFFSET_BYTES,
        Output.MULTI_VECTOR: _OFFSET_BYTES + form.token.size_bytes(model.multi_vector_dimension),
        Output.TOKENS: _OFFSET_BYTES + form.token.size_bytes(model.token_dimension),
        Output.SCORES: _NUMBER_BYTES * max(len(model.labels), 1),
    }
    return sum(least[output] for output in options.outputs)


def ragged_bytes(model: LoadedModel, form: ArrowReplyForm, job: Job) -> int:
    """Bytes of the outputs without a fixed size in the reply."""
    entries = sum(len(vector.indices) for vector in job.sparse if vector is not None)
    total = entries * ENTRY_BYTES
    for matrices, width in (
        (job.multi_vectors, model.multi_vector_dimension),
        (job.tokens_of, model.token_dimension),
    ):
        total += sum(len(matrix) for matrix in matrices if matrix is not None) * form.token.size_bytes(width)
    return total


def columns(model: LoadedModel, form: ArrowReplyForm, job: Job, errors: Mapping[int, TeimgrError]) -> list[Column]:
    """A column per requested output, and `error`; a row in `errors` is null in every output column."""
    failed = failed_rows(len(job.inputs), errors)
    made = [_column(output, model, form, job, failed) for output in _ORDER if output in job.options.outputs]
    return [*made, error_column(len(job.inputs), errors)]


def with_placeholder_results(model: LoadedModel, job: Job) -> Job:
    """`job` with placeholder results, for `noop` and tables without rows: zeros, three sparse entries per row."""
    count = len(job.inputs)
    job.vectors = np.zeros((count, job.options.dimensions or model.dimension), np.float32)
    job.scores = np.zeros((count, max(len(model.labels), 1)), np.float32)
    if Output.SPARSE in job.options.outputs:
        job.sparse = [SparseRow(_NOOP_INDICES + np.uint32(row), _NOOP_VALUES) for row in range(count)]
    return job


def _column(
    output: Output, model: LoadedModel, form: ArrowReplyForm, job: Job, failed: NDArray[np.bool_] | None
) -> Column:
    name = _name(output)
    if output is Output.DENSE:
        return vector_column(name, job.vectors, failed, form.dense, _described(form.dense, job.vectors.shape[1]))
    if output is Output.SPARSE:
        return sparse_column(name, job.sparse)
    if output is Output.SCORES:
        return _scores(name, model, job.scores, failed)
    matrices = job.multi_vectors if output is Output.MULTI_VECTOR else job.tokens_of
    width = token_width(model, output)
    return matrix_column(name, matrices, width, form.token, _described(form.token, width))


def _scores(name: str, model: LoadedModel, scores: NDArray[np.float32], failed: NDArray[np.bool_] | None) -> Column:
    if model.kind == RERANKER:
        return number_column(name, scores[:, 0], failed)
    return vector_column(name, scores, failed, metadata={"labels": json.dumps(model.labels)})


def _described(precision: Precision, width: int) -> dict[str, str]:
    return {"precision": precision.value, "width": str(width)}


def _name(output: Output) -> str:
    return output.value.replace("-", "_")
