"""Authorisation of requests: the right required by each route, and the decision about a caller.

The middleware applies it to requests of the application, `Inference` to inference requests. A route missing in
`PERMISSIONS` requires the right to administer, so an omission is safe; a test compares the table with the routes.
"""

from __future__ import annotations

import hashlib
import socket
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from teimgr.api.gateway.model_cards import (
    COHERE_CHECKS,
    INFINITY_HEALTH,
    VLLM_HEALTH,
    VLLM_VERSION,
    WEAVIATE_META,
    WEAVIATE_PROBES,
)
from teimgr.api.gateway.ollama import CHAT, GENERATE, PULL, REFUSED
from teimgr.api.gateway.routes import (
    INFO,
    MODEL_CARDS,
    MODEL_LISTS,
    OLLAMA_RUNNING,
    OLLAMA_SHOW,
    OLLAMA_TAGS,
    OLLAMA_VERSION,
    paths,
)
from teimgr.config.settings import Settings
from teimgr.errors import Forbidden, Replaced
from teimgr.http.auth.policy import (
    ANONYMOUS,
    CERTIFICATE,
    NO_CERTIFICATE,
    Caller,
    Policy,
    PolicyInForce,
    Right,
    authenticate_request,
    caller_of,
)
from teimgr.http.auth.sessions import Sessions, is_same_origin
from teimgr.http.bodies import foreign_page
from teimgr.http.connection_gate import sender_of

READS = ("GET", "HEAD", "OPTIONS")
# Limit of the raw path: a longest file path (4 KiB), percent-encoded. Longer paths would take long to match.
MAX_PATH_BYTES = 12 * 1024
# Longer paths are not cached, so that callers cannot fill the memory.
_CACHED_PATHS, _CACHED_CHARS = 4096, 256
_MAX_KNOWN, _MAX_CREDENTIAL_BYTES = 4096, 4096
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"cookie"))
# Every request of a web page with a side effect has one of these.
_OF_PAGES = frozenset((b"origin", b"sec-fetch-site"))
_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
_HOST_NAME = socket.gethostname()


class Permission(NamedTuple):
    """The requirements of a route.

    Attributes:
        rights: One of these is required; empty: any authenticated caller.
        is_public: No authentication.
        is_fleet_wide: The route concerns several instances, so keys restricted to some instances are rejected. If it is
            False and the path has no `{name}`, the route itself checks the instances of the key.
    """

    rights: frozenset[Right] = frozenset()
    is_public: bool = False
    is_fleet_wide: bool = False


class MatchedRoute(NamedTuple):
    """The permission of a request's route, the names in its path, and the route's template."""

    permission: Permission
    named: Mapping[str, str] = MappingProxyType({})
    template: str | None = None

    def check(self, caller: Caller) -> None:
        """Authorise a caller.

        Raises:
            Forbidden: the key lacks the right, or is not for this instance.
        """
        caller.require(self.permission.rights)
        if "name" in self.named:
            caller.require_instance(self.named["name"])
        elif self.permission.is_fleet_wide and caller.is_restricted:
            raise Forbidden(f"The key '{caller.name}' is restricted to some instances, but this concerns all")


PUBLIC = Permission(is_public=True)
KNOWN = Permission()
READ = Permission(frozenset({Right.READ}))
READ_ALL = READ._replace(is_fleet_wide=True)
ADMIN = Permission(frozenset({Right.ADMIN}))
ADMIN_ALL = ADMIN._replace(is_fleet_wide=True)
INFERENCE = Permission(frozenset({Right.INFERENCE}))
# Read by inference clients before they send a request.
EITHER = Permission(frozenset({Right.INFERENCE, Right.READ}))

