"""Values that the templates and the live streams show, made from views, figures and devices."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from teimgr.api.page.figures import UNWATCHED_S, Figures, Point, Sampler
from teimgr.api.page.format import SPARK_POINTS, scale_end
from teimgr.control.capacity.advisor import DEFAULT_WINDOW_S, Advisor
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventLog, FleetEvent, known_to
from teimgr.control.ledger.system_memory import host_memory
from teimgr.control.placement.gpus import Gpu
from teimgr.control.supervision.manager import Manager
from teimgr.http.auth.policy import ANONYMOUS, Caller, Right, caller_of
from teimgr.spec import InstanceView, State, attempt_text

EVENTS_SHOWN = 100
Values = dict[str, Any]


def fleet_rows(views: Iterable[InstanceView], sampler: Sampler, gpus: Sequence[Gpu]) -> list[Values]:
    """One row per instance, in order of creation."""
    cards = {gpu.uuid: gpu for gpu in gpus}
    host_bytes, _ = host_memory()
    now = time.time()
    return [_row(view, sampler, cards, host_bytes, now) for view in views]


def _row(view: InstanceView, sampler: Sampler, cards: dict[str, Gpu], host_bytes: int, now: float) -> Values:
    figures = sampler.of(view.spec.name)
    point, as_of = figures.now if view.state is State.RUNNING else None, None
    if point is not None and math.isnan(point.queue) and figures.answered is not None:
        point, as_of = figures.answered, round(figures.answered.time)  # its workers do not answer
    on = [cards[uuid] for uuid in dict.fromkeys(worker.gpu for worker in view.workers) if uuid in cards]
    total = sum(card.memory_total_bytes or 0 for card in on) if on else host_bytes
    memory = None if figures.now is None or math.isnan(figures.now.memory) else int(figures.now.memory)
    running = sum(worker.state is State.RUNNING for worker in view.workers)
    silent = [sampler.silent_since(worker.incarnation) for worker in view.workers]
    mute = f", {len(silent) - silent.count(None)} silent" if any(silent) else ""
    return {
        "name": view.spec.name,
        "model": view.spec.model_id,
        "kind": view.model.kind if view.model else view.spec.kind,
        "state": view.state.value,
        "reason": view.reason,
        "attempt": attempt_text((each.attempt, each.next_attempt_secs) for each in view.workers),
        "wanted": view.spec.wanted_running,
        "updating": view.update is not None and view.update.state == "rolling",
        "unhealthy": bool(view.health_check_failures),
        "device": device_of(view),
        "memory": memory,
        "memory_total": total or None,
        "tokens": _rounded(point.tokens if point else None),
        "requests": _rounded(point.requests if point else None),
        "errors": _rounded(point.failures if point else None),
        "refused": _rounded(point.refused if point else None),
        "busy": None if point is None or math.isnan(point.busy) else round(100 * point.busy),
        "queue": None if point is None or math.isnan(point.queue) else int(point.queue),
        "p99": _milliseconds(figures.percentile(0.99, now)) if point else None,
        "as_of": as_of,
        "silent": [None if each is None else round(each) for each in silent],  # of each worker, the last answer
        "spark": _spark(figures, now) if point else [],
        "workers": f"{running}/{len(view.workers)}{mute}" if len(view.workers) > 1 else "",
        "tags": dict(view.spec.tags),
        "port": view.spec.port,
    }


def tag_names(rows: Iterable[Values]) -> list[str]:
    """Names of the tags by which the rows may be grouped."""
    return sorted({name for row in rows for name in row["tags"]})


def failed_first(rows: Iterable[Values]) -> list[Values]:
    """The rows in their order, behind those that need someone: failed, then such as should serve and do not."""
    needs = {State.FAILED.value: 0, State.STARTING.value: 1}
    return sorted(rows, key=lambda row: needs.get(row["state"], 2))


def largest_first(rows: Iterable[Values]) -> list[Values]:
    """The rows by their memory; those whose memory is not known yet, such as of workers that load, come last."""
    return sorted(rows, key=lambda row: row["memory"] or 0, reverse=True)


def _spark(figures: Figures, now: float) -> list[float | None]:
    """Tokens per second of the last five minutes, whether a page was open or not."""
    recent = figures.coarse.after(now - SPARK_POINTS * UNWATCHED_S)
    return [_rounded(point.tokens) for point in recent][-SPARK_POINTS:]


def device_of(view: InstanceView) -> str:
    """Such as "GPU 0, 1" or "CPU"; before a worker was placed, what was asked for."""
    indices = sorted({worker.gpu_id for worker in view.workers if worker.gpu_id is not None})
    if not indices and view.spec.gpu_id is not None:
        indices = [view.spec.gpu_id]
    if indices:
        return f"GPU {', '.join(map(str, indices))}"
    if any(worker.pid is not None for worker in view.workers):
        return "CPU"
    return "–"


def totals(rows: Sequence[Values]) -> Values:
    """The sums over the rows that a caller sees."""
    states = Counter(row["state"] for row in rows)
    return {
        "instances": len(rows),
        "states": {state.value: states[state.value] for state in State},
        "tokens": _rounded(sum(row["tokens"] or 0 for row in rows)),
        **{key: _rounded(sum(row[key] or 0 for row in rows)) for key in ("requests", "errors", "refused")},
        "queue": sum(row["queue"] or 0 for row in rows),
        "busy": max((row["busy"] or 0 for row in rows), default=0),
        "spark_top": scale_end(max((value or 0 for row in rows for value in row["spark"]), default=0)),
    }


def memory_in_use(gpus: Sequence[Gpu]) -> Values:
    """Memory in use and in all, of the cards, or of this host without any; bytes."""
    used, total = sum(gpu.memory_used_bytes or 0 for gpu in gpus), sum(gpu.memory_total_bytes or 0 for gpu in gpus)
    of = "GPU memory in use"
    if not total:
        (total, used), of = host_memory(), "Host memory in use"
    return {"memory": used, "memory_total": total, "memory_of": of}


def instance_alarms(rows: Iterable[Values]) -> list[Values]:
    """Instances that should serve and do not, or not well."""
    found = []
    for row in rows:
        if row["state"] == State.FAILED.value:
            found.append({"instance": row["name"], "text": row["reason"] or "failed"})
        elif row["unhealthy"] and row["wanted"]:
            found.append({"instance": row["name"], "text": row["reason"] or "its last self-test failed"})
    return found


def points_after(figures: Figures, fine_after: float, coarse_after: float) -> Values:
    """New points of both rings as lists, in the order of `Point`; NaN is null in JSON."""
    return {
        "fine": [_shown(point) for point in figures.fine.after(fine_after)],
        "coarse": [_shown(point) for point in figures.coarse.after(coarse_after)],
    }


def _shown(point: Point) -> list[float]:
    return [round(point.time, 1), *(value if math.isnan(value) else float(f"{value:.4g}") for value in point[1:])]


def events_for(caller: Caller, event_log: EventLog | None, last: int) -> list[FleetEvent]:
    """The latest events that the caller may see, newest first: those of its instances."""
    if event_log is None:
        return []
    covered = [event for event in event_log.since(0) if caller.covers(event.instance)]
    return [known_to(event, caller.covers) for event in covered[: -last - 1 : -1]]


def history_for(caller: Caller, event_log: EventLog | None, instance: str, after: int = 0) -> list[FleetEvent]:
    """The events of an instance of the caller's after the id `after`, oldest first."""
    history = event_log.history(instance) if event_log else []
    return [known_to(event, caller.covers) for event in history if event.id > after]


