"""REST routes of models: list, add, download, try, delete. Each is one call to the registry.

A model id may be one path segment (`BAAI%2Fbge-m3`, as in tei-manager) or several (`BAAI/bge-m3`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from teimgr.api.rest.error_answers import error_body
from teimgr.api.rest.events import EVENT_SCHEMA, EVENT_STREAM, Event, event_stream, wants_events
from teimgr.api.rest.schemas import (
    ANY_FAILURE,
    Body,
    Failure,
    StrictQueryRoute,
    Text,
    answer,
    answer_list,
    has_body,
    json_body,
    read_json,
)
from teimgr.control.registry.cache import ModelFileInfo
from teimgr.control.registry.records import DownloadProgress, ModelCommit, ModelStatus, Verification, known_values
from teimgr.control.registry.registry import Registry, TrialOptions
from teimgr.control.registry.tasks import ModelTask
from teimgr.errors import TeimgrError, ValidationError
from teimgr.spec import U32

ModelId = Annotated[Text, Field(min_length=1, description="id on the model hub, or a local directory")]
Revision = Annotated[Text, Field(min_length=1, description="branch, tag or commit on the hub")]


class Strict(BaseModel):
    """Base of request bodies: unknown fields and values of a wrong type are errors."""

    model_config = ConfigDict(strict=True, extra="forbid")


class AddModel(Strict):
    """Body of POST /models."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model_id": "BAAI/bge-small-en-v1.5"}]})

    model_id: ModelId
    revision: Revision | None = None


class DownloadModel(Strict):
    """Optional body of a download."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"revision": "main", "update": True}]})

    revision: Revision | None = None
    update: bool = Field(False, description="check the hub even if the model is here, since the branch may have moved")
    code_revision: Revision | None = Field(None, description="of other repositories whose code the model names")


class LoadModel(Strict):
    """Optional body of a trial."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"device": "cpu", "dtype": "float32"}]})

    gpu_id: int | None = Field(
        None, ge=0, le=U32, description="index of the GPU; default: the one with the most free memory"
    )
    device: Literal["auto", "cpu"] = Field("auto", description="cpu: not on a GPU, even if there is one")
    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = Field("auto", description="element type")
    revision: Revision | None = None
    trust_remote_code: bool = Field(False, description="run code of the model's own repository")
    code_revision: Revision | None = Field(None, description="of other repositories whose code the model runs")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.gpu_id is not None and self.device == "cpu":
            raise ValueError("gpu_id and device 'cpu' exclude each other")
        return self

    def options(self) -> TrialOptions:
        return TrialOptions(on_cpu=self.device == "cpu", **self.model_dump(exclude={"device"}))


class ModelInfo(BaseModel):
    """One model. A key without a value is absent."""

    model_id: str
    status: ModelStatus
    downloaded: bool = Field(description="all files that a worker needs are on this host")
    added_at: str
    cache_path: str | None = None
    cache_size_bytes: int | None = Field(None, description="size of the files of this commit")
    last_verified: str | None = Field(None, description="when a trial last passed")
    verification_error: str | None = Field(None, description="why the last trial failed; a pass clears it")
    verification: Verification | None = None
    metadata: dict[str, Any] | None = Field(None, description="some keys of config.json")
    revision: str | None = Field(None, description="last requested revision; absent: main")
    commit: str | None = None
    commits: list[ModelCommit] | None = Field(None, description="all commits in the cache, newest first")
    files: list[ModelFileInfo] | None = None
    used_by: list[str] = Field(description="instances of this model")
    gated: bool | None = Field(None, description="the hub requires accepting its licence")
    progress: DownloadProgress | None = Field(None, description="while it is being downloaded")
    download_error: str | None = Field(None, description="why the last download since the daemon's start failed")


