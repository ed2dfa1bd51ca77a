"""`GET /v1/models`: everything that the `model` of a request may say, in OpenAI's form."""

from __future__ import annotations

import time
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
    """The names of the fleet: instances, aliases and model ids."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """The list, and one of them."""
        return [Route("/v1/models", self.all), Route("/v1/models/{model:path}", self.one)]

    async def all(self, request: Request) -> Response:
        """All names, sorted."""
        return _json({"object": "list", "data": [self._card(name) for name in self._naming.names()]})

    async def one(self, request: Request) -> Response:
        """One name; 404 where nothing is called so."""
        name = request.path_params["model"]
        try:
            self._naming.check(name)
        except ModelNotFound as error:
            reply = failure(OPENAI, error)
            return Response(reply.body, reply.status, dict(reply.headers))
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        """`root` is the model behind the name, as vLLM says it; `created` is when the daemon began to know it."""
        card = {"id": name, "object": "model", "created": self._since, "owned_by": OWNER}
        return card | {"root": self._naming.model_id(name)}


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), headers=dict(JSON_TYPE))
