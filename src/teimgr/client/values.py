"""Results of client calls: frozen values read from JSON or from messages; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import InvalidInput
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.spec import State

Vectors = NDArray[np.float32]

_NAMED_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance as REST shows it; keys that a server does not send are None. Timestamps are RFC 3339 in UTC.

    `details` is the whole JSON object, for keys that have no attribute here.
    """

    name: str
    model_id: str
    port: int
    status: State
    pid: int | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None
    max_batch_tokens: int | None = None
    max_concurrent_requests: int | None = None
    max_queue_wait_secs: int | None = None
    pooling: str | None = None
    gpu_id: int | None = None
    prometheus_port: int | None = None
    startup_timeout_secs: int | None = None
    extra_args: Sequence[str] | None = None
    created_at: str | None = None
    dtype: str | None = None
    revision: str | None = None
    threads: int | None = None
    max_rss_mib: int | None = None
    kind: str | None = None
    trust_remote_code: bool | None = None
    safetensors_only: bool | None = None
    replicas: int | Literal["per-gpu"] | None = None
    tags: Mapping[str, str] | None = None
    wanted_running: bool | None = None
    seeded: bool | None = None
    details: Mapping[str, Any]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Instance:
        known = {item.name: body[item.name] for item in fields(cls) if item.name in body}
        return cls(**known | {"status": State(body["status"]), "details": dict(body)})


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvent:
    """One fleet event; `event` is one of `spec.EVENTS` or "missed", `id` counts from 1 in the life of a daemon."""

    event: str
    id: int | None = None
    timestamp: str | None = None
    instance: str | None = None
    model_id: str | None = None
    status: str | None = None
    reason: str | None = None
    tags: Mapping[str, str] | None = None
    crash_report: str | None = None
    details: Mapping[str, Any]

    @classmethod
    def from_json(cls, event: str, body: Mapping[str, Any]) -> InstanceEvent:
        known = {item.name: body[item.name] for item in fields(cls) if item.name in body}
        return cls(**known | {"event": event, "details": dict(body)})


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is "healthy" while the daemon answers; `details` is the whole JSON object."""

    status: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logs:
    """Lines `[start, end)` of `total_lines` in the log of an instance."""

    lines: tuple[str, ...]
    start: int
    end: int
    total_lines: int


@dataclass(frozen=True, slots=True)
class Info:
    """Properties of the served model. Lengths are tokens; `kind` is embedding, classifier or reranker."""

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

    @classmethod
    def from_message(cls, message: tei_pb2.InfoResponse) -> Info:
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
    """

    vectors: Vectors
    errors: Mapping[int, str]

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