PERMISSIONS: dict[str, Permission] = {
    "GET /health": PUBLIC,
    "GET /health/ready": PUBLIC,
    "GET /ready": READ_ALL,
    "GET /metrics": READ_ALL,
    "GET /metrics/scaling": READ_ALL,
    "GET /docs": KNOWN,
    "GET /docs/errors": PUBLIC,  # also explains a refused key
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
    "GET /logs": READ_ALL,
    "GET /instances/{name}/events": READ,
    "GET /instances/{name}/health": EITHER,
    "POST /instances/actions": ADMIN_ALL,
    "GET /health/all": READ_ALL,
    "GET /templates": READ_ALL,
    "GET /events": READ_ALL,
    "GET /config": ADMIN_ALL,
    "POST /config/reload": ADMIN_ALL,
    "GET /daemon": READ_ALL,
    "POST /daemon/restart": ADMIN_ALL,
    "GET /gpus": READ_ALL,
    "GET /usage": READ_ALL,
    "POST /plan": ADMIN_ALL,
    "POST /rebalance": ADMIN_ALL,
    "GET /recommendations": READ,
    "POST /recommendations/{id}/apply": ADMIN,
    "GET /hosts": READ_ALL,
    "POST /hosts/tokens": ADMIN_ALL,
    "DELETE /hosts/{name}": ADMIN_ALL,
    "GET /models": READ_ALL,
    "POST /models": ADMIN_ALL,
    "GET /models/{model_id:path}": READ_ALL,
    "DELETE /models/{model_id:path}": ADMIN_ALL,
    "GET /models/{model_id:path}/download/events": READ_ALL,
    "POST /models/{model_id:path}/download": ADMIN_ALL,
    "POST /models/{model_id:path}/load": ADMIN_ALL,
    **{f"GET {path}": EITHER for path in (*MODEL_LISTS, *MODEL_CARDS, VLLM_VERSION, *WEAVIATE_META)},
    **{f"GET {path}": EITHER if "{" in path else PUBLIC for path in WEAVIATE_PROBES},
    **{f"GET {path}": PUBLIC for path in (*INFINITY_HEALTH, *VLLM_HEALTH)},
    **{f"POST {path}": EITHER for path in COHERE_CHECKS},
    **{f"GET {path}": EITHER for path in (OLLAMA_TAGS, OLLAMA_RUNNING, OLLAMA_VERSION)},
    f"POST {OLLAMA_SHOW}": EITHER,
    **{f"POST {path}": INFERENCE for path in (GENERATE, CHAT, PULL)},
    **{f"{method} {path}": KNOWN for method, path in REFUSED},
    # Files and batches are those of the caller's key; a batch may use what the key may use while it runs.
    "POST /v1/files": INFERENCE,
    "GET /v1/files": INFERENCE,
    "GET /v1/files/{id}": INFERENCE,
    "GET /v1/files/{id}/content": INFERENCE,
    "DELETE /v1/files/{id}": INFERENCE,
    "POST /v1/batches": INFERENCE,
    "GET /v1/batches": INFERENCE,
    "GET /v1/batches/{id}": INFERENCE,
    "POST /v1/batches/{id}/cancel": INFERENCE,
    # The page. It changes nothing itself: its scripts call the routes above.
    "GET /": KNOWN,  # the first view that the caller's rights allow
    "GET /ui/static/{digest}/{name}": PUBLIC,
    "GET /ui/sign-in": PUBLIC,
    "POST /ui/sign-in": PUBLIC,
    "POST /ui/sign-out": KNOWN,
    "GET /ui/create": ADMIN,
    "GET /ui/fleet": READ,
    "GET /ui/fleet/live": READ,
    "GET /ui/instances/{name}": READ,
    "GET /ui/instances/{name}/live": READ,
    "GET /ui/scaling": READ,
    "GET /ui/alarms": READ,
    "GET /ui/models": READ_ALL,
    "GET /ui/devices": READ_ALL,
    "GET /ui/playground": INFERENCE,
    f"GET {INFO.path}": EITHER,
} | {f"POST {path.path}": INFERENCE for path in paths()}


