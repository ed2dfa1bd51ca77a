"""The bodies of the REST API; the OpenAPI document is made from them.

Requests are strict: no unknown field, no text where a number is meant. `null` in an optional field means absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from teimgr.config.provenance import shown_args
from teimgr.config.schema import Faulty
from teimgr.config.settings import SPEC_RULES, U32
from teimgr.config.sources import with_template
from teimgr.errors import ValidationError
from teimgr.spec import DTYPES, KINDS, POOLINGS, InstanceSpec, InstanceView, State, WorkerView

Text = Annotated[str, Field(max_length=4096)]
TagText = Annotated[str, Field(max_length=256)]


def _number(name: str, default: object = None) -> Any:
    """An optional field with the meaning and the limits of the seed's key of that name."""
    rule = SPEC_RULES[name]
    meaning = rule.meaning if default is None else f"{rule.meaning} (default {default})"
    return Field(None, ge=rule.low, le=rule.high, description=meaning)


def _one_of(*allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return AfterValidator(check)


def _batch_tokens(value: object) -> object:
    """0 is how the rest of the daemon says "auto"; REST has the word alone, as tei-manager has."""
    if type(value) is int and value < 1:
        raise ValueError("must be >= 1, or auto")
    return 0 if value == "auto" else value


BatchTokens = Annotated[
    int,
    Field(le=U32),
    BeforeValidator(_batch_tokens),
    WithJsonSchema({"anyOf": [{"const": "auto", "type": "string"}, {"type": "integer", "minimum": 1, "maximum": U32}]}),
]


class CreateInstance(BaseModel):
    """What POST /instances takes."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"name": "bge-small", "model_id": "BAAI/bge-small-en-v1.5"}]},
    )

    name: Text = Field(description="a letter or digit, then up to 63 of A-Z a-z 0-9 . _ -")
    template: Text | None = Field(None, description="a template of the configuration, for what is not said here")
    model_id: Annotated[Text, Field(min_length=1)] | None = Field(
        None, description="id on the model hub, or a local directory; needed unless the template has one"
    )
    revision: Text | None = Field(None, description="branch, tag or commit on the hub")
    port: int | None = _number("port")
    max_batch_tokens: BatchTokens | None = Field(
        None, description="token budget of one batch (default 16384); auto: from the free GPU memory"
    )
    max_concurrent_requests: int | None = _number("max_concurrent_requests", 512)
    pooling: Annotated[Text, _one_of(*POOLINGS)] | None = Field(
        None, description=f"{', '.join(POOLINGS)}; absent: what the model says"
    )
    kind: Annotated[Text, _one_of(*KINDS)] | None = Field(
        None, description=f"{', '.join(KINDS)}; absent: what the model's files say"
    )
    trust_remote_code: bool | None = Field(None, description="run code of the model's own repository (default false)")
    dtype: Annotated[Text, _one_of(*DTYPES)] | None = Field(None, description=f"{', '.join(DTYPES)}; absent: auto")
    gpu_id: int | None = _number("gpu_id")
    threads: int | None = _number("threads")
    prometheus_port: int | None = _number("prometheus_port")
    startup_timeout_secs: int | None = _number("startup_timeout_secs")
    replicas: Literal["per-gpu"] | Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="workers of the instance (default 1), or per-gpu: one on each"
    )
    tags: dict[TagText, TagText] | None = Field(
        None, max_length=64, description="for people and filters: {team: search}"
    )
    extra_args: list[Text] | None = Field(None, max_length=256, description="flags of TEI, such as --revision main")

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model_id is None and self.template is None:
            raise PydanticCustomError("no_model", "missing field `model_id`")
        return self

    def spec(self, templates: Mapping[str, Mapping[str, Any]] | None = None) -> InstanceSpec:
        """The instance that is asked for, with what its template adds; its name and ports are not judged yet.

        Raises:
            ValidationError: there is no such template, or nobody says which model.
        """
        given = self.model_dump(exclude_none=True, exclude={"template"})
        if self.template is not None:
            given = self._filled(given, templates or {})
        return InstanceSpec(**given | {"extra_args": tuple(given.get("extra_args", ()))})

    def _filled(self, given: dict[str, Any], templates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        try:
            filled = with_template(given, self.template, templates)
        except Faulty as error:
            raise ValidationError(error.message) from error
        if not filled.get("model_id"):
            raise ValidationError(f"missing field `model_id`, which the template {self.template!r} has not either")
        return filled


class UpdateInstance(BaseModel):
    """What PATCH /instances/{name} takes: what is not said stays, `null` is the default again."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"examples": [{"dtype": "float32"}]})

    strategy: Literal["rolling", "recreate"] = Field(
        "rolling", description="recreate: the old workers end before the new ones start, where both have no room"
    )
    model_id: Annotated[Text, Field(min_length=1)] | None = Field(None, description="another model")
    revision: Text | None = Field(None, description="branch, tag or commit on the hub")
    max_batch_tokens: BatchTokens | None = Field(
        None, description="token budget of one batch; auto: from the free GPU memory"
    )
    max_concurrent_requests: int | None = _number("max_concurrent_requests")
    pooling: Annotated[Text, _one_of(*POOLINGS)] | None = Field(None, description=", ".join(POOLINGS))
    kind: Annotated[Text, _one_of(*KINDS)] | None = Field(None, description=", ".join(KINDS))
    trust_remote_code: bool | None = Field(None, description="run code of the model's own repository")
    dtype: Annotated[Text, _one_of(*DTYPES)] | None = Field(None, description=", ".join(DTYPES))
    gpu_id: int | None = _number("gpu_id")
    threads: int | None = _number("threads")
    startup_timeout_secs: int | None = _number("startup_timeout_secs")
    replicas: Literal["per-gpu"] | Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="workers of the instance, or per-gpu: one on each"
    )
    tags: dict[TagText, TagText] | None = Field(None, max_length=64, description="all of them anew")
    extra_args: list[Text] | None = Field(None, max_length=256, description="flags of TEI, all of them anew")

    def changes(self) -> dict[str, Any]:
        """The keys of a spec that were said.

        Raises:
            ValidationError: `model_id` is null, and has no default.
        """
        given = {key: getattr(self, key) for key in self.model_fields_set - {"strategy"}}
        if given.get("model_id", "") is None:
            raise ValidationError("model_id: has no default to go back to")
        if given.get("extra_args") is not None:
            given["extra_args"] = tuple(given["extra_args"])
        return given


