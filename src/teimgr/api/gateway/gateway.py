"""The inference gateway: forwards each HTTP request to a worker of its model and returns the reply.

`api/gateway/routes.py` lists the routes; workers parse bodies and write replies (`worker/dialects/`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from teimgr.api.gateway.bodies import SMALL_BYTES, Bodies, ModelNames, ModelScans, ReadBody, framed
from teimgr.api.gateway.model_cards import (
    COHERE_CHECKS,
    INFINITY_HEALTH,
    VLLM_HEALTH,
    VLLM_VERSION,
    WEAVIATE_META,
    WEAVIATE_PROBES,
    CardRows,
    ModelCards,
    cohere_check_key,
    infinity_health,
    vllm_health,
    vllm_version,
    weaviate_meta,
)
from teimgr.api.gateway.ollama import OllamaRoutes, known_name
from teimgr.api.gateway.routes import (
    DIALECT_HEADER,
    INFO,
    MODEL_CARDS,
    MODEL_LISTS,
    OLLAMA_EMBEDDING,
    DialectPath,
    InferenceCall,
    dialect_of,
    kinds_of,
    paths,
)
from teimgr.config.sections import allows
from teimgr.config.settings import Settings
from teimgr.control.sharing.tenants import RateState
from teimgr.errors import Code, Internal, InvalidInput, ModelNotFound, NotLoaded, TeimgrError, Unavailable
from teimgr.http.auth.policy import ANONYMOUS, Caller, caller_of
from teimgr.http.bodies import SlowClient, compression_fault, has_room, room_for_reply
from teimgr.http.direct import DirectRequest, answered_directly
from teimgr.http.turns import TURNS_OF
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import CURRENT, current_tenant
from teimgr.spec import KEEP_ALIVE, LANE_KEY, LOAD_NS, InstanceView, RouteEntry
from teimgr.wire import error_bodies
from teimgr.wire.error_bodies import INFINITY, JSON_TYPE, OLLAMA, OPENAI, TEI_OPENAI, VLLM, WEAVIATE
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import (
    MAX_HEAD_BYTES,
    Flag,
    HeadTooLong,
    HttpReply,
    HttpRequest,
    Method,
    in_lane,
    read_reply,
    request_head,
)
from teimgr.wire.routing.directory import Directory
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.on_demand import NO_LOADS, ModelStays, ReturningWorkers, as_unloaded, call_when_ready
from teimgr.wire.routing.router import Lease, Router, router_view
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import STATUS
from teimgr.wire.tenants.table import FILE as TENANTS_FILE
from teimgr.worker.tenant_meter import EntryMeters

log = logging.getLogger(__name__)

# Request headers that dialects read.
_HEADERS = ("content-type", "accept", "content-encoding", DIALECT_HEADER, LANE_KEY, EXPECT_KEY)
_KEYS = [(name, name.encode()) for name in _HEADERS]
_OWNER = "teimgr"
_MAX_REPLY_BYTES = 256 * 2**20  # vectors as JSON take four times the bytes of gRPC


class _Call(NamedTuple):
    """A request for the model or instance in its path (`named`), or the body's `model`.

    `holder` is the caller charged for its bytes, as in `Bodies.held_for`.
    """

    head: HttpRequest
    names: ModelNames
    named: Mapping[str, str]
    body: ReadBody
    holder: str | None
    flags: int = Flag.NONE


class Gateway:
    """Forwards inference requests to workers. It follows `directory` until `close`.

    `identity` is this node's identity in a cluster, for mutual TLS to workers of other nodes. `views` are the
    instances, `rates` the buckets of tenants; `loads` loads models on demand.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        metrics: DaemonMetrics,
        identity: FleetIdentity | None = None,
        views: Callable[[], Iterable[InstanceView]] = tuple,
        rates: Callable[[int], RateState | None] = lambda tenant: None,
        loads: ModelStays = NO_LOADS,
    ) -> None:
        self._rates = rates
        self._loads = loads
        self._metrics = metrics
        self._timeout_s = float(settings.inference_timeout_secs) or None
        limit_bytes = min(settings.inference_max_body_mb, settings.grpc_max_message_size_mb) * 2**20
        self._bodies = Bodies(limit_bytes)
        self.reply_budget = self._bodies.large
        self._router = Router(
            LinkLimits(max_message_bytes=limit_bytes + MAX_HEAD_BYTES, max_reply_bytes=_MAX_REPLY_BYTES),
            identity,
            partial(allows, settings.on_demand.models),
            EntryMeters(settings.run_dir / TENANTS_FILE) if identity else None,
        )
        self._waits = ReturningWorkers(self._router, loads, settings.worker_wait_secs)
        self._views = views
        self.aliases = settings.aliases
        self._names = ModelNames(self._router, lambda: self.aliases)
        self._names_of = lru_cache(64)(self._restricted)  # each has a sorted list
        self._rows = CardRows(self._cards)
        self._scans = ModelScans()
        self._router.update(directory.snapshot())
        self._unsubscribe = directory.subscribe(self._on_route)
        self._since = int(time.time())

    def _on_route(self, name: str, entry: RouteEntry | None) -> None:
        self._router.apply(name, entry)
        self._rows.routed(name, entry)

    def on_change(self, name: str) -> None:
        """React to a change of an instance that its routes do not show."""
        self._rows.changed(name)

    def reconfigure(self, settings: Settings) -> None:
        """Apply the keys of a reload that need no restart."""
        self.aliases = settings.aliases

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self._list_models) for path in MODEL_LISTS),
            *(Route(path, self._get_model) for path in MODEL_CARDS),
            *(Route(path, infinity_health) for path in INFINITY_HEALTH),
            *(Route(path, vllm_health) for path in VLLM_HEALTH),
            Route(VLLM_VERSION, vllm_version),
            *(Route(path, self._weaviate_ready) for path in WEAVIATE_PROBES),
            *(Route(path, weaviate_meta) for path in WEAVIATE_META),
            *(Route(path, cohere_check_key, methods=["POST"]) for path in COHERE_CHECKS),
            Route(INFO.path, self._info),
            *OllamaRoutes(self._names_for, self._views, self._since, self._loads).routes(),
            *(Route(path, answered_directly, methods=["POST"]) for path in dict.fromkeys(one.path for one in paths())),
        ]

    async def close(self) -> None:
        self._unsubscribe()
        await self._router.close()
        self._scans.close()

    async def answer(self, call: InferenceCall, request: DirectRequest, caller: Caller) -> HttpReply:
        """Reply to a request of inference, reading its body as it arrives."""
        path, given = call.path, request.headers
        headers = {name: value.decode("latin-1") for name, key in _KEYS if (value := given.get(key)) is not None}
        head = HttpRequest(_dialect(path, headers), "POST", path.inner, call.query, headers)

        async def call_worker() -> HttpReply:
            check_encoding(headers)
            if not has_room(request.scope):
                await room_for_reply(request.scope)
            start = request_head(head)
            body, charge = self._bodies.take_small(request, start) or await self._bodies.read(
                request, start, _sharer(request.scope, caller)
            )
            try:
                names = self._names_for(caller)
                return await self._call_worker(_Call(head, names, call.named, body, _holder(caller)))
            finally:
                charge.release()

        reply = await self._count(path, head.dialect, call_worker())
        if caller.tenant and head.dialect in _RATE_DIALECTS and (state := self._rates(caller.tenant)) is not None:
            return HttpReply(reply.status, {**reply.headers, **rate_headers(state)}, reply.body)
        return reply

    async def _info(self, request: Request) -> Response:
        """Return TEI's reply about its model, from a worker of the instance in the path."""
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        head = HttpRequest(INFO.dialect, "GET", INFO.inner, request.url.query, headers)
        caller = caller_of(request.scope)

        async def call_worker() -> HttpReply:
            body, _ = await self._bodies.hold(request_head(head), b"")
            names = self._names_for(caller)
            return await self._call_worker(_Call(head, names, request.path_params, body, _holder(caller)))

        reply = await self._count(INFO, head.dialect, call_worker())
        return Response(reply.body, reply.status, dict(reply.headers))

    async def answer_bulk(self, path: DialectPath, body: bytes, caller: Caller) -> HttpReply:
        """Like `answer`, in the bulk lane, for a JSON body of a batch (`batches/`).

        Raises:
            TeimgrError: no worker answered. Refusals by a worker are returned as replies.
        """
        head = HttpRequest(path.dialect, "POST", path.inner, "", dict(JSON_TYPE))
        began, status = time.perf_counter(), STATUS[Code.CANCELLED].http
        if (context := CURRENT.get()) is not None:
            context.belongs_to(caller.tenant)
        TURNS_OF.set(caller.name)
        held, charge = await self._bodies.hold(request_head(head), body, self._bodies.large)
        try:
            names = self._names_for(caller)
            reply = await self._call_worker(_Call(head, names, {}, held, _holder(caller), Flag.BULK))
            status = reply.status
            return reply
        except TeimgrError as error:
            status = STATUS[error.code].http
            raise
        finally:
            charge.release()
            seconds = time.perf_counter() - began
            self._metrics.observe(catalogue.INFERENCE, seconds, path.dialect, path.inner, str(status))

    def check_model(self, model: str, caller: Caller) -> None:
        """Raise ModelNotFound, with similar names, for a name that is unknown or that the caller may not use."""
        self._names_for(caller).check(model)

    async def _count(self, path: DialectPath, dialect: str, calling: Coroutine[Any, Any, HttpReply]) -> HttpReply:
        """Count the result of `_as_dialect` by dialect, route and status."""
        began, status = time.perf_counter(), STATUS[Code.CANCELLED].http
        try:
            reply = await self._as_dialect(path, dialect, calling)
            status = reply.status
        finally:
            seconds = time.perf_counter() - began
            self._metrics.observe(catalogue.INFERENCE, seconds, dialect, path.inner, str(status))
        return reply

    async def _as_dialect(self, path: DialectPath, dialect: str, calling: Coroutine[Any, Any, HttpReply]) -> HttpReply:
        """Return the worker's reply, or a failure in the form of the dialect."""
        try:
            return await calling
        except TeimgrError as error:
            return error_bodies.failure(dialect, error)
        except HeadTooLong:
            return error_bodies.refusal(dialect, 431, "The query and the headers are too long")
        except SlowClient:
            return error_bodies.refusal(dialect, 408, "The request body did not come in time")
        except Exception:
            log.exception("inference request failed", extra={"path": path.path})
            return error_bodies.failure(dialect, Internal("Internal error: see the daemon's log"))

    async def _call_worker(self, call: _Call) -> HttpReply:
        """Forward the call to a worker, loading its model if needed."""
        try:
            return await self._call_loaded(call, self._timeout_s)
        except NotLoaded as error:
            missing = error

        began_ns = time.monotonic_ns()

        async def again(left_s: float | None) -> HttpReply:
            waited = call
            if call.head.dialect == OLLAMA:
                head, body = after_load(call.head, call.body, time.monotonic_ns() - began_ns)
                waited = call._replace(head=head, body=body)
            return await self._call_loaded(waited, left_s, is_held=True)

        with self._bodies.held_for(missing.instance, call.body, call.holder):
            return await call_when_ready(self._waits, missing, self._timeout_s, again)

    async def _call_loaded(self, call: _Call, timeout_s: float | None, *, is_held: bool = False) -> HttpReply:
        """Forward a call to a model that is loaded; `is_held`: its body is counted already.

        Raises:
            NotLoaded: the model is not loaded, or is being unloaded; the call was not begun.
        """
        head, body = call.head, call.body
        payload, lease = body.payload, await self._lease(call)
        with lease, nullcontext() if is_held else self._bodies.held_for(lease.instance, body, call.holder):
            flags = call.flags | (Flag.BULK if len(payload) > SMALL_BYTES else Flag.NONE)
            flags = in_lane(flags, head.headers.get(LANE_KEY))
            try:
                answer = await lease.call(Method.HTTP, payload, flags=flags, timeout_s=timeout_s)
            except Unavailable as error:
                raise as_unloaded(self._router, lease.instance, error) or error from None
            reply = read_reply(answer.payload)
            if head.dialect == OLLAMA:
                reply = self._kept(lease.instance, reply)
        self._metrics.count(catalogue.INFERENCE_BYTES, head.dialect, "in", by=len(payload) - body.start)
        self._metrics.count(catalogue.INFERENCE_BYTES, head.dialect, "out", by=len(reply.body))
        return reply

    def _kept(self, instance: str, reply: HttpReply) -> HttpReply:
        """Return a worker's reply for the client, and keep the model loaded as long as the call asked."""
        if (seconds := reply.headers.get(KEEP_ALIVE)) is None:
            return reply
        self._loads.keep(instance, float(seconds), current_tenant())
        return reply._replace(headers={name: value for name, value in reply.headers.items() if name != KEEP_ALIVE})

    async def _lease(self, call: _Call) -> Lease:
        names, named, body, inner = call.names, call.named, call.body, call.head.path
        if "name" in named:
            return names.lease_instance(named["name"])
        if "model" in named:
            return names.lease(named["model"])
        model = await self._scans.model_of(body.payload, body.start)
        if inner in OLLAMA_EMBEDDING:
            if len(body.payload) == body.start:
                raise InvalidInput("missing request body")
            model = known_name(names, model)
        elif model and inner.startswith("/v1/"):  # OpenAI's routes on Ollama's port
            model = names.spelt_here(model)
        return names.lease(model, kinds_of(inner))

    def _names_for(self, caller: Caller) -> ModelNames:
        if caller is ANONYMOUS:  # without authentication, all names may be listed
            return self._names
        return self._names_of(caller)

    def _restricted(self, caller: Caller) -> ModelNames:
        return self._names.restricted(router_view(caller, self._router), caller.is_operator)

    async def _list_models(self, request: Request) -> Response:
        names = self._names_for(caller_of(request.scope))
        body = await self._rows.listed(names.names(), *self._asker(request), self.aliases)
        return Response(body, headers=dict(JSON_TYPE))

    async def _weaviate_ready(self, request: Request) -> Response:
        """Return 204 while the daemon routes; below an instance's name, while it takes calls or a call would load
        it."""
        try:
            if "name" in request.path_params:
                with (
                    suppress(NotLoaded),
                    self._names_for(caller_of(request.scope)).lease_instance(request.path_params["name"]),
                ):
                    pass
        except TeimgrError as error:
            reply = error_bodies.failure(WEAVIATE, error)
            return Response(reply.body, reply.status, dict(reply.headers))
        return Response(status_code=204)

    @staticmethod
    def _asker(request: Request) -> tuple[str, Caller]:
        """Return whom the cards of a request are for: the owner that they name, and the caller."""
        dialect = dialect_of(request.url.path)
        return dialect if dialect in (INFINITY, VLLM) else _OWNER, caller_of(request.scope)

    def _cards(self, owner: str, caller: Caller) -> ModelCards:
        views = (view for view in self._views() if caller.covers(view.spec.name))
        return ModelCards(views, self._names.model_id, self._since, owner, caller.is_operator)

    async def _get_model(self, request: Request) -> Response:
        names, name = self._names_for(caller_of(request.scope)), request.path_params["model"]
        try:
            names.check(name)
        except ModelNotFound as error:
            reply = error_bodies.failure(dialect_of(request.url.path) or OPENAI, error)
            return Response(reply.body, reply.status, dict(reply.headers))
        if names.model_id(name) is not None:
            [row] = await self._rows.rows([name], *self._asker(request), self.aliases)
        else:  # without an instance; a call would create one
            caller = caller_of(request.scope)
            row = orjson.dumps(ModelCards((), names.model_id, self._since, _OWNER, caller.is_operator).card(name))
        return Response(row, headers=dict(JSON_TYPE))


