"""The daemon's OpenAPI document of inference, and the file that it is made of."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
from fastapi import FastAPI

from teimgr.api.gateway.routes import describe, paths
from teimgr.worker.dialects import ROUTES
from teimgr.worker.dialects.openapi import daemon_document


@pytest.fixture
def told() -> dict[str, Any]:
    app = FastAPI()
    describe(app)
    return app.openapi()


def test_the_file_is_fresh() -> None:
    """If it is not: python -m teimgr.worker.dialects.openapi > src/teimgr/api/gateway/openapi.json."""
    text = files("teimgr.api.gateway").joinpath("openapi.json").read_text()

    assert json.loads(text) == json.loads(json.dumps(daemon_document()))


def test_every_path_has_a_route_in_the_worker_and_an_operation(told: dict[str, Any]) -> None:
    for path in paths():
        for dialect in (path.dialect, *path.others):
            assert ("POST", path.inner) in ROUTES[dialect], path
        assert "post" in told["paths"][path.path.replace(":path}", "}")]


def test_names_are_whole_and_operations_have_names_of_their_own(told: dict[str, Any]) -> None:
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
    assert references <= set(told["components"]["schemas"])
    names = [operation["operationId"] for verbs in told["paths"].values() for operation in verbs.values()]
    assert len(names) == len(set(names))
