"""A job: the inputs, options and results of one call to the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import Kind, LoadedModel
from teimgr.wire.text_column import SharedTexts, TextColumn


class Lane(StrEnum):
    """The priority class of a job: low latency for interactive queries, throughput for bulk."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


class Output(StrEnum):
    """The kinds of result; a job may request several from one forward.

    DENSE one vector · SPARSE a weight per vocabulary entry · TOKENS the last hidden state of every token, with special
    tokens and prompt; for a token classifier the logits of its labels · MULTI_VECTOR a projected, normalised vector
    per kept token, for late interaction · SCORES a number per label.
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MediaFile:
    """An image or a sound as an input: its file, and the format in its header.

    It takes `tokens` of the forward. `digest` is the SHA-256 of the file: equal files have equal results.
    """

    data: bytes
    format: str
    tokens: int
    digest: bytes

    def __len__(self) -> int:
        """Number of its characters: it has none."""
        return 0

    def __bool__(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Size of its file in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Picture(MediaFile):
    """An image, with the size in pixels of its header."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sound(MediaFile):
    """A sound, with the length of its header."""

    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A text with images as one input, for a model that reads both: the images precede the text.

    `instruction` replaces the prompt of its job for this input.
    """

    text: str
    pictures: tuple[Picture, ...] = ()
    instruction: str | None = None

    def __len__(self) -> int:
        """Number of its characters, without those of an instruction."""
        return len(self.text)

    def __bool__(self) -> bool:
        return True


class ContentPair(NamedTuple):
    """A query and a document, with images in them."""

    first: Content
    second: Content


class SparseRow(NamedTuple):
    """The non-zero entries of a vector: indices uint32 [K], ascending, and values float32 [K]."""

    indices: NDArray[np.uint32]
    values: NDArray[np.float32]


# A text, a pair, token ids of the model's vocabulary (int32 [tokens], with special ones), a file, or null; contents
# only for models that read texts and images in one input.
Input = str | Pair | NDArray[np.int32] | MediaFile | Content | ContentPair | None


class Share(NamedTuple):
    """A tenant's share of a busy instance: by `weight` among the tenants of its `priority`; 0 is served first."""

    tenant: int = 0
    weight: int = 1
    priority: int = 1

    def aside(self) -> Share:
        """Return the share of the tenant's queries in the bulk lane, so that they do not wait for its own bulk work."""
        return self._replace(tenant=~self.tenant)


EQUAL = Share()
"""The share of calls without a key."""


Decided = Callable[[TeimgrError | None], None]
"""Gets the decision on a charge: the reason if it is refused."""


class Account(Protocol):
    """The account to which a job is charged. Any thread may call it. `is_shadowed` if only `shadow` prevented a
    refusal."""

    is_shadowed: bool

    @property
    def decides_later(self) -> bool:
        """True if another host decides: `later` then gets the decision, rather than the caller of `charge`."""

    def charge(self, tokens: int, later: Decided | None = None) -> TeimgrError | None:
        """Charge the tokens of the whole job before any is computed; returns the reason if it is refused."""

    def took(self, tokens: int) -> None:
        """Note that tokens of the job have left the queue for a batch."""

    def settle(self, computed: int | None) -> None:
        """End the job: refund what was not computed, or with None what was not taken. A second call does nothing."""


class ZeroVector(EmptyInput):
    """The text has no tokens: its dense vector is zero, and it has no other result."""


