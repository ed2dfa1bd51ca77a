"""The frozen values that every part of teimgr shares: what is wanted, what is running, where it answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

from teimgr.errors import InvalidInstanceName

# What an instance may ask for; TEI's spelling, and "auto" beside it.
DTYPES = ("auto", "float32", "float16", "bfloat16")
POOLINGS = ("cls", "mean", "max", "last-token", "splade")
# What an instance may say its model is, over what the model's files say.
KINDS = ("embedding", "sparse", "multi-vector", "reranker", "classifier")
# The keys of an instance that take one word of several.
SPEC_WORDS = {"dtype": DTYPES, "pooling": POOLINGS, "kind": KINDS}

# What may happen to an instance, as events and webhooks call it.
EVENTS = ("created", "starting", "running", "stopping", "stopped", "failed", "unhealthy", "updated", "deleted")

_ROUTES = {"actions"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class State(str, Enum):
    """Where an instance is in its life, as REST says it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


def check_name(name: str) -> str:
    """`name` itself, when it may name an instance, a log file and a run file.

    Raises:
        InvalidInstanceName: it may not.
    """
    if not name:
        raise InvalidInstanceName(name, "Instance name cannot be empty")
    if "/" in name or "\\" in name:
        raise InvalidInstanceName(name, "it cannot contain path separators")
    if name in _ROUTES:
        raise InvalidInstanceName(name, "it is the name of a route below /instances")
    if not _NAME.fullmatch(name):
        raise InvalidInstanceName(name, "use a letter or digit, then up to 63 of A-Z a-z 0-9 . _ -")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What a user wants under one name. An edit is a new spec.

    The keys are those of the contract's create body, seed and state file; `dtype`, `revision`, `threads`, `kind`,
    `trust_remote_code` and `replicas` (a number of workers, or one per GPU) are teimgr's own. `port` and
    `prometheus_port` are resolved before a spec is stored; 0 and None ask for one. `max_batch_tokens` 0 asks for as
    many as the GPU's free memory allows. `tags` are for people and filters. `wanted_running` is the user's last word: a
    stop survives a restart of the daemon. `seeded` is an instance that the configuration made.
    """

    name: str
    model_id: str
    port: int = 0
    max_batch_tokens: int = 16384
    max_concurrent_requests: int = 512
    pooling: str | None = None
    gpu_id: int | None = None
    prometheus_port: int | None = None
    startup_timeout_secs: int | None = None
    extra_args: tuple[str, ...] = ()
    created_at: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    threads: int | None = None
    kind: str | None = None
    trust_remote_code: bool = False
    replicas: int | Literal["per-gpu"] = 1
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    wanted_running: bool = True
    seeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything one worker process is told, as the JSON object it is launched with.

    `replica` tells the workers of one instance apart. `gpu` is a CUDA device name for CUDA_VISIBLE_DEVICES (a UUID, so
    that NVML's and CUDA's orders cannot disagree) or None for the CPU. Times are seconds.
    """

    name: str
    model_id: str
    replica: int = 0
    revision: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    pooling: str | None = None
    kind: str | None = None
    trust_remote_code: bool = False
    gpu: str | None = None
    threads: int = 1
    instance_host: str = "127.0.0.1"
    port: int = 0
    prometheus_port: int | None = None
    max_batch_tokens: int = 16384
    max_batch_requests: int | None = None
    max_concurrent_requests: int = 512
    max_client_batch_size: int = 32
    max_message_bytes: int = 40 * 1024 * 1024
    payload_limit_bytes: int = 2_000_000
    auto_truncate: bool = True
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ()
    default_prompt_name: str | None = None
    default_prompt: str | None = None
    arrow_output_dtype: str = "f32"
    orphan_grace_s: float = 300.0
    nice: int = 0
    log_level: str = "info"
    log_format: str = "json"

    def to_json(self) -> str:
        """The object as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """The inverse of `to_json`; unknown keys of a newer daemon are an error."""
        values = json.loads(text)
        return cls(**values | {"cors_allow_origin": tuple(values.get("cors_allow_origin", ()))})

    @property
    def hash(self) -> str:
        """Sixteen hex digits that change whenever a running worker would have to be replaced.

        `threads` is left out: it is changed in place while the fleet grows and shrinks.
        """
        facts = {key: value for key, value in asdict(self).items() if key != "threads"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a ready worker says of its model. Lengths are tokens.

    `kind` is one of `KINDS`; `outputs` are those of `engine.job.Output` that it has. `dimension` is that of a dense
    vector, of the vocabulary (sparse) or of a token's vector (multi-vector), and 0 for classifiers and rerankers, which
    have `labels` by index. `model_sha` is what was asked for, `commit` the commit it resolved to. `batching` is
    "packed" where one padding-free row passed the load-time probe, else "equal-length".
    """

    model_id: str
    model_sha: str | None
    dtype: str
    device: str
    kind: str
    pooling: str
    dimension: int
    max_input_length: int
    max_batch_tokens: int
    batching: str
    prompts: tuple[str, ...] = ()
    default_prompt_name: str | None = None
    outputs: tuple[str, ...] = ("dense", "tokens")
    labels: tuple[str, ...] = ()
    activation: str | None = None
    multi_vector_dimension: int = 0
    token_dimension: int = 0
    commit: str | None = None
    tokenization_workers: int = 1
    load_s: float = 0.0

    _LISTS: ClassVar[tuple[str, ...]] = ("prompts", "outputs", "labels")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {name: list(getattr(self, name)) for name in self._LISTS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelInfo:
        """The inverse of `to_dict`."""
        return cls(**{**values, **{name: tuple(values[name]) for name in cls._LISTS if name in values}})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A snapshot of one worker of an instance, for display.

    `replica` counts from 0; while an update rolls, two workers have the same number. `role` is where it is in an
    update: `serving` for those of the instance as it is, `joining` for those that are to take over, `leaving` for those
    that serve only who has not heard yet. `gpu` is the card's UUID and `gpu_id` its index, None on the CPU.
    """

    replica: int
    role: str
    state: State
    gpu: str | None = None
    gpu_id: int | None = None
    pid: int | None = None
    incarnation: str | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateView:
    """The last change of an instance, of the keys `changes`: `rolling`, `done`, or `failed` for `reason`."""

    state: str
    changes: tuple[str, ...] = ()
    reason: str | None = None
    started_at: str = ""
    finished_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """A snapshot of one instance for display; it may inform a decision and never gates one.

    Timestamps are RFC 3339 in UTC.
    """

    spec: InstanceSpec
    state: State
    pid: int | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None
    model: ModelInfo | None = None
    threads: int | None = None
    workers: tuple[WorkerView, ...] = ()
    update: UpdateView | None = None
