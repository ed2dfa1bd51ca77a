"""The engine's own question to itself, whose answer may not change while it lives."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import InferOptions, Input, Job, Lane, Output, Pair
from teimgr.engine.probe import PROBE_TEXTS
from teimgr.spec import ModelInfo

# Of vectors of length 1, or of the largest weight or logit where that is above 1: far above what a batch's shape
# changes, far below another input's result.
_DIFFERENCE = 2e-2


class Proof(Job):
    """A known input for the first output of a model; `done` is set when it is answered."""

    __slots__ = ("_output", "done")

    def __init__(self, info: ModelInfo) -> None:
        self._output = Output(info.outputs[0])
        options = InferOptions(frozenset({self._output}), normalize=info.kind != "sparse", raw_scores=True)
        known: Input = Pair(*PROBE_TEXTS[1:3]) if info.kind == "reranker" else PROBE_TEXTS[1]
        super().__init__([known], options, Lane.INTERACTIVE)
        self.make_room(info.dimension, len(info.labels))
        self.done = threading.Event()

    def agrees_with(self, known: Proof) -> bool:
        """Whether the answer is that of an earlier proof, within what the shape of a batch changes."""
        here, there = self._answer(), known._answer()
        if self._output is Output.SPARSE:
            here, there = _over_one_vocabulary(self, known)
        if here.shape != there.shape:
            return False
        return bool(np.abs(here - there).max() <= _DIFFERENCE * max(1.0, float(np.abs(there).max())))

    def _answer(self) -> NDArray[np.float32]:
        """The numbers of the one row, [K] or [*, width]."""
        if self._output is Output.DENSE:
            return np.array(self.vectors[0])
        if self._output is Output.SCORES:
            return np.array(self.scores[0])
        rows = self.tokens_of if self._output is Output.TOKENS else self.multi_vectors
        row = rows[0] if rows else None
        return np.zeros(0, dtype=np.float32) if row is None else row


def _over_one_vocabulary(*proofs: Proof) -> tuple[NDArray[np.float32], ...]:
    """Sparse answers as vectors of one size: an entry near zero may be there once and not the other time."""
    answers = [proof.sparse[0] for proof in proofs]
    width = 1 + max((int(a.indices.max()) for a in answers if a is not None and len(a.indices)), default=0)
    vectors = tuple(np.zeros(width, dtype=np.float32) for _ in answers)
    for vector, answer in zip(vectors, answers, strict=True):
        if answer is not None:
            vector[answer.indices] = answer.values
    return vectors
