"""The REST verbs on instances, each one call to the manager."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from teimgr.front.answers import answer
from teimgr.front.bodies import read_json
from teimgr.front.callers import caller_of
from teimgr.front.filters import ModelIds, Statuses, Tags, chosen
from teimgr.front.gpus import TheBoard, card_of
from teimgr.front.manager import Manager
from teimgr.front.schemas import CreateInstance, Failure, InstanceInfo, instance_info

router = APIRouter(tags=["instances"])

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Failure, "description": "no such instance"}}
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": Failure, "description": "not in the state it is in"}}
REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": meaning}
    for status, meaning in (
        (400, "no JSON, an unknown GPU, or a flag nobody knows"),
        (409, "the name is taken"),
        (413, "a body over 2 MiB"),
        (415, "another content type"),
        (422, "another shape, a bad name, a taken port, or no room for one more"),
    )
}
CREATE_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": CreateInstance.model_json_schema()}}}
}


def manager_of(request: Request) -> Manager:
    """The manager that the application was made with."""
    manager: Manager = request.app.state.manager
    return manager


TheManager = Annotated[Manager, Depends(manager_of)]


@router.get("/instances", response_model=list[InstanceInfo])
async def list_instances(
    request: Request,
    manager: TheManager,
    board: TheBoard,
    tags: Tags = None,
    statuses: Statuses = None,
    models: ModelIds = None,
) -> Response:
    """All instances that the caller may see, or those of them that fit every filter, in order of creation."""
    covers = caller_of(request.scope).covers
    views = [view for view in chosen(manager.list(), tags, statuses, models) if covers(view.spec.name)]
    return answer([instance_info(view, await card_of(view, board)) for view in views])


@router.post("/instances", status_code=201, response_model=InstanceInfo, responses=REFUSED, openapi_extra=CREATE_BODY)
async def create_instance(request: Request, manager: TheManager) -> Response:
    """Create an instance and start it; the answer does not wait for the model to load."""
    body = await read_json(request, CreateInstance)
    caller_of(request.scope).require_instance(body.name)
    return answer(instance_info(await manager.create(body.spec(request.app.state.settings.templates))), 201)


@router.get("/instances/{name}", response_model=InstanceInfo, responses=UNKNOWN)
async def get_instance(name: str, manager: TheManager, board: TheBoard) -> Response:
    """One instance."""
    view = manager.get(name)
    return answer(instance_info(view, await card_of(view, board)))


@router.delete("/instances/{name}", response_model=InstanceInfo, responses=UNKNOWN)
async def delete_instance(name: str, manager: TheManager) -> Response:
    """Stop an instance and forget it; the answer is how it was last. Its log stays."""
    return answer(instance_info(await manager.delete(name)))


@router.post("/instances/{name}/start", response_model=InstanceInfo, responses=UNKNOWN | CONFLICT)
async def start_instance(name: str, manager: TheManager) -> Response:
    """Start a stopped or failed instance; the answer does not wait for the model to load."""
    return answer(instance_info(await manager.start(name)))


@router.post("/instances/{name}/stop", response_model=InstanceInfo, responses=UNKNOWN | CONFLICT)
async def stop_instance(name: str, manager: TheManager) -> Response:
    """Stop an instance; it stays stopped, after a restart of the daemon too."""
    return answer(instance_info(await manager.stop(name)))


@router.post("/instances/{name}/restart", response_model=InstanceInfo, responses=UNKNOWN)
async def restart_instance(name: str, manager: TheManager) -> Response:
    """Stop an instance where it runs, and start it."""
    return answer(instance_info(await manager.restart(name)))
