"""Vertex AI's form: a request holds instances, each a request of another route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field, ValidationError

from teimgr.errors import InvalidInput
from teimgr.spec import ModelInfo
from teimgr.worker.tei.fields import Body, first_fault
from teimgr.worker.tei.inference import InferenceRequest
from teimgr.worker.tei.requests import REQUEST_OF_KIND, PredictRequest, RerankRequest

# A rerank request is known by its fields.
_OF_KIND = REQUEST_OF_KIND | {"reranker": PredictRequest}


class VertexRequest(Body):
    """`POST /vertex`: what an instance may be depends on the model."""

    instances: Annotated[list[Any], Field(fail_fast=True)]

    def requests(self, model: ModelInfo) -> list[InferenceRequest]:
        """Each instance as a rerank request if it is one, else as the request of the model's kind.

        Raises:
            InvalidInput: an instance is neither.
        """
        return [_request(place, instance, _OF_KIND[model.kind]) for place, instance in enumerate(self.instances)]


def predictions(bodies: Sequence[bytes]) -> bytes:
    """The answers of the single requests in one body."""
    return orjson.dumps({"predictions": [orjson.Fragment(body) for body in bodies]})


def _request(place: int, instance: Any, kind: type[InferenceRequest]) -> InferenceRequest:
    if isinstance(instance, dict) and instance.keys() >= {"query", "texts"}:
        kind = RerankRequest
    try:
        return kind.model_validate(instance)
    except ValidationError as error:
        raise InvalidInput(f"Failed to deserialize instance {place}: {first_fault(error)}") from error
