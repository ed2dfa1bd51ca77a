"""What one request asks of the engine, whichever route it came by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from teimgr.engine.job import InferOptions, Input, Job, Pair
from teimgr.spec import ModelInfo, WorkerSpec
from teimgr.worker.tei.fields import Body

Answer = Callable[[Job], bytes]


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind a route, and the terms on which it is served."""

    model: ModelInfo
    spec: WorkerSpec

    @property
    def name(self) -> str:
        """What the OpenAI dialect calls the model."""
        return self.spec.served_model_name or self.model.model_id


@dataclass(frozen=True, slots=True)
class Inference:
    """Inputs and options for a job, and the bytes that a finished job without errors is answered with.

    `limit` is how many inputs the dialect lets a client send at once.
    """

    inputs: Sequence[Input]
    options: InferOptions
    answer: Answer
    limit: int

    @property
    def size_bytes(self) -> int:
        """About what the inputs take in memory."""
        return sum(map(_size, self.inputs))

    @property
    def over_limit(self) -> str | None:
        """TEI's sentence for too many inputs, None where they are not too many."""
        if len(self.inputs) <= self.limit:
            return None
        return f"batch size {len(self.inputs)} > maximum allowed batch size {self.limit}"


class InferenceRequest(Body):
    """A body that asks for inference."""

    def inference(self, served: Served) -> Inference:
        """What it asks for.

        Raises:
            EmptyInput, WrongModelKind: TEI refuses it before it counts the inputs.
        """
        raise NotImplementedError


def _size(one: Input) -> int:
    if isinstance(one, Pair):
        return len(one.first) + len(one.second)
    if isinstance(one, np.ndarray):
        return one.nbytes
    return len(one or "")
