"""The applications of an instance's port and of its metrics port."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from teimgr.worker.desk import Desk
from teimgr.worker.instance_port.exchange import Exchange
from teimgr.worker.instance_port.guards import ApiKey, Cors
from teimgr.worker.instance_port.routes import INFERENCE, OPENAI, TOKENIZER, Endpoint, Routes
from teimgr.worker.metrics import TeiMetrics
from teimgr.worker.tei import openai
from teimgr.worker.tei.inference import InferenceRequest
from teimgr.worker.tei.openai import OpenAICompatRequest
from teimgr.worker.tei.requests import REQUEST_OF_KIND, SimilarityRequest

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
            *(_post(path, routes.inference(kind)) for path, kind in INFERENCE.items()),
            *(_post(path, routes.tokenizer(kind)) for path, kind in TOKENIZER.items()),
            *(_post(path, routes.inference(OpenAICompatRequest, openai.error_body)) for path in OPENAI),
            _post("/vertex", routes.vertex()),
            *(_post(path, routes.inference(_default_task(desk))) for path in ("/", "/invocations")),
        ],
        exception_handlers={HTTPException: _without_a_body},
    )
    app.router.redirect_slashes = False
    guarded = app if desk.spec.api_key is None else ApiKey(app, desk.spec.api_key)
    return Cors(guarded, desk.spec.cors_allow_origin)


def metrics_app(metrics: TeiMetrics) -> ASGIApp:
    """What TEI's gRPC builds serve on their Prometheus port: the metrics on every path, `OK` on `/health`."""

    async def answer(request: Request) -> Response:
        return Response("OK" if request.url.path == "/health" else metrics.render(), media_type=_TEXT)

    return Starlette(routes=[Route("/{path:path}", answer)])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _default_task(desk: Desk) -> type[InferenceRequest]:
    """What a request asks for that names no task; the environment's `TASK` is how Hugging Face's endpoints say it."""
    kind = desk.engine.info.kind
    if kind == "embedding" and os.environ.get("TASK") == "sentence-similarity":
        return SimilarityRequest
    return REQUEST_OF_KIND[kind]


async def _without_a_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)