class RestartInstance(BaseModel):
    """What POST /instances/{name}/restart may take."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rolling: bool = Field(False, description="new workers start beside the old ones, and no call is lost")


class WorkerFacts(BaseModel):
    """One worker of an instance; all of one instance take connections of its port."""

    replica: int
    role: Literal["serving", "joining", "leaving"] = Field(description="joining and leaving in the midst of an update")
    state: State
    pid: int | None
    gpu: str | None = Field(description="UUID of its card")
    gpu_id: int | None
    uptime_secs: int | None
    restarts: int
    health_check_failures: int
    last_health_check: str | None
    reason: str | None


class Update(BaseModel):
    """The last change of an instance. One that failed has left everything as it was."""

    state: Literal["rolling", "done", "failed"]
    changes: list[str] = Field(description="the keys that it is about; none for a rolling restart")
    reason: str | None
    started_at: str
    finished_at: str | None


class ModelFacts(BaseModel):
    """What a running instance's model is. Lengths are tokens; classifiers and rerankers have labels, others none."""

    model_config = ConfigDict(extra="allow")

    model_id: str
    model_sha: str | None
    dtype: str
    device: str
    kind: str
    pooling: str
    dimension: int
    max_input_length: int
    batching: str
    outputs: list[str]
    labels: list[str]
    activation: str | None
    prompts: list[str]
    default_prompt_name: str | None
    commit: str | None = Field(description="the commit that the revision is")


class Card(BaseModel):
    """A GPU, as the driver sees it now; null where it does not say."""

    index: int = Field(description="what `gpu_id` may be")
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_used_bytes: int | None = Field(description="by whomever")
    memory_free_bytes: int
    utilization: float | None = Field(description="share of time with a kernel running, 0 to 1")
    temperature_c: int | None
    power_w: float | None


