"""What watchers and newcomers read: health, readiness, metrics, the OpenAPI document and its page."""

from __future__ import annotations

import json
import re
from datetime import datetime
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.rest_listener import Front

from teimgr import __version__
from teimgr.mux.forwarding import CallCounters
from teimgr.observability import catalogue
from teimgr.spec import InstanceSpec


@pytest.mark.clause("M2.3-health")
async def test_health_is_200_while_alive_and_shows_alarms(front: Front) -> None:
    health = await front.call("GET", "/health", 200)
    assert (health["status"], health["version"], health["alarms"]) == ("healthy", __version__, [])
    assert datetime.fromisoformat(health["timestamp"]).utcoffset() is not None
    front.fleet.store_alarm = "the state file was corrupt"
    front.alarms.append("the multiplexer died")
    assert (await front.call("GET", "/health", 200))["alarms"] == ["the state file was corrupt", "the multiplexer died"]


@pytest.mark.clause("D-listeners")
async def test_ready_is_503_until_all_that_should_run_does(front: Front) -> None:
    assert (await front.call("GET", "/ready", 200))["ready"] is True
    await front.create("a")
    await front.create("b")
    front.fleet.ready("a")
    assert (await front.call("GET", "/ready", 503))["waiting"] == [{"name": "b", "status": "starting", "reason": None}]
    front.fleet.fail("b", "no such model")
    assert (await front.call("GET", "/ready", 503))["waiting"][0]["reason"] == "no such model"


@pytest.mark.clause("D-listeners")
async def test_ready_is_503_before_the_fleet_is_known(front: Front) -> None:
    front.app.state.booted = lambda: False
    assert (await front.call("GET", "/ready", 503))["ready"] is False


async def test_a_stopped_instance_does_not_hold_readiness_up(front: Front) -> None:
    await front.create("a")
    await front.call("POST", "/instances/a/stop", 200)
    assert (await front.call("GET", "/ready", 200))["waiting"] == []


async def scrape(front: Front) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name → labels and values."""
    async with front.http.get("/metrics") as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/plain;")
        families = text_string_to_metric_families(await reply.text())
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in families:
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return samples


@pytest.mark.clause("M2.9-metrics")
async def test_metrics_keep_the_names_of_the_contract(front: Front) -> None:
    spec = (await front.fleet.create(InstanceSpec(name="a", model_id="tiny"))).spec
    front.metrics.count(catalogue.CREATED, spec.name, spec.model_id)
    front.metrics.count(catalogue.DELETED, "b")
    front.metrics.count(catalogue.RESTARTS, "a")
    front.metrics.count(catalogue.PROBE_FAILURES, "a")
    samples = await scrape(front)
    assert samples["tei_manager_instances_created_total"] == [({"instance": "a", "model": "tiny"}, 1.0)]
    assert samples["tei_manager_instances_deleted_total"] == [({"instance": "b"}, 1.0)]
    assert samples["tei_manager_instance_restarts_total"] == [({"instance": "a"}, 1.0)]
    assert samples["tei_manager_health_check_failures_total"] == [({"instance": "a"}, 1.0)]
    assert samples["tei_manager_instances_count"] == [({}, 1.0)]


async def test_metrics_show_states_starts_and_alarms(front: Front) -> None:
    await front.create("a")
    front.fleet.ready("a")
    front.alarms.append("something")
    front.metrics.observe(catalogue.WORKER_START, 0.2, "a")
    samples = await scrape(front)
    states = {labels["state"]: value for labels, value in samples["teimgr_instances"]}
    assert states == {"running": 1, "starting": 0, "stopping": 0, "stopped": 0, "failed": 0}
    assert samples["teimgr_worker_start_seconds_sum"] == [({"instance": "a"}, 0.2)]
    assert samples["teimgr_alarms"] == [({}, 1)]


async def test_metrics_show_what_the_multiplexers_count(front: Front) -> None:
    counters = CallCounters({"a", "b"})
    note = counters.begin("Embed")
    note.instance, note.messages = "a", 3
    counters.end(note, "OK")
    counters.begin("Info")
    front.metrics.mux_stats("mux-0", json.loads(json.dumps(counters.to_dict())))
    samples = await scrape(front)
    call = {"mux": "mux-0", "method": "Embed", "instance": "a"}
    assert samples["teimgr_mux_in_flight"] == [({"mux": "mux-0"}, 1)]
    assert samples["teimgr_mux_calls_total"] == [(call | {"status": "OK"}, 1)]
    assert samples["teimgr_mux_messages_total"] == [(call, 3)]
    assert samples["teimgr_mux_call_seconds_count"] == [(call, 1)]
    assert samples["teimgr_mux_call_seconds_bucket"][-1] == (call | {"le": "+Inf"}, 1)
    front.metrics.mux_gone("mux-0")
    assert "teimgr_mux_calls_total" not in await scrape(front)


async def test_requests_are_counted_by_template_never_by_path(front: Front) -> None:
    await front.call("GET", "/instances/x1", 404)
    await front.call("GET", "/instances/x2", 404)
    await front.call("GET", "/no/such", 404)
    async with front.http.head("/health"):
        pass
    counts = {
        (labels["method"], labels["route"], labels["status"]): value
        for labels, value in (await scrape(front))["teimgr_rest_request_seconds_count"]
    }
    assert counts == {
        ("GET", "/instances/{name}", "404"): 2,
        ("GET", "unmatched", "404"): 1,
        ("HEAD", "/health", "200"): 1,
    }


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
        "/ready",
        "/metrics",
        "/instances",
        "/instances/{name}",
        "/instances/{name}/start",
        "/instances/{name}/stop",
        "/instances/{name}/restart",
        "/instances/{name}/logs",
        "/instances/{name}/health",
        "/instances/actions",
        "/health/all",
        "/templates",
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
    assert links == ["/openapi.json"]
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
