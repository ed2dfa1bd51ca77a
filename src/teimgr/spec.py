"""Specs and views: what should run, what a worker is launched with, what is shown. Every part of teimgr shares them.

`InstanceSpec` declares the keys of an instance, one line each. REST bodies, seeds and templates of the configuration,
the state file, flags of `extra_args`, the client's checks and what a change needs are derived from it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from datetime import UTC, datetime
from enum import Enum, IntEnum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from teimgr.errors import InvalidConfig, InvalidInstanceName

U16 = 2**16 - 1
UNPRIVILEGED_PORT, LAST_PORT = 1024, U16
U32 = 2**32 - 1
I64 = 2**63 - 1  # what TOML can express

# TEI's words; "auto", and "int8" on CPUs, are ours.
DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
# The lanes of a worker, and the header, or metadata of gRPC, by which a caller chooses one for a request.
LANES = ("interactive", "bulk")
LANE_KEY = "x-teimgr-lane"
# Of one text in a request; no model reads so much. Python makes the text in one call, with up to four bytes per
# character.
MAX_TEXT_BYTES = 8 * 2**20
# Headers between gateway and worker: for how many seconds a call asks that its model stay, and for how many nanoseconds
# it has waited for its load.
KEEP_ALIVE, LOAD_NS = "x-teimgr-keep-alive", "x-teimgr-load-ns"
POOLINGS = ("cls", "mean", "max", "last-token", "splade")
# The time that nginx and most load balancers wait for an answer; after a longer one their callers are cut off anyway.
_MAX_QUEUE_WAIT_SECS = 60
# Clients that embed a document send its thousands of chunks in parallel, and many of them never retry.
_MAX_WAITING = 16384
_MAX_SCALE_WAIT_MS = 600_000
# Kinds of fleet events, for REST, webhooks and their filters.
EVENTS = (
    *("created", "starting", "running", "stopping", "stopped", "failed", "unhealthy"),
    *("crashed", "over_memory", "no_host", "updated", "update_failed", "deleted"),
    *("unloaded", "evicted", "war", "scaled", "applied", "refused", "taken_back"),
    *("reloaded", "reload_refused"),  # of the configuration, so of no instance
)

_ROUTES = {"actions"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATH_PREFIX = re.compile(r"(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._~-]+){0,16}/?")
_MAX_PATH_PREFIX = 256
GRAPH_TOKENS = 3 << 17
"""Tokens whose hidden states the CUDA graphs of a model keep at most, in 16 bits: memory of a card."""
CPU_BATCH_TOKENS, CPU_TEMPORARY_BYTES = 2048, 25_000_000
"""Limits of a batch on a CPU: every operation maps and unmaps larger temporaries; more tokens gain nothing."""
PLACEMENTS = ("spread", "pack")
LOADS = ("eager", "on_demand")


class State(str, Enum):
    """State of an instance or a worker; the value is the word of REST."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    UNLOADED = "unloaded"  # on demand: no worker until a call asks for the model


_STATES = {state.value: state for state in State}


class Kind(str, Enum):
    """The purpose of a model, the value of `LoadedModel.kind`; a configured one overrides what its files indicate."""

    EMBEDDING = "embedding"
    SPARSE = "sparse"
    MULTI_VECTOR = "multi-vector"
    RERANKER = "reranker"
    CLASSIFIER = "classifier"
    TOKEN_CLASSIFIER = "token-classifier"


KINDS = tuple(kind.value for kind in Kind)
TOKEN_INPUTS = ("accept", "refuse", "tiktoken")
"""Handling of token ids in requests: taken as the model's own, refused, or decoded by tiktoken."""
TOKEN_ENCODING = "cl100k_base"