class InferOptions(NamedTuple):
    """The options of a call, the same for all its inputs.

    `dimensions` keeps that many leading values of the dense vector, before `normalize` scales it to length 1; both
    apply only to DENSE. None keeps the default of the model's files. A text that is too long loses its end, or its
    beginning with `truncation_left`, or by the model's files if the request names no side (`names_side`). `prompt` is
    the text of a prompt, in place of one by name. `raw_scores` skips the model's activation and returns logits. On a
    late-interaction model `prompt_name` "query" or "document" selects the role; None is "document". If `listed`, pairs
    with the same query are a list, which a listwise reranker scores together. With `pool_factor`, the encoder of the
    answer keeps 1 / `pool_factor` of a document's vectors per token (`token_pooling`).
    """

    outputs: frozenset[Output] = frozenset({Output.DENSE})
    truncate: bool = True
    truncation_left: bool = False
    names_side: bool = False
    prompt_name: str | None = None
    prompt: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    raw_scores: bool = False
    listed: bool = False
    pool_factor: float = 1.0


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """The inputs, options and results of one call. Rows fail singly: `errors` maps a row to its error; a null input
    always fails.

    If `inputs` is a `TextColumn` and the tokenizer is native, texts reach the device without becoming Python objects.
    `deadline` is a `time.monotonic()` value or None. `context` belongs to the caller; the engine does not use it. Only
    the finisher writes results; they are complete when the job is delivered. Results of outputs that were not requested
    stay empty, and rows in `errors` are zero or None:

        vectors        float32 [N, dimensions]         DENSE
        scores         float32 [N, labels]             SCORES
        sparse         N × SparseRow                   SPARSE
        tokens_of      N × float32 [tokens, hidden]    TOKENS
        multi_vectors  N × float32 [kept, projected]   MULTI_VECTOR

    `share` is the share of the job's tenant, `tenant` the tenant's number: 0 for none, negative for the engine itself.
    `account` is charged before the job's rows are queued; if it refuses, the job is delivered with only `refused`.
    `cut_to` is the number of dimensions to which dense vectors are cut, None for all; with `is_rounded` they become the
    model's integers. `chars`, counted by the job if not given, counts ids of inputs that are ids; `media_tokens`, those
    of images and sounds, are counted by `tokens_of_media`. The three times are means over the served rows: from
    submission to queue, from queue to the start of the batch, and the duration of the row's batch.
    """

    inputs: Sequence[Input]
    options: InferOptions
    lane: Lane
    deadline: float | None = None
    context: object = None
    tenant: int = 0
    chars: int = -1
    media_tokens: int = -1
    share: Share = field(default=EQUAL, init=False)
    account: Account | None = field(default=None, init=False)
    refused: TeimgrError | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    vectors: NDArray[np.float32] = field(init=False)
    scores: NDArray[np.float32] = field(init=False)
    sparse: list[SparseRow | None] = field(default_factory=list, init=False)
    tokens_of: list[NDArray[np.float32] | None] = field(default_factory=list, init=False)
    multi_vectors: list[NDArray[np.float32] | None] = field(default_factory=list, init=False)
    cut_to: int | None = field(default=None, init=False)
    is_rounded: bool = field(default=False, init=False)
    errors: dict[int, TeimgrError] = field(default_factory=dict, init=False)
    remaining: int = field(init=False)
    tokens: int = field(default=0, init=False)
    submitted_ns: int = field(default=0, init=False)
    tokenization_ns: int = field(default=0, init=False)
    queue_ns: int = field(default=0, init=False)
    inference_ns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.vectors = self.scores = np.zeros((len(self.inputs), 0), dtype=np.float32)
        self.remaining = len(self.inputs)
        if self.chars < 0:
            self.chars = total_characters(self.inputs)

    def allocate_results(self, dimension: int, labels: int, *, is_cut: bool = False, is_rounded: bool = False) -> None:
        """Allocate the results that `options` request.

        `dimension` is the default size of dense vectors, to which they have to be cut if `is_cut`. With `is_rounded`
        they become round(127 · tanh(x)) before any norm.
        """
        self.is_rounded = is_rounded
        rows, outputs = len(self.inputs), self.options.outputs
        self.cut_to = self.options.dimensions or (dimension if is_cut else None)
        if Output.DENSE in outputs:
            self.vectors = np.zeros((rows, self.options.dimensions or dimension), dtype=np.float32)
            if len(outputs) == 1:  # nearly all jobs
                return
        if Output.SCORES in outputs:
            self.scores = np.zeros((rows, labels), dtype=np.float32)
        if Output.SPARSE in outputs:
            self.sparse = [None] * rows
        if Output.TOKENS in outputs:
            self.tokens_of = [None] * rows
        if Output.MULTI_VECTOR in outputs:
            self.multi_vectors = [None] * rows

    def tokens_of_media(self) -> int:
        """The tokens of its images and sounds, which are known before they are decoded."""
        if self.media_tokens < 0:
            self.media_tokens = total_media_tokens(self.inputs)
        return self.media_tokens

    def cancel(self) -> None:
        """Skip the rows that have not started, and never deliver the job. Any thread may call it."""
        self.cancelled = True

    def belongs_to(self, share: Share) -> None:
        """Set the tenant. Called before the job is submitted."""
        self.share = share

    def charge_to(self, account: Account) -> None:
        """Set the account. Called before the job is submitted."""
        self.account = account

    def refuse(self, error: TeimgrError) -> None:
        """Refuse the whole job: none of its rows is computed, and it is delivered with this error."""
        self.refused, self.remaining = error, 0

    def fill(self, vectors: NDArray[np.float32], scores: NDArray[np.float32], sparse: list[SparseRow | None]) -> None:
        """Set placeholder results; `sparse` only if it was requested."""
        self.vectors, self.scores = vectors, scores
        if Output.SPARSE in self.options.outputs:
            self.sparse = sparse

    def take_scores(self, part: Job, rows: Sequence[int]) -> None:
        """Copy scores, errors and times from a delivered job whose inputs are these rows of this job."""
        if not self.scores.shape[1]:
            self.scores = np.zeros((len(self.inputs), part.scores.shape[1]), np.float32)
        self.scores[rows] = part.scores
        self.errors |= {rows[row]: error for row, error in part.errors.items()}
        served = len(part.inputs) - len(part.errors)
        self.tokens += part.tokens
        self.tokenization_ns += part.tokenization_ns * served
        self.queue_ns += part.queue_ns * served
        self.inference_ns += part.inference_ns * served

    def take_costs(self, other: Job) -> None:
        """Add tokens and times of a delivered job that this job's results were made from."""
        self.tokens, self.tokenization_ns = other.tokens, other.tokenization_ns
        self.queue_ns, self.inference_ns = other.queue_ns, other.inference_ns

    def mark_submitted(self) -> None:
        """Start the times."""
        self.submitted_ns = time.monotonic_ns()

    def count_served(self, rows: int, tokens: int, enqueued_ns: int, began_ns: int, duration_ns: int) -> None:
        """Count rows of one batch, and sum their times; `enqueued_ns` is the sum of the rows' enqueue times."""
        self.tokens += tokens
        self.remaining -= rows
        self.queue_ns += began_ns * rows - enqueued_ns
        self.tokenization_ns += enqueued_ns - self.submitted_ns * rows
        self.inference_ns += duration_ns * rows

    def count_failed(self) -> None:
        """Count a row that is not computed."""
        self.remaining -= 1

    def average_times(self) -> None:
        """Turn the summed times into means over the rows without an error."""
        served = max(len(self.inputs) - len(self.errors), 1)
        self.tokenization_ns //= served
        self.queue_ns //= served
        self.inference_ns //= served