# Dialects whose clients read OpenAI's rate-limit headers.
_RATE_DIALECTS = (OPENAI, TEI_OPENAI, VLLM)


def rate_headers(state: RateState) -> dict[str, str]:
    """Return OpenAI's headers of a key's rate: the burst, what is left of it, and when it is full again."""
    return {
        "x-ratelimit-limit-tokens": str(state.limit),
        "x-ratelimit-remaining-tokens": str(state.remaining),
        "x-ratelimit-reset-tokens": go_duration(state.reset_s),
    }


def go_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _dialect(path: DialectPath, headers: Mapping[str, str]) -> str:
    """Return the dialect of a request: the one in its header, if the path has it, else the path's default."""
    chosen = headers.get(DIALECT_HEADER)
    return chosen if chosen is not None and chosen in path.others else path.dialect


def _sharer(scope: Mapping[str, Any], caller: Caller) -> Hashable:
    """Return whose bodies share a part of the budgets: a caller's, or without authentication a connection's."""
    return scope.get("client") if caller is ANONYMOUS else caller.name


def _holder(caller: Caller) -> str | None:
    return None if caller is ANONYMOUS else caller.name


def after_load(head: HttpRequest, body: ReadBody, waited_ns: int) -> tuple[HttpRequest, ReadBody]:
    """Return head and body of a request after the load of its model, with the waiting time for the worker."""
    head = head._replace(headers={**head.headers, LOAD_NS: str(waited_ns)})
    start = request_head(head)
    rest = memoryview(body.payload)[body.start :]
    return head, body._replace(payload=framed(start, rest), start=len(start))


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raise InvalidInput for a compressed body, which cannot be read."""
    if fault := compression_fault(headers.get("content-encoding", "")):
        raise InvalidInput(fault)
