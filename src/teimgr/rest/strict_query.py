"""Routes that refuse unknown query parameters: a mistyped filter would else return everything."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from teimgr.config.schema import nearest
from teimgr.errors import ValidationError

_SHOWN_CHARS = 80


class StrictQueryRoute(APIRoute):
    """A route of FastAPI whose query parameters are those that it declares; another one is 400, naming the nearest.

    Not for probes: load balancers and scrapers add parameters of their own.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = frozenset(_query_names(self.dependant))

        async def strict(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    hint = nearest(name[:_SHOWN_CHARS], known) if known else "this route has none"
                    raise ValidationError(f"unknown query parameter {name[:_SHOWN_CHARS]!r}; {hint}")
            return await handle(request)

        return strict


def _query_names(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for each in dependant.dependencies:
        yield from _query_names(each)
