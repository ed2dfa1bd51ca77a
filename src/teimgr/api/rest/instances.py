"""REST routes of instances: create, read, update, delete, start, stop, restart, with limits for restricted keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from teimgr.api.rest.hosts import GpuReportDep
from teimgr.api.rest.schemas import (
    ANY_FAILURE,
    CreateInstance,
    DeletedInstance,
    Failure,
    InstanceInfo,
    RestartInstance,
    StrictQueryRoute,
    UpdateInstance,
    answer,
    answer_list,
    has_body,
    instance_info,
    json_body,
    read_json,
)
from teimgr.config.instance_keys import check_bounds, check_restricted
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.validation import with_changes
from teimgr.errors import Forbidden, InvalidConfig, PortConflict, error_from_code
from teimgr.http.auth.policy import Caller, caller_of
from teimgr.http.turns import LISTING
from teimgr.spec import InstanceSpec, InstanceView, State

log = logging.getLogger(__name__)

router = APIRouter(tags=["instances"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

# Keys that determine a worker's resources, and the code and files that it loads.
_BOUNDED = {"threads", "max_batch_tokens", "extra_args"}
_WORKERS = {"replicas", "min_replicas", "max_replicas"}
_CODE_AND_FILES = {"model_id", "revision", "trust_remote_code", "code_revision", "safetensors_only", "extra_args"}

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Failure, "description": "no such instance"}}
CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": Failure, "description": "not possible in the current state"}
}
REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": meaning}
    for status, meaning in (
        (400, "invalid JSON, an unknown GPU or an unknown flag"),
        (409, "the name is taken"),
        (413, "a body over 2 MiB"),
        (415, "another content type"),
        (422, "wrong structure, invalid name, port in use, or max_instances reached"),
    )
}
ROLLING: dict[int | str, dict[str, Any]] = {
    202: {"model": InstanceInfo, "description": "new workers are starting beside the old ones"},
    409: {"model": Failure, "description": "another update is in progress, or this one failed"},
}


def manager_of(request: Request) -> Manager:
    manager: Manager = request.app.state.manager
    return manager


ManagerDep = Annotated[Manager, Depends(manager_of)]


Tags = Annotated[
    list[str] | None,
    Query(alias="tag", description="team:search, or team for any value; several must all match", max_length=64),
]
Statuses = Annotated[list[State] | None, Query(alias="status", description="several: any of them")]
Purging = Annotated[bool, Query(alias="purge", description="delete its log files and crash reports too")]
Waiting = Annotated[
    bool,
    Query(alias="wait", description="reply when it runs or has failed, at the latest after its startup_timeout_secs"),
]
ModelIds = Annotated[list[str] | None, Query(alias="model_id", description="several: any of them")]


@router.get("/instances", response_model=list[InstanceInfo])
async def list_instances(
    request: Request,
    manager: ManagerDep,
    gpus: GpuReportDep,
    tags: Tags = None,
    statuses: Statuses = None,
    models: ModelIds = None,
) -> Response:
    """All instances that the caller may see and that match every filter, in order of creation."""
    covers = caller_of(request.scope).covers
    views = [view for view in await chosen(manager.list(), tags, statuses, models) if covers(view.spec.name)]
    card_of = await gpus.cards() if gpus else None
    return await answer_list(instance_info(view, card_of and card_of(view)) for view in views)


@router.post(
    "/instances",
    status_code=201,
    response_model=InstanceInfo,
    responses=REFUSED,
    openapi_extra=json_body(CreateInstance, required=True),
)
async def create_instance(request: Request, manager: ManagerDep, wait: Waiting = False) -> Response:
    """Create an instance and start it; without `wait` the answer does not wait for the model to load.

    With `wait`, `status` in the answer is `running`, or `failed` with the reason, or what it is when the time is over.
    """
    body = await read_json(request, CreateInstance)
    caller, settings = caller_of(request.scope), request.app.state.settings
    caller.require_instance(body.name)
    spec = body.spec(settings.templates)
    promised: AbstractContextManager[None] = nullcontext()
    if caller.is_restricted:
        if "safetensors_only" not in body.model_fields_set:
            spec = replace(spec, safetensors_only=True)
        spec = replace(spec, confined=True)
        check_restricted(spec, settings)
        check_bounds(spec, settings)
        promised = request.app.state.promised_workers.within(manager, spec, caller)
    with _telling(caller), promised:
        created = await manager.create(spec)
    return answer(instance_info(await manager.started(spec.name) if wait else created), 201)


@router.get("/instances/{name}", response_model=InstanceInfo, responses=UNKNOWN)
async def get_instance(name: str, manager: ManagerDep, gpus: GpuReportDep) -> Response:
    """One instance."""
    view = manager.get(name)
    return answer(instance_info(view, await gpus.of(view) if gpus else None))


@router.delete("/instances/{name}", response_model=DeletedInstance, responses=UNKNOWN)
async def delete_instance(request: Request, name: str, manager: ManagerDep, purge: Purging = False) -> Response:
    """Stop and remove an instance; the answer is its last state. Its log stays, unless `purge`."""
    view, reloader = await manager.delete(name, purge=purge), request.app.state.reloader
    notice = reloader.notice_of_missing(name) if reloader else None
    if notice:
        log.warning(notice)
    return answer(instance_info(view) | ({"notice": notice} if notice else {}))


@router.post("/instances/{name}/start", response_model=InstanceInfo, responses=UNKNOWN | CONFLICT)
async def start_instance(name: str, manager: ManagerDep, wait: Waiting = False) -> Response:
    """Start a stopped or failed instance; without `wait` the answer does not wait for the model to load."""
    view = await manager.start(name)
    return answer(instance_info(await manager.started(name) if wait else view))


@router.post("/instances/{name}/stop", response_model=InstanceInfo, responses=UNKNOWN | CONFLICT)
async def stop_instance(name: str, manager: ManagerDep) -> Response:
    """Stop an instance; it stays stopped, also after a restart of the daemon."""
    return answer(instance_info(await manager.stop(name)))


@router.post(
    "/instances/{name}/restart",
    response_model=InstanceInfo,
    responses=ROLLING | UNKNOWN,
    openapi_extra=json_body(RestartInstance, required=False),
)
async def restart_instance(
    request: Request, name: str, manager: ManagerDep, rolling: bool = False, wait: bool = False
) -> Response:
    """Restart an instance; rolling: new workers start beside the old ones, without a gap.

    A rolling restart that has not ended when the daemon dies is not begun again; the old workers go on.
    """
    if has_body(request):
        rolling |= (await read_json(request, RestartInstance)).rolling
    view = await manager.restart(name, rolling=rolling, wait=wait)
    return _progress(await manager.started(name) if wait else view, rolling)


@router.patch(
    "/instances/{name}",
    response_model=InstanceInfo,
    responses=ROLLING | UNKNOWN | REFUSED,
    openapi_extra=json_body(UpdateInstance, required=True),
)
async def update_instance(request: Request, name: str, wait: bool = False) -> Response:
    """Change an instance without a gap: new workers start beside the old ones, pass a self-test, and take over.

    The answer is 202 meanwhile, with the progress in the instance's `update`; with `wait` it comes at the end, and is
    409 `UPDATE_FAILED` after a rollback. Changes that need no new worker are made at once. If the daemon ends
    meanwhile, the next one starts it again.
    """
    body = await read_json(request, UpdateInstance)
    view = await changed(request, name, body.changes(), recreate=body.strategy == "recreate", wait=wait)
    return _progress(view, True)


async def changed(
    request: Request, name: str, changes: dict[str, Any], *, recreate: bool = False, wait: bool = False
) -> InstanceView:
    """Change an instance as the caller of `request` may.

    Raises:
        Forbidden: the caller's key does not allow these changes.
        TeimgrError: as `Manager.update`.
    """
    manager = manager_of(request)
    caller, settings = caller_of(request.scope), request.app.state.settings
    promised: AbstractContextManager[None] = nullcontext()
    if "model_id" in changes and manager.get(name).spec.confined != caller.is_restricted:
        changes["confined"] = caller.is_restricted
    if caller.is_restricted:
        changed = with_changes(manager.get(name).spec, changes)
        if changes.keys() & _CODE_AND_FILES:
            check_restricted(changed, settings)
        if changes.keys() & _BOUNDED:
            check_bounds(changed, settings)
        if changes.keys() & _WORKERS or _most_workers(manager, changed) > manager.planned_workers(name):
            promised = request.app.state.promised_workers.within(manager, changed, caller)
    with _telling(caller), promised:
        return await manager.update(name, changes, recreate=recreate, wait=wait)


class PromisedWorkers:
    """Workers that restricted callers are about to start, so that two requests cannot use the same quota."""

    def __init__(self) -> None:
        self._promises: list[tuple[str, int]] = []

    @contextmanager
    def within(self, manager: Manager, spec: InstanceSpec, caller: Caller) -> Iterator[None]:
        """Promise the workers of `spec` to a caller until the block ends, which starts them.

        Raises:
            Forbidden: the instances of its key would have more than its `max_workers` together.
        """
        promise = spec.name, _most_workers(manager, spec)
        counts = {
            view.spec.name: max(manager.planned_workers(view.spec.name), _most_workers(manager, view.spec))
            for view in manager.list()
        }
        counts[spec.name] = 0  # replaced by the promise, which may be smaller
        for name, count in (*self._promises, promise):
            counts[name] = max(count, counts.get(name, 0))
        total = sum(count for name, count in counts.items() if caller.covers(name))
        if total > caller.max_workers:
            text = f"{total} workers of the instances of the key '{caller.name}'"
            raise Forbidden(f"replicas: {text} would be more than its max_workers = {caller.max_workers}")
        self._promises.append(promise)
        try:
            yield
        finally:
            self._promises.remove(promise)


def _most_workers(manager: Manager, spec: InstanceSpec) -> int:
    """The workers that an instance may come to have: by its replicas, or by those that its load may set."""
    by_load = max(spec.min_replicas, spec.max_replicas) if spec.max_replicas else 0
    return max(manager.replicas(spec), by_load)


@contextmanager
def _telling(caller: Caller) -> Iterator[None]:
    """Keep names of instances and directories of others out of the refusals that a restricted caller reads."""
    try:
        yield
    except PortConflict as error:
        if not caller.is_restricted:
            raise
        raise error_from_code(error.code, f"{error.message.partition(' in use by ')[0]} in use") from None
    except InvalidConfig as error:
        if caller.is_restricted:
            error.reword(error.message.partition("; did you mean")[0])
        raise


def _progress(view: InstanceView, is_update: bool) -> Response:
    rolls = is_update and view.update is not None and view.update.state == "rolling"
    return answer(instance_info(view), 202 if rolls else 200)


async def chosen(
    views: Sequence[InstanceView],
    tags: Sequence[str] | None = None,
    statuses: Sequence[State] | None = None,
    models: Sequence[str] | None = None,
) -> list[InstanceView]:
    """The instances that match every filter; within `statuses` and `models`, any value."""
    of_models, of_states = frozenset(models or ()), frozenset(statuses or ())
    if not (tags or of_states or of_models):
        return list(views)
    of_tags = [tag.partition(":") for tag in dict.fromkeys(tags or ())]

    def matches(view: InstanceView) -> bool:
        return (
            (not of_states or view.state in of_states)
            and (not of_models or view.spec.model_id in of_models)
            and all(_has_tag(view.spec.tags, *tag) for tag in of_tags)
        )

    matching = await LISTING.listed(map(matches, views))
    return [view for view, is_chosen in zip(views, matching, strict=True) if is_chosen]


def _has_tag(tags: Mapping[str, str], name: str, colon: str, value: str) -> bool:
    return name in tags and (not colon or tags[name] == value)
