"""Which instance a request means by its `model`: an instance's name, an alias, or a model's id, in this order."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from teimgr.errors import AmbiguousInstance, Forbidden, InstanceNotFound, ModelNotFound, TeimgrError, Unavailable
from teimgr.routing.router import Lease, RouterView
from teimgr.wire.error_bodies import JSON_TYPE, OPENAI, failure
from teimgr.wire.protobuf import Target

_NEAREST = 3
# What is longer is no name; to look for what is near it, or to say it all again, would take long.
_LOOKED_AT_CHARS = 256


class Naming:
    """Resolves names against the last snapshot; `aliases` maps an alias to an instance's name or a model's id."""

    def __init__(self, router: RouterView, aliases: Callable[[], Mapping[str, str]]) -> None:
        self._router = router
        self._aliases = aliases

    def of(self, router: RouterView) -> Naming:
        """The same names over the part of the router that one caller sees."""
        return self if router is self._router else Naming(router, self._aliases)

    def lease(self, model: str | None) -> Lease:
        """A lease on the least busy worker that `model` means; where it is None, on the only running instance.

        Raises:
            ModelNotFound: nothing is called so; the text names what nearly is.
            AmbiguousInstance: no model is given and there is not exactly one to choose.
            Unavailable: what it means does not run.
        """
        if not model:
            return self._router.lease(self._unnamed())
        self.check(model)
        meant = self._meant(model)
        if meant in self._instances():
            return self._router.lease(Target(instance_name=meant))
        try:
            return self._router.lease(Target(model_id=meant))
        except (ModelNotFound, Forbidden):  # there are such instances, as was just seen
            having = (entry for entry in self._router.snapshot.entries if entry.model_id == meant)
            states = ", ".join(f"'{entry.name}' is {entry.state.value}" for entry in having)
            raise Unavailable(f"No instance of the model '{meant}' takes calls now: {states}") from None

    def instance(self, name: str) -> Lease:
        """A lease on the instance of that name.

        Raises:
            InstanceNotFound: with the nearest names.
            Unavailable: it does not run.
        """
        try:
            return self._router.lease(Target(instance_name=name))
        except InstanceNotFound as error:
            raise _extended(error, _nearest(name, self._instances())) from None

    def names(self) -> list[str]:
        """Everything that a `model` may say, sorted: instances, aliases and model ids."""
        aliases = (alias for alias in self._aliases() if self.model_id(alias) is not None)
        return sorted({*self._instances(), *self._model_ids(), *aliases})

    def check(self, model: str) -> None:
        """See that something is called so, whether or not it runs.

        Raises:
            ModelNotFound: the text names what nearly is.
        """
        if self.model_id(model) is None:
            shown = model if len(model) <= _LOOKED_AT_CHARS else model[:_LOOKED_AT_CHARS] + "…"
            raise ModelNotFound(f"The model '{shown}' does not exist{_nearest(model, self.names())}")

    def model_id(self, model: str) -> str | None:
        """The id of the model behind a name; None where nothing is called so."""
        meant = self._meant(model)
        return next((one.model_id for one in self._router.snapshot.entries if meant in (one.name, one.model_id)), None)

    def _meant(self, model: str) -> str:
        """The instance or model id that a name stands for."""
        return model if model in self._instances() else self._aliases().get(model, model)

    def _unnamed(self) -> Target:
        try:
            return self._router.only_running()
        except AmbiguousInstance as error:
            raise AmbiguousInstance(f"Say which model: {error.message}") from None

    def _instances(self) -> list[str]:
        return [entry.name for entry in self._router.snapshot.entries]

    def _model_ids(self) -> list[str]:
        return [entry.model_id for entry in self._router.snapshot.entries]


def _nearest(name: str, known: list[str]) -> str:
    """What a caller may have meant, as the end of a sentence."""
    called: dict[str, list[str]] = {}
    for one in known:
        for word in {one.casefold(), one.casefold().rpartition("/")[2]}:  # a model's id, or that without its owner
            called.setdefault(word, []).append(one)
    given = name[:_LOOKED_AT_CHARS].casefold()
    words = difflib.get_close_matches(given, called, _NEAREST, 0.5) or [word for word in called if given in word]
    nearest = list(dict.fromkeys(one for word in words for one in sorted(called[word], key=len)))[:_NEAREST]
    if nearest:
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return f"; there are {', '.join(map(repr, known[:_NEAREST]))}" if known else "; there are none"


def _extended(error: TeimgrError, tail: str) -> TeimgrError:
    error.message += tail
    return error


OWNER = "teimgr"


class ModelList:
    """The names of the fleet: instances, aliases and model ids; `naming_of` gives those that a request may use."""

    def __init__(self, naming_of: Callable[[Request], Naming]) -> None:
        self._naming_of = naming_of
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """The list, and one of them."""
        return [Route("/v1/models", self.all), Route("/v1/models/{model:path}", self.one)]

    async def all(self, request: Request) -> Response:
        """All names, sorted."""
        naming = self._naming_of(request)
        return _json({"object": "list", "data": [self._card(name, naming) for name in naming.names()]})

    async def one(self, request: Request) -> Response:
        """One name; 404 where nothing is called so."""
        name, naming = request.path_params["model"], self._naming_of(request)
        try:
            naming.check(name)
        except ModelNotFound as error:
            reply = failure(OPENAI, error)
            return Response(reply.body, reply.status, dict(reply.headers))
        return _json(self._card(name, naming))

    def _card(self, name: str, naming: Naming) -> dict[str, Any]:
        """`root` is the model behind the name, as vLLM says it; `created` is when the daemon began to know it."""
        card = {"id": name, "object": "model", "created": self._since, "owned_by": OWNER}
        return card | {"root": naming.model_id(name)}


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), headers=dict(JSON_TYPE))
