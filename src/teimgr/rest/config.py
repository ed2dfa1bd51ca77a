"""GET /config: the settings in effect and their sources. POST /config/reload: plan and apply a new configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.config.sources import effective
from teimgr.rest.json_http import answer
from teimgr.rest.schemas import Failure
from teimgr.supervision.reload import Plan, Reloader, Step

router = APIRouter(tags=["configuration"])

DryRun = Annotated[bool, Query(description="show the plan and change nothing")]
Prune = Annotated[bool | None, Query(description="instead of the key prune_seeds")]

WRONG: dict[int | str, dict[str, Any]] = {400: {"model": Failure, "description": "the configuration is wrong"}}


class EffectiveSetting(BaseModel):
    """One key; the source is `default`, a file with its line, `environment NAME`, or `command line`."""

    key: str
    value: Any
    source: str


class SettingChange(BaseModel):
    """One key with another value; null where there is none."""

    key: str
    before: Any
    after: Any
    source: str
    applies: Literal["at once", "at the next start"]


class ReloadPlan(BaseModel):
    """What changes. The instances in `left` are of an earlier configuration, and stay because pruning is off."""

    settings: list[SettingChange]
    create: list[str]
    update: dict[str, dict[str, Any]] = Field(description="by instance, the keys that change and their new values")
    recreate: list[str] = Field(description="deleted and created: a port changes")
    remove: list[str]
    left: list[str]


class ReloadStep(BaseModel):
    """Result of one step."""

    action: Literal["remove", "update", "recreate", "create"]
    instance: str
    ok: bool
    error: str | None
    code: str | None


class Reloaded(BaseModel):
    """The plan and the results of its steps; a dry run has no steps."""

    dry_run: bool
    plan: ReloadPlan
    steps: list[ReloadStep]
    failed: int


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
    if dry_run:
        return answer(_reloaded(await reloader.plan(prune=prune), [], dry_run=True))
    plan, steps = await reloader.reload(prune=prune)
    return answer(_reloaded(plan, steps, dry_run=False))


def _reloaded(plan: Plan, steps: list[Step], *, dry_run: bool) -> dict[str, Any]:
    results = [
        {
            "action": step.action,
            "instance": step.instance,
            "ok": step.error is None,
            "error": step.error.message if step.error else None,
            "code": step.error.code.name if step.error else None,
        }
        for step in steps
    ]
    failed = sum(step.error is not None for step in steps)
    return {"dry_run": dry_run, "plan": plan.to_dict(), "steps": results, "failed": failed}
