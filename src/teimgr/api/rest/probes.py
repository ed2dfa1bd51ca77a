"""Probes and GET /metrics, and the scraper that collects the workers' metrics when /metrics is read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import Response

from teimgr import __version__
from teimgr.api.rest.instances import ManagerDep
from teimgr.api.rest.schemas import ANY_FAILURE, Liveness, Readiness, Routing, answer, answer_list
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.reload import Reloader
from teimgr.errors import TeimgrError, Unauthenticated
from teimgr.http.auth.policy import Policy, authenticate_request
from teimgr.http.turns import LISTING
from teimgr.observability import catalogue
from teimgr.observability.exposition import CONTENT_TYPE, Page, Sample, added, condensed, text_lines, to_json, unpack
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceView, State, WorkerEndpoint, now_rfc3339
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import Flag, Method
from teimgr.wire.routing.directory import Directory
from teimgr.wire.routing.links import LinkLimits, Replica
from teimgr.wire.routing.remote_links import RemoteReplica

log = logging.getLogger(__name__)

SCRAPE_LIMIT_S = 1.0
MAX_AGE_S = 1.0
_CUT_SHOWN = 10

router = APIRouter(tags=["probes"], responses=ANY_FAILURE)

Alarms = Callable[[], Sequence[str]]
"""Returns the current problems that need an operator, as sentences."""

Form = Annotated[Literal["text", "json"], Query(alias="format", description="Prometheus text format, or JSON")]
BucketsShown = Annotated[
    Literal["few", "all"], Query(alias="buckets", description="few: every third bucket of the workers' long histograms")
]
_BOTH: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}, "application/json": {}}}}


def _waits_for_calls(view: InstanceView) -> bool:
    """True if an instance is loaded on demand, and did not fail."""
    return view.spec.load == "on_demand" and view.state is not State.FAILED


def _waiting(manager: Manager) -> list[dict[str, Any]]:
    """Instances that should run and do not."""
    return [
        {"name": view.spec.name, "status": view.state.value, "reason": view.reason}
        for view in manager.list()
        if view.spec.wanted_running and view.state is not State.RUNNING and not _waits_for_calls(view)
    ]


@router.get("/health", response_model=Liveness)
async def health(request: Request, manager: ManagerDep) -> Response:
    """200 while the daemon is alive, whatever its instances do.

    Alarms and notices have names and reasons. Where keys are needed, only a key sees them that sees all instances.
    """
    state = request.app.state
    names = _knows_names(request)
    return answer(
        {
            "status": "healthy",
            "timestamp": now_rfc3339(),
            "version": __version__,
            "alarms": all_alarms(manager, state.alarms, names),
            "notices": all_notices(manager, state.reloader, names),
        }
    )


@router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "not all run"}})
async def ready(request: Request, manager: ManagerDep) -> Response:
    """200 when every instance that should run does, else 503 with those that do not; while booting 503 too."""
    waiting = _waiting(manager)
    is_ready = request.app.state.booted() and not waiting
    return answer({"ready": is_ready, "timestamp": now_rfc3339(), "waiting": waiting}, 200 if is_ready else 503)


@router.get(
    "/health/ready", response_model=Routing, responses={503: {"model": Routing, "description": "not yet, or stopping"}}
)
async def health_ready(request: Request, manager: ManagerDep) -> Response:
    """200 when this daemon routes calls: it has booted, and the instances of its start have served once or failed.

    It stays 200 until the daemon stops, whatever becomes of single instances: load balancers and Kubernetes take a
    daemon out of service by it. /ready says whether every instance serves.
    """
    is_ready = routes_calls(request.app, manager)
    return answer({"ready": is_ready, "timestamp": now_rfc3339()}, 200 if is_ready else 503)


def routes_calls(app: FastAPI, manager: Manager) -> bool:
    """True if the daemon has booted and the instances of its start have settled."""
    routing: RoutingState = app.state.routing
    return bool(app.state.booted()) and routing.has_settled(manager.list())


class RoutingState:
    """Whether the instances of the daemon's start have settled; checked until they have."""

    def __init__(self) -> None:
        self._settled = False

    def has_settled(self, views: Iterable[InstanceView]) -> bool:
        """True once no instance is in its first start; it stays so."""
        self._settled = self._settled or not any(
            view.state is State.STARTING
            and not view.restarts
            and view.spec.load == "eager"
            and view.spec.wanted_running
            for view in views
        )
        return self._settled


@router.get("/metrics", response_class=Response, responses=_BOTH)
async def metrics(
    request: Request, manager: ManagerDep, form: Form = "text", buckets: BucketsShown = "few"
) -> Response:
    """Every metric of the daemon, its muxes, its workers and its GPUs; `buckets=all` has all that TEI has."""
    registry: DaemonMetrics = request.app.state.metrics
    registry.fleet(manager.list())
    registry.set(catalogue.READY, request.app.state.booted() and not _waiting(manager))
    registry.set(catalogue.ALARMS, len(all_alarms(manager, request.app.state.alarms)))
    page = await registry.page()
    if buckets == "few":
        page = condensed(page)
    if form == "json":
        return await answer_list(to_json(page), "families", timestamp=now_rfc3339())
    return Response("".join(await LISTING.listed(text_lines(page))), headers={"Content-Type": CONTENT_TYPE})


