"""POST /plan: what would run where, why something would not, or doing exactly that. POST /rebalance: which workers
move to better places, and why others stay.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from teimgr.api.rest.instances import ManagerDep
from teimgr.api.rest.schemas import (
    ANY_FAILURE,
    CreateInstance,
    Failure,
    StrictQueryRoute,
    answer,
    has_body,
    json_body,
    read_json,
)
from teimgr.control.supervision.fleet_plan import MAX_INSTANCES
from teimgr.errors import ValidationError

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

DryRun = Annotated[bool, Query(description="show the plan and change nothing")]


class PlanRequest(BaseModel):
    """Body of POST /plan: instances as in POST /instances; absent: those of the daemon that should run."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={"examples": [{"instances": [{"name": "a", "model_id": "BAAI/bge-small-en-v1.5"}]}]},
    )

    instances: list[CreateInstance] | None = Field(None, max_length=MAX_INSTANCES)
    apply: bool = Field(False, description="create or start the instances, in their order; the answer is what happened")


class PlannedWorkerInfo(BaseModel):
    """One worker. Bytes are those of its host and of its GPU, `loading_bytes` the most on the host while it loads."""

    instance: str
    replica: int
    outcome: Literal["runs", "starts", "waits", "on_demand", "refused"] = Field(
        description="waits: until models on demand that have calls can be evicted"
    )
    node: str | None
    gpu: str | None
    gpu_id: int | None
    host_bytes: int
    loading_bytes: int
    device_bytes: int
    source: str = Field(description="measured, predicted from the heads of its files, or assumed; empty for none")
    reason: str | None


class EvictionInfo(BaseModel):
    """A model on demand that is evicted for others; its next call loads it again."""

    instance: str
    reason: str


class DeviceUseInfo(BaseModel):
    """A host or a GPU: reserved now and as planned, and what is free then; null where it is not limited."""

    device: str
    label: str
    budget_bytes: int | None
    total_bytes: int | None
    reserved_bytes: int
    planned_bytes: int
    free_bytes: int | None


class Plan(BaseModel):
    """What would happen, or with `apply` what happened. `fits`: nothing is refused, and nothing waits."""

    fits: bool
    workers: list[PlannedWorkerInfo]
    evictions: list[EvictionInfo]
    devices: list[DeviceUseInfo]


@router.post(
    "/plan",
    response_model=Plan,
    responses={409: {"model": Failure, "description": "with `apply`: not possible in its present state"}},
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
    wanted = None if body.instances is None else [each.spec(settings.templates) for each in body.instances]
    names = [spec.name for spec in wanted or ()]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValidationError(f"instances: '{repeated}' is there twice")
    if body.apply and wanted is None:
        raise ValidationError("apply: needs `instances`")
    made = await (manager.carry_out(wanted) if body.apply and wanted is not None else manager.plan(wanted))
    return answer(made.to_dict())


class PlaceInfo(BaseModel):
    """Where a worker runs; `gpu` null: on the CPU, `node` null: a fleet of one host."""

    node: str | None
    gpu: str | None
    gpu_id: int | None


class MoveInfo(BaseModel):
    """A worker that moves. `failed`: it did not start there, and the old one serves on; `reason` is then why."""

    model_config = ConfigDict(populate_by_name=True)

    instance: str
    replica: int
    from_: PlaceInfo = Field(alias="from")
    to: PlaceInfo
    outcome: Literal["planned", "moved", "failed"]
    reason: str


class StayInfo(BaseModel):
    """A worker that stays where it is, and why."""

    instance: str
    replica: int
    at: PlaceInfo
    reason: str


class Rebalanced(BaseModel):
    """What moves or has moved, in that order, and what stays."""

    moves: list[MoveInfo]
    stays: list[StayInfo]


@router.post("/rebalance", response_model=Rebalanced)
async def rebalance(manager: ManagerDep, dry_run: DryRun = False) -> Response:
    """Move running workers to where they would be placed now, if the fleet is more even then.

    One after the other, each without a gap: the new worker serves before the old one ends. The answer comes when all
    have moved; if the caller leaves, the moves go on.
    """
    return answer(await manager.rebalance(dry_run=dry_run))
