"""Which right each REST route asks for: the whole of it in one table.

A route that is not in the table asks for the right to administer, so that one which somebody forgets is closed; a test
compares the table with the routes that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Match

from teimgr.auth.policy import Caller, Policy, Right
from teimgr.errors import Forbidden
from teimgr.gateway.paths import paths

# A longer path is looked up each time, so that callers cannot fill the memory with them.
_REMEMBERED_PATHS, _REMEMBERED_CHARS = 4096, 256


class Need(NamedTuple):
    """What a route asks of its caller.

    Attributes:
        rights: One of these; none asks for no right, of somebody who is known.
        is_public: Nobody is asked who he is.
        is_fleets: It is about more than one instance, so a key for some instances is not enough. Where it is false and
            the path has no `{name}`, the route itself looks at what the caller's key is for.
    """

    rights: frozenset[Right] = frozenset()
    is_public: bool = False
    is_fleets: bool = False


class Found(NamedTuple):
    """What a request asks for: the need of its route, the instance that its path names, and the route's template."""

    need: Need
    instance: str | None = None
    template: str | None = None

    def check(self, caller: Caller) -> None:
        """Pass a caller who may do it.

        Raises:
            Forbidden: the key lacks the right, or is not for this instance.
        """
        caller.require(self.need.rights)
        if self.instance is not None:
            caller.require_instance(self.instance)
        elif self.need.is_fleets and caller.is_restricted:
            raise Forbidden(f"The key '{caller.name}' is for some instances only, and this is about all")


PUBLIC = Need(is_public=True)
KNOWN = Need()
READ = Need(frozenset({Right.READ}))
READ_ALL = READ._replace(is_fleets=True)
ADMIN = Need(frozenset({Right.ADMIN}))
ADMIN_ALL = ADMIN._replace(is_fleets=True)
INFERENCE = Need(frozenset({Right.INFERENCE}))
# What clients of inference look at before they ask.
EITHER = Need(frozenset({Right.INFERENCE, Right.READ}))

NEEDS: dict[str, Need] = {
    "GET /health": PUBLIC,
    "GET /ready": READ_ALL,
    "GET /metrics": READ_ALL,
    "GET /docs": KNOWN,
    "GET /openapi.json": KNOWN,
    "GET /instances": READ,
    "POST /instances": ADMIN,
    "GET /instances/{name}": READ,
    "PATCH /instances/{name}": ADMIN,
    "DELETE /instances/{name}": ADMIN,
    "POST /instances/{name}/start": ADMIN,
    "POST /instances/{name}/stop": ADMIN,
    "POST /instances/{name}/restart": ADMIN,
    "GET /instances/{name}/logs": READ,
    "GET /instances/{name}/health": READ,
    "POST /instances/actions": ADMIN_ALL,
    "GET /health/all": READ_ALL,
    "GET /templates": READ_ALL,
    "GET /events": READ_ALL,
    "GET /config": ADMIN_ALL,
    "POST /config/reload": ADMIN_ALL,
    "GET /gpus": READ_ALL,
    "GET /models": READ_ALL,
    "POST /models": ADMIN_ALL,
    "GET /models/{model_id:path}": READ_ALL,
    "DELETE /models/{model_id:path}": ADMIN_ALL,
    "GET /models/{model_id:path}/download/events": READ_ALL,
    "POST /models/{model_id:path}/download": ADMIN_ALL,
    "POST /models/{model_id:path}/load": ADMIN_ALL,
    "GET /v1/models": EITHER,
    "GET /v1/models/{model:path}": EITHER,
} | {f"{path.method} {path.path}": INFERENCE if path.method == "POST" else EITHER for path in paths()}

_DIALECTS = {path.path: path.dialect for path in paths()}


class Rights:
    """Looks up what a request asks for, by the routes of the application as its router sees them."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        self._remembered = lru_cache(_REMEMBERED_PATHS)(self._look_up)

    def of(self, method: str, path: str, policy: Policy) -> Found:
        """What this request asks for under `policy`."""
        look_up = self._remembered if len(path) <= _REMEMBERED_CHARS else self._look_up
        found = look_up("GET" if method == "HEAD" else method, path)
        if found.template == "/metrics" and policy.is_certified:
            return Found(PUBLIC)  # Prometheus has shown a certificate of the authority; tei-manager asks for no more
        return found

    def _look_up(self, method: str, path: str) -> Found:
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        for route in flat(self._routes):
            match, inner = route.matches(scope)
            if match is Match.FULL:
                template = str(getattr(route, "path", ""))
                need = NEEDS.get(f"{method} {template}", ADMIN_ALL)
                return Found(need, inner.get("path_params", {}).get("name"), template)
        return Found(KNOWN)


def dialect_of(template: str | None) -> str | None:
    """The dialect that a route answers in, None for REST's own."""
    return None if template is None else _DIALECTS.get(template)


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """The routes with those of included routers in their place; none is included under a prefix."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from flat(included.routes)
