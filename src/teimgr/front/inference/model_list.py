"""`GET /v1/models`: everything that the `model` of a request may say, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from teimgr.errors import ModelNotFound
from teimgr.front.inference.naming import Naming
from teimgr.wire.error_bodies import JSON_TYPE, OPENAI, failure

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