_NOT_SIZED = frozenset({Pair, ContentPair, type(None)})


def characters(item: Input) -> int:
    """Return the number of characters of an input, or of its ids; 0 for null."""
    if type(item) is str:  # first: requests have thousands of texts
        return len(item)
    if item is None:
        return 0
    return len(item.first) + len(item.second) if isinstance(item, (Pair, ContentPair)) else len(item)


def pictures_of(item: Input) -> tuple[MediaFile, ...]:
    """Return the images, or the sound, in an input."""
    if type(item) is str:
        return ()
    if isinstance(item, MediaFile):
        return (item,)
    if isinstance(item, ContentPair):
        return (*item.first.pictures, *item.second.pictures)
    return item.pictures if isinstance(item, Content) else ()


def are_texts(inputs: Sequence[object]) -> TypeGuard[list[str]]:
    """True for a list of texts only, as most requests have; C code can then process each element."""
    return type(inputs) is list and set(map(type, inputs)) == {str}


def total_characters(inputs: Sequence[Input]) -> int:
    """Return the characters of all inputs together, counted as by `characters`."""
    if isinstance(inputs, (TextColumn, SharedTexts)):
        return inputs.characters
    if _NOT_SIZED.isdisjoint(map(type, inputs)):  # most requests: `len` of each in C
        return sum(map(len, cast(Sequence[str], inputs)))
    return sum(map(characters, inputs))


