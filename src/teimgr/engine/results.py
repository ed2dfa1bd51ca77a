"""From what the device gave for a batch to what its jobs asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.heads.pooling import finish
from teimgr.engine.heads.scoring import activate
from teimgr.engine.job import Job, Output, SparseVector
from teimgr.errors import InferenceFailed

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HostRows:
    """`heads.Rows` on the host: `values` are float32, and both others int64."""

    values: Floats
    offsets: NDArray[np.int64] | None = None
    indices: NDArray[np.int64] | None = None

    def sound(self) -> NDArray[np.bool_]:
        """Which of the N texts have no NaN and no infinity, bool [N]."""
        finite = np.isfinite(self.values)
        if self.offsets is None:
            return np.asarray(finite.all(axis=1))
        good = finite if finite.ndim == 1 else finite.all(axis=1)
        bad_before = np.concatenate([[0], np.cumsum(~good)])
        return np.asarray(bad_before[self.offsets[1:]] == bad_before[self.offsets[:-1]])

    def row(self, i: int) -> Floats:
        """The values of text i, a copy: a small job must not hold the whole batch in memory."""
        assert self.offsets is not None
        return np.array(self.values[self.offsets[i] : self.offsets[i + 1]])

    def sparse_row(self, i: int) -> SparseVector:
        """The entries of text i that are not zero."""
        assert self.offsets is not None
        assert self.indices is not None
        begin, stop = self.offsets[i], self.offsets[i + 1]
        values = self.values[begin:stop]
        kept = values != 0.0
        return SparseVector(self.indices[begin:stop][kept].astype(np.uint32), values[kept])


class Results:
    """The results of one batch of N texts, and what its jobs make of them, made once for all jobs that ask alike."""

    def __init__(self, rows: Mapping[Output, HostRows], activation: str) -> None:
        self._rows = rows
        self._activation = activation
        self._sound: dict[Output, NDArray[np.bool_]] = {}
        self._vectors: dict[tuple[int | None, bool], Floats] = {}
        self._scores: Floats | None = None

    def write(self, job: Job, texts: Sequence[int], rows: Sequence[int]) -> dict[int, InferenceFailed]:
        """Put the batch's `texts` into `rows` of the job; the rows that failed, of which nothing is written.

        Nothing that the job did not ask for is looked at.
        """
        failed: dict[int, InferenceFailed] = {}
        for output in sorted(job.options.outputs, key=_ORDER.index):
            sound = self._soundness(output)
            for text, row in zip(texts, rows, strict=True):
                if not sound[text] and row not in failed:
                    failed[row] = InferenceFailed(self._complaint(output, text))
        good = [(text, row) for text, row in zip(texts, rows, strict=True) if row not in failed]
        if good:
            at, into = [text for text, _ in good], [row for _, row in good]
            for output in job.options.outputs:
                _WRITERS[output](self, job, at, into)
        return failed

    def _soundness(self, output: Output) -> NDArray[np.bool_]:
        if output not in self._sound:
            self._sound[output] = self._rows[output].sound()
        return self._sound[output]

    def _complaint(self, output: Output, text: int) -> str:
        if output is not Output.SCORES:
            return "Backend error: the vector has NaN or infinity in it"
        nan = np.isnan(self._rows[output].values[text]).any()
        return "score is NaN" if nan else "Backend error: a score is infinite"

    def _dense(self, job: Job, texts: list[int], rows: list[int]) -> None:
        key = (job.options.dimensions, job.options.normalize)
        if key not in self._vectors:
            self._vectors[key] = finish(self._rows[Output.DENSE].values, *key)
        job.vectors[rows] = self._vectors[key][texts]

    def _score(self, job: Job, texts: list[int], rows: list[int]) -> None:
        logits = self._rows[Output.SCORES].values
        if job.options.raw_scores:
            job.scores[rows] = logits[texts]
            return
        if self._scores is None:
            self._scores = activate(logits, self._activation)
        job.scores[rows] = self._scores[texts]

    def _sparse(self, job: Job, texts: list[int], rows: list[int]) -> None:
        for text, row in zip(texts, rows, strict=True):
            job.sparse[row] = self._rows[Output.SPARSE].sparse_row(text)

    def _tokens(self, job: Job, texts: list[int], rows: list[int]) -> None:
        for text, row in zip(texts, rows, strict=True):
            job.tokens_of[row] = self._rows[Output.TOKENS].row(text)

    def _multi_vectors(self, job: Job, texts: list[int], rows: list[int]) -> None:
        for text, row in zip(texts, rows, strict=True):
            job.multi_vectors[row] = self._rows[Output.MULTI_VECTOR].row(text)


_ORDER = list(Output)
_WRITERS: dict[Output, Callable[[Results, Job, list[int], list[int]], None]] = {
    Output.DENSE: Results._dense,
    Output.SPARSE: Results._sparse,
    Output.TOKENS: Results._tokens,
    Output.MULTI_VECTOR: Results._multi_vectors,
    Output.SCORES: Results._score,
}