def check_name(name: str) -> str:
    """Return `name` if it is valid for an instance, its log file and its run file.

    Raises:
        InvalidInstanceName: It is not.
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


def path_prefix(text: str) -> str:
    """A path prefix of URLs, such as '/ai/teimgr' or '' for none, without its last slash.

    Its segments have A-Z a-z 0-9 . _ ~ - and nothing else, because it is written into pages and headers.

    Raises:
        InvalidConfig: it is not valid.
    """
    if len(text) > _MAX_PATH_PREFIX or not _PATH_PREFIX.fullmatch(text):
        raise InvalidConfig(
            "must be a path such as /teimgr: segments of A-Z a-z 0-9 . _ ~ -, "
            f"{_MAX_PATH_PREFIX} characters at most (got {text[:80]!r})"
        )
    return text.rstrip("/")


def known(kind: type[Any], values: Any) -> dict[str, Any]:
    """The keys of a message or file that a dataclass has, for its constructor: a later version may have sent more.

    What processes of two versions tell each other, or leave in files, is read so: unknown keys are ignored, missing
    ones have their defaults. Orders to start a process (`WorkerSpec`, `MuxConfig`) and access rules refuse them by
    name: one that was not carried out would be missed.
    """
    return {item.name: values[item.name] for item in fields(kind) if item.name in values}


def rfc3339(moment: datetime, timespec: str = "microseconds") -> str:
    """A moment in UTC, such as 2026-03-04T12:00:00.123456Z; `timespec` as `datetime.isoformat` has it."""
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def now_rfc3339() -> str:
    return rfc3339(datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class DeclaredKey:
    """A declared key of the configuration.

    Attributes:
        meaning: One line for documentation.
        low: Inclusive lower limit of a number.
        high: Inclusive upper limit of a number.
        label: What a message calls the key where its path alone is not clear.
        also: tei-manager's environment variable for it.
        live: A reload changes it at once; other keys change at the next start.
        secret: Its value is never shown.
    """

    meaning: str = ""
    low: float | None = None
    high: float | None = None
    label: str = ""
    also: str = ""
    live: bool = False
    secret: bool = False

    def out_of_range(self, value: object) -> str | None:
        """The sentence that refuses a number outside the limits; None for one inside and for anything else."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        label = f"{self.label} " if self.label else ""
        if self.low is not None and value < self.low:
            return f"{label}must be >= {self.low} (got {value})"
        if self.high is not None and value > self.high:
            return f"{label}must be <= {self.high} (got {value})"
        return None


class Change(IntEnum):
    """The effect that an update of a key has on workers; an update of several keys has the greatest."""

    IN_PLACE = 0  # only the daemon uses it
    SCALE = 1  # workers are added or removed
    REPLACE = 2  # other workers, where it changes their `WorkerSpec`
    FIXED = 3  # no update can change it; a reload deletes the instance and creates it again


@dataclass(frozen=True, slots=True)
class InstanceKey(DeclaredKey):
    """A declared key of an instance.

    Attributes:
        change: What an update of it needs.
        words: The values of a text that is one of several.
        most: Limit of the entries of a list or table in a REST body.
        flag: `extra_args` may give it as `--key-name`.
        left_open: The value that lets the daemon choose, if there is one.
        auto: REST takes the word "auto" for 0.
        in_rest: A REST request may give it.
        in_config: A seed may give it.
    """

    change: Change = Change.IN_PLACE
    words: tuple[str, ...] = ()
    most: int | None = None
    flag: bool = False
    left_open: Any = ...
    auto: bool = False
    in_rest: bool = True
    in_config: bool = True

    def not_a_word(self, value: object) -> str | None:
        """The sentence that refuses a value that is not one of `words`."""
        if not self.words or value is None or value in self.words:
            return None
        return f"must be one of {', '.join(self.words)} (got {value!r})"


def declared(
    meaning: str,
    low: float | None = None,
    high: float | None = None,
    *,
    kind: type[DeclaredKey] = DeclaredKey,
    **options: Any,
) -> Mapping[str, DeclaredKey]:
    """The metadata of a dataclass field that is a declared key."""
    return {"key": kind(meaning, low, high, **options)}


def key(default: Any, meaning: str, low: float | None = None, high: float | None = None, **options: Any) -> Any:
    """A dataclass field that is a declared key; a `default` that is a type makes a new value each time."""
    metadata, shown = declared(meaning, low, high, **options), not options.get("secret")
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata, repr=shown, hash=False)
    return field(default=default, metadata=metadata, repr=shown)


def key_of(item: Field[Any]) -> DeclaredKey:
    """The declaration in a field's metadata, or one that allows everything."""
    found: DeclaredKey = item.metadata.get("key", _ANY)
    return found


