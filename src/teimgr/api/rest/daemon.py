"""The daemon's process and its restart (/daemon); the settings in effect and their reload (/config)."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from teimgr import __version__
from teimgr.api.rest.schemas import ANY_FAILURE, Failure, StrictQueryRoute, answer
from teimgr.config.sources import effective
from teimgr.control.supervision.reload import Reloaded, Reloader

router = APIRouter(tags=["configuration"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

_WRONG: dict[int | str, dict[str, Any]] = {
    409: {"model": Failure, "description": "the next daemon did not start; this one keeps serving"},
}


class Follower(Protocol):
    """A daemon that is ready to take over."""

    @property
    def pid(self) -> int: ...

    @property
    def version(self) -> str: ...


class Restarter(Protocol):
    """Starts the successor of this daemon."""

    @property
    def serving(self) -> asyncio.Event: ...

    @property
    def is_taking_over(self) -> bool: ...

    async def begin(self) -> Follower:
        """Return when it is ready. Raises TeimgrError: it does not start, and this daemon serves on."""


class DaemonProcess(BaseModel):
    """A daemon's process; `uptime_secs` is absent for one that is about to take over.

    `is_starting` until it has adopted the workers of an earlier daemon; it exits if that fails.
    """

    pid: int
    version: str
    uptime_secs: int | None = None
    is_starting: bool | None = None


_began = time.monotonic()


@router.get("/daemon", response_model=DaemonProcess)
async def daemon(request: Request) -> Response:
    """The process and version that answers; it is another one after a restart."""
    restarter: Restarter = request.app.state.restarter
    found = {"pid": os.getpid(), "version": __version__, "uptime_secs": int(time.monotonic() - _began)}
    return answer(found | {"is_starting": not restarter.serving.is_set()})


@router.post("/daemon/restart", response_model=DaemonProcess, responses=_WRONG)
async def restart(request: Request) -> Response:
    """Start the next daemon, by the same command line, and have it take over; the answer names it.

    It comes when that is ready: GET /daemon is answered by it as soon as it serves. Workers and muxes serve on, and
    clients that connect meanwhile wait. A daemon that does not get ready changes nothing.
    """
    restarter: Restarter = request.app.state.restarter
    found = await restarter.begin()
    return answer({"pid": found.pid, "version": found.version})


config_router = APIRouter(tags=["configuration"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

DryRun = Annotated[bool, Query(description="show the plan and change nothing")]
Prune = Annotated[bool | None, Query(description="overrides the key prune_seeds")]

WRONG: dict[int | str, dict[str, Any]] = {400: {"model": Failure, "description": "the configuration is wrong"}}


class EffectiveSetting(BaseModel):
    """One key; the source is `default`, a file with its line, `environment NAME`, or `command line`."""

    key: str
    value: Any
    source: str


@config_router.get("/config", response_model=list[EffectiveSetting])
async def config(request: Request) -> Response:
    """Every setting in effect, with its source; secrets are not shown."""
    reloader: Reloader = request.app.state.reloader
    found = effective(reloader.configuration)
    return answer([{"key": each.path, "value": each.value, "source": each.source} for each in found])


@config_router.post("/config/reload", response_model=Reloaded, responses=WRONG)
async def reload(request: Request, dry_run: DryRun = False, prune: Prune = None) -> Response:
    """Read the configuration again and apply it, or only return the plan.

    An invalid configuration changes nothing. Instances are changed one after the other; each has its own result.
    """
    reloader: Reloader = request.app.state.reloader
    return answer(await (reloader.plan(prune=prune) if dry_run else reloader.reload(prune=prune)))
