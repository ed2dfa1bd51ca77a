"""The page's view of scaling and recommendations: work that waits, replicas, and what to change."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from teimgr.control.capacity.advisor import DEFAULT_WINDOW_S, Advisor
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.supervision.manager import Manager
from teimgr.http.auth.policy import caller_of
from teimgr.spec import InstanceView, State

_APPLIED_SHOWN = 20


async def scaling_values(request: Request, manager: Manager) -> dict[str, Any]:
    """What the template shows of the instances that the caller may see; nothing of parts that the daemon lacks."""
    covers = caller_of(request.scope).covers
    state = request.app.state
    autoscaler: Autoscaler | None = state.autoscaler
    advisor: Advisor | None = state.advisor
    figures = await autoscaler.figures() if autoscaler else {}
    views = [view for view in manager.list() if view.state is State.RUNNING or view.spec.max_replicas]
    rows = [
        _row(view, figures[view.spec.name]._asdict(), state.events)
        for view in views
        if covers(view.spec.name) and view.spec.name in figures
    ]
    found = await advisor.recommendations(DEFAULT_WINDOW_S, covers) if advisor else []
    applied = [each for each in advisor.applied() if covers(each.instance)] if advisor else []
    return {"scaled": rows, "found": found, "applied": applied[::-1][:_APPLIED_SHOWN], "window_s": DEFAULT_WINDOW_S}


def _row(view: InstanceView, figures: dict[str, Any], events: EventLog | None) -> dict[str, Any]:
    spec = view.spec
    history = events.history(spec.name) if events else []
    last = next((each for each in reversed(history) if each.event == "scaled"), None)
    limits = {"least": spec.min_replicas, "most": spec.max_replicas, "target_s": spec.scale_up_wait_ms / 1000}
    return figures | limits | {"name": spec.name, "last": last}