def navigation(caller: Caller) -> list[tuple[str, str, str]]:
    """Path, id and title of the views that the caller's rights allow."""
    may_read, everywhere = Right.READ in caller.rights, not caller.is_restricted
    entries = (
        ("/ui/fleet", "fleet", "Fleet", may_read),
        ("/ui/models", "models", "Models", may_read and everywhere),
        ("/ui/devices", "devices", "Devices", may_read and everywhere),
        ("/ui/scaling", "scaling", "Scaling", may_read),
        ("/ui/alarms", "alarms", "Alarms", may_read),
        ("/ui/playground", "playground", "Playground", Right.INFERENCE in caller.rights),
    )
    return [(path, id, title) for path, id, title, is_allowed in entries if is_allowed]


def rights_of(caller: Caller, *, can_write: bool = True) -> Values:
    """What the page offers to the caller; the routes decide again at each request."""
    return {
        "name": caller.name,
        "is_anonymous": caller is ANONYMOUS,
        "admin": Right.ADMIN in caller.rights and can_write,
        "read": Right.READ in caller.rights,
        "inference": Right.INFERENCE in caller.rights and can_write,
        "everywhere": not caller.is_restricted,
        "rights": sorted(right.value for right in caller.rights),
        "instances": caller.instances,
    }


def _rounded(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return round(value) if value >= 100 else round(value, 1)


def _milliseconds(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(f"{seconds * 1000:.3g}")


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
        _scaled_row(view, figures[view.spec.name]._asdict(), state.events)
        for view in views
        if covers(view.spec.name) and view.spec.name in figures
    ]
    found = await advisor.recommendations(DEFAULT_WINDOW_S, covers) if advisor else []
    applied = [each for each in advisor.applied() if covers(each.instance)] if advisor else []
    return {"scaled": rows, "found": found, "applied": applied[::-1][:_APPLIED_SHOWN], "window_s": DEFAULT_WINDOW_S}


def _scaled_row(view: InstanceView, figures: dict[str, Any], events: EventLog | None) -> dict[str, Any]:
    spec = view.spec
    history = events.history(spec.name) if events else []
    last = next((each for each in reversed(history) if each.event == "scaled"), None)
    limits = {"least": spec.min_replicas, "most": spec.max_replicas, "target_s": spec.scale_up_wait_ms / 1000}
    return figures | limits | {"name": spec.name, "last": last}
