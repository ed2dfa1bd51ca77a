"""The applications of an instance's port and of its metrics port."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from teimgr.worker.desk import Desk
from teimgr.worker.exchange import Exchange
from teimgr.worker.instance_port.guards import ApiKey, Cors
from teimgr.worker.instance_port.origins import Origins
from teimgr.worker.instance_port.routes import Routes
from teimgr.worker.metrics import TeiMetrics
from teimgr.worker.tei.routes import POST

_TEXT = "text/plain; charset=utf-8"


def create_app(desk: Desk) -> ASGIApp:
    """The instance port of a desk that has its engine."""
    routes = Routes(desk, Exchange(desk))
    app = Starlette(
        routes=[
            *(Route(path, routes.health) for path in ("/", "/health", "/ping")),
            Route("/info", routes.info),
            Route("/metrics", routes.metrics),
            Route("/docs", routes.docs),
            Route("/docs/", routes.docs),
            Route("/api-doc/openapi.json", routes.openapi),
            *(Route(path, routes.post(path, route), methods=["POST"]) for path, route in POST.items()),
        ],
        exception_handlers={HTTPException: _without_a_body},
    )
    app.router.redirect_slashes = False
    guarded = app if desk.spec.api_key is None else ApiKey(app, desk.spec.api_key)
    return Origins(Cors(guarded, desk.spec.cors_allow_origin))


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return Starlette(routes=[Route("/{path:path}", answer)])


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)
