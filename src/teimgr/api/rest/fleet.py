"""REST routes of the fleet as a whole: bulk actions, templates, health, plans (POST /plan, /rebalance), GET /usage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from teimgr.api.rest.instances import UNKNOWN, ManagerDep, chosen
from teimgr.api.rest.schemas import (
    ANY_FAILURE,
    CreateInstance,
    Failure,
    InstanceInfo,
    StrictQueryRoute,
    TagText,
    Text,
    answer,
    answer_list,
    has_body,
    instance_info,
    json_body,
    read_json,
)
from teimgr.config.settings import Settings
from teimgr.config.sources import plain
from teimgr.control.sharing.tenants import TenantRegistry, tenant_counts
from teimgr.control.supervision.fleet_plan import MAX_INSTANCES
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.worker_run import FleetProber, ProbeResult
from teimgr.errors import TeimgrError, ValidationError
from teimgr.http.turns import LISTING, Turns
from teimgr.spec import InstanceView, State, now_rfc3339

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)
usage_router = APIRouter(tags=["usage"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

GROUPS = ("key", "instance", "model")
# Of bulk actions: how many go on at a time, and begin in each turn of the loop.
_ACTIONS_AT_ONCE = 64
_ACTIONS = Turns(4)

Action = Literal["start", "stop", "restart", "delete"]
DryRun = Annotated[bool, Query(description="show the plan and change nothing")]
By = Annotated[str, Query(description="comma-separated grouping: key, instance, model", max_length=64)]
Probing = Annotated[bool, Query(alias="probe", description="run a self-test in each worker now")]


class BulkAction(BaseModel):
    """Body of POST /instances/actions: instances by name, or all with every given tag."""

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
    """Result of an action on one instance; `error` and `code` are set if it failed."""

    name: str
    ok: bool
    instance: InstanceInfo | None
    error: str | None
    code: str | None


class BulkResult(BaseModel):
    """One result per instance, in the order of the request's names or of creation."""

    action: Action
    results: list[ActionResult]
    failed: int


class TemplateInfo(BaseModel):
    """One `[templates.NAME]` of the configuration."""

    name: str
    keys: dict[str, Any]


class WorkerProof(BaseModel):
    """Result of one worker's self-test, which computes a known text on its device."""

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
    """Health of every instance. `healthy`: all instances that should run are healthy."""

    healthy: bool
    timestamp: str
    counts: dict[str, int] = Field(description="instances by status")
    instances: list[InstanceHealth]


@router.post("/instances/actions", response_model=BulkResult)
async def act(request: Request, manager: ManagerDep) -> Response:
    """Apply an action to many instances concurrently; each has its own result, and the answer is always 200."""
    body = await read_json(request, BulkAction)
    tags = [f"{name}:{value}" for name, value in (body.tags or {}).items()]
    names = dict.fromkeys(body.names or [view.spec.name for view in await chosen(manager.list(), tags)])
    results: dict[str, orjson.Fragment] = {}
    failed, left = 0, iter(names)

    async def act_on_next() -> None:
        nonlocal failed
        for name in left:
            await _ACTIONS.go_on(None)
            result = await _act(manager, body.action, name)
            failed += not result["ok"]
            results[name] = orjson.Fragment(orjson.dumps(result))  # to free thousands at once would take 40 ms

    await asyncio.gather(*(act_on_next() for _ in range(min(len(names), _ACTIONS_AT_ONCE))))
    rows = (results[name] for name in names)
    return await answer_list(rows, "results", action=body.action, failed=failed)


@router.get("/templates", response_model=list[TemplateInfo])
async def templates(request: Request) -> Response:
    """The templates that POST /instances may name."""
    settings: Settings = request.app.state.settings
    return answer([{"name": name, "keys": plain(keys)} for name, keys in settings.templates.items()])


