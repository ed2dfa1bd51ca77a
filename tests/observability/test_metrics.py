"""The metrics page of the daemon."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.rest_listener import Front

from teimgr.mux.forwarding import CallCounters
from teimgr.observability import catalogue
from teimgr.spec import InstanceSpec


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
    assert states == {"running": 1, "starting": 0, "stopping": 0, "stopped": 0, "failed": 0, "unloaded": 0}
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
