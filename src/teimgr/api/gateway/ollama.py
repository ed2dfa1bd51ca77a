"""Ollama's routes other than embedding: models, loaded models, details of a model.

Routes that generate text or change models are refused. Model names may have Ollama's form.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr import __version__
from teimgr.api.gateway.bodies import ModelNames
from teimgr.api.gateway.routes import OLLAMA_RUNNING, OLLAMA_SHOW, OLLAMA_TAGS, OLLAMA_VERSION
from teimgr.errors import InvalidInput, ModelNotFound, TooLarge
from teimgr.http.auth.policy import Caller, caller_of
from teimgr.http.bodies import SlowClient, read_limited
from teimgr.http.turns import LISTING
from teimgr.spec import InstanceView, Kind, State, rfc3339
from teimgr.wire.error_bodies import JSON_TYPE, OLLAMA, failure, refusal
from teimgr.wire.frames import HttpReply
from teimgr.wire.routing.on_demand import ModelStays

_NOT_SERVED = 501
_TEXT = "the models of this server do not support {}: use /api/embed for embeddings"
_MANAGED = "{} is not supported: manage models with `teimgr create` and other commands"
GENERATE, CHAT, PULL = "/api/generate", "/api/chat", "/api/pull"
REFUSED: Mapping[tuple[str, str], str] = {
    (method, path): _MANAGED.format(path)
    for method, path in (
        *(("POST", f"/api/{name}") for name in ("push", "create", "copy")),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/{digest}"),
        ("GET", "/api/blobs/{digest}"),
    )
}
"""Routes of Ollama answered with 501 and this sentence."""

API_VERSION = "0.33.0"  # clients compare it before they use a route
# Expiry of a model that is never unloaded; Ollama adds 292 years to the current time.
_FOR_EVER = "2318-01-01T00:00:00Z"
_OLLAMA_PORT_PATHS = ("/api/", "/v1/")
_MAX_BODY_BYTES = 64 * 1024
_SLOW = "The request body did not come in time"


def known_name(names: ModelNames, model: str | None) -> str | None:
    """Return the name of a model here, for a name that Ollama's clients write with or without the tag `latest`.

    Raises:
        ModelNotFound: the name is unknown; in Ollama's words, with similar names.
    """
    if model:
        model = names.spelt_here(model)
        names.check(model, "model '{}' not found")
    return model


class OllamaPort:
    """The routes on Ollama's own port: `/` as in Ollama, without the page and the daemon's control routes."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope.get("server") or ("", 0))[1] != self._port:
            await self._app(scope, receive, send)
        elif scope["path"] == "/":
            await PlainTextResponse("Ollama is running")(scope, receive, send)
        elif not scope["path"].startswith(_OLLAMA_PORT_PATHS):
            await PlainTextResponse("404 page not found", 404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Listed(NamedTuple):
    """A usable model name and its best instance."""

    name: str
    model_id: str
    view: InstanceView


class OllamaRoutes:
    """Ollama's routes; `names_for` and `views` belong to the gateway, which started at `created`.

    `loads` determines how long models stay loaded.
    """

    def __init__(
        self,
        names_for: Callable[[Caller], ModelNames],
        views: Callable[[], Iterable[InstanceView]],
        created: int,
        loads: ModelStays,
    ) -> None:
        self._names_for = names_for
        self._views = views
        self._loads = loads
        self._since = _rfc3339(created)

    def routes(self) -> list[Route]:
        return [
            Route(OLLAMA_TAGS, self._tags),
            Route(OLLAMA_RUNNING, self._running),
            Route(OLLAMA_VERSION, _version),
            Route(OLLAMA_SHOW, self._show, methods=["POST"]),
            *(Route(path, self._generate, methods=["POST"]) for path in (GENERATE, CHAT)),
            Route(PULL, self._pull, methods=["POST"]),
            *(Route(path, _refusing(text), methods=[method]) for (method, path), text in REFUSED.items()),
        ]

    async def _tags(self, request: Request) -> Response:
        listed = await self._listed(request)
        rows = await LISTING.listed(orjson.dumps(self._tag(each)) for each in listed)
        return _json({"models": [*map(orjson.Fragment, rows)]})

    async def _running(self, request: Request) -> Response:
        found = [each for each in await self._listed(request) if each.view.spec.name == each.name]
        return _json({"models": [self._process(each) for each in found if each.view.state is State.RUNNING]})

    async def _show(self, request: Request) -> Response:
        try:
            return _json(self._shown(await self._found(request, await _body(request))))
        except (InvalidInput, TooLarge, ModelNotFound) as error:
            return _response(failure(OLLAMA, error))
        except SlowClient:
            return _response(refusal(OLLAMA, 408, _SLOW))

    async def _generate(self, request: Request) -> Response:
        """Unload a model if there is nothing to generate and it is not kept alive, as Ollama does; else answer 400."""
        what = request.url.path.rpartition("/")[2]
        try:
            body = await _body(request)
            if not _unloads(body):
                return _response(refusal(OLLAMA, 400, _TEXT.format(what)))
            found = await self._found(request, body)
        except (InvalidInput, TooLarge):
            return _response(refusal(OLLAMA, 400, _TEXT.format(what)))
        except ModelNotFound as error:
            return _response(failure(OLLAMA, error))
        except SlowClient:
            return _response(refusal(OLLAMA, 408, _SLOW))
        self._loads.keep(found.view.spec.name, 0.0, caller_of(request.scope).tenant)
        nothing = {"response": ""} if what == "generate" else {"message": {"role": "assistant", "content": ""}}
        end = {"done": True, "done_reason": "unload"}
        return _json({"model": _name_in(body), "created_at": _rfc3339(time.time())} | nothing | end)

    async def _pull(self, request: Request) -> Response:
        """Report a finished download for a model that is here, since some clients pull before they embed."""
        try:
            body = await _body(request)
            await self._found(request, body)
        except (InvalidInput, TooLarge, ModelNotFound):
            return _response(refusal(OLLAMA, _NOT_SERVED, _MANAGED.format(PULL)))
        except SlowClient:
            return _response(refusal(OLLAMA, 408, _SLOW))
        media_type = "application/json" if body.get("stream") is False else "application/x-ndjson"
        return Response(b'{"status":"success"}\n', media_type=media_type)

    async def _found(self, request: Request, body: Mapping[str, Any]) -> _Listed:
        """Return the model that a body names.

        Raises:
            InvalidInput: the body names no model.
            ModelNotFound: there is no such model for embedding.
        """
        name = known_name(self._names_for(caller_of(request.scope)), _name_in(body))
        found = next((each for each in await self._listed(request) if each.name == name), None)
        if found is None:
            raise ModelNotFound(f"model '{name}' not found")
        return found

    async def _listed(self, request: Request) -> list[_Listed]:
        """Return the caller's names of models that embed, or may do so once loaded."""
        caller = caller_of(request.scope)
        names = self._names_for(caller)
        by_name: dict[str, InstanceView] = {}
        by_model: dict[str, InstanceView] = {}
        for view in self._views():
            if not caller.covers(view.spec.name):
                continue
            by_name[view.spec.name] = view
            if view.spec.model_id not in by_model or view.state is State.RUNNING:
                by_model[view.spec.model_id] = view

        def listed(name: str) -> _Listed | None:
            model_id = names.model_id(name) or ""
            found = by_name.get(name) or by_name.get(names.target(name)) or by_model.get(model_id)
            embeds = found is not None and _kind(found) in (None, Kind.EMBEDDING)
            return _Listed(name, model_id, found) if found is not None and embeds else None

        return [each for each in await LISTING.listed(map(listed, names.names())) if each is not None]

    def _tag(self, listed: _Listed) -> dict[str, Any]:
        return self._entry(listed) | {"modified_at": self._since}

    def _process(self, listed: _Listed) -> dict[str, Any]:
        model = listed.view.model
        length = model.max_input_length if model else 0
        left_s = self._loads.left_s(listed.name)
        expires_at = _FOR_EVER if left_s is None else _rfc3339(time.time() + left_s)
        return self._entry(listed) | {"expires_at": expires_at, "size_vram": 0, "context_length": length}

    def _entry(self, listed: _Listed) -> dict[str, Any]:
        name = _tagged(listed.name)
        size = sum(worker.private_bytes or 0 for worker in listed.view.workers)
        return {"name": name, "model": name, "size": size, "digest": _digest(listed), "details": _details(listed)}

    def _shown(self, listed: _Listed) -> dict[str, Any]:
        model = listed.view.model
        facts: dict[str, Any] = {"general.architecture": "teimgr", "general.basename": listed.name}
        if model is not None:
            facts |= {"teimgr.context_length": model.max_input_length, "teimgr.embedding_length": model.dimension}
        return {
            "modelfile": f"FROM {_tagged(listed.name)}\n",
            "parameters": "",
            "template": "{{ .Prompt }}",
            "details": _details(listed),
            "model_info": facts,
            "capabilities": ["embedding"],
            "modified_at": self._since,
        }


def _rfc3339(seconds: float) -> str:
    return rfc3339(datetime.fromtimestamp(seconds, UTC), "auto")


def _kind(view: InstanceView) -> str | None:
    return view.model.kind if view.model else view.spec.kind


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _digest(listed: _Listed) -> str:
    """Return the space of a model's vectors, 64 hexadecimal digits; before its first load, the hash of its id."""
    if listed.view.model and listed.view.model.space:
        return listed.view.model.space
    revision = listed.view.model.commit if listed.view.model else None
    return hashlib.sha256(f"{listed.model_id}\0{revision or ''}".encode()).hexdigest()


def _details(listed: _Listed) -> dict[str, Any]:
    dtype = listed.view.model.dtype if listed.view.model else ""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": dtype,
    }


