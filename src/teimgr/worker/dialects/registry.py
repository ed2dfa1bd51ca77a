"""Every dialect and its routes, by method and path."""

from __future__ import annotations

from collections.abc import Mapping

from teimgr.wire import error_bodies
from teimgr.worker.dialects import cohere, infinity, openai, sie, vllm
from teimgr.worker.tei import routes as tei
from teimgr.worker.tei.routes import Route

_TEI = {("POST", path): route for path, route in tei.POST.items()} | {
    ("GET", path): route for path, route in tei.GET.items()
}

ROUTES: Mapping[str, Mapping[tuple[str, str], Route]] = {
    error_bodies.TEI: _TEI,
    error_bodies.TEI_OPENAI: _TEI,
    error_bodies.OPENAI: openai.ROUTES,
    error_bodies.COHERE: cohere.ROUTES,
    error_bodies.JINA: cohere.JINA_ROUTES,
    error_bodies.VLLM: vllm.ROUTES,
    error_bodies.INFINITY: infinity.ROUTES,
    error_bodies.SIE: sie.ROUTES,
}
