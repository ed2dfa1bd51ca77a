"""GET /metrics/scaling: the load of each instance, as JSON for KEDA's metrics-api scaler and for people."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.api.rest.schemas import ANY_FAILURE, StrictQueryRoute, answer
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.spec import now_rfc3339

router = APIRouter(tags=["probes"], responses=ANY_FAILURE, route_class=StrictQueryRoute)


class ScalingFigures(BaseModel):
    """The load of one instance."""

    queued_tokens: int = Field(description="tokens that wait in its workers")
    waiting_seconds: float = Field(description="how long its replicas take to compute them")
    tokens_per_second: float = Field(description="what one replica computes, as measured; 0: not yet")
    refused_per_second: float = Field(description="calls that full replicas refused, over the last minute")
    replicas: int = Field(description="those that serve")
    wanted: int = Field(description="those that there should be; as `replicas` without max_replicas")
    reason: str


class Scaling(BaseModel):
    """`instances` by name; `flat` the same by names whose dots and hyphens are underscores, for a path in GJSON."""

    timestamp: str
    instances: dict[str, ScalingFigures]
    flat: dict[str, ScalingFigures]


@router.get("/metrics/scaling", response_model=Scaling)
async def scaling(request: Request) -> Response:
    """What the number of replicas depends on; an instance without a replica is there too, with zeros."""
    autoscaler: Autoscaler = request.app.state.autoscaler
    found = {name: each._asdict() for name, each in (await autoscaler.figures()).items()}
    return answer({"timestamp": now_rfc3339(), "instances": found, "flat": flat(found)})


def flat(found: dict[str, Any]) -> dict[str, Any]:
    """By aliases without characters that a path in GJSON has to escape; a name that is its own alias comes first."""
    aliases = {re.sub(r"[^A-Za-z0-9_]", "_", name): each for name, each in reversed(found.items())}
    return aliases | {name: each for name, each in found.items() if name in aliases}
