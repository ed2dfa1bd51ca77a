"""What watches the daemon: /health (it is alive), /ready (what should run runs), /metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from teimgr import __version__
from teimgr.exposition import CONTENT_TYPE, text, to_json
from teimgr.front.answers import answer, now
from teimgr.front.instances import TheManager
from teimgr.front.manager import Manager
from teimgr.front.schemas import Health, Readiness
from teimgr.metrics import Metrics
from teimgr.spec import InstanceView, State

router = APIRouter(tags=["probes"])

Alarms = Callable[[], Sequence[str]]
"""Sentences about what needs a person, as they are now."""


@router.get("/health", response_model=Health)
async def health(request: Request, manager: TheManager) -> Response:
    """200 while the daemon is alive, whatever its instances do."""
    alarms = all_alarms(manager, request.app.state.alarms)
    notices = list(request.app.state.notices())
    return answer(
        {"status": "healthy", "timestamp": now(), "version": __version__, "alarms": alarms, "notices": notices}
    )


@router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "not all run"}})
async def ready(request: Request, manager: TheManager) -> Response:
    """200 when every instance that should run does, else 503 with those that do not; while booting 503 too."""
    waiting = [_waiting(view) for view in manager.list() if view.spec.wanted_running and view.state != State.RUNNING]
    serves = request.app.state.booted() and not waiting
    return answer({"ready": serves, "timestamp": now(), "waiting": waiting}, 200 if serves else 503)


Form = Annotated[Literal["text", "json"], Query(alias="format", description="Prometheus' text, or JSON")]
_BOTH: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}, "application/json": {}}}}


@router.get("/metrics", response_class=Response, responses=_BOTH)
async def metrics(request: Request, manager: TheManager, form: Form = "text") -> Response:
    """Every number of the daemon, its muxes, its workers and its GPUs."""
    figures: Metrics = request.app.state.metrics
    figures.fleet(manager.list())
    figures.alarms(len(all_alarms(manager, request.app.state.alarms)))
    page = await figures.page()
    if form == "json":
        return answer({"timestamp": now(), "families": to_json(page)})
    return Response(text(page), headers={"Content-Type": CONTENT_TYPE})


def all_alarms(manager: Manager, others: Alarms) -> list[str]:
    """The alarm of the store first, then those of the rest of the daemon."""
    return [alarm for alarm in (manager.store_alarm, *others()) if alarm]


def _waiting(view: InstanceView) -> dict[str, str | None]:
    return {"name": view.spec.name, "status": view.state.value, "reason": view.reason}
