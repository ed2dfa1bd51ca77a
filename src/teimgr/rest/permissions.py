"""The table of REST routes and the right that each requires.

A route that is missing in the table requires the right to administer, so an omission is safe; a test compares the table
with the application's routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Match

from teimgr.auth.policy import Caller, Policy, Right
from teimgr.errors import Forbidden
from teimgr.gateway.gateway import paths

# Longer paths are not cached, so that callers cannot fill the memory with them.
_CACHED_PATHS, _CACHED_CHARS = 4096, 256


class Permission(NamedTuple):
    """What a route requires of its caller.

    Attributes:
        rights: One of these; empty requires a known caller and no right.
        is_public: No authentication.
        is_fleet_wide: The route concerns more than one instance, so keys for some instances only are rejected. Where it
            is False and the path has no `{name}`, the route itself checks the instances of the caller's key.
    """

    rights: frozenset[Right] = frozenset()
    is_public: bool = False
    is_fleet_wide: bool = False


class MatchedRoute(NamedTuple):
    """What a request requires: the permission of its route, the instance in its path, and the route's template."""

    permission: Permission
    instance: str | None = None
    template: str | None = None

    def check(self, caller: Caller) -> None:
        """Authorise a caller.

        Raises:
            Forbidden: the key lacks the right, or is not for this instance.
        """
        caller.require(self.permission.rights)
        if self.instance is not None:
            caller.require_instance(self.instance)
        elif self.permission.is_fleet_wide and caller.is_restricted:
            raise Forbidden(f"The key '{caller.name}' is for some instances only, and this is about all")


PUBLIC = Permission(is_public=True)
KNOWN = Permission()
READ = Permission(frozenset({Right.READ}))
READ_ALL = READ._replace(is_fleet_wide=True)
ADMIN = Permission(frozenset({Right.ADMIN}))
ADMIN_ALL = ADMIN._replace(is_fleet_wide=True)
INFERENCE = Permission(frozenset({Right.INFERENCE}))
# What clients of inference look up before they send a request.
EITHER = Permission(frozenset({Right.INFERENCE, Right.READ}))

PERMISSIONS: dict[str, Permission] = {
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


class RoutePermissions:
    """Finds the permission of a request by matching it against the application's routes."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        self._cached = lru_cache(_CACHED_PATHS)(self._match)

    def of(self, method: str, path: str, policy: Policy) -> MatchedRoute:
        """What this request requires under `policy`."""
        match = self._cached if len(path) <= _CACHED_CHARS else self._match
        found = match("GET" if method == "HEAD" else method, path)
        if found.template == "/metrics" and policy.is_certified:
            # Prometheus has presented a certificate of the authority, which is enough for tei-manager too.
            return MatchedRoute(PUBLIC)
        return found

    def _match(self, method: str, path: str) -> MatchedRoute:
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        for route in flat(self._routes):
            match, inner = route.matches(scope)
            if match is Match.FULL:
                template = str(getattr(route, "path", ""))
                permission = PERMISSIONS.get(f"{method} {template}", ADMIN_ALL)
                return MatchedRoute(permission, inner.get("path_params", {}).get("name"), template)
        return MatchedRoute(KNOWN)


def dialect_of(template: str | None) -> str | None:
    """The API dialect of a route, None for REST's own."""
    return None if template is None else _DIALECTS.get(template)


def flat(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """The routes, with included routers replaced by their routes; no router has a prefix."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from flat(included.routes)