class RoutePermissions:
    """Finds the permission of a request by matching it against the application's routes."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        self._cached = lru_cache(_CACHED_PATHS)(self._match)

    def of(self, method: str, path: str, policy: Policy) -> MatchedRoute:
        """Return the requirements of this request under `policy`."""
        if len(path) > MAX_PATH_BYTES:  # it is refused
            return MatchedRoute(KNOWN)
        match = self._cached if len(path) <= _CACHED_CHARS else self._match
        found = match("GET" if method == "HEAD" else method, path)
        if found.template == "/metrics" and policy.is_certified:
            # Prometheus has presented a certificate of the authority, which is enough for tei-manager too.
            return MatchedRoute(PUBLIC)
        return found

    def _match(self, method: str, path: str) -> MatchedRoute:
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        for route in self._routes:
            match, inner = route.matches(scope)
            if match is Match.FULL:
                template = str(getattr(route, "path", ""))
                permission = PERMISSIONS.get(f"{method} {template}", ADMIN_ALL)
                return MatchedRoute(permission, inner.get("path_params", {}), template)
        return MatchedRoute(KNOWN)


class Access:
    """Decides whether a request is served: by the origin of a web page, the caller's key, and the right to the route.

    Where no API key is required, web pages of other origins get nothing but the public routes: a browser sends its
    user's certificate, or uses its user's place in the network, for every page, and what is not public holds data of
    callers or operators. A key is sent by none but a page that has it. A session cookie (`sessions`) stands for a key
    in requests of our own page alone. Once the daemon `is_left` to its successor, it accepts no commands.
    """

    def __init__(
        self,
        policy: PolicyInForce,
        settings: Callable[[], Settings],
        routes: Sequence[BaseRoute],
        sessions: Sessions | None,
        is_left: Callable[[], bool],
    ) -> None:
        self.policy = policy
        self._is_left = is_left
        self._settings = settings
        self._permissions = RoutePermissions(routes)
        self._sessions = sessions
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # key names by digests of credentials
        policy.subscribe(self._checked.clear)

    def whose(self, scope: Scope) -> Hashable:
        """The caller whose turns of the loop this unchecked request uses: the key that its credentials had before, else
        the network of the client's address."""
        given = _credentials(scope)
        return (None if given is None else self._checked.get(given)) or sender_of(scope)

    def remember(self, scope: Scope, caller: Caller) -> None:
        """Keep `caller` as the one whose credentials this checked request has."""
        if caller.name and (given := _credentials(scope)) is not None:
            self._checked[given] = caller.name
            if len(self._checked) > _MAX_KNOWN:
                self._checked.popitem(last=False)

    def route(self, method: str, path: str) -> MatchedRoute:
        """Return the requirements of a request under the policy in force."""
        return self._permissions.of(method, path, self.policy.now)

    def check_command(self, scope: Scope) -> None:
        """Whether this daemon may still carry a request out that may change something.

        Raises:
            Replaced: its successor would not have the change: its state is read once, or has been already.
        """
        rights = self.route(scope["method"], scope["path"]).permission.rights
        if self._is_left() and rights and Right.READ not in rights:  # POST is also used for lookups
            raise Replaced

    def check(self, scope: Scope, headers: Mapping[bytes, bytes], route: MatchedRoute | None = None) -> Caller:
        """The caller of a request that is served; `headers` has the first of several values.

        `route` is the request's, where that is known; without it the scope has the path.

        Raises:
            Unauthenticated: the certificate is not allowed, or the key is unknown.
            Forbidden: a foreign page has sent it, or the caller lacks the right.
        """
        policy = self.policy.now
        if policy.keys is None:
            self._check_page(scope, headers, route)
            if policy.is_open:
                return ANONYMOUS
        route = route or self.route(scope["method"], scope["path"])
        if route.permission.is_public:
            return ANONYMOUS
        caller = self._authenticate(policy, scope, headers)
        route.check(caller)
        return caller

    def who(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """The caller in words, for records: `key NAME`, `page session of key NAME`, `certificate …` or where from."""
        caller, certificate = caller_of(scope), scope.get(CERTIFICATE, NO_CERTIFICATE)
        if caller.name:
            return f"{'page session of ' if _KEY_HEADERS.isdisjoint(headers) else ''}key {caller.name}"
        if certificate != NO_CERTIFICATE:
            return f"certificate {', '.join(sorted(certificate.subject)) or ', '.join(sorted(certificate.sans))}"[:256]
        host = (scope.get("client") or ("",))[0]
        is_local = not host or host == "::1" or host.startswith(("127.", "::ffff:127."))
        return "local" if is_local else f"address {host}"

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes], route: MatchedRoute | None) -> None:
        reads = scope["method"] in READS
        if not reads and _OF_PAGES.isdisjoint(headers):
            return
        settings = self._settings()
        page = foreign_page(_text(headers), settings.allowed_origins, own_names(settings), reads=reads)
        if page is None:
            return
        if reads and (route or self.route(scope["method"], scope["path"])).permission.is_public:
            return
        raise Forbidden(f"requests of web page {page} are refused: its origin is not in allowed_origins")

    def _authenticate(self, policy: Policy, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller by the key in the headers, else by the session of our page."""
        has_key = not _KEY_HEADERS.isdisjoint(headers)
        token = None if has_key or self._sessions is None else self._sessions.token_in(scope)
        if self._sessions is None or token is None or policy.keys is None:
            return authenticate_request(policy, scope, headers)
        if not is_same_origin(scope["method"] in READS, _text(headers)):
            raise Forbidden("a session is valid only for pages of this server: send an API key")
        return policy.authenticate_digest(scope.get(CERTIFICATE, NO_CERTIFICATE), self._sessions.key_of(token))


def _credentials(scope: Scope) -> bytes | None:
    """A digest of the fields of a head by which a request may be authenticated; None without them, or of long ones."""
    given = b"\0".join(value for name, value in scope["headers"] if name in _CREDENTIALS)
    return hashlib.sha256(given).digest() if 0 < len(given) <= _MAX_CREDENTIAL_BYTES else None


def own_names(settings: Settings) -> tuple[str, ...]:
    """The names under which this server's own web pages are reached, besides addresses and localhost."""
    return (_HOST_NAME, settings.api_host, *settings.allowed_hosts)


def _text(headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