@router.get("/instances/{name}/health", response_model=InstanceHealth, responses=UNKNOWN)
async def instance_health(request: Request, name: str, manager: ManagerDep, probe: Probing = False) -> Response:
    """Health of one instance, by its last self-test or by one run now. 200 also when it is unhealthy."""
    view, prober = manager.get(name), request.app.state.live_probe if probe else None
    return answer(_health(view, await prober.probe(name) if prober else None))


@router.get("/health/all", response_model=FleetHealth)
async def fleet_health(request: Request, manager: ManagerDep, probe: Probing = False) -> Response:
    """Health of every instance. 200 also when some are unhealthy; /ready has another status then."""
    views = manager.list()
    prober: FleetProber | None = request.app.state.live_probe if probe else None
    runs = [view.spec.name for view in views if prober is not None and prober.has_workers(view.spec.name)]
    results = dict(zip(runs, await asyncio.gather(*(prober.probe(name) for name in runs if prober)), strict=True))
    nothing: Sequence[ProbeResult] | None = None if prober is None else ()
    found = await LISTING.listed(_health(view, results.get(view.spec.name, nothing)) for view in views)
    wanted = {view.spec.name for view in views if view.spec.wanted_running and view.state is not State.UNLOADED}
    by_state = Counter(view.state for view in views)
    counts = {state.value: by_state[state] for state in State}
    healthy = all(each["healthy"] for each in found if each["name"] in wanted)
    return await answer_list(found, "instances", healthy=healthy, timestamp=now_rfc3339(), counts=counts)