class CardOfInstance(Card):
    """The GPU of an instance."""

    instance_memory_bytes: int | None = Field(description="what the driver gave the instance")


class InstanceInfo(BaseModel):
    """One instance. Every key is always there; null means none."""

    name: str
    model_id: str
    port: int
    status: State
    pid: int | None
    created_at: str | None
    uptime_secs: int | None
    restarts: int
    health_check_failures: int
    last_health_check: str | None = Field(description="last successful probe")
    gpu_id: int | None
    prometheus_port: int | None
    reason: str | None = Field(description="why it is not running, or what is wrong with it")
    wanted_running: bool = Field(description="false after a user's stop")
    revision: str | None
    dtype: str = Field(description="element type in use once the model is loaded, until then the one asked for")
    pooling: str | None
    kind: str | None = Field(description="what the model is for once it is loaded, until then the one asked for")
    trust_remote_code: bool
    threads: int | None
    max_batch_tokens: int
    max_concurrent_requests: int
    startup_timeout_secs: int | None
    extra_args: list[str] = Field(description="as they were given, but for the value of --api-key")
    tags: dict[str, str]
    seeded: bool = Field(description="the configuration made it")
    replicas: int | Literal["per-gpu"]
    workers: list[WorkerFacts] = Field(description="one for each replica, in an update those of before or after too")
    update: Update | None = Field(description="null while nothing was changed since the daemon started")
    model: ModelFacts | None = Field(description="null until the model is loaded")
    gpu: CardOfInstance | None = Field(description="the card it is on; told by GET alone, null on the CPU")


class LogSlice(BaseModel):
    """Lines [start, end) of an instance's log, oldest first, rotated files included."""

    lines: list[str]
    start: int
    end: int
    total_lines: int


class Health(BaseModel):
    """The daemon is alive; `alarms` are sentences about what needs a person."""

    status: Literal["healthy"]
    timestamp: str
    version: str
    alarms: list[str]
    notices: list[str] = Field(description="what is worth knowing and needs nobody")


class Waiting(BaseModel):
    """An instance that should run and does not."""

    name: str
    status: State
    reason: str | None


class Readiness(BaseModel):
    """Whether every instance that should run does."""

    ready: bool
    timestamp: str
    waiting: list[Waiting]


class Failure(BaseModel):
    """Every failure of every route."""

    error: str
    code: str
    timestamp: str


def _worker_facts(worker: WorkerView) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in WorkerFacts.model_fields} | {"state": worker.state.value}


def instance_info(view: InstanceView, gpu: dict[str, Any] | None = None) -> dict[str, Any]:
    """`InstanceInfo` of a view, as plain values; `gpu` is the card it is on, where that was looked up."""
    spec, model = view.spec, view.model
    return {
        "name": spec.name,
        "model_id": spec.model_id,
        "port": spec.port,
        "status": view.state.value,
        "pid": view.pid,
        "created_at": spec.created_at,
        "uptime_secs": view.uptime_secs,
        "restarts": view.restarts,
        "health_check_failures": view.health_check_failures,
        "last_health_check": view.last_health_check,
        "gpu_id": spec.gpu_id,
        "prometheus_port": spec.prometheus_port,
        "reason": view.reason,
        "wanted_running": spec.wanted_running,
        "revision": spec.revision,
        "dtype": model.dtype if model else spec.dtype,
        "pooling": model.pooling if model else spec.pooling,
        "kind": model.kind if model else spec.kind,
        "trust_remote_code": spec.trust_remote_code,
        "threads": view.threads,
        "max_batch_tokens": spec.max_batch_tokens,
        "max_concurrent_requests": spec.max_concurrent_requests,
        "startup_timeout_secs": spec.startup_timeout_secs,
        "extra_args": shown_args(spec.extra_args),
        "tags": dict(spec.tags),
        "seeded": spec.seeded,
        "replicas": spec.replicas,
        "workers": [_worker_facts(worker) for worker in view.workers],
        "update": asdict(view.update) if view.update else None,
        "model": model.to_dict() if model else None,
        "gpu": gpu,
    }
