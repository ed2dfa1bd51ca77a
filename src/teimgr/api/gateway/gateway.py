"""The inference gateway: each HTTP request is forwarded to a worker of the model it names, its reply passed back.

`api/gateway/routes.py` lists the routes; bodies are parsed and answers written by the workers (`worker/dialects/`).
"""

from __future__ import annotations

import difflib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from teimgr.config.on_demand import allows
from teimgr.config.settings import Settings
from teimgr.control.sharing.tenants import RateState
from teimgr.errors import (
    AmbiguousInstance,
    Code,
    Forbidden,
    InstanceNotFound,
    Internal,
    InvalidInput,
    ModelNotFound,
    NotLoaded,
    Overloaded,
    Stopped,
    TeimgrError,
    TooLarge,
    Unavailable,
)
from teimgr.http.auth.policy import ANONYMOUS, Caller, caller_of
from teimgr.http.bodies import SlowClient, charge_body, compression_fault, read_body
from teimgr.http.byte_budget import ByteBudget, Charge, Shares
from teimgr.http.direct import DirectRequest, answered_directly
from teimgr.http.replies import has_room, room_for_reply
from teimgr.models.source import names_a_path, shown_id
from teimgr.observability import catalogue
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import CURRENT
from teimgr.spec import KEEP_ALIVE, LANE_KEY, LOAD_NS, InstanceView, RouteEntry, State
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
from teimgr.wire.json_scan import text_member
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.on_demand import NO_LOADS, ModelStays, refused_by_end, when_loaded
from teimgr.wire.routing.returning import ReturningWorkers
from teimgr.wire.routing.router import Directory, Lease, Router, RouterView, router_view
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import STATUS
from teimgr.wire.step_thread import StepThread
from teimgr.wire.tenants.table import FILE as TENANTS_FILE
from teimgr.worker.tenant_meter import EntryMeters

log = logging.getLogger(__name__)

# The request headers that a dialect may read.
_HEADERS = ("content-type", "accept", "content-encoding", DIALECT_HEADER, LANE_KEY, EXPECT_KEY)
_KEYS = [(name, name.encode()) for name in _HEADERS]
_OWNER = "teimgr"
# Vectors as JSON are four times the size of what gRPC carries.
_MAX_REPLY_BYTES = 256 * 2**20


