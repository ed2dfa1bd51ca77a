"""A mistyped query parameter is refused, with the nearest one; probes take any."""

from __future__ import annotations

import pytest
from tests.support.rest_listener import Front, failed


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/instances?state=running", "unknown query parameter 'state'; did you mean 'status'?"),
        ("POST", "/instances?wiat=true", "unknown query parameter 'wiat'; did you mean 'wait'?"),
        ("GET", "/instances/a?verbose=1", "unknown query parameter 'verbose'; this route has none"),
        ("GET", "/health/all?prob=true", "unknown query parameter 'prob'; did you mean 'probe'?"),
    ],
)
async def test_an_unknown_parameter_is_refused_and_nothing_is_done(
    front: Front, method: str, path: str, says: str
) -> None:
    refused = await front.call(method, path, 400, json={"name": "a", "model_id": "tiny"})
    assert failed(refused, "VALIDATION_ERROR") == f"Validation error: {says}"
    assert await front.call("GET", "/instances", 200) == []


async def test_known_parameters_and_those_of_probes_are_taken(front: Front) -> None:
    await front.call("GET", "/instances?status=running&tag=a", 200)
    await front.call("GET", "/health?from=balancer", 200)