class PlanRequest(BaseModel):
    """Body of POST /plan: instances as in POST /instances; absent: all existing instances that should run."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"instances": [{"name": "a", "model_id": "BAAI/bge-small-en-v1.5"}]}]},
    )

    instances: list[CreateInstance] | None = Field(None, max_length=MAX_INSTANCES)
    apply: bool = Field(False, description="create or start the instances in this order; the reply is the result")


class PlannedWorkerInfo(BaseModel):
    """One worker. Bytes on its host and GPU; `loading_bytes` is the peak on the host during the load."""

    instance: str
    replica: int
    outcome: Literal["runs", "starts", "waits", "on_demand", "refused"] = Field(
        description="waits: until models on demand have no calls and can be evicted"
    )
    node: str | None
    gpu: str | None
    gpu_id: int | None
    host_bytes: int
    loading_bytes: int
    device_bytes: int
    source: str = Field(description="measured, predicted from the headers of its files, or assumed; may be empty")
    reason: str | None


class EvictionInfo(BaseModel):
    """A model on demand that is evicted for others; its next call loads it again."""

    instance: str
    reason: str


class DeviceUseInfo(BaseModel):
    """A host or a GPU: bytes reserved now, reserved as planned, and then free; null if unlimited."""

    device: str
    label: str
    budget_bytes: int | None
    total_bytes: int | None
    reserved_bytes: int
    planned_bytes: int
    free_bytes: int | None


class Plan(BaseModel):
    """The plan, or with `apply` the result. `fits`: no worker is refused or waits."""

    fits: bool
    workers: list[PlannedWorkerInfo]
    evictions: list[EvictionInfo]
    devices: list[DeviceUseInfo]


@router.post(
    "/plan",
    response_model=Plan,
    responses={409: {"model": Failure, "description": "with `apply`: not possible in the current state"}},
    openapi_extra=json_body(PlanRequest, required=False),
)
async def plan(request: Request, manager: ManagerDep) -> Response:
    """Plan instances beside those that run: where each worker runs, what it takes, what is evicted for it, or why it
    does not fit.

    The figures were measured on earlier workers of the same model if there were any; else they are predictions. With
    `apply` the planned workers are started; a worker that does not fit is refused with the plan's reason.
    """
    body = await read_json(request, PlanRequest) if has_body(request) else PlanRequest(instances=None, apply=False)
    settings = request.app.state.settings
    given = body.instances
    wanted = None if given is None else await LISTING.listed(each.spec(settings.templates) for each in given)
    counts = Counter(spec.name for spec in wanted or ())
    if repeated := next((name for name, count in counts.items() if count > 1), None):
        raise ValidationError(f"instances: '{repeated}' is there twice")
    if body.apply and wanted is None:
        raise ValidationError("apply: needs `instances`")
    made = await (manager.carry_out(wanted) if body.apply and wanted is not None else manager.plan(wanted))
    return answer(await asyncio.to_thread(made.to_dict))


class PlaceInfo(BaseModel):
    """Place of a worker; `gpu` is null on the CPU, `node` is null in a fleet of one host."""

    node: str | None
    gpu: str | None
    gpu_id: int | None


class MoveInfo(BaseModel):
    """A worker that moves. `failed`: it did not start there, and the old one keeps serving; `reason` is the cause."""

    model_config = ConfigDict(populate_by_name=True)

    instance: str
    replica: int
    from_: PlaceInfo = Field(alias="from")
    to: PlaceInfo
    outcome: Literal["planned", "moved", "failed"]
    reason: str


class StayInfo(BaseModel):
    """A worker that stays, and why."""

    instance: str
    replica: int
    at: PlaceInfo
    reason: str


class Rebalanced(BaseModel):
    """The moves in order, and the workers that stay."""

    moves: list[MoveInfo]
    stays: list[StayInfo]


@router.post("/rebalance", response_model=Rebalanced)
async def rebalance(manager: ManagerDep, dry_run: DryRun = False) -> Response:
    """Move running workers to where they would be placed now, if the fleet is more even then.

    One after the other, each without a gap: the new worker serves before the old one ends. The answer comes when all
    have moved; if the caller leaves, the moves go on.
    """
    return answer(await manager.rebalance(dry_run=dry_run))


class UsageCounts(BaseModel):
    """Usage of one group of calls, with the requested fields of key, instance and model."""

    key: str | None = Field(default=None, description="the name of an API key; null for calls without one")
    instance: str | None = None
    model: str | None = None
    tokens: int = Field(description="tokens of answered texts, including special tokens and prompts")
    texts: int
    calls: int
    refused: int = Field(description="calls refused for a quota or a full queue")
    shadowed: int = Field(description="calls that a quota with `shadow` would have refused")


class Usage(BaseModel):
    """`enabled` is false if no API key is required; then nothing is counted."""

    enabled: bool
    usage: list[UsageCounts]


@usage_router.get("/usage", response_model=Usage)
async def usage(request: Request, by: By = "key,model") -> Response:
    """What was used on this host since its first start, the largest first; kept across restarts.

    Of a fleet on several hosts it is the calls that the daemon's host has admitted, whichever host computed them.
    """
    tenants: TenantRegistry = request.app.state.tenants
    groups = [name.strip() for name in by.split(",")]
    if unknown := next((name for name in groups if name not in GROUPS), None):
        raise ValidationError(f"by: {unknown!r} is not one of {', '.join(GROUPS)}")
    found: dict[str, Any] = {"enabled": tenants.is_on, "usage": tenant_counts(tenants.usage(), dict.fromkeys(groups))}
    return answer(found)


async def _act(manager: Manager, action: Action, name: str) -> dict[str, Any]:
    verbs = {"start": manager.start, "stop": manager.stop, "restart": manager.restart, "delete": manager.delete}
    try:
        view: InstanceView = await verbs[action](name)
    except TeimgrError as error:
        return {"name": name, "ok": False, "instance": None, "error": error.message, "code": error.code.name}
    return {"name": name, "ok": True, "instance": instance_info(view), "error": None, "code": None}


def _health(view: InstanceView, probed: Sequence[ProbeResult] | None) -> dict[str, Any]:
    """`InstanceHealth` as plain values; `probed` is None if no self-test was asked for."""
    results = None
    if probed is not None:
        results = [
            {
                "incarnation": result.incarnation,
                "ok": result.problem is None,
                "seconds": round(result.seconds, 6),
                "problem": result.problem,
            }
            for result in probed
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