class Gateway:
    """Forwards inference requests to workers. It follows `directory` from its construction to `close`.

    With `identity`, that of this node in a fleet of several hosts, workers of other nodes are reached over mutual TLS.
    `views` are the instances, for what is known of their models; `rates` are the buckets of tenants; `loads` has models
    on demand loaded.
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
        self.reply_budget = self._bodies.large  # of long ones
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
        self._rows = CardRows(self._cards)
        self._scanning = StepThread("scan")
        self._router.update(directory.snapshot())
        self._unsubscribe = directory.subscribe(self._on_route)
        self._since = int(time.time())

    def _on_route(self, name: str, entry: RouteEntry | None) -> None:
        self._router.apply(name, entry)
        self._rows.routed(name, entry)

    def on_change(self, name: str) -> None:
        """An instance has changed in what its routes do not say."""
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
        self._scanning.close()

    async def answer(self, call: InferenceCall, request: DirectRequest, caller: Caller) -> HttpReply:
        """The reply to a request of inference, whose body is read as it comes."""
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
                return await self._call_worker(head, self._names_for(caller), call.named, body, _holder(caller))
            finally:
                charge.release()

        reply = await self._count(path, head.dialect, call_worker())
        if caller.tenant and head.dialect in _RATE_DIALECTS and (state := self._rates(caller.tenant)) is not None:
            return HttpReply(reply.status, {**reply.headers, **rate_headers(state)}, reply.body)
        return reply

    async def _info(self, request: Request) -> Response:
        """TEI's reply about its model, by a worker of the instance in the path."""
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        head = HttpRequest(INFO.dialect, "GET", INFO.inner, request.url.query, headers)
        caller = caller_of(request.scope)

        async def call_worker() -> HttpReply:
            body, _ = await self._bodies.hold(request_head(head), b"")
            return await self._call_worker(head, self._names_for(caller), request.path_params, body, _holder(caller))

        reply = await self._count(INFO, head.dialect, call_worker())
        return Response(reply.body, reply.status, dict(reply.headers))

    async def answer_bulk(self, path: DialectPath, body: bytes, caller: Caller) -> HttpReply:
        """Like `answer`, in the bulk lane, of a JSON body that no client waits for (`batches/`).

        Raises:
            TeimgrError: no worker answered. Refusals by a worker are replies.
        """
        head = HttpRequest(path.dialect, "POST", path.inner, "", dict(JSON_TYPE))
        began, status = time.perf_counter(), STATUS[Code.CANCELLED].http
        if (context := CURRENT.get()) is not None:
            context.belongs_to(caller.tenant)
        held, charge = await self._bodies.hold(request_head(head), body, self._bodies.large)
        try:
            reply = await self._call_worker(head, self._names_for(caller), {}, held, _holder(caller), Flag.BULK)
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
        """Raises ModelNotFound, with similar names, for a name that is unknown or that the caller may not use."""
        self._names_for(caller).check(model)

    async def _count(self, path: DialectPath, dialect: str, calling: Coroutine[Any, Any, HttpReply]) -> HttpReply:
        """`_as_dialect`, counted by dialect, route and status."""
        began, status = time.perf_counter(), STATUS[Code.CANCELLED].http
        try:
            reply = await self._as_dialect(path, dialect, calling)
            status = reply.status
        finally:
            seconds = time.perf_counter() - began
            self._metrics.observe(catalogue.INFERENCE, seconds, dialect, path.inner, str(status))
        return reply

    async def _as_dialect(self, path: DialectPath, dialect: str, calling: Coroutine[Any, Any, HttpReply]) -> HttpReply:
        """The worker's reply, or a failure in the form of the dialect."""
        try:
            return await calling
        except TeimgrError as error:
            return error_bodies.failure(dialect, error)
        except HeadTooLong:
            return error_bodies.refusal(dialect, 431, "The query and the headers are too long")
        except SlowClient:
            return error_bodies.refusal(dialect, 408, "The request body did not come in time")
        except Exception:
            log.exception("an inference request failed", extra={"path": path.path})
            return error_bodies.failure(dialect, Internal("Internal error: see the daemon's log"))

    async def _call_worker(
        self,
        head: HttpRequest,
        names: ModelNames,
        named: Mapping[str, str],
        body: ReadBody,
        holder: str | None,
        flags: int = Flag.NONE,
    ) -> HttpReply:
        """The reply of a worker of what the path names (`named`), else of the body's `model`.

        `holder` is the caller whose bytes are counted, as in `Bodies.held_for`.
        """
        try:
            return await self._call_loaded(head, names, named, body, holder, flags, self._timeout_s)
        except NotLoaded as error:
            missing = error

        began_ns = time.monotonic_ns()

        async def call(left_s: float | None) -> HttpReply:
            request = (head, body)
            if head.dialect == OLLAMA:
                request = after_load(head, body, time.monotonic_ns() - began_ns)
            return await self._call_loaded(request[0], names, named, request[1], holder, flags, left_s, is_held=True)

        with self._bodies.held_for(missing.instance, body, holder):
            return await when_loaded(self._waits, missing, self._timeout_s, call)

    async def _call_loaded(
        self,
        head: HttpRequest,
        names: ModelNames,
        named: Mapping[str, str],
        body: ReadBody,
        holder: str | None,
        flags: int,
        timeout_s: float | None,
        *,
        is_held: bool = False,
    ) -> HttpReply:
        """`_call_worker` of a model that is loaded; `is_held`: its body is counted already.

        Raises:
            NotLoaded: it is not, or is being unloaded; the call was not begun.
        """
        payload, lease = body.payload, await self._lease(names, head.path, named, body)
        with lease, nullcontext() if is_held else self._bodies.held_for(lease.instance, body, holder):
            flags |= Flag.BULK if len(payload) > SMALL_BYTES else Flag.NONE
            flags = in_lane(flags, head.headers.get(LANE_KEY))
            call_class = (head.path, flags)
            lease.check_refusals(call_class, len(payload), timeout_s)
            try:
                answer = await lease.call(Method.HTTP, payload, flags=flags, timeout_s=timeout_s)
            except Unavailable as error:
                raise refused_by_end(self._router, lease.instance, error) or error from None
            reply = read_reply(answer.payload)
            if head.dialect == OLLAMA:
                reply = self._kept(lease.instance, reply)
            if reply.status == STATUS[Code.OVERLOADED].http:
                whole_s = int(reply.headers.get("retry-after", "0"))  # rounded up
                lease.keep_refusal(call_class, len(payload), timeout_s, whole_s - 1)
        self._metrics.count(catalogue.INFERENCE_BYTES, head.dialect, "in", by=len(payload) - body.start)
        self._metrics.count(catalogue.INFERENCE_BYTES, head.dialect, "out", by=len(reply.body))
        return reply

    def _kept(self, instance: str, reply: HttpReply) -> HttpReply:
        """The reply of a worker for the client; the model stays as long as the call has asked."""
        if (seconds := reply.headers.get(KEEP_ALIVE)) is None:
            return reply
        self._loads.keep(instance, float(seconds))
        return reply._replace(headers={name: value for name, value in reply.headers.items() if name != KEEP_ALIVE})

    async def _lease(self, names: ModelNames, inner: str, named: Mapping[str, str], body: ReadBody) -> Lease:
        if "name" in named:
            return names.lease_instance(named["name"])
        if "model" in named:
            return names.lease(named["model"])
        model = await model_of(body.payload, self._scanning, body.start)
        if inner in OLLAMA_EMBEDDING:
            if len(body.payload) == body.start:
                raise InvalidInput("missing request body")
            model = known_name(names, model)
        return names.lease(model, kinds_of(inner))

    def _names_for(self, caller: Caller) -> ModelNames:
        if caller is ANONYMOUS:  # who may know all
            return self._names
        return self._names.restricted(router_view(caller, self._router), caller.is_operator)

    async def _list_models(self, request: Request) -> Response:
        names = self._names_for(caller_of(request.scope))
        rows = b",".join(await self._rows_of(request, names.names()))
        body = b"".join((b'{"object":"list","data":[', rows, b'],"models":[', rows, b"]}"))
        return Response(body, headers=dict(JSON_TYPE))

    async def _weaviate_ready(self, request: Request) -> Response:
        """204 while the daemon routes, and below an instance's name while that takes calls, or is loaded by one."""
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

    async def _rows_of(self, request: Request, names: Sequence[str]) -> list[bytes]:
        """The cards of names that the caller may use, as JSON."""
        dialect = dialect_of(request.url.path)
        owner = dialect if dialect in (INFINITY, VLLM) else _OWNER
        return await self._rows.rows(names, owner, caller_of(request.scope), self.aliases)

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
            [row] = await self._rows_of(request, [name])
        else:  # a call would have an instance of it made
            caller = caller_of(request.scope)
            row = orjson.dumps(ModelCards((), names.model_id, self._since, _OWNER, caller.is_operator).card(name))
        return Response(row, headers=dict(JSON_TYPE))


