"""Bodies and query parameters of the REST API, from which the OpenAPI document is made.

The keys of an instance are declared in `spec.InstanceSpec`. Requests are strict: unknown fields and strings for numbers
are errors. `null` in an optional field means absent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import orjson
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic import ValidationError as BodyErrors
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from teimgr.config.instance_keys import shown_args
from teimgr.config.schema import ConfigFaults, nearest, quoted
from teimgr.config.sources import with_template
from teimgr.errors import InvalidInput, TooLarge, ValidationError
from teimgr.http.bodies import SlowClient, compression_fault, is_json, read_limited
from teimgr.http.turns import LISTING
from teimgr.observability.shown_text import in_own_words
from teimgr.spec import FIXED, KEYS, InstanceKey, InstanceSpec, InstanceView, LoadedModel, State, WorkerView, updatable
from teimgr.wire import json_scan

Text = Annotated[str, Field(max_length=4096)]
TagText = Annotated[str, Field(max_length=256)]

_HINTS = get_type_hints(InstanceSpec)

BODY_LIMIT_BYTES = 2 * 2**20
# Larger bodies are validated on a thread: pydantic reports all faults in one call, which takes 1.3 s for 2 MiB of keys.
# The largest valid body is a list of 10,000 names.
_LARGE_BYTES = 16 * 1024
_MAX_VALUES = 12_000
_PROBLEMS_SHOWN = 5
_ROWS_OF_PART = 64
_SHOWN_CHARS = 80

Body = TypeVar("Body", bound=BaseModel)


def answer(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def answer_list(values: Iterable[object], key: str = "", **others: object) -> Response:
    """Answer with a list that may have thousands of members, or with an object whose `key` it is, beside `others`.

    The members are made and encoded in several turns of the loop, and a long body is sent in parts.
    """
    rows = await LISTING.listed(map(orjson.dumps, values))
    begin, end = (orjson.dumps(others)[:-1] + b',"%b":[' % key.encode(), b"]}") if key else (b"[", b"]")
    length = len(begin) + sum(map(len, rows)) + max(0, len(rows) - 1) + len(end)
    headers = {"Content-Length": str(length)}
    return StreamingResponse(_parts(begin, rows, end), headers=headers, media_type="application/json")


async def _parts(begin: bytes, rows: Sequence[bytes], end: bytes) -> AsyncIterator[bytes]:
    part = [begin]
    for first in range(0, len(rows), _ROWS_OF_PART):
        part += (b"," if first else b"", b",".join(rows[first : first + _ROWS_OF_PART]))
        if first + _ROWS_OF_PART < len(rows):
            yield b"".join(part)
            part.clear()
    yield b"".join((*part, end))


async def read_json(
    request: Request, kind: type[Body], limit_bytes: int = BODY_LIMIT_BYTES, *, misshapen_status: int = 422
) -> Body:
    """The request's body, validated as `kind`.

    Raises:
        TooLarge: more than `limit_bytes`.
        HTTPException: 415 for another content type, 408 for a body that does not come in time, 400 for invalid JSON,
            `misshapen_status` for another shape.
    """
    content_type = request.headers.get("content-type", "")
    if not is_json(content_type):
        raise HTTPException(415, f"Expected request with `Content-Type: application/json` (got {quoted(content_type)})")
    try:
        text = await read_limited(request.stream(), limit_bytes)
    except SlowClient:
        raise HTTPException(408, "The request body did not come in time") from None
    if text is None:
        raise TooLarge(f"Failed to buffer the request body: the limit is {limit_bytes} bytes")
    try:
        if len(text) > _LARGE_BYTES:
            return await asyncio.to_thread(parsed_json, text, kind, misshapen_status)
        return parsed_json(text, kind, misshapen_status)
    except HTTPException as error:
        fault = compression_fault(request.headers.get("content-encoding", ""))
        if fault and error.status_code == 400:
            raise HTTPException(400, fault) from error
        raise


def parsed_json(text: bytes, kind: type[Body], misshapen_status: int = 422) -> Body:
    """A body as `kind`. A large one is for a thread: it is decoded in pieces, and has `_MAX_VALUES` values at most.

    Raises:
        HTTPException: 400 for invalid JSON, `misshapen_status` for another shape.
    """
    try:
        value = orjson.loads(text) if len(text) <= _LARGE_BYTES else json_scan.loads(text, _MAX_VALUES)
    except InvalidInput as error:
        raise HTTPException(misshapen_status, f"Validation error: {error.message}") from error
    except ValueError as error:
        raise HTTPException(400, f"Failed to parse the request body as JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except BodyErrors as error:
        found = error.errors(include_url=False, include_context=False)
        faults = _joined(found, value)
        problems = "; ".join(_problem(item, kind) for item in faults[:_PROBLEMS_SHOWN])
        raise HTTPException(misshapen_status, f"Validation error: {problems}") from error


class StrictQueryRoute(APIRoute):
    """A FastAPI route that answers undeclared query parameters with 400 and the nearest name.

    Not for probes, since load balancers and scrapers add their own parameters.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = frozenset(_query_names(self.dependant))

        async def strict(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    hint = nearest(name[:_SHOWN_CHARS], known) if known else "this route has no query parameters"
                    raise ValidationError(f"unknown query parameter {name[:_SHOWN_CHARS]!r}; {hint}")
            return await handle(request)

        return strict


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _query_names(each)


def has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def json_body(kind: type[BaseModel], *, required: bool) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `kind` itself."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


def _joined(faults: Sequence[ErrorDetails], body: object) -> list[ErrorDetails]:
    """The faults; several of one field's value, which is of no type that the field takes, are one."""
    by_place: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for item in faults:
        loc = item["loc"]
        is_of_field = isinstance(body, dict) and len(loc) > 1 and body.get(loc[0]) is item["input"]
        by_place.setdefault(loc[:1] if is_of_field else loc, []).append(item)
    return [_one_of(items) if len(items) > 1 else items[0] for items in by_place.values()]


def _one_of(items: Sequence[ErrorDetails]) -> ErrorDetails:
    first, *others = (in_own_words(each["msg"]) for each in items)
    either = " or ".join((first, *(each.removeprefix("must be ") for each in others)))
    return items[0] | {"loc": items[0]["loc"][:1], "msg": either}


def _problem(item: ErrorDetails, kind: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        if issubclass(kind, UpdateInstance) and path in KEYS and KEYS[path].in_rest:
            return f"{path}: {FIXED}"
        return f"unknown field {path!r}; {nearest(path, kind.model_fields)}"
    if item["type"] == "missing":
        return f"missing field `{path}`"
    if item["type"] == _NO_MODEL:
        return item["msg"]
    return f"{path or 'body'}: {in_own_words(item['msg'])} (got {quoted(item['input'])})"


_NO_MODEL = "no_model"


def _word_of(words: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return AfterValidator(check)


def _zero_if_auto(value: object) -> object:
    """Internally 0 means "auto"; REST has the word alone, as tei-manager has."""
    if type(value) is int and value < 1:
        raise ValueError("must be >= 1, or auto")
    return 0 if value == "auto" else value


def _typed(name: str, key: InstanceKey) -> Any:
    """The annotation of a key in a request: the declared type with the declared limits."""
    if key.words:
        return Annotated[Text, _word_of(key.words)]
    if key.auto:
        number = {"type": "integer", "minimum": 1, "maximum": key.high}
        shown = WithJsonSchema({"anyOf": [{"const": "auto", "type": "string"}, number]})
        return Annotated[int, Field(le=key.high), BeforeValidator(_zero_if_auto), shown]
    limited: Mapping[Any, Any] = {
        str: Text,
        int: Annotated[int, Field(ge=key.low, le=key.high)],
        tuple: Annotated[list[Text], Field(max_length=key.most)],
        Mapping: Annotated[dict[TagText, TagText], Field(max_length=key.most)],
    }
    kinds = [_HINTS[name]] if get_origin(_HINTS[name]) in limited else get_args(_HINTS[name]) or [_HINTS[name]]
    return reduce(or_, (limited.get(get_origin(kind) or kind, kind) for kind in kinds if kind is not NoneType))


def _described(name: str, key: InstanceKey) -> str:
    default = next(item.default for item in fields(InstanceSpec) if item.name == name)
    parts = [", ".join(key.words), key.meaning, "auto: from the free GPU memory" if key.auto else ""]
    if default not in (None, MISSING, (), 0) or default is False:
        parts.append(f"default {str(default).lower()}")
    return "; ".join(filter(None, parts))


def _request_keys(chosen: Callable[[str], bool]) -> dict[str, Any]:
    return {
        name: (_typed(name, key) | None, Field(None, description=_described(name, key)))
        for name, key in KEYS.items()
        if key.in_rest and chosen(name)
    }


_shown: dict[str, Any] = {
    name: (_HINTS[name], Field(description=key.meaning)) for name, key in KEYS.items() if not key.secret
}
_Create: Any = create_model("_Create", **_request_keys(lambda name: name != "name"))
_Update: Any = create_model("_Update", **_request_keys(updatable))
_Info: Any = create_model("_Info", **_shown)
_loaded: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(LoadedModel).items()}
_Model: Any = create_model("_Model", **_loaded)


class CreateInstance(_Create):  # type: ignore[misc]
    """Body of POST /instances."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"name": "bge-small", "model_id": "BAAI/bge-small-en-v1.5"}]},
    )

    name: Text = Field(description=KEYS["name"].meaning)
    template: Text | None = Field(
        None, description="a template of the configuration, which sets keys that are absent here"
    )
    model_id: Annotated[Text, Field(min_length=1)] | None = Field(
        None, description=f"{KEYS['model_id'].meaning}; required unless the template sets it"
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model_id is None and self.template is None:
            is_null = "model_id" in self.model_fields_set
            said = "model_id: must be a valid string (got null)" if is_null else "missing field `model_id`"
            raise PydanticCustomError(_NO_MODEL, said)
        return self

    def spec(self, templates: Mapping[str, Mapping[str, Any]] | None = None) -> InstanceSpec:
        """The requested instance, completed from its template; name and ports are not validated yet.

        Raises:
            ValidationError: There is no such template, or no model is given.
        """
        keys = self.model_dump(exclude_none=True, exclude={"template"})
        if self.template is not None:
            try:
                keys = with_template(keys, self.template, templates or {})
            except ConfigFaults as error:
                raise ValidationError(error.message) from error
            if not keys.get("model_id"):
                raise ValidationError(f"missing field `model_id`, and the template {self.template!r} does not set it")
        return InstanceSpec(**keys | {"extra_args": tuple(keys.get("extra_args", ()))})


class UpdateInstance(_Update):  # type: ignore[misc]
    """Body of PATCH /instances/{name}: an absent key is unchanged, `null` resets it to the default.

    Lists and tables are replaced as a whole.
    """

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"examples": [{"dtype": "float32"}]})

    strategy: Literal["rolling", "recreate"] = Field(
        "rolling",
        description="recreate: the old workers end before the new ones start, for hosts without room for both",
    )
    model_id: Annotated[Text, Field(min_length=1)] | None = Field(None, description="another model")

    def changes(self) -> dict[str, Any]:
        """The keys of a spec that were given.

        Raises:
            ValidationError: `model_id` is null, and has no default.
        """
        given = {key: getattr(self, key) for key in self.model_fields_set - {"strategy"}}
        if given.get("model_id", "") is None:
            raise ValidationError("model_id: cannot be null, since it has no default")
        if given.get("extra_args") is not None:
            given["extra_args"] = tuple(given["extra_args"])
        return given


class RestartInstance(BaseModel):
    """Optional body of POST /instances/{name}/restart."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"examples": [{"rolling": True}]})

    rolling: bool = Field(False, description="new workers start beside the old ones; no call is lost")


class WorkerFacts(BaseModel):
    """One worker of an instance; all workers of an instance accept connections on its port."""

    replica: int
    role: Literal["serving", "joining", "leaving"] = Field(description="joining and leaving occur during an update")
    state: State
    pid: int | None
    node: str | None = Field(description="name of its host in a cluster; null in a fleet of one host")
    gpu: str | None = Field(description="UUID of its card")
    gpu_id: int | None
    uptime_secs: int | None
    restarts: int
    health_check_failures: int
    last_health_check: str | None
    reason: str | None
    attempt: int | None = Field(description="number of this start or of the next one, if an earlier start failed")
    next_attempt_secs: int | None = Field(description="seconds until the next start, during a backoff")
    private_bytes: int | None = Field(description="private host memory at the last probe")


class Update(BaseModel):
    """The last change of an instance. A failed one was rolled back."""

    state: Literal["rolling", "done", "failed"]
    changes: list[str] = Field(description="the changed keys; empty for a rolling restart")
    reason: str | None
    started_at: str
    finished_at: str | None


class ModelFacts(_Model):  # type: ignore[misc]
    """The model of a running instance. Lengths are in tokens; only classifiers and rerankers have labels."""


class Card(BaseModel):
    """A GPU with the driver's current figures; null if not reported."""

    index: int = Field(description="the value for `gpu_id`")
    node: str | None = Field(description="its host in a cluster, the value for `node`")
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_used_bytes: int | None = Field(description="by all processes")
    memory_free_bytes: int
    utilization: float | None = Field(description="fraction of time with a kernel running, 0 to 1")
    temperature_c: int | None
    power_w: float | None


class CardOfInstance(Card):
    """The GPU of an instance."""

    instance_memory_bytes: int | None = Field(description="allocated to the instance, as the driver reports")


class Requested(BaseModel):
    """Requested values, which may differ from the loaded model's; null: decided by the model's files."""

    dtype: str
    pooling: str | None
    kind: str | None


class InstanceInfo(_Info):  # type: ignore[misc]
    """One instance. Every key is always present; null means none."""

    status: State
    pid: int | None
    uptime_secs: int | None
    restarts: int
    health_check_failures: int
    last_health_check: str | None = Field(description="last successful probe")
    reason: str | None = Field(description="why it is not running, or its current problem")
    dtype: str = Field(description="dtype in use, or the requested one until the model is loaded")
    kind: str | None = Field(description="kind of the loaded model, or the requested one until it is loaded")
    requested: Requested = Field(description="dtype, pooling and kind as requested")
    extra_args: list[str] = Field(description="as given, without the value of --api-key")
    workers: list[WorkerFacts] = Field(description="one per replica; old and new ones during an update")
    update: Update | None = Field(description="null until the first change since the daemon started")
    model: ModelFacts | None = Field(description="null until the model is loaded")
    gpu: CardOfInstance | None = Field(description="its GPU, only in replies to GET; null on the CPU")


class DeletedInstance(InstanceInfo):
    """The last state of a deleted instance."""

    notice: str | None = Field(None, description="set if the configuration lists it, so that it will be created again")


class LogSlice(BaseModel):
    """Lines [start, end) of an instance's log, oldest first, rotated files included."""

    lines: list[str]
    start: int
    end: int
    total_lines: int
    unread: list[str] | None = Field(
        None, description="hosts whose lines are missing, with the reason; absent if complete"
    )


class Liveness(BaseModel):
    """The daemon is alive; `alarms` describe problems that need an operator."""

    status: Literal["healthy"]
    timestamp: str
    version: str
    alarms: list[str]
    notices: list[str] = Field(description="information without need for action")


class Waiting(BaseModel):
    """An instance that should run but does not."""

    name: str
    status: State
    reason: str | None


class Readiness(BaseModel):
    """Whether every instance that should run is running."""

    ready: bool
    timestamp: str
    waiting: list[Waiting]


class Routing(BaseModel):
    """Whether the daemon routes calls."""

    ready: bool
    timestamp: str


class Failure(BaseModel):
    """The body of every failure."""

    error: str
    code: str
    timestamp: str


class OpenAIFailure(BaseModel):
    """OpenAI's error object."""

    class Details(BaseModel):
        """The error."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Details


# Set on each router, since the application copies their routes unchanged.
ANY_FAILURE: dict[int | str, dict[str, Any]] = {"default": {"model": Failure, "description": "any other failure"}}

CLIENT_FAILURE: dict[int | str, dict[str, Any]] = {
    "default": {"model": OpenAIFailure, "description": "any failure, in OpenAI's form"}
}


def instance_info(view: InstanceView, gpu: dict[str, Any] | None = None) -> dict[str, Any]:
    """`InstanceInfo` of a view, as plain values; `gpu` is its card, where that was read."""
    spec, model = view.spec, view.model
    info = {name: getattr(spec, name) for name, key in KEYS.items() if not key.secret} | {
        "status": view.state.value,
        "pid": view.pid,
        "uptime_secs": view.uptime_secs,
        "restarts": view.restarts,
        "health_check_failures": view.health_check_failures,
        "last_health_check": view.last_health_check,
        "reason": view.reason,
        "threads": view.threads,
        "extra_args": shown_args(spec.extra_args),
        "tags": dict(spec.tags),
        "labels": dict(spec.labels),
        "workers": [_worker_facts(worker) for worker in view.workers],
        "update": asdict(view.update) if view.update else None,
        "model": model.to_dict() if model else None,
        "gpu": gpu,
    }
    in_effect = {key: getattr(model, key) for key in Requested.model_fields if model}
    return info | {"requested": {key: getattr(spec, key) for key in Requested.model_fields}} | in_effect


def _worker_facts(worker: WorkerView) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in WorkerFacts.model_fields} | {"state": worker.state.value}