_ANY = DeclaredKey()
_IN_PLACE, _SCALE, _REPLACE, _FIXED = Change
_declared = partial(declared, kind=InstanceKey)
_key = partial(key, kind=InstanceKey)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What should run under one name, by the contract's keys and our own. An update makes a new spec.

    Values that are left open are resolved before a spec is stored.
    """

    name: str = field(metadata=_declared("a letter or digit, then up to 63 of A-Z a-z 0-9 . _ -", change=_FIXED))
    model_id: str = field(metadata=_declared("id on the model hub, or a local directory", change=_REPLACE))
    port: int = _key(0, "port of the instance; 0: a free one of the range", 0, U16, change=_FIXED, left_open=0)
    max_batch_tokens: int = _key(
        16384, "maximum tokens of one batch", 0, U32, change=_REPLACE, flag=True, left_open=0, auto=True
    )
    max_concurrent_requests: int = _key(
        512, "calls that a worker serves at a time; `max_waiting` more may wait", 1, U32, change=_REPLACE, flag=True
    )
    max_waiting: int = _key(
        _MAX_WAITING,
        "calls that may wait in a worker, in addition to `max_concurrent_requests`; more are refused",
        0,
        U32,
        change=_REPLACE,
    )
    max_queue_wait_secs: int = _key(
        _MAX_QUEUE_WAIT_SECS,
        "reject calls whose client set no deadline (all over HTTP) if their expected wait exceeds this; 0: no limit",
        0,
        U32,
        change=_REPLACE,
    )
    max_queued_tokens: int = _key(
        0,
        "tokens that may wait in a lane of a worker; further single calls are refused; 0: no limit",
        0,
        U32,
        change=_REPLACE,
    )
    cache_bytes: int = _key(
        0,
        "bytes of results that each worker caches for equal inputs of the same API key; 0: no cache",
        0,
        2**40,
        change=_REPLACE,
    )
    pooling: str | None = _key(None, "default: that of the model's files", change=_REPLACE, words=POOLINGS, flag=True)
    gpu_id: int | None = _key(
        None, "index of the GPU; default: the GPU with the most free memory, else the CPU", 0, U32, change=_REPLACE
    )
    prometheus_port: int | None = _key(
        None, "port of its te_* metrics; default: a free one; 0: none", 0, U16, change=_FIXED, left_open=None
    )
    startup_timeout_secs: int | None = _key(None, "time limit of a start; default: the daemon's", 1, I64)
    extra_args: tuple[str, ...] = _key((), "flags of TEI, such as --revision main", change=_REPLACE, most=256)
    created_at: str | None = _key(None, "RFC 3339, in UTC", change=_FIXED, in_rest=False)
    dtype: str = _key(
        "auto",
        "element type of the weights; int8 runs on CPUs only, and auto never chooses it",
        change=_REPLACE,
        words=DTYPES,
        flag=True,
    )
    revision: str | None = _key(None, "branch, tag or commit on the hub", change=_REPLACE, flag=True)
    threads: int | None = _key(None, "CPU threads of each worker; default: a fair share of the cores", 1, 4096)
    kind: str | None = _key(None, "default: that of the model's files", change=_REPLACE, words=KINDS, flag=True)
    trust_remote_code: bool = _key(False, "run code from the model's own repository", change=_REPLACE, flag=True)
    code_revision: str | None = _key(
        None,
        "branch, tag or commit of other repositories whose code the model runs; default: main as first fetched",
        change=_REPLACE,
    )
    safetensors_only: bool = _key(False, "refuse weights in pickled files (.bin, .pt)", change=_REPLACE)
    max_rss_mib: int | None = _key(
        None, "resident memory in MiB above which a worker is replaced, without a gap; default: no limit", 1, U32
    )
    replicas: Literal["per-gpu"] | int = _key(
        1, "number of workers, or per-gpu: one on each GPU", 1, 256, change=_SCALE
    )
    node: str | None = _key(None, "name of the host in the cluster; default: any suitable host", change=_REPLACE)
    labels: Mapping[str, str] = _key(
        dict, "labels that its hosts in the cluster must have: {zone: a}", change=_REPLACE, most=64
    )
    placement: str = _key(
        "spread", "spread: replicas on different hosts and GPUs first; pack: on few hosts", words=PLACEMENTS
    )
    load: str = _key("eager", "on_demand: loaded by the first call, unloaded when idle or evicted", words=LOADS)
    idle_timeout_secs: int = _key(
        0,
        "seconds without a call after which an on-demand model is unloaded; 0: only if others need its memory",
        0,
        U32,
    )
    pinned: bool = _key(False, "keep an on-demand model loaded after its first call: never unload or evict it")
    max_replicas: int = _key(0, "maximum of `replicas` when the load sets it; 0: `replicas` is fixed", 0, 256)
    min_replicas: int = _key(1, "minimum of `replicas` when the load sets it; 0 needs load on_demand", 0, 256)
    scale_up_wait_ms: int = _key(2000, "add a replica if more work than this waits for each one", 1, _MAX_SCALE_WAIT_MS)
    scale_down_wait_ms: int = _key(
        500, "remove no replica while more work than this waits for each one", 0, _MAX_SCALE_WAIT_MS
    )
    scale_down_delay_secs: int = _key(
        300, "how long fewer replicas must have been enough before one is removed", 1, 86400
    )
    tags: Mapping[str, str] = _key(dict, "labels for filters and people: {team: search}", most=64)
    token_inputs: str | None = _key(
        None,
        "token ids in requests: accept the model's, refuse all, or decode tiktoken's; default: the daemon's",
        change=_REPLACE,
        words=TOKEN_INPUTS,
    )
    token_encoding: str | None = _key(None, "encoding for tiktoken; default: the daemon's", change=_REPLACE)
    wanted_running: bool = _key(True, "false after a user's stop", in_rest=False, in_config=False)
    pending_update: str | None = _key(
        None, "an accepted update that is under way, as JSON", in_rest=False, in_config=False, secret=True
    )
    seeded: bool = _key(False, "the configuration created it", in_rest=False, in_config=False)
    confined: bool = _key(
        False,
        "a key for some instances chose its model: no directory outside of local_model_roots",
        change=_REPLACE,
        in_rest=False,
        in_config=False,
        secret=True,
    )
    by_call: bool = _key(False, "a call had it made", in_rest=False, in_config=False, secret=True)
    by_key: str = _key("", "the badge of that call's key", in_rest=False, in_config=False, secret=True)

    @property
    def space_settings(self) -> str:
        """The settings that decide, with the model's files, the space of its vectors; "" for the model's own
        settings."""
        names = ("pooling", "revision", "kind", "trust_remote_code", "code_revision", "extra_args")
        given = {name: value for name in names if (value := getattr(self, name))}
        return json.dumps(given) if given else ""


KEYS: Mapping[str, InstanceKey] = {item.name: item.metadata["key"] for item in fields(InstanceSpec)}
"""The declared keys of an instance, in the order of the state file."""


FIXED = "cannot be changed; delete the instance and create it again"
"""Why a change of a key that is not `updatable` is refused."""


def updatable(name: str) -> bool:
    """True if PATCH and a template may have the key."""
    return KEYS[name].in_rest and KEYS[name].change is not Change.FIXED


class CpuThreads(NamedTuple):
    """The CPU threads of a worker: those that are its own, and the most while other workers are idle."""

    own: int
    most: int


MADE_BY, A_CALL, MADE_FOR = "made_by", "call", "made_for"
"""Tags that show `by_call` and `by_key`; 0.1.0 had nothing else to tell such instances by."""
TRIAL_NAME = "_model-trial"
"""The name of a trial's worker, which no instance may have."""
OWN_FORWARD = "its own float32 forward"
"""The reference of a model at each load, and in a trial if no library can run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Options of one worker process, launched with them as a JSON object.

    `replica` distinguishes the workers of one instance. `gpu` is a CUDA device name for CUDA_VISIBLE_DEVICES (a UUID:
    NVML and CUDA may order cards differently) or None for the CPU. A directory as model has to be below one of
    `model_roots`, if they are given. Times are seconds.

    In a fleet of several hosts `host` is the name of the worker's host. It listens for other hosts at `link_address` (a
    numeric address, to which the launch adds the port), with the certificate in the folder `identity_dir`. `port_host`
    is the address of its instance ports, where that is not `instance_host`. `agent_socket` is that of the host's agent,
    which knows the other hosts; they may have the model.
    """

    name: str
    model_id: str
    replica: int = 0
    host: str = ""
    revision: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    pooling: str | None = None
    kind: str | None = None
    trust_remote_code: bool = False
    code_revision: str | None = None
    safetensors_only: bool = False
    model_roots: tuple[str, ...] | None = None
    strict_model_files: bool = False
    gpu: str | None = None
    threads: int = 1
    instance_host: str = "127.0.0.1"
    port: int = 0
    prometheus_port: int | None = None
    max_batch_tokens: int = 16384
    max_batch_requests: int | None = None
    max_concurrent_requests: int = 512
    max_waiting: int = _MAX_WAITING
    max_queue_wait_secs: int = _MAX_QUEUE_WAIT_SECS
    max_queued_tokens: int = 0
    cache_bytes: int = 0
    max_client_batch_size: int = 32
    max_message_bytes: int = 40 * 1024 * 1024
    payload_limit_bytes: int = 2_000_000
    auto_truncate: bool = True
    auto_truncate_given: bool = False
    """Whether the flag was given: a small `max_batch_tokens` cuts every text, which has to be wanted."""
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ()
    default_prompt_name: str | None = None
    default_prompt: str | None = None
    arrow_output_dtype: str = "f32"
    orphan_grace_s: float = 300.0
    link_address: str | None = None
    identity_dir: str | None = None
    port_host: str | None = None
    agent_socket: str | None = None
    nice: int = 0
    log_level: str = "info"
    log_format: str = "json"
    token_inputs: str = TOKEN_INPUTS[0]
    token_encoding: str = TOKEN_ENCODING
    media_url_hosts: tuple[str, ...] = ()
    media_url_networks: tuple[str, ...] = ()
    restarts: int = 0
    """Restarts of the replica before this worker; the next daemon, which adopts it, continues the count."""

    def accepts(self, authorization: bytes) -> bool:
        """True if an `Authorization` header has the instance's API key, if it has one; compared in constant time."""
        return self.api_key is None or hmac.compare_digest(authorization, f"Bearer {self.api_key}".encode())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """The inverse of `to_json`; unknown keys are an error."""
        values = json.loads(text)
        names = ("cors_allow_origin", "model_roots", "media_url_hosts", "media_url_networks")
        lists = {name: values[name] for name in names if values.get(name) is not None}
        return cls(**values | {name: tuple(value) for name, value in lists.items()})

    @property
    def hash(self) -> str:
        """Sixteen hex digits; a running worker with another hash has to be replaced. `threads` changes in place,
        `restarts` is a figure for display, how other hosts reach the worker is set by its node, and where its model may
        come from, and whether its texts may be cut, matters only while it loads.
        """
        # A key that is newer than 0.1.0 counts where it is set: workers of that version are adopted.
        unset = {
            "safetensors_only": False,
            "strict_model_files": False,
            "code_revision": None,
            "max_waiting": _MAX_WAITING,
            "max_queue_wait_secs": _MAX_QUEUE_WAIT_SECS,
            "max_queued_tokens": 0,
            "cache_bytes": 0,
            "host": "",
            "token_inputs": TOKEN_INPUTS[0],
            "token_encoding": TOKEN_ENCODING,
            "media_url_hosts": (),
            "media_url_networks": (),
        }
        facts = {key: value for key, value in asdict(self).items() if key not in unset or value != unset[key]}
        others = ("link_address", "identity_dir", "port_host", "agent_socket", "model_roots", "auto_truncate_given")
        for name in ("threads", "restarts", *others):
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


