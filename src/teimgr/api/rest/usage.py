"""GET /usage: tokens, texts, calls and refusals by key, instance and model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.api.rest.schemas import ANY_FAILURE, StrictQueryRoute, answer
from teimgr.control.sharing.tenants import TenantRegistry, tenant_counts
from teimgr.errors import ValidationError

router = APIRouter(tags=["usage"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

GROUPS = ("key", "instance", "model")

By = Annotated[str, Query(description="how to add up: some of key, instance and model, with commas", max_length=64)]


class UsageCounts(BaseModel):
    """What was used by a group of calls; it has those of key, instance and model that were asked for."""

    key: str | None = Field(default=None, description="the name of an API key; null for calls without one")
    instance: str | None = None
    model: str | None = None
    tokens: int = Field(description="of answers, as the model sees them: special ones and prompt included")
    texts: int
    calls: int
    refused: int = Field(description="calls refused for a quota or a full queue")
    shadowed: int = Field(description="calls that a quota with `shadow` would have refused")


class Usage(BaseModel):
    """`enabled` is false while no API key is required: then nothing is counted."""

    enabled: bool
    usage: list[UsageCounts]


@router.get("/usage", response_model=Usage)
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