# Of which clients read OpenAI's headers.
_RATE_DIALECTS = (OPENAI, TEI_OPENAI, VLLM)


def rate_headers(state: RateState) -> dict[str, str]:
    """OpenAI's headers of what a key may use: the burst, what is left of it, and when all of it is there again."""
    return {
        "x-ratelimit-limit-tokens": str(state.limit),
        "x-ratelimit-remaining-tokens": str(state.remaining),
        "x-ratelimit-reset-tokens": go_duration(state.reset_s),
    }


def go_duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _dialect(path: DialectPath, headers: Mapping[str, str]) -> str:
    """The dialect of a request: the one that its header selects, if the path has it, else the path's default."""
    chosen = headers.get(DIALECT_HEADER)
    return chosen if chosen is not None and chosen in path.others else path.dialect


def _sharer(scope: Mapping[str, Any], caller: Caller) -> Hashable:
    """Whose bodies share a part of the budgets: a caller's, or a connection's without authentication."""
    return scope.get("client") if caller is ANONYMOUS else caller.name


def _holder(caller: Caller) -> str | None:
    return None if caller is ANONYMOUS else caller.name


def after_load(head: HttpRequest, body: ReadBody, waited_ns: int) -> tuple[HttpRequest, ReadBody]:
    """Head and body of a request that has waited for its model, with that time for the worker."""
    head = head._replace(headers={**head.headers, LOAD_NS: str(waited_ns)})
    start = request_head(head)
    return head, body._replace(payload=bytearray(start + body.payload[body.start :]), start=len(start))


def check_encoding(headers: Mapping[str, str]) -> None:
    """Raises InvalidInput for a compressed body: nothing in it could be read."""
    if fault := compression_fault(headers.get("content-encoding", "")):
        raise InvalidInput(fault)