WORKER_KEYS = tuple(item.name for item in fields(WorkerSpec) if item.name in KEYS and item.name != "threads")
"""The keys of an instance that its workers are launched with; `threads` is resolved to a share of the cores."""


CUT_TEXTS = "texts are cut to "
"""The beginning of the warning that `max_batch_tokens` is below the length of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Description of the model that a ready worker has loaded. Lengths are tokens.

    `kind` is one of `KINDS`; `outputs` are those of `engine.job.Output` that it has. `dimension` is that of a dense
    vector, of the vocabulary (sparse) or of a token's vector (multi-vector), and 0 for classifiers and rerankers, which
    have `labels` by index. `model_sha` is the requested revision, `commit` the commit it resolved to. `batching` is
    "packed" where one padding-free row passed the load-time probe, else "equal-length". `attention` of a packed row is
    "varlen" (one call of a kernel for all texts) or "by-run" (one call per run of equal lengths), else "library"; an
    embedding table has "none".
    `forward` is "native" where our C library computes all layers in one call, else "library". `mean_cosine` and
    `min_cosine` are those of the results to float32 on known texts, 1.0 for models with scores only. `most_dimensions`
    may be asked of a dense vector where its files cut it to fewer, `dimension`; else 0. `warnings` are about the
    model's files (keys without effect, contradictions) and texts that are cut. `code` is the code of models' own that
    runs: each repository with its commit and its files. `has_routes`: queries go another way than documents.
    `listwise`: a reranker whose scores depend on all documents of a query; then `multi_vector_dimension` is that of
    what it compares. `space` is the SHA-256 of all that decides what a vector means (`engine/space`), `precision` the
    class of its element type: fp32, 16-bit or int8. `modalities`: what it embeds, "text" and for some "image"; `fused`:
    both in one input. `dtype_reason` is why it has its dtype, and `dtype_candidates` what else was considered
    (`engine/loading`).
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
    attention: str = "by-run"
    forward: str = "library"
    mean_cosine: float = 1.0
    min_cosine: float = 1.0
    most_dimensions: int = 0
    warnings: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    listwise: bool = False
    has_routes: bool = False
    space: str = ""
    precision: str = ""
    modalities: tuple[str, ...] = ("text",)
    fused: bool = False
    dtype_reason: str = ""
    dtype_candidates: tuple[dict[str, Any], ...] = ()

    @property
    def cut_notice(self) -> str | None:
        """That `max_batch_tokens` cuts texts which the model could read, if it does."""
        return next((each for each in self.warnings if each.startswith(CUT_TEXTS)), None)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoadedModel:
        found = {name: tuple(it) if isinstance(it, list) else it for name, it in known(cls, values).items()}
        return cls(**cast(dict[str, Any], found))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A snapshot of one worker of an instance, for display.

    `replica` counts from 0; during an update two workers have the same number. `role` in an update is `serving`,
    `joining` for workers that will take over, or `leaving` for replaced ones that finish their calls. `gpu` is the
    card's UUID and `gpu_id` its index, None on the CPU. `node` is the name of its host in a cluster. `attempt` is the
    number of the start under way, or of the one that follows in `next_attempt_secs`, once one before it has failed.
    `private_bytes` is the memory that its end gives back, as of its last probe.
    """

    replica: int
    role: str
    state: State
    node: str | None = None
    gpu: str | None = None
    gpu_id: int | None = None
    pid: int | None = None
    incarnation: str | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None
    attempt: int | None = None
    next_attempt_secs: int | None = None
    private_bytes: int | None = None


