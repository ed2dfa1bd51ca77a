"""Values for the templates and live streams, made from views, figures and devices.

The template filters at the end format numbers, sizes and times, as `static/format.js` does for scripts.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from teimgr.api.page.figures import UNWATCHED_S, Figures, Point, Sampler
from teimgr.control.capacity.advisor import DEFAULT_WINDOW_S, Advisor
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventLog, FleetEvent, known_to
from teimgr.control.ledger.system_memory import host_memory
from teimgr.control.placement.hosts import Gpu
from teimgr.control.supervision.manager import Manager
from teimgr.http.auth.policy import ANONYMOUS, Caller, Right, caller_of
from teimgr.http.docs_page import prose
from teimgr.spec import InstanceView, State, attempt_text

EVENTS_SHOWN = 100
Values = dict[str, Any]


def fleet_rows(views: Iterable[InstanceView], sampler: Sampler, gpus: Sequence[Gpu]) -> Iterator[Values]:
    """One row per instance, in order of creation."""
    cards = {gpu.uuid: gpu for gpu in gpus}
    host_bytes, _ = host_memory()
    now = time.time()
    return (_row(view, sampler, cards, host_bytes, now) for view in views)


def _row(view: InstanceView, sampler: Sampler, cards: dict[str, Gpu], host_bytes: int, now: float) -> Values:
    figures = sampler.of(view.spec.name)
    point, as_of = figures.now if view.state is State.RUNNING else None, None
    if point is not None and math.isnan(point.queue) and figures.answered is not None:
        point, as_of = figures.answered, round(figures.answered.time)  # its workers did not answer
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
        "silent": [None if each is None else round(each) for each in silent],  # time of each worker's last answer
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
    """The actions that the page offers to the caller; the routes decide again at each request."""
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
    """Return the template's values about the instances that the caller may see; nothing about parts that the daemon
    lacks."""
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


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 24
_SPARK_MIN = 100.0  # hides self-tests of an idle fleet
SPARK_POINTS = 20
"""Points of five minutes at the resolution of the hour's chart."""
NOTHING = "–"
SCALE_END_MS = 248_000  # upper end of the duration buckets, minus rounding


def size(count: float | None) -> str:
    """Bytes such as 1.5 GiB."""
    if count is None:
        return NOTHING
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {_UNITS[power]}" if count >= 100 or not power else f"{count:.1f} {_UNITS[power]}"


def number(value: float | None) -> str:
    """At most four characters and a unit: 0, 7.4, 312, 12.3k, 4.1M."""
    if value is None:
        return NOTHING
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        if abs(value) < limit:
            short = value / divisor
            return f"{short:.0f}{unit}" if short >= 100 or short == round(short) else f"{short:.1f}{unit}"
    return NOTHING


def milliseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= SCALE_END_MS:
        return f"> {value / 1000:.0f} s"
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 10 or not value else f"{value:.1f} ms"


def duration(seconds: float | None) -> str:
    """The two greatest units: 3 d 4 h, 5 min 12 s, 8 s."""
    if seconds is None:
        return NOTHING
    parts: list[str] = []
    rest = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def evidence(figures: Mapping[str, float | str]) -> list[str]:
    """Figures such as `held 39.9 MiB`, each with the unit that its name ends in."""
    return [_figure(name, value) for name, value in figures.items()]


def _figure(name: str, value: float | str) -> str:
    word, _, unit = name.replace("_", " ").rpartition(" ")
    if not isinstance(value, str):
        if unit == "bytes":
            return f"{word} {size(value)}"
        if unit == "s":
            return f"{word} {duration(value)}"
        if unit == "share":
            return f"{word} {100 * value:.0f} %"
    return f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"


def tags(named: Mapping[str, str]) -> list[str]:
    """Tags such as team=search; one without a value is its name."""
    return [f"{name}={value}" if value else name for name, value in named.items()]


def clock(moment: float | None) -> str:
    """A Unix time such as 14:03:22 UTC; empty for None."""
    return "" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


def scale_end(greatest: float) -> float:
    """Where a scale from 0 that holds the value ends: 1, 2 or 5 times a power of ten, and at least `_SPARK_MIN`."""
    power = 10.0 ** math.floor(math.log10(max(greatest, _SPARK_MIN)))
    return next(end for end in (power, 2 * power, 5 * power, 10 * power) if end >= greatest)


def spark(values: Sequence[float | None], top: float) -> str:
    """The path of a line through the values, in a box of 96 by 24 that ends at `top`; a gap where one is missing.

    The last value is at the right, and the box has room for `SPARK_POINTS`: lines beside each other show equal times.
    """
    step, first = _SPARK_WIDTH / (SPARK_POINTS - 1), SPARK_POINTS - len(values)
    path, move = [], "M"
    for index, value in enumerate(values, first):
        if value is None:
            move = "M"
            continue
        path.append(f"{move}{index * step:.1f},{_SPARK_HEIGHT - 2 - min(value / top, 1) * (_SPARK_HEIGHT - 4):.1f}")
        move = "L"
    return "".join(path)


FILTERS = {
    "size": size,
    "evidence": evidence,
    "number": number,
    "ms": milliseconds,
    "duration": duration,
    "tags": tags,
    "clock": clock,
    "spark": spark,
    "prose": prose,
}
