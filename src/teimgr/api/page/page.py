"""The web page: routes, sampler, sessions, and replies to refused requests.

Views are rendered from the same objects as the REST routes, with the same rights. Changes are sent to the REST routes
by the page's scripts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from urllib.parse import parse_qs, quote, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from teimgr import __version__
from teimgr.api.page import views
from teimgr.api.page.assets import assets, html_response
from teimgr.api.page.figures import Sampler
from teimgr.api.page.forms import ESSENTIAL, POPULAR, groups
from teimgr.api.page.views import EVENTS_SHOWN, Values, scaling_values
from teimgr.api.rest.access import own_names
from teimgr.api.rest.app import PageRoutes
from teimgr.api.rest.events import Event, event_stream
from teimgr.api.rest.models import ModelInfo
from teimgr.api.rest.probes import Scraper, all_alarms, all_notices
from teimgr.api.rest.schemas import instance_info
from teimgr.config.settings import Settings
from teimgr.control.ledger.system_memory import host_memory
from teimgr.control.placement.hosts import InventorySource
from teimgr.control.placement.planner import usable_cores
from teimgr.control.supervision.manager import Manager
from teimgr.errors import Code, Forbidden, InstanceNotFound, TeimgrError, Unauthenticated
from teimgr.http.auth.policy import CERTIFICATE, NO_CERTIFICATE, Caller, Right, Scope, caller_of, digest
from teimgr.http.auth.sessions import Sessions, is_same_origin
from teimgr.http.bodies import SlowClient, foreign_page, path_prefix_of, read_limited
from teimgr.http.turns import LISTING
from teimgr.spec import InstanceView, State, updatable
from teimgr.wire.status import STATUS

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SIGN_IN_BYTES = 4096
_SIGN_IN, _SIGN_OUT = "/ui/sign-in", "/ui/sign-out"


class Page:
    """The page of a daemon; `running` samples the fleet."""

    def __init__(self, settings: Settings, manager: Manager, scraper: Scraper, gpus: InventorySource) -> None:
        self.sessions = Sessions(settings.api_port)
        self._manager = manager
        self._gpus = gpus
        self._sampler = Sampler(scraper, manager.list, gpus)
        self._rows_of: tuple[object, list[Values]] = (None, [])
        self._templates = Environment(
            loader=PackageLoader("teimgr.api.page"),
            autoescape=select_autoescape(),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters.update(views.FILTERS)
        self._are_compiled = False

    def alarms(self) -> list[str]:
        """Instances that are overloaded."""
        return self._sampler.alarms()

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._sampler.running()

    def routes(self) -> PageRoutes:
        """The arguments of `create_app`."""
        pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._home,
            "/ui/fleet": self._fleet,
            "/ui/create": self._create,
            "/ui/instances/{name}": self._instance,
            "/ui/models": self._models,
            "/ui/devices": self._devices,
            "/ui/scaling": self._scaling,
            "/ui/alarms": self._alarms,
            "/ui/playground": self._playground,
        }
        routes = [
            *(Route(path, self._with_errors(answer)) for path, answer in pages.items()),
            Route("/ui/fleet/live", self._fleet_live),
            Route("/ui/instances/{name}/live", self._instance_live),
            Route("/ui/static/{digest}/{name}", _static),
            Route(_SIGN_IN, self._sign_in_form),
            Route(_SIGN_IN, self._sign_in, methods=["POST"]),
            Route(_SIGN_OUT, self._sign_out, methods=["POST"]),
        ]
        return PageRoutes(routes, self.sessions, self._refused, self._docs)

    # Views

    async def _home(self, request: Request) -> Response:
        """The first view that the caller's rights allow."""
        rights = caller_of(request.scope).rights
        if Right.READ in rights:
            return await self._fleet(request)
        return RedirectResponse("/ui/playground" if Right.INFERENCE in rights else "/ui/create", 303)

    async def _fleet(self, request: Request) -> Response:
        rows = await self._rows(request)
        self._sampler.seen()
        alarms = self._alarm_lines(request, rows)
        return await self._html(
            request,
            "fleet.html",
            view="fleet",
            rows=views.failed_first(rows),
            totals=views.totals(rows) | await self._memory(request),
            alarms=alarms,
            states=[*State],
            tag_names=views.tag_names(rows),
        )

    async def _instance(self, request: Request) -> Response:
        name, settings = request.path_params["name"], request.app.state.settings
        view = self._manager.get(name)
        self._sampler.seen()
        [row] = views.fleet_rows([view], self._sampler, (await self._gpus.read()).gpus)
        events = views.history_for(caller_of(request.scope), request.app.state.events, name)
        return await self._html(
            request,
            "instance.html",
            view="fleet",
            row=row,
            info=instance_info(view),
            groups=groups(updatable, view.spec, is_cluster=bool(settings.cluster.address)),
            callers=_callers(request),
            events=events[::-1],
        )

    async def _create(self, request: Request) -> Response:
        settings: Settings = request.app.state.settings
        chosen = {"model": request.query_params.get("model", "")[:4096]}
        return await self._html(
            request,
            "create.html",
            view="fleet",
            essential=groups(ESSENTIAL.__contains__),
            others=groups(lambda name: name not in ESSENTIAL, is_cluster=bool(settings.cluster.address)),
            popular=POPULAR,
            templates=sorted(settings.templates) if not caller_of(request.scope).is_restricted else [],
            known=await self._known_models(request),
            chosen=chosen,
        )

    async def _models(self, request: Request) -> Response:
        registry = request.app.state.registry
        nothing = dict.fromkeys(ModelInfo.model_fields)
        models = [nothing | view.to_dict() for view in await registry.list()] if registry else []
        return await self._html(request, "models.html", view="models", models=models)

    async def _devices(self, request: Request) -> Response:
        inventory = await self._gpus.read()
        self._sampler.seen()
        rows = await self._rows(request)
        by_name = {row["name"]: row for row in rows}
        on_card: dict[str, dict[str, Values]] = {gpu.uuid: {} for gpu in inventory.gpus}
        on_cpu = []
        for view in self._manager.list():
            row = by_name.get(view.spec.name)
            if row is None:
                continue
            cards = {worker.gpu for worker in view.workers if worker.gpu in on_card}
            for uuid in cards:
                on_card[str(uuid)][view.spec.name] = row
            if not cards and view.pid is not None:
                on_cpu.append(row | {"threads": view.threads})
        total, used = host_memory()
        host = {"cores": usable_cores(), "total": total, "used": used, "rows": views.largest_first(on_cpu)}
        cards_shown = [(gpu, views.largest_first(on_card[gpu.uuid].values())) for gpu in inventory.gpus]
        return await self._html(
            request, "devices.html", view="devices", cards=cards_shown, reason=inventory.reason, host=host
        )

    async def _alarms(self, request: Request) -> Response:
        rows = await self._rows(request)
        caller = caller_of(request.scope)
        return await self._html(
            request,
            "alarms.html",
            view="alarms",
            alarms=self._alarm_lines(request, rows),
            notices=all_notices(self._manager, request.app.state.reloader, not caller.is_restricted),
            events=views.events_for(caller, request.app.state.events, EVENTS_SHOWN),
        )

    async def _scaling(self, request: Request) -> Response:
        return await self._html(request, "scaling.html", view="scaling", **await scaling_values(request, self._manager))

    async def _playground(self, request: Request) -> Response:
        settings: Settings = request.app.state.settings
        covers = caller_of(request.scope).covers
        instances = [_playable(view) for view in self._manager.list() if covers(view.spec.name)]
        playground = _callers(request) | {
            "instances": [each for each in instances if each],
            "limit": settings.max_client_batch_size,
            "body_bytes": min(settings.inference_max_body_mb, settings.grpc_max_message_size_mb) * 2**20,
        }
        chosen = request.query_params.get("instance", "")
        return await self._html(request, "playground.html", view="playground", playground=playground, chosen=chosen)

    async def _docs(self, request: Request, text: str) -> Response:
        """The reference of REST, which is HTML, as a view."""
        own = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}{path_prefix_of(request.scope)}"
        keys = request.app.state.policy.now.keys is not None
        return await self._html(request, "docs.html", view="docs", text=text, own=own, keys=keys)

    # Live streams

    async def _fleet_live(self, request: Request) -> Response:
        return event_stream(self._fleet_events(request))

    async def _fleet_events(self, request: Request) -> AsyncGenerator[Event]:
        """The rows of the fleet that have changed, and the sums, whenever they do."""
        sent: dict[str, Values] = {}
        seen: object = None
        with self._sampler.watching():
            while not self._is_closing(request):
                state = self._state(request)
                if state is None or state != seen:
                    seen = state
                    rows = await self._rows(request)
                    now = {row["name"]: row for row in rows}
                    changed = [row for name, row in now.items() if sent.get(name) != row]
                    gone = [name for name in sent if name not in now]
                    sent = now
                    alarms = self._alarm_lines(request, rows)
                    totals = views.totals(rows) | await self._memory(request)
                    yield Event("fleet", {"rows": changed, "gone": gone, "totals": totals, "alarms": alarms})
                await asyncio.sleep(_LOOK_S)

    async def _instance_live(self, request: Request) -> Response:
        self._manager.get(request.path_params["name"])  # 404 before the stream begins
        return event_stream(self._instance_events(request))

    async def _instance_events(self, request: Request) -> AsyncGenerator[Event]:
        """The instance, new points of its charts and its events, whenever there are some; ends when it is deleted.

        Events begin behind the id `after`: others may come between the page and its stream.
        """
        name, event_log = request.path_params["name"], request.app.state.events
        seen: object = None
        fine = coarse = 0.0
        last_id = _last_seen(request.query_params.get("after", ""), 0 if event_log is None else event_log.latest)
        with self._sampler.watching():
            while not self._is_closing(request):
                state = self._state(request)
                if state is None or state != seen:
                    seen = state
                    try:
                        view = self._manager.get(name)
                    except InstanceNotFound:
                        yield Event("gone", {})
                        return
                    figures = self._sampler.of(name)
                    points = views.points_after(figures, fine, coarse)
                    fine = points["fine"][-1][0] + 0.05 if points["fine"] else fine
                    coarse = points["coarse"][-1][0] + 0.05 if points["coarse"] else coarse
                    new = views.history_for(caller_of(request.scope), event_log, name, last_id)
                    last_id = new[-1].id if new else last_id
                    [row] = views.fleet_rows([view], self._sampler, (await self._gpus.read()).gpus)
                    info = instance_info(view)
                    yield Event("instance", {"row": row, "info": info, "points": points, "events": new})
                await asyncio.sleep(_LOOK_S)

    def _state(self, request: Request) -> object:
        """Something that changes whenever a stream has news; None if every look may bring some."""
        event_log = request.app.state.events
        return None if event_log is None else (self._sampler.version, event_log.latest)

    def _is_closing(self, request: Request) -> bool:
        event_log = request.app.state.events
        return bool(event_log and event_log.is_closed)

    # Sessions

    async def _sign_in_form(self, request: Request) -> Response:
        if request.app.state.policy.now.keys is None:
            return RedirectResponse("/", 303)
        return await self._sign_in_page(request, _local_path(request.query_params.get("next", "/")))

    async def _sign_in(self, request: Request) -> Response:
        """Begin a session for the key of the form; the form's page must be our own."""
        policy = request.app.state.policy.now
        if policy.keys is None:
            return RedirectResponse("/", 303)
        if not is_same_origin(False, request.headers):
            return await self._sign_in_page(request, "/", "Sign in on this server's own page.", 403)
        try:
            body = await read_limited(request.stream(), _SIGN_IN_BYTES)
        except SlowClient:
            body = None
        form = parse_qs((body or b"").decode("utf-8", "replace"), max_num_fields=8)
        key, path = form.get("key", [""])[0].strip(), _local_path(form.get("next", ["/"])[0])
        sha256 = digest(key) if key else None
        try:
            caller: Caller = policy.authenticate_digest(request.scope.get(CERTIFICATE, NO_CERTIFICATE), sha256)
        except Unauthenticated as error:
            log.warning("sign-in refused", extra={"reason": error.message})
            return await self._sign_in_page(request, path, "Unknown API key.", 401)
        if (token := self.sessions.token_in(request.scope)) is not None:
            self.sessions.end(token)
        log.info("signed in", extra={"key": caller.name})
        cookie = self.sessions.cookie(request.scope, self.sessions.begin(str(sha256)))
        return RedirectResponse(path, 303, headers={"Set-Cookie": cookie})

    async def _sign_out(self, request: Request) -> Response:
        if (token := self.sessions.token_in(request.scope)) is not None:
            self.sessions.end(token)
        return RedirectResponse(_SIGN_IN, 303, headers={"Set-Cookie": self.sessions.cookie(request.scope, "")})

    async def _refused(self, scope: Scope, template: str | None, error: TeimgrError) -> Response | None:
        """A sign-in page or an error page for a browser that asked for a view; None for everything else."""
        request = Request(scope)
        if template == _SIGN_OUT and isinstance(error, Unauthenticated):
            return RedirectResponse(_SIGN_IN, 303)  # the session has ended
        is_view = template is not None and (template in ("/", "/docs") or template.startswith("/ui/"))
        if not is_view or request.method not in ("GET", "HEAD") or "text/html" not in request.headers.get("accept", ""):
            return None
        if isinstance(error, Forbidden) or request.app.state.policy.now.keys is None:
            return await self._error(request, error)
        path = scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{_SIGN_IN}?next={quote(path, safe='/')}", 303)

    # Rendering

    async def _sign_in_page(self, request: Request, path: str, problem: str = "", status: int = 200) -> Response:
        text = await self._rendered(request, "sign_in.html", path=path, problem=problem)
        return await html_response(request, text, status)

    async def _rendered(self, request: Request, template: str, **values: object) -> str:
        """A template whose URLs begin with the path prefix of the request."""
        prefix = path_prefix_of(request.scope)
        parts = (await self._template(template)).generate(
            prefix=prefix, asset=lambda name: prefix + assets().path(name), version=__version__, **values
        )
        return "".join(await LISTING.listed(parts))

    async def _template(self, name: str) -> Template:
        """Return a template. All are compiled on a thread before the first one is used, which takes 0.3 s."""
        if not self._are_compiled:
            await asyncio.to_thread(lambda: [*map(self._templates.get_template, self._templates.list_templates())])
            self._are_compiled = True
        return self._templates.get_template(name)

    def _with_errors(self, view: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def render(request: Request) -> Response:
            try:
                return await view(request)
            except TeimgrError as error:
                return await self._error(request, error)

        return render

    async def _error(self, request: Request, error: TeimgrError) -> Response:
        status = STATUS[error.code].http
        title = HTTPStatus(status).phrase if error.code is not Code.FORBIDDEN else "Not allowed"
        return await self._html(request, "error.html", status, view="", title=title, message=error.message)

    async def _html(self, request: Request, template: str, status: int = 200, **values: object) -> Response:
        settings: Settings = request.app.state.settings
        caller = caller_of(request.scope)
        headers = dict(request.headers) | {"origin": f"{request.url.scheme}://{request.headers.get('host', '')}"}
        keys = request.app.state.policy.now.keys
        refused = foreign_page(headers, settings.allowed_origins, own_names(settings)) if keys is None else None
        text = await self._rendered(
            request,
            template,
            caller=views.rights_of(caller, can_write=refused is None),
            has_session=keys is not None and self.sessions.token_in(request.scope) is not None,
            navigation=views.navigation(caller),
            foreign_host=request.headers.get("host", "") if refused else None,
            has_registry=request.app.state.registry is not None,
            **values,
        )
        return await html_response(request, text, status)

    # Parts

    async def _rows(self, request: Request) -> list[Values]:
        """The rows of the caller's instances; those of the fleet are made once for all viewers."""
        gpus = (await self._gpus.read()).gpus
        state = self._state(request)
        if state is None or self._rows_of[0] != state:
            rows = await LISTING.listed(views.fleet_rows(self._manager.list(), self._sampler, gpus))
            self._rows_of = state, rows
        covers = caller_of(request.scope).covers
        return [row for row in self._rows_of[1] if covers(row["name"])]

    async def _known_models(self, request: Request) -> list[str]:
        """Models on this host, as suggestions for callers that may list them."""
        caller, registry = caller_of(request.scope), request.app.state.registry
        if registry is None or caller.is_restricted or Right.READ not in caller.rights:
            return []
        return [view.model_id for view in await registry.list()]

    async def _memory(self, request: Request) -> Values:
        """Memory of all cards, or of this host without any, for callers that see the whole fleet."""
        if caller_of(request.scope).is_restricted:
            return {"memory": None, "memory_total": None, "memory_of": ""}
        return views.memory_in_use((await self._gpus.read()).gpus)

    def _alarm_lines(self, request: Request, rows: Sequence[Values]) -> list[Values]:
        """Those of the daemon, as /health shows them to the caller, then those of the caller's instances."""
        names, of_instances = not caller_of(request.scope).is_restricted, views.instance_alarms(rows)
        general = all_alarms(self._manager, request.app.state.alarms, names)
        # Alarms of failed instances come from the instances, with a link.
        failed = tuple(f"{each['instance']}: failed: " for each in of_instances)
        return [{"instance": None, "text": text} for text in general if not text.startswith(failed)] + of_instances


def _callers(request: Request) -> Values:
    """Return the addresses that a caller needs besides HTTP's, by the name under which the page is reached."""
    settings: Settings = request.app.state.settings
    host = urlsplit(f"//{request.headers.get('host', 'localhost')}").hostname or "localhost"
    return {
        "grpc": f"{host}:{settings.grpc_port}" if settings.grpc_enabled else None,
        "tls": settings.tls_files is not None,
        "keys": request.app.state.policy.now.keys is not None,
    }


async def _static(request: Request) -> Response:
    return assets().respond(request) or Response("no such file", 404)


def _last_seen(after: str, latest: int) -> int:
    """The id behind which events are new for a stream that has those up to `after`.

    Without a number it is `latest`; a greater one is of the daemon before, so all are new.
    """
    if not after.isdecimal() or len(after) > 18:
        return latest
    return int(after) if int(after) <= latest else 0


def _local_path(path: str) -> str:
    """`path` if it is one of this server's own pages, else the first."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local and (path in ("/", "/docs") or path.startswith("/ui/")) else "/"


def _playable(view: InstanceView) -> Values | None:
    """Return the playground's entry of an instance; None if it does not run."""
    if view.state is not State.RUNNING or view.model is None:
        return None
    model = view.model
    return {
        "name": view.spec.name,
        "model": view.spec.model_id,
        "kind": model.kind,
        "outputs": list(model.outputs),
        "dimension": model.dimension,
        "labels": list(model.labels),
        "max_input_length": model.max_input_length,
        "modalities": list(model.modalities),
    }
