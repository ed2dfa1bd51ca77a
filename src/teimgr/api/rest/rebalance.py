"""POST /rebalance: move workers to better places without a gap, or only tell which would move, and why others stay."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from teimgr.api.rest.instances import ManagerDep
from teimgr.api.rest.schemas import ANY_FAILURE, StrictQueryRoute, answer

router = APIRouter(tags=["fleet"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

DryRun = Annotated[bool, Query(description="show the plan and change nothing")]


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