def total_media_tokens(inputs: Sequence[Input]) -> int:
    """The tokens of the images and sounds in all inputs together."""
    if isinstance(inputs, (TextColumn, SharedTexts)):
        return 0
    return sum([one.tokens for item in inputs for one in pictures_of(item)])


# Messages for outputs that a model lacks, by its kind or for any (None).
_UNSUPPORTED: dict[tuple[Kind | None, Output], str] = {
    (None, Output.DENSE): "Model is not an embedding model",
    (None, Output.TOKENS): "Model is not an embedding model",
    (None, Output.SPARSE): "Model is not an embedding model with SPLADE pooling",
    (None, Output.MULTI_VECTOR): "Model is not a late-interaction (multi-vector) model",
    (None, Output.SCORES): "Model is not a classifier model",
    (Kind.EMBEDDING, Output.TOKENS): "`embed_all` is not available: this model gives one vector for each text alone",
    (Kind.TOKEN_CLASSIFIER, Output.SCORES): "Model is a token classifier: its entities are at /predict over HTTP",
    (Kind.SPARSE, Output.TOKENS): "`embed_all` is not available for SPLADE models",
    (Kind.MULTI_VECTOR, Output.DENSE): (
        "Model is not an embedding model with one vector per text: `embed_all` gives its vectors per token"
    ),
}


def check_supported(info: LoadedModel, options: InferOptions) -> None:
    """Check that a model has the outputs that `options` request.

    Raises:
        WrongModelKind: it lacks an output, or cannot normalise it.
        InvalidInput: bad `dimensions` of a dense vector, or no output is requested.
    """
    if not options.outputs:
        raise InvalidInput("Input validation error: at least one output must be asked for")
    if info.listwise and Output.SCORES in options.outputs and not options.listed:
        raise WrongModelKind(
            "Backend error: the model scores the documents of a query together, in one prompt, and no pair or text on "
            "its own: send them to a rerank route"
        )
    offered = {*info.outputs, *((Output.MULTI_VECTOR.value,) if info.listwise and options.listed else ())}
    for output in Output:
        if output in options.outputs and output.value not in offered:
            message = _UNSUPPORTED.get((Kind(info.kind), output), _UNSUPPORTED[None, output])
            raise WrongModelKind(f"Backend error: {message}")
    if options.pool_factor != 1.0:
        _check_pool_factor(options)
    if Output.DENSE not in options.outputs:
        return
    if info.kind == Kind.SPARSE and options.normalize:
        raise WrongModelKind("Backend error: `normalize` is not available for SPLADE models")
    dimensions = options.dimensions
    if dimensions is not None and dimensions < 1:
        raise InvalidInput("Input validation error: `dimensions` should be positive")
    if dimensions is not None and dimensions > max(info.dimension, info.most_dimensions):
        raise InvalidInput(
            "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
        )


def _check_pool_factor(options: InferOptions) -> None:
    if Output.MULTI_VECTOR not in options.outputs:
        raise InvalidInput(
            "Input validation error: `pool_factor` is for the vectors per token of a late-interaction model, which are "
            "not asked for here"
        )
    if not 1.0 <= options.pool_factor < math.inf:
        raise InvalidInput(
            f"Input validation error: `pool_factor` is {options.pool_factor:g}, and must be a number of at least 1"
        )
