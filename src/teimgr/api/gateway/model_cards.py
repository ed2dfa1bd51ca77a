"""`GET /v1/models`: one list for the clients of OpenAI, vLLM, SIE, Infinity, Xinference and Cohere.

A card is the union of their model objects; the list is in both `data` and `models`. Also Infinity's health, vLLM's
health and version, Cohere's check of an API key, and Weaviate's probes.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from teimgr import __version__
from teimgr.api.gateway.routes import WEAVIATE_BASES
from teimgr.http.auth.policy import Caller, caller_of
from teimgr.models.source import shown_id
from teimgr.spec import InstanceView, Kind, LoadedModel, RouteEntry, State, other_space
from teimgr.wire.error_bodies import JSON_TYPE

INFINITY_HEALTH = ("/v1/health", "/infinity/health", "/infinity/v1/health")
VLLM_HEALTH = ("/vllm/health", "/vllm/ping")
VLLM_VERSION = "/vllm/version"
WEAVIATE_PROBES = tuple(f"{base}/.well-known/{name}" for base in WEAVIATE_BASES for name in ("live", "ready"))
WEAVIATE_META = tuple(f"{base}/meta" for base in WEAVIATE_BASES)
COHERE_CHECKS = ("/v1/check-api-key", "/cohere/v1/check-api-key")

# SIE's names of states.
_STATES = {State.RUNNING: "loaded", State.STARTING: "loading", State.STOPPING: "unloading", State.FAILED: "failed"}
_BEST_FIRST = (State.RUNNING, State.STARTING, State.UNLOADED, State.STOPPING, State.FAILED, State.STOPPED)
# States of models on demand.
_RESIDENCE = {
    State.RUNNING: "ready",
    State.STARTING: "loading",
    State.STOPPING: "loadable",
    State.UNLOADED: "loadable",
    State.FAILED: "failed",
    State.STOPPED: "stopped",
}
# Infinity's and Cohere's names of kinds.
_CAPABILITIES: dict[str, str] = {
    Kind.RERANKER: "rerank",
    Kind.CLASSIFIER: "classify",
    Kind.TOKEN_CLASSIFIER: "classify",
}
_XINFERENCE_TYPES: dict[str, str] = {
    Kind.EMBEDDING: "embedding",
    Kind.SPARSE: "embedding",
    Kind.MULTI_VECTOR: "embedding",
    Kind.RERANKER: "rerank",
}
_ROWS_AT_ONCE = 256  # between two turns of the event loop
_OUTPUTS = {"dense": "dense", "sparse": "sparse", "multi-vector": "multivector", "scores": "score"}


class _Listed(NamedTuple):
    """The last requested list and the objects it was made from; any change of an instance drops it."""

    names: Sequence[str]
    aliases: Iterable[str]
    who: tuple[str, bool, tuple[str, ...] | None]
    body: bytes


class CardRows:
    """Cached JSON cards of names; a card is rebuilt only after its instance or model has changed.

    `cards` makes them for an owner and a caller; `routed` follows the directory. Callers with the same instances and
    rights share the rows, and the list while nothing changes, since thousands of names take megabytes.
    """

    def __init__(self, cards: Callable[[str, Caller], ModelCards]) -> None:
        self._cards = cards
        self._rows: defaultdict[tuple[str, bool, tuple[str, ...] | None], dict[str, bytes]] = defaultdict(dict)
        self._models: dict[str, str] = {}
        self._siblings: defaultdict[str, set[str]] = defaultdict(set)  # the instances of each model
        self._changes = 0
        self._listed: _Listed | None = None

    def routed(self, name: str, entry: RouteEntry | None) -> None:
        """Take the new entry of an instance; None means that it was deleted."""
        self.changed(name)
        model_id = None if entry is None else entry.model_id
        if self._models.get(name) == model_id:
            return
        if (before := self._models.pop(name, None)) is not None:
            self._siblings[before].remove(name)
            if not self._siblings[before]:
                del self._siblings[before]
        if model_id is not None:
            self._models[name] = model_id
            self._siblings[model_id].add(name)
            self.changed(name)

    def changed(self, name: str) -> None:
        """Drop the rows of an instance, of its model and of the others of that, so that a request makes them again."""
        self._changes += 1
        self._listed = None
        model = self._models.get(name, name)
        for rows in self._rows.values():
            for stale in (name, model, *self._siblings.get(model, ())):
                rows.pop(stale, None)

    async def listed(self, names: Sequence[str], owner: str, caller: Caller, aliases: Iterable[str] = ()) -> bytes:
        """Return the list of these names, whose rows are under `data` and under `models`."""
        who, changes, last = (owner, caller.is_operator, caller.instances), self._changes, self._listed
        if last is not None and last.names is names and last.aliases is aliases and last.who == who:
            return last.body
        rows = b",".join(await self.rows(names, owner, caller, aliases))
        body = b"".join((b'{"object":"list","data":[', rows, b'],"models":[', rows, b"]}"))
        if changes == self._changes:
            self._listed = _Listed(names, aliases, who, body)
        return body

    async def rows(self, names: Sequence[str], owner: str, caller: Caller, aliases: Iterable[str] = ()) -> list[bytes]:
        """Return the rows of these names in their order."""
        rows = self._rows[owner, caller.is_operator, caller.instances]
        for alias in aliases:  # its target may have changed
            rows.pop(alias, None)
        found = [rows.get(name, b"") for name in names]
        missing = [place for place, row in enumerate(found) if not row] if b"" in found else []
        cards, changes = None, self._changes
        for first in range(0, len(missing), _ROWS_AT_ONCE):
            if cards is None or self._changes != changes:
                cards, changes = self._cards(owner, caller), self._changes
            for place in missing[first : first + _ROWS_AT_ONCE]:
                found[place] = rows[names[place]] = orjson.dumps(cards.card(names[place]))
            await asyncio.sleep(0)
        return found


class ModelCards:
    """The cards of names: instances, aliases or model ids; `model_id` resolves a name.

    Paths of the host and reasons of failures are included only if `is_for_operator`.
    """

    def __init__(
        self,
        views: Iterable[InstanceView],
        model_id: Callable[[str], str | None],
        created: int,
        owner: str,
        is_for_operator: bool,
    ) -> None:
        self._model_id = model_id
        self._created = created
        self._owner = owner
        self._is_for_operator = is_for_operator
        self._by_name: dict[str, InstanceView] = {}
        self._by_model: defaultdict[str, list[InstanceView]] = defaultdict(list)
        self._first: dict[str, InstanceView] = {}  # best instance of each model
        for view in views:
            self._by_name[view.spec.name] = view
            self._by_model[view.spec.model_id].append(view)
            if view.may_serve:
                self._first.setdefault(view.spec.model_id, view)

    def card(self, name: str) -> dict[str, Any]:
        """Return the card; it has facts about the model once that is loaded. `root` is the id of the model, as in
        vLLM."""
        model_id = self._model_id(name)
        views = [self._by_name[name]] if name in self._by_name else self._by_model.get(model_id or "", [])
        view = min(views, key=lambda each: _BEST_FIRST.index(each.state), default=None)
        model = view.model if view else None
        state = "available" if view is None else _STATES.get(view.state, "available")
        root = model_id if self._is_for_operator or model_id is None else shown_id(model_id)
        kind = model.kind if model else view.spec.kind if view else None
        card = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": self._owner,
            "root": root,
            "model_name": root,
            "model_type": kind and _XINFERENCE_TYPES.get(kind, kind),
            "name": name,
            "state": state,
            "loaded": state == "loaded",
            "last_error": self._error(view),
            "stats": {},  # required by Infinity's clients; see /metrics
            "backend": "torch",
            "inputs": list(model.modalities) if model else ["text"],
        }
        if view is not None and view.spec.load == "on_demand":
            card["residence"] = _RESIDENCE[view.state]
        first = self._first.get(view.spec.model_id) if view is not None and name in self._by_name else None
        if view is not None and first is not None and (other := other_space(view, (first,))) is not None:
            card["by_name_only"] = f"calls by model id use the embedding space of instance '{other}'"
        return card | (_facts(model) if model else {"capabilities": [], "outputs": [], "dims": {}, "endpoints": []})

    def _error(self, view: InstanceView | None) -> dict[str, Any] | None:
        if view is None or view.state is not State.FAILED:
            return None
        message = (view.reason if self._is_for_operator else None) or "failed"
        return {"code": "MODEL_LOAD_FAILED", "message": message, "attempts": view.restarts + 1}


def _facts(model: LoadedModel) -> dict[str, Any]:
    capability = _CAPABILITIES.get(model.kind, "embed")
    outputs = [_OUTPUTS[one] for one in model.outputs if one in _OUTPUTS]
    if model.kind in _CAPABILITIES:
        outputs = ["score"]
    widths = {"dense": model.dimension, "sparse": model.dimension, "multivector": model.multi_vector_dimension}
    return {
        "capabilities": [capability],
        "endpoints": [capability],
        "outputs": outputs,
        "dims": {name: width for name, width in widths.items() if name in outputs and width},
        "max_model_len": model.max_input_length,
        "max_sequence_length": model.max_input_length,
        "context_length": model.max_input_length,
        "max_tokens": model.max_input_length,
        "dimensions": model.dimension or None,
        "revision": model.model_sha,
    }


async def infinity_health(request: Request) -> Response:
    """Return Infinity's health: the time."""
    return Response(orjson.dumps({"unix": time.time()}), headers=dict(JSON_TYPE))


async def vllm_health(request: Request) -> Response:
    """Return vLLM's health: an empty answer while the daemon routes."""
    return Response()


async def vllm_version(request: Request) -> Response:
    return Response(orjson.dumps({"version": __version__}), headers=dict(JSON_TYPE))


async def weaviate_meta(request: Request) -> Response:
    """Return an object for Weaviate's metadata about a module's container; Weaviate reads no field of it."""
    return Response(orjson.dumps({"server": "teimgr", "version": __version__}), headers=dict(JSON_TYPE))


async def cohere_check_key(request: Request) -> Response:
    """Confirm a valid API key for Cohere's check; authentication has refused invalid ones."""
    answer = {"valid": True, "organization_id": "teimgr", "owner_id": caller_of(request.scope).name}
    return Response(orjson.dumps(answer), headers=dict(JSON_TYPE))