router = APIRouter(tags=["models"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

Responses = dict[int | str, dict[str, Any]]


def _failures(**meanings: str) -> Responses:
    return {int(status[1:]): {"model": Failure, "description": text} for status, text in meanings.items()}


UNKNOWN = _failures(_404="no such model", _400="no model's id")
BUSY = _failures(_409="a download or trial of it is in progress")
EVENTS: Responses = {
    200: {
        "description": "events `progress` (a DownloadProgress), then `done` (a ModelInfo) or `failed` (a Failure)",
        "content": {EVENT_STREAM: {"schema": EVENT_SCHEMA}},
    }
}

Wait = Annotated[bool, Query(description="false: reply 202 at once and continue in the background")]


def registry_of(request: Request) -> Registry:
    registry: Registry = request.app.state.registry
    return registry


def decoded(model_id: str) -> str:
    """The model id in a path, which the server has decoded once, decoded once more, as in tei-manager.

    Raises:
        ValidationError: not UTF-8.
    """
    try:
        found = unquote(model_id, errors="strict")
    except UnicodeDecodeError:
        found = "\ufffd"
    if "\ufffd" in found or "\0" in found:
        raise ValidationError("Invalid model_id encoding")
    return found


RegistryDep = Annotated[Registry, Depends(registry_of)]
ModelIdModels = Annotated[str, Depends(decoded)]


@router.get("/models", response_model=list[ModelInfo])
async def list_models(models: RegistryDep) -> Response:
    """The models of the hub's cache, of the configuration and of the instances, and those added, sorted by id."""
    return await answer_list(view.to_dict() for view in await models.list())


@router.post(
    "/models",
    status_code=201,
    response_model=ModelInfo,
    responses=_failures(_400="invalid JSON or model id", _413="a body over 2 MiB", _415="another content type")
    | _failures(_422="another shape")
    | {200: {"model": ModelInfo, "description": "it was known"}},
    openapi_extra=json_body(AddModel, required=True),
)
async def add_model(request: Request, models: RegistryDep) -> Response:
    """Add a model to the list; nothing is downloaded."""
    body = await read_json(request, AddModel)
    view, is_new = await models.add(body.model_id, body.revision)
    return answer(view.to_dict(), 201 if is_new else 200)


@router.get("/models/{model_id:path}/download/events", responses=EVENTS | UNKNOWN)
async def download_events(model_id: ModelIdModels, models: RegistryDep) -> Response:
    """Follow the download of a model as server-sent events; a single event `model` if nothing is downloading."""
    await models.get(model_id)  # 404 before the stream begins
    return event_stream(_events_of(models, model_id, models.task(model_id)))


@router.get("/models/{model_id:path}", response_model=ModelInfo, responses=UNKNOWN)
async def get_model(model_id: ModelIdModels, models: RegistryDep) -> Response:
    """One model, with its files on the disk now."""
    return answer((await models.get(model_id)).to_dict())


@router.post(
    "/models/{model_id:path}/download",
    response_model=ModelInfo,
    responses=UNKNOWN
    | BUSY
    | _failures(_403="its licence must be accepted on the hub first", _500="its files could not be downloaded")
    | {202: {"model": ModelInfo, "description": "with wait=false: it has begun"}},
    openapi_extra=json_body(DownloadModel, required=False),
)
async def download_model(request: Request, model_id: ModelIdModels, models: RegistryDep, wait: Wait = True) -> Response:
    """Download a model from the hub and check its files; the answer comes at the end, or as server-sent events.

    A complete model is answered at once. A broken download is resumed; it continues when the client disconnects.
    """
    body = await _read_optional(request, DownloadModel)
    task = await models.download(model_id, body.revision, update=body.update, code_revision=body.code_revision)
    if wants_events(request):
        return event_stream(_events_of(models, model_id, task))
    return await _answer_to(models, model_id, task, wait)


@router.post(
    "/models/{model_id:path}/load",
    response_model=ModelInfo,
    responses=UNKNOWN
    | BUSY
    | _failures(_500="it is not downloaded")
    | {202: {"model": ModelInfo, "description": "with wait=false: it has begun"}},
    openapi_extra=json_body(LoadModel, required=False),
)
async def load_model(request: Request, model_id: ModelIdModels, models: RegistryDep, wait: Wait = True) -> Response:
    """Load a model in a temporary worker and measure it; the answer is 200 whether it passed or failed."""
    body = await _read_optional(request, LoadModel)
    return await _answer_to(models, model_id, await models.try_out(model_id, body.options()), wait)


@router.delete(
    "/models/{model_id:path}",
    response_model=ModelInfo,
    responses=UNKNOWN | _failures(_409="it is used by instances, or a download or trial is in progress"),
)
async def delete_model(model_id: ModelIdModels, models: RegistryDep) -> Response:
    """Remove a model from the hub's cache and the list; the answer is its last state. A directory is not deleted."""
    return answer((await models.delete(model_id)).to_dict())


async def _answer_to(models: Registry, model_id: str, task: ModelTask, wait: bool) -> Response:
    if wait:
        await task.finished()
    return answer((await models.get(model_id)).to_dict(), 200 if wait else 202)


async def _read_optional(request: Request, kind: type[Body]) -> Body:
    """The JSON body, if there is one. tei-manager ignores bodies here, so other content types are ignored."""
    if has_body(request) and "json" in request.headers.get("content-type", ""):
        return await read_json(request, kind)
    return kind()


async def _events_of(models: Registry, model_id: str, task: ModelTask | None) -> AsyncGenerator[Event]:
    if task is None or task.progress is None:
        yield Event("model", (await models.get(model_id)).to_dict())
        return
    async for progress in task.progress.follow():
        yield Event("progress", known_values(progress))
    try:
        await task.finished()
        yield Event("done", (await models.get(model_id)).to_dict())
    except TeimgrError as error:
        yield Event("failed", error_body(error.code.name, error.message))
