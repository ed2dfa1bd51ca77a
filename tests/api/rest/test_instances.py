"""The lifecycle routes, by the contract's own tests and the decisions on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.support.rest_listener import Front, listening

from teimgr.api.rest.schemas import InstanceInfo, UpdateInstance
from teimgr.config.settings import Settings

CONTRACT_KEYS = {
    "name",
    "model_id",
    "port",
    "status",
    "pid",
    "created_at",
    "uptime_secs",
    "restarts",
    "health_check_failures",
    "last_health_check",
    "gpu_id",
    "prometheus_port",
}


@pytest.mark.clause("M2.1-list")
async def test_an_empty_fleet_is_an_empty_list(front: Front) -> None:
    assert await front.call("GET", "/instances", 200) == []


@pytest.mark.clause("M2.1-list")
async def test_list_grows_with_creates_and_shrinks_with_deletes(front: Front) -> None:
    for name in "abc":
        await front.create(name)
    assert {info["name"] for info in await front.call("GET", "/instances", 200)} == {"a", "b", "c"}
    await front.call("DELETE", "/instances/b", 200)
    assert {info["name"] for info in await front.call("GET", "/instances", 200)} == {"a", "c"}


@pytest.mark.clause("M2.1-create")
async def test_create_answers_201_with_what_was_asked_and_what_was_chosen(front: Front) -> None:
    info = await front.create("a", port=9090, pooling="mean", extra_args=["--dtype", "float32"], threads=2)
    assert (info["name"], info["model_id"], info["port"], info["status"]) == ("a", "tiny", 9090, "starting")
    assert info["prometheus_port"] >= 9100
    assert info["extra_args"] == ["--dtype", "float32"]


async def test_the_key_of_an_instance_is_nowhere_shown(front: Front) -> None:
    made = await front.create("a", extra_args=["--api-key", "s3cret", "--dtype=auto"])
    listed = await front.call("GET", "/instances", 200)
    one = await front.call("GET", "/instances/a", 200)

    assert made["extra_args"] == one["extra_args"] == listed[0]["extra_args"] == ["--api-key", "***", "--dtype=auto"]


async def test_what_a_model_is_and_may_run_is_kept_and_shown(front: Front) -> None:
    info = await front.create("a", kind="reranker", trust_remote_code=True)
    assert (info["kind"], info["trust_remote_code"]) == ("reranker", True)
    info = await front.create("b")
    assert (info["kind"], info["trust_remote_code"]) == (None, False)


@pytest.mark.clause("M2.4-prometheus-port")
async def test_an_explicit_prometheus_port_is_kept(front: Front) -> None:
    assert (await front.create("a", prometheus_port=9555))["prometheus_port"] == 9555


@pytest.mark.clause("M2.1-get", "M2.5-keys")
async def test_every_key_is_there_and_null_means_none(front: Front) -> None:
    info = await front.create("a")
    assert set(info) == set(InstanceInfo.model_fields) >= CONTRACT_KEYS
    assert info["gpu_id"] is None
    assert info["model"] is None


async def test_a_running_instance_shows_its_model(front: Front) -> None:
    await front.create("a")
    front.fleet.ready("a")
    info = await front.call("GET", "/instances/a", 200)
    InstanceInfo.model_validate(info)
    assert (info["status"], info["dtype"], info["threads"]) == ("running", "float32", 2)
    assert info["model"]["dimension"] == 384


@pytest.mark.clause("M2.4-null")
async def test_null_in_an_optional_field_means_absent(front: Front) -> None:
    optional = set(
        front.app.openapi()["paths"]["/instances"]["post"]["requestBody"]["content"]["application/json"]["schema"][
            "properties"
        ]
    )
    absent = dict.fromkeys(optional - {"name", "model_id"})
    assert (await front.create("a", **absent))["max_batch_tokens"] == 16384


@pytest.mark.clause("M2.4-auto-port")
async def test_port_0_asks_for_a_free_one(front: Front) -> None:
    assert (await front.create("a", port=0))["port"] == 8080


@pytest.mark.clause("M2.4-auto-port")
async def test_five_automatic_ports_differ_and_avoid_a_taken_one(front: Front) -> None:
    await front.create("fixed", port=8082)
    ports = [(await front.create(f"auto-{n}"))["port"] for n in range(5)]
    assert len({*ports, 8082}) == 6
    assert all(8080 <= port < 8180 for port in ports)


@pytest.mark.clause("M2.1-verbs", "M2.5-status")
async def test_a_stopped_instance_starts_and_a_running_one_stops(front: Front) -> None:
    await front.create("a")
    assert (await front.call("POST", "/instances/a/stop", 200))["status"] == "stopped"
    assert (await front.call("POST", "/instances/a/start", 200))["status"] == "starting"
    assert (await front.call("POST", "/instances/a/restart", 200))["restarts"] == 1


@pytest.mark.clause("M2.6-conflicts")
async def test_start_of_a_running_and_stop_of_a_stopped_instance_conflict(front: Front) -> None:
    await front.create("a")
    assert (await front.call("POST", "/instances/a/start", 409))["code"] == "ALREADY_RUNNING"
    await front.call("POST", "/instances/a/stop", 200)
    assert (await front.call("POST", "/instances/a/stop", 409))["code"] == "NOT_RUNNING"


@pytest.mark.clause("M2.1-delete")
async def test_delete_answers_the_last_view_and_then_nothing_is_left(front: Front) -> None:
    created = await front.create("a")
    assert await front.call("DELETE", "/instances/a", 200) == created
    assert (await front.call("GET", "/instances/a", 404))["code"] == "INSTANCE_NOT_FOUND"


@pytest.mark.clause("M2.1-get", "M2.1-verbs", "M2.7-deleted")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/instances/nope"),
        ("DELETE", "/instances/nope"),
        ("POST", "/instances/nope/start"),
        ("POST", "/instances/nope/stop"),
        ("POST", "/instances/nope/restart"),
        ("GET", "/instances/nope/logs"),
    ],
)
async def test_every_verb_on_an_unknown_name_is_404(front: Front, method: str, path: str) -> None:
    failure = await front.call(method, path, 404)
    assert failure["error"] == "Instance 'nope' not found"
    assert failure["code"] == "INSTANCE_NOT_FOUND"


@pytest.mark.clause("M2.1-no-body")
async def test_a_body_on_an_action_is_ignored(front: Front) -> None:
    await front.create("a")
    await front.call("POST", "/instances/a/stop", 200, data=b"not json")


@pytest.mark.clause("M2.4-duplicate-name", "M2.4-duplicate-port")
async def test_a_taken_name_and_a_taken_port_are_refused(front: Front) -> None:
    await front.create("a", port=9090)
    assert (await front.create("a", 409))["code"] == "INSTANCE_EXISTS"
    failure = await front.create("b", 422, port=9090)
    assert failure["code"] == "PORT_CONFLICT"
    assert failure["error"] == "Port 9090 already in use by instance 'a'"


@pytest.mark.clause("M2.4-gpu")
async def test_an_unknown_gpu_is_refused_with_those_there_are(front: Front) -> None:
    failure = await front.create("a", 400, gpu_id=99)
    assert failure["code"] == "INVALID_GPU_ID"
    assert "Invalid GPU ID 99" in failure["error"]


@pytest.mark.clause("M2.4-max-instances")
async def test_one_more_than_max_instances_is_refused(settings: Settings) -> None:
    async with listening(replace(settings, max_instances=2)) as front, aiohttp.ClientSession(front.url) as front.http:
        await front.create("a")
        await front.create("b")
        assert (await front.create("c", 422))["code"] == "MAX_INSTANCES_REACHED"


@pytest.mark.clause("M2.4-no-port")
async def test_no_free_port_is_refused(settings: Settings) -> None:
    one_port = replace(settings, instance_port_end=8081, max_instances=None)
    async with listening(one_port) as front, aiohttp.ClientSession(front.url) as front.http:
        await front.create("a")
        assert (await front.create("b", 422))["code"] == "PORT_ALLOCATION_FAILED"


# PATCH and rolling restarts.


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


@pytest.mark.parametrize("key", ["name", "port", "prometheus_port"])
async def test_a_key_that_no_update_can_change_is_refused_by_name(front: Front, key: str) -> None:
    await front.create("a")
    refused = await front.call("PATCH", "/instances/a", 422, json={key: 1})
    assert refused["error"].startswith(f"Validation error: {key}: cannot be changed; delete the instance")


async def test_what_was_asked_for_is_shown_beside_what_is_in_effect(front: Front) -> None:
    await front.create("a")
    front.fleet.ready("a")
    info = await front.call("GET", "/instances/a", 200)
    assert (info["dtype"], info["pooling"], info["kind"]) == ("float32", "mean", "embedding")
    assert info["requested"] == {"dtype": "auto", "pooling": None, "kind": None}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens: must be >= 1, or auto (got integer 0)"),
        ({"pooling": "foo"}, "pooling: must be one of cls, mean, max, last-token, splade (got text 'foo')"),
    ],
)
async def test_refusals_have_no_words_of_the_library(front: Front, body: dict[str, Any], says: str) -> None:
    assert (await front.create("a", 422, **body))["error"] == f"Validation error: {says}"


async def test_a_delete_removes_the_logs_where_it_is_asked_to(front: Front) -> None:
    for name in ("a", "b"):
        await front.create(name)
    await front.call("DELETE", "/instances/a", 200)
    await front.call("DELETE", "/instances/b?purge=true", 200)
    assert front.fleet.purged == ["b"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"name": "a", "model_id": None}, "Validation error: model_id: must be a valid string (got null)"),
        ({"name": "a"}, "Validation error: missing field `model_id`"),
        ({"name": None, "model_id": "tiny"}, "Validation error: name: must be a valid string (got null)"),
    ],
)
async def test_a_null_is_told_from_a_field_that_is_missing(front: Front, body: dict[str, Any], told: str) -> None:
    assert (await front.call("POST", "/instances", 422, json=body))["error"] == told


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD"),
        ("/instances", "GET, HEAD, POST"),
        ("/instances/x", "GET, HEAD, PATCH, DELETE"),
        ("/instances/x/start", "POST"),
    ],
)
async def test_options_without_cors_lists_the_methods_of_a_route(front: Front, path: str, allowed: str) -> None:
    async with front.http.options(path) as reply:
        assert (reply.status, await reply.read()) == (200, b"")
        assert sorted(reply.headers["Allow"].split(", ")) == sorted(allowed.split(", "))
    async with front.http.options("/no/such/route") as reply:
        assert reply.status == 404
