"""REST routes of the fleet as a whole: bulk actions, templates, and health with self-tests on demand."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from teimgr.api.rest.instances import UNKNOWN, ManagerDep, chosen
from teimgr.api.rest.schemas import (
    ANY_FAILURE,
    InstanceInfo,
    StrictQueryRoute,
    TagText,
    Text,
    answer,
    instance_info,
    read_json,
)
from teimgr.config.settings import Settings
from teimgr.config.sources import plain
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.worker_run import FleetProber
from teimgr.errors import TeimgrError
from teimgr.spec import InstanceView, State, now_rfc3339

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

Action = Literal["start", "stop", "restart", "delete"]
Probing = Annotated[bool, Query(alias="probe", description="run a self-test in each worker now")]


class BulkAction(BaseModel):
    """Body of POST /instances/actions: the instances by name, or all that have every tag."""

    model_config = ConfigDict(
        strict=True, extra="forbid", json_schema_extra={"examples": [{"action": "stop", "tags": {"team": "search"}}]}
    )

    action: Action
    names: list[Text] | None = Field(None, min_length=1, max_length=10_000)
    tags: dict[TagText, TagText] | None = Field(None, min_length=1, max_length=64)

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if (self.names is None) is (self.tags is None):
            raise ValueError("give either names or tags")
        return self


class ActionResult(BaseModel):
    """Result of an action on one instance; `error` and `code` where it failed."""

    name: str
    ok: bool
    instance: InstanceInfo | None
    error: str | None
    code: str | None


class BulkResult(BaseModel):
    """One result per instance, in the order of the request's names, or of creation."""

    action: Action
    results: list[ActionResult]
    failed: int


class TemplateInfo(BaseModel):
    """One `[templates.NAME]` of the configuration."""

    name: str
    keys: dict[str, Any]


class WorkerProof(BaseModel):
    """Result of one worker's self-test, a known text run on its device."""

    incarnation: str
    ok: bool
    seconds: float
    problem: str | None


class InstanceHealth(BaseModel):
    """`healthy`: it runs, and its last self-test and those of this request passed."""

    name: str
    status: State
    healthy: bool
    last_proof: str | None = Field(description="time of the last passed self-test")
    health_check_failures: int = Field(description="failed self-tests since then")
    restarts: int
    reason: str | None
    proofs: list[WorkerProof] | None = Field(
        description="self-tests of this request, one per worker; null without `probe`"
    )


class FleetHealth(BaseModel):
    """Every instance. `healthy`: all that should run are healthy."""

    healthy: bool
    timestamp: str
    counts: dict[str, int] = Field(description="instances by status")
    instances: list[InstanceHealth]


@router.post("/instances/actions", response_model=BulkResult)
async def act(request: Request, manager: ManagerDep) -> Response:
    """Apply an action to many instances concurrently; each has its own result, and the answer is always 200."""
    body = await read_json(request, BulkAction)
    tags = [f"{name}:{value}" for name, value in (body.tags or {}).items()]
    names = body.names or [view.spec.name for view in chosen(manager.list(), tags)]
    results = await asyncio.gather(*(_act(manager, body.action, name) for name in dict.fromkeys(names)))
    failed = sum(not each["ok"] for each in results)
    return answer({"action": body.action, "results": results, "failed": failed})


@router.get("/templates", response_model=list[TemplateInfo])
async def templates(request: Request) -> Response:
    """The templates that POST /instances may name."""
    settings: Settings = request.app.state.settings
    return answer([{"name": name, "keys": plain(keys)} for name, keys in settings.templates.items()])


@router.get("/instances/{name}/health", response_model=InstanceHealth, responses=UNKNOWN)
async def instance_health(request: Request, name: str, manager: ManagerDep, probe: Probing = False) -> Response:
    """Health of one instance, by its last self-test or by one run now. 200 also when it is unhealthy."""
    return answer(await _health(manager.get(name), request.app.state.live_probe if probe else None))


@router.get("/health/all", response_model=FleetHealth)
async def fleet_health(request: Request, manager: ManagerDep, probe: Probing = False) -> Response:
    """Health of every instance. 200 also when some are unhealthy; /ready has another status then."""
    views = manager.list()
    prober = request.app.state.live_probe if probe else None
    found = await asyncio.gather(*(_health(view, prober) for view in views))
    wanted = {view.spec.name for view in views if view.spec.wanted_running and view.state is not State.UNLOADED}
    counts = {state.value: sum(view.state is state for view in views) for state in State}
    healthy = all(each["healthy"] for each in found if each["name"] in wanted)
    return answer({"healthy": healthy, "timestamp": now_rfc3339(), "counts": counts, "instances": found})


async def _act(manager: Manager, action: Action, name: str) -> dict[str, Any]:
    verbs = {"start": manager.start, "stop": manager.stop, "restart": manager.restart, "delete": manager.delete}
    try:
        view: InstanceView = await verbs[action](name)
    except TeimgrError as error:
        return {"name": name, "ok": False, "instance": None, "error": error.message, "code": error.code.name}
    return {"name": name, "ok": True, "instance": instance_info(view), "error": None, "code": None}


async def _health(view: InstanceView, prober: FleetProber | None) -> dict[str, Any]:
    results = None
    if prober is not None:
        results = [
            {
                "incarnation": result.incarnation,
                "ok": result.problem is None,
                "seconds": round(result.seconds, 6),
                "problem": result.problem,
            }
            for result in await prober.probe(view.spec.name)
        ]
    return {
        "name": view.spec.name,
        "status": view.state.value,
        "healthy": view.state is State.RUNNING
        and not view.health_check_failures
        and all(result["ok"] for result in results or ()),
        "last_proof": view.last_health_check,
        "health_check_failures": view.health_check_failures,
        "restarts": view.restarts,
        "reason": view.reason,
        "proofs": results,
    }