# Bodies of more bytes, or lists and objects, are scanned for their model instead of parsed, which holds the GIL: that
# takes orjson 10 ms at most.
PARSED_BYTES = 256 * 1024
_PARSED_LISTS = 4096
# Of such a scan, the steps on the event loop: enough for a body of a few hundred texts. The rest is for a thread.
_STEPS_ON_LOOP = 16
_KEY = b'"model"'
_ESCAPED_LETTER = b"\\u006"  # of "model"; no encoder escapes ASCII letters


async def model_of(body: bytes | bytearray, scanning: StepThread, start: int = 0) -> str | None:
    """The text under `model` in the JSON object that begins at `start`, or None. Long bodies are for `scanning`.

    The first of several wins. Malformed JSON may have an answer too: the worker, which parses the whole, refuses it.

    Raises:
        InvalidInput: `json_scan.MAX_TOKENS` lists, objects and long texts come before it.
    """
    if _parses_quickly(body, start):
        try:
            value = orjson.loads(memoryview(body)[start:])
        except orjson.JSONDecodeError:
            pass
        else:
            model = value.get("model") if isinstance(value, dict) else None
            return model if isinstance(model, str) else None
    steps = text_member(body, "model", start)
    try:
        for _ in range(_STEPS_ON_LOOP):
            next(steps)
    except StopIteration as end:
        found: str | None = end.value
        return found
    return await scanning.run(steps)


def _parses_quickly(body: bytes | bytearray, start: int) -> bool:
    """Whether orjson is quick with a body, and finds the same model: that of a single key."""
    size = len(body) - start
    if size > PARSED_BYTES:
        return False
    if size > _PARSED_LISTS and body.count(b"[", start) + body.count(b"{", start) > _PARSED_LISTS:
        return False
    is_escaped = body.find(b"\\", start) >= 0 and body.find(_ESCAPED_LETTER, start) >= 0  # one byte is found fastest
    return not is_escaped and body.find(_KEY, start) == body.rfind(_KEY, start)


# Bodies up to this size have their own budget, so that interactive requests never wait for bulk ones.
SMALL_BYTES = 64 * 1024
_SMALL_BODIES_BYTES = 64 * 2**20
_LARGE_BODIES_BYTES = 256 * 2**20
# The calls to one instance may hold this part of a budget: while one hangs, the others are served.
_INSTANCE_SHARE = 4
# So may the bodies that one caller sends, or without keys one connection.
_SHARE = 2
_SMALL_DIGITS = 9  # of a length that may be small
# Replies are charged to the budget of large bodies, whether or not they fit; above this multiple of that budget new
# calls are refused.
_REPLIES = 2


# A call takes memory beside its body, so that many small ones are bounded too.
MIN_HELD_BYTES = 1024

HeldKey = tuple[str, str | None, ByteBudget]
"""Instance, the caller whose share it is (None: that of all), and the budget."""


class ReadBody(NamedTuple):
    """A request's head and body, which begins at `start`, the bytes charged for it, and their budget."""

    payload: bytearray
    start: int
    charged: int
    budget: ByteBudget


