"""Many instances at once: filters, bulk actions, templates, health by proof."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.support.measures import watch_turns
from tests.support.polling import on_uvloop
from tests.support.rest_listener import Front, listening

from teimgr.config.settings import Settings
from teimgr.control.supervision.worker_run import FleetProber
from teimgr.spec import RouteEntry, State
from teimgr.wire.routing.directory import Directory

TEMPLATES = {"big": {"model_id": "large", "max_batch_tokens": 65536, "tags": {"tier": "bulk", "team": "x"}}, "bare": {}}


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    settings = Settings(state_file=tmp_path / "state.toml", templates=TEMPLATES)
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front


async def three(front: Front) -> None:
    await front.create("a", tags={"team": "search", "tier": "live"})
    await front.create("b", tags={"team": "search"}, model_id="other")
    await front.create("c")
    front.fleet.ready("b")


@pytest.mark.clause("N-tags")
@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", "abc"),
        ("tag=team:search", "ab"),
        ("tag=team", "ab"),
        ("tag=team:search&tag=tier:live", "a"),
        ("tag=team:", ""),
        ("tag=none", ""),
        ("status=running", "b"),
        ("status=running&status=starting", "abc"),
        ("model_id=tiny", "ac"),
        ("model_id=tiny&tag=team", "a"),
    ],
)
async def test_filters_must_all_fit(front: Front, query: str, names: str) -> None:
    await three(front)
    found = await front.call("GET", f"/instances?{query}", 200)
    assert "".join(each["name"] for each in found) == names


async def test_an_unknown_status_is_refused(front: Front) -> None:
    assert "status" in (await front.call("GET", "/instances?status=asleep", 400))["error"]


@pytest.mark.clause("N-tags")
async def test_tags_are_shown(front: Front) -> None:
    assert (await front.create("a", tags={"team": "search"}))["tags"] == {"team": "search"}
    assert (await front.create("b"))["tags"] == {}
    assert "tags" in (await front.create("c", 422, tags={"team": 3}))["error"]


@pytest.mark.clause("N-bulk")
async def test_an_action_on_names_has_a_result_for_each(front: Front) -> None:
    await three(front)
    done = await front.call(
        "POST", "/instances/actions", 200, json={"action": "stop", "names": ["b", "nope", "a", "b"]}
    )
    assert [(each["name"], each["ok"], each["code"]) for each in done["results"]] == [
        ("b", True, None),
        ("nope", False, "INSTANCE_NOT_FOUND"),
        ("a", True, None),
    ]
    assert done["failed"] == 1
    assert done["results"][0]["instance"]["status"] == "stopped"
    again = await front.call("POST", "/instances/actions", 200, json={"action": "stop", "names": ["a"]})
    assert again["results"][0]["code"] == "NOT_RUNNING"


@pytest.mark.clause("N-bulk")
@pytest.mark.parametrize(("action", "status"), [("start", "starting"), ("restart", "starting")])
async def test_an_action_on_tags_takes_all_that_have_them(front: Front, action: str, status: str) -> None:
    await three(front)
    tags = {"team": "search"}
    await front.call("POST", "/instances/actions", 200, json={"action": "stop", "tags": tags})
    done = await front.call("POST", "/instances/actions", 200, json={"action": action, "tags": tags})
    assert [(each["name"], each["instance"]["status"]) for each in done["results"]] == [("a", status), ("b", status)]


async def test_many_are_deleted_at_once(front: Front) -> None:
    await three(front)
    await front.call("POST", "/instances/actions", 200, json={"action": "delete", "tags": {"team": "search"}})
    assert [each["name"] for each in await front.call("GET", "/instances", 200)] == ["c"]


@pytest.mark.parametrize(
    "body",
    [
        {"action": "stop"},
        {"action": "stop", "names": ["a"], "tags": {"a": "b"}},
        {"action": "stop", "names": []},
        {"action": "fly", "names": ["a"]},
        {"action": "stop", "name": "a"},
    ],
)
async def test_a_bulk_action_of_another_shape_is_refused(front: Front, body: dict[str, object]) -> None:
    assert (await front.call("POST", "/instances/actions", 422, json=body))["code"] == "VALIDATION_ERROR"


@pytest.mark.clause("N-templates")
async def test_a_template_fills_what_is_not_said(front: Front) -> None:
    made = await front.call("POST", "/instances", 201, json={"name": "a", "template": "big", "tags": {"team": "y"}})
    assert (made["model_id"], made["max_batch_tokens"]) == ("large", 65536)
    assert made["tags"] == {"tier": "bulk", "team": "y"}
    made = await front.call("POST", "/instances", 201, json={"name": "b", "template": "bare", "model_id": "m"})
    assert (made["model_id"], made["max_batch_tokens"]) == ("m", 16384)


async def test_a_template_that_does_not_help_is_refused(front: Front) -> None:
    refused = await front.call("POST", "/instances", 400, json={"name": "a", "template": "bgi"})
    assert refused["error"].endswith("template: unknown 'bgi'; did you mean 'big'?")
    refused = await front.call("POST", "/instances", 400, json={"name": "a", "template": "bare"})
    assert "missing field `model_id`" in refused["error"]
    assert "missing field `model_id`" in (await front.call("POST", "/instances", 422, json={"name": "a"}))["error"]


async def test_templates_are_shown(front: Front) -> None:
    shown = await front.call("GET", "/templates", 200)
    assert shown == [{"name": name, "keys": keys} for name, keys in TEMPLATES.items()]


@pytest.mark.clause("N-auto-tokens")
async def test_auto_batch_tokens_reach_the_manager_as_zero(front: Front) -> None:
    assert (await front.create("a", max_batch_tokens="auto"))["max_batch_tokens"] == 0  # which the real one resolves
    assert "max_batch_tokens" in (await front.create("b", 422, max_batch_tokens="most"))["error"]


@pytest.mark.clause("N-health")
async def test_health_of_one_and_of_all(front: Front) -> None:
    await three(front)
    front.fleet.fail("c", "broken files")
    assert await front.call("GET", "/instances/b/health", 200) == {
        "name": "b",
        "status": "running",
        "healthy": True,
        "last_proof": None,
        "health_check_failures": 0,
        "restarts": 0,
        "reason": None,
        "proofs": None,
    }
    whole = await front.call("GET", "/health/all", 200)
    assert whole["healthy"] is False
    assert (whole["counts"]["running"], whole["counts"]["failed"], whole["counts"]["starting"]) == (1, 1, 1)
    assert [each["reason"] for each in whole["instances"]] == [None, None, "broken files"]
    for name in "ac":
        await front.call("POST", f"/instances/{name}/stop", 200)
    assert (await front.call("GET", "/health/all", 200))["healthy"] is True
    assert (await front.call("GET", "/instances/nope/health", 404))["code"] == "INSTANCE_NOT_FOUND"


THOUSANDS = 5000
TAGS = {f"t{number}": "v" * 20 for number in range(64)}


@pytest.mark.parametrize(
    ("request_line", "names"),
    [
        ("GET /instances?" + "&".join(f"tag={name}:{value}" for name, value in TAGS.items()), None),
        ("GET /health/all?probe=true", None),
        ("POST /instances/actions", [f"nobody-{number}" for number in range(10_000)]),
        ("POST /instances/actions", [f"declared-{number}" for number in range(THOUSANDS)]),
    ],
    ids=["list", "health", "unknown names", "stopping all"],
)
@on_uvloop
async def test_what_concerns_thousands_of_instances_holds_the_loop_for_some_turns_only(
    tmp_path: Path, request_line: str, names: list[str] | None
) -> None:
    """Made in one go they would hold it for 60 ms to 2.4 s."""
    directory, held = Directory(), [0.0]
    for number in range(THOUSANDS):
        directory.publish(RouteEntry(f"declared-{number}", f"org/{number}", State.UNLOADED, on_demand=True))
    (method, path), body = request_line.split(), None if names is None else {"action": "stop", "names": names}
    data = None if body is None else json.dumps(body).encode()
    parts = {"live_probe": FleetProber(directory, 1.0)}
    async with listening(Settings(state_file=tmp_path / "state.toml"), parts=lambda fleet: parts) as front:
        front.fleet.declare(THOUSANDS, tags=TAGS)
        front.fleet.on_views_changed = lambda views: None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(front.url + path, data, headers, method=method)
        watching = asyncio.create_task(watch_turns(held))
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
        watching.cancel()
    found = json.loads(answer)
    rows = found if isinstance(found, list) else found["instances" if data is None else "results"]
    assert len(rows) == len(names or range(THOUSANDS))
    assert max(held) < 0.03
