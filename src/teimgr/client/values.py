"""Results of inference calls: frozen values read from messages; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import InvalidInput
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2

Vectors = NDArray[np.float32]

_NAMED_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Info:
    """Properties of the served model. Lengths are tokens; `kind` is embedding, classifier or reranker.

    `modalities` are what it embeds, of text, image and audio; `fused`: whether a text and images are one input for it.
    """

    model_id: str
    model_sha: str | None
    dtype: str
    kind: str
    version: str
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    max_concurrent_requests: int
    modalities: tuple[str, ...] = ("text",)
    fused: bool = False

    @classmethod
    def from_message(cls, message: tei_pb2.InfoResponse) -> Info:
        ours = arrow_pb2.InfoAddition.FromString(message.SerializeToString())  # fields of ours
        return cls(
            model_id=message.model_id,
            model_sha=message.model_sha if message.HasField("model_sha") else None,
            dtype=message.model_dtype,
            kind=tei_pb2.ModelType.Name(message.model_type).removeprefix("MODEL_TYPE_").lower(),
            version=message.version,
            max_input_length=message.max_input_length,
            max_batch_tokens=message.max_batch_tokens,
            max_batch_requests=message.max_batch_requests if message.HasField("max_batch_requests") else None,
            max_client_batch_size=message.max_client_batch_size,
            max_concurrent_requests=message.max_concurrent_requests,
            modalities=tuple(ours.modalities) or ("text",),
            fused=ours.fused,
        )


@dataclass(frozen=True, slots=True)
class Token:
    """One token; `start` and `stop` are UTF-8 byte offsets, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None

    @classmethod
    def from_message(cls, message: tei_pb2.SimpleToken) -> Token:
        return cls(
            message.id,
            message.text,
            message.special,
            message.start if message.HasField("start") else None,
            message.stop if message.HasField("stop") else None,
        )


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries of a vector that are not zero: uint32 [k] ascending, float32 [k]."""

    indices: NDArray[np.uint32]
    values: Vectors

    @classmethod
    def from_message(cls, message: tei_pb2.EmbedSparseResponse) -> SparseVector:
        entries = message.sparse_embeddings
        indices = np.array([entry.index for entry in entries], np.uint32)
        return cls(indices, np.array([entry.value for entry in entries], np.float32))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A label and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Rank:
    """How well the text at `index` of the request answers the query; `text` only if requested."""

    index: int
    score: float
    text: str | None

    @classmethod
    def from_message(cls, message: tei_pb2.Rank) -> Rank:
        return cls(message.index, message.score, message.text if message.HasField("text") else None)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to a batch: one row of `vectors` (float32, [n, dim]) per text, in order.

    `errors` has, by row, the reason why a text has no vector; such a row is NaN, so that it is not taken for one.
    `space` and `precision` are those of the vectors, empty where the server does not tell them.
    """

    vectors: Vectors
    errors: Mapping[int, str]
    space: str = ""
    precision: str = ""

    def checked(self) -> Vectors:
        """`vectors`, when every text has one.

        Raises:
            InvalidInput: some rows failed; the message names the first few.
        """
        if not self.errors:
            return self.vectors
        named = [f"row {row}: {reason}" for row, reason in sorted(self.errors.items())[:_NAMED_FAILURES]]
        more = f" and {len(self.errors) - len(named)} more" if len(self.errors) > len(named) else ""
        raise InvalidInput(f"{len(self.errors)} of {len(self.vectors)} texts failed: {'; '.join(named)}{more}")
