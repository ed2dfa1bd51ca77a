"""GET /config: the settings in effect and their sources. POST /config/reload: plan and apply a new configuration."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from teimgr.api.rest.schemas import ANY_FAILURE, Failure, StrictQueryRoute, answer
from teimgr.config.sources import effective
from teimgr.control.supervision.reload import Reloaded, Reloader

router = APIRouter(tags=["configuration"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

DryRun = Annotated[bool, Query(description="show the plan and change nothing")]
Prune = Annotated[bool | None, Query(description="instead of the key prune_seeds")]

WRONG: dict[int | str, dict[str, Any]] = {400: {"model": Failure, "description": "the configuration is wrong"}}


class EffectiveSetting(BaseModel):
    """One key; the source is `default`, a file with its line, `environment NAME`, or `command line`."""

    key: str
    value: Any
    source: str


@router.get("/config", response_model=list[EffectiveSetting])
async def config(request: Request) -> Response:
    """Every setting in effect, with its source; secrets are not shown."""
    reloader: Reloader = request.app.state.reloader
    found = effective(reloader.configuration)
    return answer([{"key": each.path, "value": each.value, "source": each.source} for each in found])


@router.post("/config/reload", response_model=Reloaded, responses=WRONG)
async def reload(request: Request, dry_run: DryRun = False, prune: Prune = None) -> Response:
    """Read the configuration again and apply it, or only return the plan.

    An invalid configuration changes nothing. Instances are changed one after the other; each has its own result.
    """
    reloader: Reloader = request.app.state.reloader
    return answer(await (reloader.plan(prune=prune) if dry_run else reloader.reload(prune=prune)))
