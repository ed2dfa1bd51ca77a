"""A job: the inputs, options and results of one call to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import LoadedModel


class Lane(Enum):
    """The priority class of a job: interactive queries want latency, bulk pipelines throughput."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


class Output(Enum):
    """The kinds of result; a job may ask for several of one forward.

    DENSE one vector · SPARSE a weight per vocabulary entry · TOKENS the last hidden state of every token, special ones
    and prompt included · MULTI_VECTOR a projected, normalised vector per kept token, for late interaction · SCORES a
    number per label.
    """

    DENSE = "dense"
    SPARSE = "sparse"
    TOKENS = "tokens"
    MULTI_VECTOR = "multi-vector"
    SCORES = "scores"


class Pair(NamedTuple):
    """Two texts encoded together, as for cross-encoders."""

    first: str
    second: str


class SparseRow(NamedTuple):
    """The non-zero entries of a vector: uint32 [K] ascending, float32 [K]."""

    indices: NDArray[np.uint32]
    values: NDArray[np.float32]


# A text, a pair, token ids of the model's vocabulary (int32 [tokens], special ones included), or null.
Input = str | Pair | NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The options of a call, the same for all its inputs.

    `dimensions` keeps that many leading values of the dense vector, before `normalize` scales it to length 1; both
    concern DENSE alone. `raw_scores` skips the model's activation: logits. On a late-interaction model `prompt_name`
    "query" or "document" chooses the role, "document" where it is None.
    """

    outputs: frozenset[Output] = frozenset({Output.DENSE})
    truncate: bool = True
    truncation_left: bool = False
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    raw_scores: bool = False


class Job:
    """Inputs, options and results of one call. Rows fail one by one: `errors` by row; a null input always fails.

    `deadline` is a `time.monotonic()` moment or None. `context` belongs to the caller, the engine does not use it.
    Only the finisher thread writes results; they are complete when the job is delivered. Those of outputs that were
    not requested stay empty, and rows in `errors` are zero or None:

        vectors        float32 [N, dimensions]         DENSE
        scores         float32 [N, labels]             SCORES
        sparse         N × SparseVector                SPARSE
        tokens_of      N × float32 [tokens, hidden]    TOKENS
        multi_vectors  N × float32 [kept, projected]   MULTI_VECTOR

    `chars` counts ids where an input is given as ids. The three times are means over the served rows: from submission
    to queue, from queue to the start of the batch, and the duration of the batch the row rode in.
    """

    __slots__ = (
        "cancelled",
        "chars",
        "context",
        "deadline",
        "errors",
        "inference_ns",
        "inputs",
        "lane",
        "multi_vectors",
        "options",
        "queue_ns",
        "remaining",
        "scores",
        "sparse",
        "submitted_ns",
        "tokenization_ns",
        "tokens",
        "tokens_of",
        "vectors",
    )

    def __init__(
        self,
        inputs: Sequence[Input],
        options: InferOptions,
        lane: Lane,
        deadline: float | None = None,
        context: object = None,
    ) -> None:
        self.inputs = inputs
        self.options = options
        self.lane = lane
        self.deadline = deadline
        self.context = context
        self.cancelled = False
        self.vectors: NDArray[np.float32] = np.zeros((len(inputs), 0), dtype=np.float32)
        self.scores: NDArray[np.float32] = np.zeros((len(inputs), 0), dtype=np.float32)
        self.sparse: list[SparseRow | None] = []
        self.tokens_of: list[NDArray[np.float32] | None] = []
        self.multi_vectors: list[NDArray[np.float32] | None] = []
        self.errors: dict[int, TeimgrError] = {}
        self.remaining = len(inputs)
        self.chars = sum(map(characters, inputs))
        self.tokens = 0
        self.submitted_ns = 0
        self.tokenization_ns = 0
        self.queue_ns = 0
        self.inference_ns = 0

    def allocate_results(self, dimension: int, labels: int) -> None:
        """Allocate the results that `options` request; `dimension` is that of an uncut dense vector."""
        rows, outputs = len(self.inputs), self.options.outputs
        if Output.DENSE in outputs:
            self.vectors = np.zeros((rows, self.options.dimensions or dimension), dtype=np.float32)
        if Output.SCORES in outputs:
            self.scores = np.zeros((rows, labels), dtype=np.float32)
        if Output.SPARSE in outputs:
            self.sparse = [None] * rows
        if Output.TOKENS in outputs:
            self.tokens_of = [None] * rows
        if Output.MULTI_VECTOR in outputs:
            self.multi_vectors = [None] * rows

    def cancel(self) -> None:
        """From any thread: rows not yet started are skipped, and the job is never delivered."""
        self.cancelled = True

    def average_times(self) -> None:
        """Turn the summed times into means over the rows without an error."""
        served = max(len(self.inputs) - len(self.errors), 1)
        self.tokenization_ns //= served
        self.queue_ns //= served
        self.inference_ns //= served


def characters(item: Input) -> int:
    """The number of characters of an input, or of ids; 0 for null."""
    if item is None:
        return 0
    return len(item.first) + len(item.second) if isinstance(item, Pair) else len(item)


_NO_EMBEDDING = "Model is not an embedding model"
_UNSUPPORTED = {
    Output.DENSE: _NO_EMBEDDING,
    Output.TOKENS: _NO_EMBEDDING,
    Output.SPARSE: "Model is not an embedding model with SPLADE pooling",
    Output.MULTI_VECTOR: "Model is not a late-interaction (multi-vector) model",
    Output.SCORES: "Model is not a classifier model",
}


def check_supported(info: LoadedModel, options: InferOptions) -> None:
    """Check that a model has the outputs that `options` request.

    Raises:
        WrongModelKind: it lacks an output, or cannot normalise it.
        InvalidInput: bad `dimensions` of a dense vector, or no output is requested.
    """
    if not options.outputs:
        raise InvalidInput("Input validation error: at least one output must be asked for")
    for output in Output:
        if output in options.outputs and output.value not in info.outputs:
            raise WrongModelKind(f"Backend error: {_unsupported(info, output)}")
    if Output.DENSE not in options.outputs:
        return
    if info.kind == "sparse" and options.normalize:
        raise WrongModelKind("Backend error: `normalize` is not available for SPLADE models")
    dimensions = options.dimensions
    if dimensions is not None and dimensions < 1:
        raise InvalidInput("Input validation error: `dimensions` should be positive")
    if dimensions is not None and dimensions > info.dimension:
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
        )


def _unsupported(info: LoadedModel, output: Output) -> str:
    if info.kind == "sparse" and output is Output.TOKENS:
        return "`embed_all` is not available for SPLADE models"
    if info.kind == "multi-vector" and output is Output.DENSE:
        return "Model is not an embedding model with one vector per text"
    return _UNSUPPORTED[output]
