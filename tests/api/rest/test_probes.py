"""What watchers and newcomers read: health, readiness, metrics, the OpenAPI document and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from typing import Any

import aiohttp
import pytest
from tests.support.credentials import AUTH, SECRETS
from tests.support.rest_listener import MODEL, Front, listening

from teimgr import __version__
from teimgr.api.rest import probes
from teimgr.config.settings import Settings
from teimgr.spec import CUT_TEXTS


@pytest.mark.clause("M2.3-health")
async def test_health_is_200_while_alive_and_shows_alarms(front: Front) -> None:
    health = await front.call("GET", "/health", 200)
    assert (health["status"], health["version"], health["alarms"]) == ("healthy", __version__, [])
    assert datetime.fromisoformat(health["timestamp"]).utcoffset() is not None
    front.fleet.store_alarm = "the state file was corrupt"
    front.alarms.append("the multiplexer died")
    assert (await front.call("GET", "/health", 200))["alarms"] == ["the state file was corrupt", "the multiplexer died"]


async def test_health_tells_whose_texts_are_cut_and_of_many_how_many(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_CUT_SHOWN", 2)
    cut = replace(MODEL, warnings=("config.json: unknown key", f"{CUT_TEXTS}the 600 tokens of max_batch_tokens"))
    for number in range(5):
        await front.create(f"m{number}")
        front.fleet.ready(f"m{number}")
        if number:
            front.fleet.put(replace(front.fleet.get(f"m{number}"), model=cut))
    notices = (await front.call("GET", "/health", 200))["notices"]
    assert notices[0] == "m1: texts are cut to the 600 tokens of max_batch_tokens"
    assert notices[2:] == ["further instances that truncate texts: 2"]


@pytest.mark.clause("D-listeners")
async def test_ready_is_503_until_all_that_should_run_does(front: Front) -> None:
    assert (await front.call("GET", "/ready", 200))["ready"] is True
    await front.create("a")
    await front.create("b")
    front.fleet.ready("a")
    assert (await front.call("GET", "/ready", 503))["waiting"] == [{"name": "b", "status": "starting", "reason": None}]
    front.fleet.fail("b", "no such model")
    assert (await front.call("GET", "/ready", 503))["waiting"][0]["reason"] == "no such model"


async def test_health_ready_does_not_fall_for_one_instance(front: Front) -> None:
    front.app.state.booted = lambda: False
    assert (await front.call("GET", "/health/ready", 503))["ready"] is False
    front.app.state.booted = lambda: True
    await front.create("a")
    await front.create("b")
    front.fleet.ready("a")
    assert (await front.call("GET", "/health/ready", 503))["ready"] is False  # `b` of the start still loads
    front.fleet.fail("b", "no such model")
    assert (await front.call("GET", "/health/ready", 200))["ready"] is True
    await front.create("misspelt")
    assert (await front.call("GET", "/health/ready", 200))["ready"] is True
    await front.call("GET", "/ready", 503)


@pytest.mark.clause("D-listeners")
async def test_ready_is_503_before_the_fleet_is_known(front: Front) -> None:
    front.app.state.booted = lambda: False
    assert (await front.call("GET", "/ready", 503))["ready"] is False


async def test_a_stopped_instance_does_not_hold_readiness_up(front: Front) -> None:
    await front.create("a")
    await front.call("POST", "/instances/a/stop", 200)
    assert (await front.call("GET", "/ready", 200))["waiting"] == []


@pytest.mark.clause("M2-head")
@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/instances", "/openapi.json", "/docs"])
async def test_head_answers_like_get_without_a_body(front: Front, path: str) -> None:
    async with front.http.get(path) as got, front.http.head(path) as head:
        assert (head.status, head.headers["Content-Type"]) == (got.status, got.headers["Content-Type"])
        assert await head.read() == b""


@pytest.mark.clause("M2-cors")
async def test_any_origin_may_read_and_preflights_are_answered_before_routing(front: Front) -> None:
    origin = {"Origin": "https://app.example"}
    async with front.http.get("/health", headers=origin) as reply:
        assert reply.headers["Access-Control-Allow-Origin"] == "*"
    asked = origin | {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "content-type"}
    async with front.http.options("/no/such/route", headers=asked) as reply:
        assert reply.status == 200
        assert "DELETE" in reply.headers["Access-Control-Allow-Methods"]


async def test_the_openapi_document_names_every_route_and_its_failures(front: Front) -> None:
    document = await front.call("GET", "/openapi.json", 200)
    assert set(document["paths"]) == {
        "/health",
        "/health/ready",
        "/ready",
        "/metrics",
        "/instances",
        "/instances/{name}",
        "/instances/{name}/start",
        "/instances/{name}/stop",
        "/instances/{name}/restart",
        "/instances/{name}/logs",
        "/logs",
        "/instances/{name}/health",
        "/instances/actions",
        "/health/all",
        "/templates",
        "/hosts/tokens",
        "/plan",
        "/rebalance",
        "/hosts/{name}",
    }
    create = document["paths"]["/instances"]["post"]
    assert {"201", "400", "409", "413", "415", "422"} <= set(create["responses"])
    assert set(document["components"]["schemas"]["Failure"]["properties"]) == {"error", "code", "timestamp"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["properties"]["port"]["description"]


async def test_the_docs_page_lists_the_operations_and_loads_nothing_from_outside(front: Front) -> None:
    async with front.http.get("/docs") as reply:
        page, policy = await reply.text(), reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    links = _links(page)
    assert [each for each in links if not each.startswith("#")] == ["/openapi.json"]
    for path in ("/instances/{name}/logs", "max_batch_tokens", "/ready"):
        assert path in page
    assert "<script" not in page


def _links(page: str) -> list[str]:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(str(value) for name, value in attrs if name in ("href", "src"))

    Reader().feed(page)
    return found + re.findall(r"url\(.*?\)|@import", page)


def bearer(name: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {SECRETS[name]}"}}


async def test_only_a_key_that_sees_all_instances_reads_names_in_health(settings: Settings) -> None:
    async with listening(replace(settings, auth=AUTH)) as front, aiohttp.ClientSession(front.url) as http:
        async with http.post("/instances", json={"name": "other", "model_id": "tiny"}, **bearer("admin")) as reply:
            assert reply.status == 201
        front.fleet.fail("other", "no model 'secret/name'")
        front.alarms.append("other: failed: no model 'secret/name'")

        for name in (None, "inference", "team"):
            async with http.get("/health", **({} if name is None else bearer(name))) as reply:
                assert reply.status == 200
                assert (await reply.json())["alarms"] == ["alarms: 1; use a key for all instances to see them"], name
        async with http.get("/health", **bearer("read")) as reply:
            assert (await reply.json())["alarms"] == front.alarms
        async with http.get("/ready", **bearer("team")) as reply:
            assert reply.status == 403
