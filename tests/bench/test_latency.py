"""The figures of `bench latency`: percentiles, ratios paired by round, and every interface of a real daemon."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench import latency, report, weights
from bench.child import KINDS
from bench.fleet import fleet
from bench.latency import BASELINE, LOADS, Found, record

_DAEMON = [
    "teimgr daemon, Embed through the mux",
    "teimgr daemon, Embed through the mux, without gRPC's library",
    "teimgr daemon, /v1/embeddings",
    "teimgr daemon, /embed",
]


def _found(path: str, *rounds: list[float]) -> Found:
    return Found(path, "float32", {load: list(rounds) for load in LOADS})


def test_a_record_has_percentiles_of_all_rounds_and_ratios_within_a_round() -> None:
    baseline = _found(BASELINE, [4.0, 4.0, 4.0], [9.0, 9.0, 9.0], [8.0, 8.0, 8.0])
    ours = _found("ours", [2.0, 2.0, 8.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0])

    found = record(ours, baseline)["loads"]["back to back"]

    assert found["p50_ms"] == 2.0
    assert found["p99_ms"] > 7.0
    assert found["times_baseline"] == {"median": 3.0, "least": 2.0, "most": 8.0}
    assert found["rounds"]["p50_ms"] == [2.0, 3.0, 1.0]
    assert len(latency._line(record(ours, baseline))) == len(latency.HEADER)


def test_float32_is_compared_with_onnx_runtime_round_by_round() -> None:
    ours, theirs = _found(latency.OURS, [1.0], [3.0], [2.0]), _found(latency.THEIRS, [2.0], [4.0], [4.0])
    records = {each.path: record(each, theirs) for each in (ours, theirs)}

    (said,) = latency.compared_in_float32(records).values()

    assert said == "back to back 0.50 (0.50 to 0.75), every 50 ms 0.50 (0.50 to 0.75)"
    assert latency.compared_in_float32({latency.OURS: records[latency.OURS]}) == {}


def test_only_rounds_that_every_path_has_count() -> None:
    baseline, ours = _found(BASELINE, [4.0], [5.0]), _found("ours", [2.0], [2.5])
    ours.latencies_ms["every 50 ms"].pop()

    latency._keep_whole_rounds([baseline, ours])

    assert {len(turns) for each in (baseline, ours) for turns in each.latencies_ms.values()} == {1}
    ours.latencies_ms["every 50 ms"].clear()
    with pytest.raises(KeyboardInterrupt):
        latency._keep_whole_rounds([baseline, ours])


@pytest.mark.slow
def test_callers_of_every_interface_get_the_same_vector() -> None:
    with fleet() as running:
        running.client.create("bench", str(weights.minilm()))
        running.client.wait_until_running("bench", deadline_s=100)
        callers = {
            name: KINDS[task.kind](task)
            for name, task in latency.tasks("", running, Path()).items()
            if name.startswith("teimgr daemon")
        }
        found = {name: caller.query("how does fog form") for name, caller in callers.items()}
        again = {name: caller.encode(["how does fog form", "yes"]) for name, caller in callers.items()}
        refused = callers["teimgr daemon, /embed"]
        with pytest.raises(RuntimeError, match=r"^/embed: .* 4\d\d "):
            refused.post({"inputs": 7})
        for caller in callers.values():
            caller.close()

    assert list(found) == _DAEMON
    assert {caller.dtype for caller in callers.values()} <= {"float32", "bfloat16", "float16"}
    for name, vector in found.items():
        assert vector.shape == (384,)
        assert again[name].shape == (2, 384)
        assert vector @ found[_DAEMON[0]] == pytest.approx(1.0, abs=1e-4)
        assert vector @ again[name][0] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.long
def test_every_interface_of_a_daemon_gives_the_vectors_of_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    command = argparse.ArgumentParser()
    latency.arguments(command)
    few = ["--queries", "4", "--seconds", "0.1", "--rounds", "2"]

    assert latency.run(command.parse_args([*few, "--only", "teimgr daemon"])) == 0

    (found,) = tmp_path.glob("latency-20*.json")
    document = json.loads(found.read_text())
    assert [row["path"] for row in document["rows"]] == [BASELINE, *_DAEMON]
    assert document["facts"]["could not load"] == "none"
    for row in document["rows"]:
        assert row["cosine_min"] > 0.999
        assert row["loads"].keys() == LOADS.keys()
        assert all(0 < load["p50_ms"] <= load["p99_ms"] for load in row["loads"].values())
        assert all(len(load["rounds"]["p50_ms"]) == 2 for load in row["loads"].values())


def test_paths_of_other_runtimes_are_known_kinds() -> None:
    assert {"openai", "embed", "grpc", *latency._PACKAGES} < KINDS.keys()
