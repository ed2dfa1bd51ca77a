"""The REST application: routers, failures, and what surrounds every request."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from teimgr import __version__
from teimgr.auth.policy import PolicyInForce
from teimgr.config.auth import policy_of
from teimgr.config.settings import Settings
from teimgr.docs_page import HEADERS, page
from teimgr.gateway import Gateway
from teimgr.gateway.openapi import describe
from teimgr.observability.metrics import Metrics
from teimgr.observability.telemetry import Telemetry
from teimgr.registry.registry import Registry
from teimgr.rest import config, events, fleet, gpus, instances, json_http, logs, models, probes
from teimgr.rest.fleet import FleetTools
from teimgr.rest.gpus import GpuBoard
from teimgr.rest.instances import Manager
from teimgr.rest.middleware import Gate, HeadAsGet, Observe, WholeNames
from teimgr.rest.probes import Alarms
from teimgr.rest.schemas import Failure

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(page(request.app.openapi(), "/openapi.json"), headers=HEADERS)


ROUTERS = (instances.router, fleet.router, logs.router, probes.router, router)


def create_app(
    manager: Manager,
    settings: Settings,
    metrics: Metrics,
    alarms: Alarms = tuple,
    booted: Callable[[], bool] = lambda: True,
    registry: Registry | None = None,
    inference: Gateway | None = None,
    board: GpuBoard | None = None,
    policy: PolicyInForce | None = None,
    tools: FleetTools | None = None,
    telemetry: Telemetry | None = None,
) -> FastAPI:
    """The application over `manager`; `registry`, `inference`, `board` and `tools` have no routes where absent.

    `policy` says who may call; where it is absent, the settings do. `telemetry` traces what is asked.
    `alarms` gives the alarms of everything but the store; until `booted`, when the manager knows all its instances, the
    answer of /ready is no. More routers may be included afterwards; failures they raise get the same shape.
    """
    app = FastAPI(
        title="teimgr",
        version=__version__,
        description="A fleet of embedding models behind one daemon.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": Failure, "description": "any other failure, in this one shape"}},
    )
    app.state.manager, app.state.settings, app.state.metrics = manager, settings, metrics
    app.state.alarms, app.state.booted = alarms, booted
    app.state.models, app.state.gpus = registry, board
    for router in ROUTERS:
        app.include_router(router)
    _equip(app, tools)
    for router, behind in ((models.router, registry), (gpus.router, board)):
        if behind is not None:
            app.include_router(router)
    if inference is not None:
        app.router.routes.extend(inference.routes())
        describe(app)
    json_http.install(app)
    _surround(app, metrics, policy or PolicyInForce(policy_of(settings.auth)), telemetry)
    return app


def _equip(app: FastAPI, tools: FleetTools | None) -> None:
    """Hand the application what watches and moves the fleet as a whole."""
    app.state.live_probe = tools.live_probe if tools else None
    app.state.notices = tools.reloader.notices if tools else tuple
    if tools is not None:
        app.state.happenings, app.state.reloader = tools.happenings, tools.reloader
        app.include_router(events.router)
        app.include_router(config.router)


def _surround(app: FastAPI, metrics: Metrics, policy: PolicyInForce, telemetry: Telemetry | None) -> None:
    """Add the middleware, innermost first."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(WholeNames)
    app.add_middleware(Gate, policy=policy, routes=app.router.routes)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )
    app.add_middleware(Observe, metrics=metrics, telemetry=telemetry)