def _knows_names(request: Request) -> bool:
    """True if the caller of a public route may know the names of all instances."""
    policy: Policy = request.app.state.policy.now
    if policy.is_open:
        return True
    try:
        caller = authenticate_request(policy, request.scope, dict(reversed(request.scope["headers"])))
    except Unauthenticated:
        return False
    return caller.is_operator and not caller.is_restricted


def all_alarms(manager: Manager, others: Alarms, names: bool = True) -> list[str]:
    """The state file's alarm first, then those of the rest of the daemon; how many without `names`."""
    alarms = [alarm for alarm in (manager.store_alarm, *others()) if alarm]
    return alarms if names or not alarms else [f"alarms: {len(alarms)}; use a key for all instances to see them"]


def all_notices(manager: Manager, reloader: Reloader | None, names: bool = True) -> list[str]:
    """What needs no action but should be known: of the configuration, then of instances whose texts are cut. Without
    `names`, how many there are of each.
    """
    cut = ((view.spec.name, view.model.cut_notice) for view in manager.list() if view.model is not None)
    lines = [f"{name}: {notice}" for name, notice in cut if notice]
    if lines and not names:
        lines = [f"instances that truncate texts: {len(lines)}"]
    if len(lines) > _CUT_SHOWN:
        lines[_CUT_SHOWN:] = [f"further instances that truncate texts: {len(lines) - _CUT_SHOWN}"]
    configured = reloader.notices() if reloader else ()
    if configured and not names:
        configured = [f"notices of the configuration: {len(configured)}"]
    return [*configured, *lines]


class WorkerStats(NamedTuple):
    """The counters of one worker, from `Method.STATS`."""

    instance: str
    incarnation: str
    counters: Mapping[str, Any]


class Scraper:
    """Reads the metrics of all workers concurrently, each within `limit_s`, and caches them for `max_age_s`.

    Workers that do not answer in time are left out. Metrics are summed by instance and host.
    """

    def __init__(
        self,
        directory: Directory,
        limit_s: float = SCRAPE_LIMIT_S,
        max_age_s: float = MAX_AGE_S,
        identity: FleetIdentity | None = None,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._limit_s = limit_s
        self._max_age_s = max_age_s
        self._workers: dict[WorkerEndpoint, Replica] = {}
        self._reading = asyncio.Lock()
        self._page: Page = {}
        self._read_at = float("-inf")

    async def page(self) -> Page:
        """The metrics, at most `max_age_s` old; concurrent callers share one round."""
        async with self._reading:
            if time.monotonic() - self._read_at >= self._max_age_s:
                self._page = await self._read()
                self._read_at = time.monotonic()
        return self._page

    async def stats(self, instances: Collection[str] | None = None) -> list[WorkerStats]:
        """The counters of all workers that answer in time: a few numbers each, where a page has some hundreds.

        Only of these instances, if they are given.
        """
        async with self._reading:
            workers = [each for each in self._connected() if instances is None or each[0] in instances]
            found = await asyncio.gather(*(self._ask(name, worker, Method.STATS) for name, worker in workers))
        return [
            WorkerStats(name, worker.endpoint.incarnation, counters)
            for (name, worker), counters in zip(workers, found, strict=True)
            if counters is not None
        ]

    async def close(self) -> None:
        workers, self._workers = tuple(self._workers.values()), {}
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _read(self) -> Page:
        pages = await asyncio.gather(*(self._scrape(name, worker) for name, worker in self._connected()))
        given = [page for page in pages if page is not None]
        counts = {"given": len(given), "missing": len(pages) - len(given)}
        answers = [Sample("", {"answer": answer}, count) for answer, count in counts.items()]
        return {catalogue.WORKER_ANSWERS: answers, **added(given)}

    def _connected(self) -> list[tuple[str, Replica]]:
        """The workers of the directory with their instances' names; links to workers that left it are retired."""
        before, self._workers = self._workers, {}
        found = []
        for entry in self._directory.snapshot().entries:
            for endpoint in entry.endpoints:
                worker = before.pop(endpoint, None) or self._replica(entry.name, endpoint)
                self._workers[endpoint] = worker
                found.append((entry.name, worker))
        for worker in before.values():
            worker.retire()
        return found

    def _replica(self, instance: str, endpoint: WorkerEndpoint) -> Replica:
        if endpoint.is_on(self._identity.node if self._identity else ""):
            return Replica(instance, endpoint, LinkLimits())
        return RemoteReplica(instance, endpoint, LinkLimits(), identity=self._identity)

    async def _scrape(self, instance: str, worker: Replica) -> Page | None:
        found = await self._ask(instance, worker, Method.METRICS)
        node = worker.endpoint.node  # only in a cluster
        return None if found is None else unpack(found, instance=instance, **({"node": node} if node else {}))

    async def _ask(self, instance: str, worker: Replica, method: Method) -> dict[str, Any] | None:
        if not worker.usable:
            return None
        try:
            call = await worker.start(method, b"", Flag.NONE, self._limit_s)
            found: dict[str, Any] = orjson.loads((await call.answer).payload)
            return found
        except (TeimgrError, ValueError) as error:
            log.debug("worker did not return its metrics", extra={"instance": instance, "reason": str(error)})
            return None
