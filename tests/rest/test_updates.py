"""PATCH of an instance and rolling restarts, as REST takes and tells them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.rest_listener import Front

from teimgr.rest.schemas import InstanceInfo, UpdateInstance


async def patch(front: Front, status: int, path: str = "/instances/a", **body: Any) -> Any:
    return await front.call("PATCH", path, status, json=body)


async def test_a_change_that_rolls_is_202_and_one_that_was_waited_for_200(front: Front) -> None:
    await front.create("a")

    rolling = await patch(front, 202, model_id="other", replicas=2)
    done = await patch(front, 200, "/instances/a?wait=true", dtype="float32")

    assert (rolling["model_id"], rolling["replicas"], rolling["update"]["state"]) == ("other", 2, "rolling")
    assert rolling["update"]["changes"] == ["model_id", "replicas"]
    assert (done["dtype"], done["update"]["state"]) == ("float32", "done")
    InstanceInfo.model_validate(done)


async def test_what_is_not_said_stays_and_null_is_the_default_again(front: Front) -> None:
    await front.create("a", dtype="float16", pooling="cls", max_batch_tokens=7, extra_args=["--auto-truncate"])

    info = await patch(front, 202, dtype=None, extra_args=None, strategy="recreate")

    assert (info["dtype"], info["extra_args"], info["pooling"], info["max_batch_tokens"]) == ("auto", [], "cls", 7)


@pytest.mark.parametrize(
    "body",
    [
        {"name": "b"},
        {"port": 9191},
        {"prometheus_port": 9191},
        {"wanted_running": False},
        {"replicas": 0},
        {"replicas": "two"},
        {"dtype": "int3"},
        {"strategy": "hope"},
        {"max_batch_tokens": "16"},
    ],
)
async def test_other_fields_and_other_shapes_are_refused(front: Front, body: dict[str, Any]) -> None:
    await front.create("a")

    answer = await patch(front, 422, **body)

    assert next(iter(body)) in answer["error"]


async def test_a_model_cannot_be_taken_away(front: Front) -> None:
    await front.create("a")

    assert "model_id" in (await patch(front, 400, model_id=None))["error"]


async def test_an_unknown_instance_cannot_be_changed(front: Front) -> None:
    assert (await patch(front, 404, dtype="float32"))["code"] == "INSTANCE_NOT_FOUND"


@pytest.mark.parametrize("how", [{"json": {"rolling": True}}, {"params": {"rolling": "true"}}])
async def test_a_restart_may_be_rolling(front: Front, how: dict[str, Any]) -> None:
    await front.create("a")

    rolling = await front.call("POST", "/instances/a/restart", 202, **how)
    plain = await front.call("POST", "/instances/a/restart", 200)

    assert (rolling["restarts"], rolling["update"]["state"], plain["restarts"]) == (0, "rolling", 1)


async def test_the_document_knows_both(front: Front) -> None:
    document = await front.call("GET", "/openapi.json", 200)

    patched = document["paths"]["/instances/{name}"]["patch"]
    schema = patched["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"].keys() == UpdateInstance.model_fields.keys()
    assert {"200", "202", "400", "404", "409", "422"} <= patched["responses"].keys()