class Bodies:
    """Budgets of the bytes of requests and replies in memory, one for small and one for large bodies.

    Calls to one instance hold a part of them at most, and so do the bodies of one caller, or of one connection.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.small_bytes = min(SMALL_BYTES, limit_bytes)
        self.small = ByteBudget(_SMALL_BODIES_BYTES)
        self.large = ByteBudget(max(_LARGE_BODIES_BYTES, limit_bytes))
        self._small_shares, self._large_shares = Shares(self.small, _SHARE), Shares(self.large, _SHARE)
        self._held: Counter[HeldKey] = Counter()

    async def read(self, request: DirectRequest, head: bytes, sharer: Hashable) -> tuple[ReadBody, Charge]:
        """`head` and the body in one buffer, and the charge for it, which the caller releases.

        The bytes count from the first one, also against the part of the budget that the bodies of `sharer` may hold
        together.

        Raises:
            TooLarge: the body is over the limit; the rest of it is discarded.
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
            SlowClient: the client stopped sending.
        """
        self._check_replies()
        length = request.headers.get(b"content-length", b"")
        is_small = length.isdigit() and len(length) <= _SMALL_DIGITS and int(length) <= SMALL_BYTES
        budget, shares = (self.small, self._small_shares) if is_small else (self.large, self._large_shares)
        charge = shares.charge(sharer)
        try:
            buffer = await read_body(request, self.limit_bytes, charge, head)
            if buffer is None:
                raise TooLarge(f"The request body is larger than the limit of {self.limit_bytes} bytes")
        except Overloaded:
            charge.release()
            raise Overloaded("Too many large requests are being read; try again later") from None
        except BaseException:
            charge.release()
            raise
        return ReadBody(buffer, len(head), charge.bytes, budget), charge

    def take_small(self, request: DirectRequest, head: bytes) -> tuple[ReadBody, Charge] | None:
        """The result of `read` for a small body that is there and fits its budget now; else None."""
        size = request.body.whole_bytes
        if size is None or size > self.small_bytes:
            return None
        self._check_replies()
        charge = Charge(self.small)
        if not charge.try_take(size):
            return None
        return ReadBody(bytearray(head + request.body.take()), len(head), size, self.small), charge

    async def hold(
        self, head: bytes, body: bytes | bytearray, budget: ByteBudget | None = None
    ) -> tuple[ReadBody, Charge]:
        """Like `read`, of a body that is there, a small one unless a budget is given; the caller releases the charge.

        Raises:
            Overloaded: too many replies wait for their clients, or the budget stayed exhausted for too long.
        """
        self._check_replies()
        charge = Charge(budget or self.small)
        await charge_body(charge, len(body))
        return ReadBody(bytearray(head + body), len(head), charge.bytes, budget or self.small), charge

    def _check_replies(self) -> None:
        if self.large.taken_bytes > self.large.limit_bytes * _REPLIES:
            raise Overloaded("Too many replies wait for clients that do not read them; try again later")

    def held_for(self, instance: str, body: ReadBody, holder: str | None = None) -> Holding:
        """Count `body` as held by `instance` within the block, `MIN_HELD_BYTES` at least, and by the caller `holder`.

        Raises:
            Overloaded: the calls to the instance, or those of `holder` to it, hold their share already.
        """
        count = max(body.charged, MIN_HELD_BYTES)
        most = body.budget.limit_bytes // _INSTANCE_SHARE
        of_all: HeldKey = (instance, None, body.budget)
        if (held := self._held.get(of_all, 0)) and held + count > most:
            raise Overloaded(f"Too many requests wait for instance '{instance}'; try again later")
        if holder is None:
            return Holding(self._held, (of_all,), count)
        of_holder: HeldKey = (instance, holder, body.budget)
        if (held := self._held.get(of_holder, 0)) and held + count > most // _SHARE:
            raise Overloaded(
                f"Too many requests with the key '{holder}' wait for instance '{instance}'; try again later"
            )
        return Holding(self._held, (of_all, of_holder), count)


class Holding:
    """A context manager: `count` more is held under each of `keys` within its block."""

    __slots__ = ("_count", "_held", "_keys")

    def __init__(self, held: Counter[HeldKey], keys: Sequence[HeldKey], count: int) -> None:
        self._held = held
        self._keys = keys
        self._count = count

    def __enter__(self) -> None:
        for key in self._keys:
            self._held[key] += self._count

    def __exit__(self, *failure: object) -> None:
        for key in self._keys:
            self._held[key] -= self._count
            if not self._held[key]:
                del self._held[key]


_NEAREST = 3
# Of an absurdly long name that does not exist, in the error text.
_SHOWN_CHARS = 256
# What finding similar names may cost, in products of two lengths: some 10 ms on the event loop. A comparison costs as
# much as one of two names of 40 characters before it begins.
_COMPARED_CHARS, _COMPARISONS, _BEGUN = 128, 200_000, 1600


class ModelNames:
    """Resolves names against the router's last snapshot; `aliases` maps an alias to an instance name or a model id.

    Ids that are paths of the host resolve for every caller, and are listed only if `shows_paths`.
    """

    def __init__(
        self, router: RouterView, aliases: Callable[[], Mapping[str, str]], *, shows_paths: bool = True
    ) -> None:
        self._router = router
        self._aliases = aliases
        self._shows_paths = shows_paths
        self._sorted: tuple[object, object, list[str]] | None = None  # of these entries and aliases

    def restricted(self, router: RouterView, shows_paths: bool) -> ModelNames:
        return self if router is self._router else ModelNames(router, self._aliases, shows_paths=shows_paths)

    def lease(self, model: str | None, kinds: Sequence[str] = ()) -> Lease:
        """A lease on the least busy worker of `model`; without one, on that of the instance for one of `kinds`.

        Raises:
            ModelNotFound: the name is unknown; the text lists similar ones.
            AmbiguousInstance: no model is given, and `RouterView.unnamed` finds several instances or none.
            Unavailable: the instance does not run.
        """
        if not model:
            try:
                return self._router.lease(self._router.unnamed(kinds))
            except AmbiguousInstance as error:
                raise AmbiguousInstance(f"Say which model: {error.message}") from None
        self.check(model)
        target = self.target(model)
        if self._router.find(target) is not None:
            return self._router.lease(Target(instance_name=target))
        try:
            return self._router.lease(Target(model_id=target))
        except (ModelNotFound, Forbidden):  # there are such instances, as was just checked
            found = [(entry.name, entry.state) for entry in self._router.of_model(target)]
            states = ", ".join(f"'{name}' is {state.value}" for name, state in found)
            kind = Stopped if all(state is State.STOPPED for _, state in found) else Unavailable
            shown = target if self._shows_paths else shown_id(target)
            raise kind(f"No instance of the model '{shown}' takes calls now: {states}") from None

    def lease_instance(self, name: str) -> Lease:
        """A lease on the instance of that name.

        Raises:
            InstanceNotFound: with the nearest names.
            Unavailable: it does not run.
        """
        try:
            return self._router.lease(Target(instance_name=name))
        except InstanceNotFound as error:
            error.reword(error.message + _nearest(name, self._instances()))
            raise error from None

    def names(self) -> list[str]:
        """The names that `model` may have, sorted: instances, aliases and model ids that are listed."""
        entries, given = self._router.snapshot.entries, self._aliases()
        if self._sorted is not None and self._sorted[0] is entries and self._sorted[1] is given:
            return self._sorted[2]
        aliases = (alias for alias in given if self.model_id(alias) is not None)
        ids = {entry.model_id for entry in entries}
        listed = ids if self._shows_paths else {each for each in ids if not names_a_path(each)}
        self._sorted = entries, given, sorted({*self._instances(), *listed, *aliases})
        return self._sorted[2]

    def check(self, model: str, refusal: str = "The model '{}' does not exist") -> None:
        """Raises ModelNotFound, with similar names, for an unknown name; what is known need not run."""
        if self.model_id(model) is None and not self._router.may_load(self.target(model)):
            shown = model if len(model) <= _SHOWN_CHARS else model[:_SHOWN_CHARS] + "…"
            raise ModelNotFound(refusal.format(shown) + _nearest(model, self.names()))

    def model_id(self, model: str) -> str | None:
        """The id of the model behind a name; None for an unknown name."""
        target = self.target(model)
        if (entry := self._router.find(target)) is not None:
            return entry.model_id
        return target if self._router.of_model(target) else None

    def target(self, model: str) -> str:
        """The instance or the model id that an alias stands for; any other name unchanged."""
        return model if self._router.find(model) is not None else self._aliases().get(model, model)

    def _instances(self) -> list[str]:
        return [entry.name for entry in self._router.snapshot.entries]


def _nearest(name: str, candidates: list[str]) -> str:
    by_spelling: dict[str, list[str]] = {}
    for each in candidates:
        for spelling in {
            each.casefold(),
            each.casefold().rpartition("/")[2],
        }:  # a model's id, or that without its owner
            by_spelling.setdefault(spelling, []).append(each)
    given = name[:_COMPARED_CHARS].casefold()
    similar = difflib.get_close_matches(given, _comparable(given, by_spelling), _NEAREST, 0.5) or [
        key for key in by_spelling if given in key
    ]
    nearest = list(dict.fromkeys(one for key in similar for one in sorted(by_spelling[key], key=len)))[:_NEAREST]
    if nearest:
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return f"; there are {', '.join(map(repr, candidates[:_NEAREST]))}" if candidates else "; no model is running"


def _comparable(given: str, names: Iterable[str]) -> Iterator[str]:
    """The names with which a name is compared: those of about its length, as far as the time for it goes."""
    left = _COMPARISONS
    for name in sorted(names, key=lambda each: abs(len(each) - len(given))):
        left -= _BEGUN + len(name) * len(given)
        if left < 0:
            return
        yield name