def attempt_text(attempts: Iterable[tuple[int | None, int | None]]) -> str:
    """Such as "attempt 6, next in 20 s", of the worker that failed most often; empty where none failed.

    `attempts` are `attempt` and `next_attempt_secs` of the workers.
    """
    attempt, next_s = max(attempts, key=lambda each: each[0] or 0, default=(None, None))
    if attempt is None:
        return ""
    return f"attempt {attempt}" if next_s is None else f"attempt {attempt}, next in {next_s} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateView:
    """The last change of an instance, of the keys `changes`: `rolling`, `done`, or `failed` for `reason`."""

    state: str
    changes: tuple[str, ...] = ()
    reason: str | None = None
    started_at: str = ""
    finished_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happened to one worker, which no state shows; `event` is one of `EVENTS`, `at` the time."""

    event: str
    reason: str
    at: str
    crash_report: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """A snapshot of one instance, for display only. Timestamps are RFC 3339 in UTC."""

    spec: InstanceSpec
    state: State
    pid: int | None = None
    uptime_secs: int | None = None
    restarts: int = 0
    health_check_failures: int = 0
    last_health_check: str | None = None
    reason: str | None = None
    model: LoadedModel | None = None
    threads: int | None = None
    workers: tuple[WorkerView, ...] = ()
    update: UpdateView | None = None
    incident: Incident | None = None
    """The latest."""

    @property
    def may_serve(self) -> bool:
        """True if it takes calls, or would be started or loaded for one."""
        return may_serve(self.state, on_demand=self.spec.load == "on_demand")


def may_serve(state: State, *, on_demand: bool) -> bool:
    """True if an instance takes calls, or would be started or loaded for one."""
    return state in (State.RUNNING, State.STARTING) or (on_demand and state in (State.UNLOADED, State.STOPPING))


def is_same_space(one: object, other: object, settings: str, other_settings: str) -> bool:
    """True if vectors of two instances of one model id can be compared; decided by their settings until both spaces are
    known, that is not empty.
    """
    return one == other if one and other else settings == other_settings


def other_space(view: InstanceView, of_model: Iterable[InstanceView]) -> str | None:
    """Return the instance in whose space calls by the model id are answered, None if `view` is in it. `of_model` are
    the instances of the model id in order of creation.
    """
    if (first := next((one for one in of_model if one.may_serve), None)) is None:
        return None
    its, own = (one.model.space if one.model else "" for one in (first, view))
    return None if is_same_space(its, own, first.spec.space_settings, view.spec.space_settings) else first.spec.name


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One live replica: its unix socket, and the incarnation that its worker reports in reply to WATCH.

    In a fleet of several hosts `node` is the one that it runs on, and `address` (`host:port`) where it listens for the
    others; the socket is of use on that node alone. `space` and `precision` are those of its model, empty where a
    worker of an earlier version does not tell them.
    """

    socket: str
    incarnation: str
    node: str = ""
    address: str = ""
    space: str = ""
    precision: str = ""

    def is_on(self, node: str) -> bool:
        """True if the worker is reached by its socket from the host of this name, which is "" in a fleet of one."""
        return not self.address or self.node == node


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """Route of one instance. `endpoints` is empty unless `state` is running. An `on_demand` one is loaded by calls.

    `serves` has the kind and the outputs of its model, empty until they are known; `default_for` the kinds of calls
    that it gets if they name no instance; `space_settings` those of its settings that decide the space of its vectors.
    """

    name: str
    model_id: str
    state: State
    reason: str | None = None
    dimension: int = 0
    endpoints: tuple[WorkerEndpoint, ...] = ()
    serves: tuple[str, ...] = ()
    default_for: tuple[str, ...] = ()
    on_demand: bool = False
    space_settings: str = ""

    @property
    def is_loadable(self) -> bool:
        """True if a call has its model loaded, or waits until it is."""
        return self.on_demand and self.state in (State.UNLOADED, State.STARTING, State.STOPPING)

    @property
    def returns(self) -> bool:
        """True while a worker restarts whose model was loaded before."""
        return not self.on_demand and self.state is State.STARTING and (self.dimension > 0 or len(self.serves) > 1)

    @property
    def asks_owner(self) -> bool:
        """True if a call asks for its model: who loads it knows whether, and when, a failed one is tried again."""
        return self.is_loadable or (self.on_demand and self.state is State.FAILED)

    def to_json(self) -> str:
        """Return it as a JSON object; made once for all muxes."""
        return _route_json(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RouteEntry:
        """The inverse of `dataclasses.asdict`, also after JSON; a state of a later version is STARTING."""
        endpoints = tuple(WorkerEndpoint(**known(WorkerEndpoint, each)) for each in values["endpoints"])
        words = {name: tuple(values.get(name, ())) for name in ("serves", "default_for")}
        state = _STATES.get(values["state"], State.STARTING)
        return cls(**known(cls, values) | {"state": state, "endpoints": endpoints} | words)


@lru_cache(maxsize=4096)
def _route_json(entry: RouteEntry) -> str:
    values = asdict(entry)
    if not entry.on_demand:
        del values["on_demand"]  # which a mux of an earlier version does not know
    if not entry.space_settings:
        del values["space_settings"]
    return json.dumps(values)


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """All instances in order of creation, which is that of `instance_index`."""

    entries: tuple[RouteEntry, ...] = ()

    def to_json(self) -> str:
        return f"[{', '.join(entry.to_json() for entry in self.entries)}]"

    @classmethod
    def from_values(cls, entries: Iterable[dict[str, Any]]) -> RoutingSnapshot:
        """The inverse of `to_json`, after JSON."""
        return cls(tuple(map(RouteEntry.from_dict, entries)))


LINK_LISTENER = -3
"""Name of the listening socket for other hosts among those that a worker inherits; the other names are ports."""


def worker_file(folder: Path, incarnation: str, suffix: Literal["sock", "json", "exit"]) -> Path:
    """A worker's control socket, run file or exit report in the run directory `folder`."""
    return folder / f"{incarnation}.{suffix}"