async def _body(request: Request) -> dict[str, Any]:
    """Read the object in a body.

    Raises:
        InvalidInput: the body does not contain one.
        TooLarge: the body is longer than one that only names a model needs to be.
        SlowClient: the body does not arrive.
    """
    text = await read_limited(request.stream(), _MAX_BODY_BYTES)
    if text is None:
        raise TooLarge(f"The request body is larger than the limit of {_MAX_BODY_BYTES} bytes")
    if not text:
        raise InvalidInput("missing request body")
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInput("The body is not a JSON object")
    return body


def _name_in(body: Mapping[str, Any]) -> str:
    """Return the `model`, or `name`, of a body; raises InvalidInput without one."""
    given = body.get("model") or body.get("name")
    if not isinstance(given, str):
        raise InvalidInput("model is required")
    return given


def _unloads(body: Mapping[str, Any]) -> bool:
    """True if a request to generate has nothing to answer and asks to unload its model."""
    kept = body.get("keep_alive")
    is_zero = (kept == 0 and not isinstance(kept, bool)) or kept in ("0", "0s", "0m", "0h")
    return is_zero and not body.get("prompt") and not body.get("messages")


async def _version(request: Request) -> Response:
    """Return the release of Ollama whose API this implements."""
    return _json({"version": API_VERSION, "server": f"teimgr {__version__}"})


def _refusing(message: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        return _response(refusal(OLLAMA, _NOT_SERVED, message))

    return refuse


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), headers=dict(JSON_TYPE))


def _response(reply: HttpReply) -> Response:
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
