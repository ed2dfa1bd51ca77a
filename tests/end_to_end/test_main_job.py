"""The main job on the real model: every way to ask gives the vectors the authors meant."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tests.support.daemon_process import MINILM, DaemonProcess

from teimgr.errors import EmptyInput, InstanceNotFound, InvalidInput, TeimgrError
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

# contract/tei.md §9.2: TEI's own values for "test" at 128 dimensions, computed with tanh-GELU.
TEI_VALUES = [0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755]

# Of the texts, for the ways that take one text or a few at a time; Arrow takes all.
FEW = 100

COSINES = {"exact": 0.99999, "fast": 0.9995}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def instance_url(daemon: DaemonProcess, name: str) -> str:
    with daemon.client() as client:
        return f"http://127.0.0.1:{client.get(name).port}"


def lowest_cosine(vectors: np.ndarray, reference: np.ndarray) -> float:
    return float((vectors * reference).sum(axis=1).min())


def test_the_instance_port_gives_the_known_values(daemon: DaemonProcess) -> None:
    found = post(instance_url(daemon, "exact") + "/embed", {"inputs": "test", "dimensions": 128})

    assert np.shape(found) == (1, 128)
    assert abs(np.linalg.norm(found[0]) - 1) < 1e-6
    assert np.abs(np.array(found[0][:8]) - TEI_VALUES).max() < 2e-3


@pytest.mark.parametrize("name", COSINES)
def test_embed_arrow_agrees_with_sentence_transformers(
    daemon: DaemonProcess, texts: list[str], reference: np.ndarray, name: str
) -> None:
    with daemon.client() as client:
        answer = client.embed_arrow(texts, instance=name, truncate=True, normalize=True)

    assert answer.errors == {}
    assert lowest_cosine(answer.vectors, reference) >= COSINES[name]


@pytest.mark.parametrize("name", COSINES)
def test_single_calls_agree_whatever_they_were_batched_with(
    daemon: DaemonProcess, texts: list[str], reference: np.ndarray, name: str
) -> None:
    with daemon.client() as client:
        vectors = client.embed(texts[:FEW], instance=name, truncate=True)

    assert lowest_cosine(vectors, reference[:FEW]) >= COSINES[name]


@pytest.mark.clause("M8-streams")
@pytest.mark.parametrize("name", COSINES)
def test_a_stream_agrees_and_keeps_the_order(
    daemon: DaemonProcess, texts: list[str], reference: np.ndarray, name: str
) -> None:
    with daemon.client() as client:
        vectors = np.stack(list(client.embed_stream(texts[:FEW], instance=name, truncate=True)))

    assert lowest_cosine(vectors, reference[:FEW]) >= COSINES[name]


@pytest.mark.clause("M7.5-port")
@pytest.mark.parametrize("name", COSINES)
def test_http_agrees(daemon: DaemonProcess, texts: list[str], reference: np.ndarray, name: str) -> None:
    url = instance_url(daemon, name) + "/embed"

    vectors = np.array([row for start in range(0, FEW, 25) for row in post(url, {"inputs": texts[start : start + 25]})])

    assert lowest_cosine(vectors, reference[:FEW]) >= COSINES[name]


def test_a_text_has_the_same_vector_alone_and_in_a_crowd(daemon: DaemonProcess, texts: list[str]) -> None:
    with daemon.client() as client:
        crowd = client.embed_arrow(texts[:200], instance="exact", truncate=True, normalize=True).vectors
        alone = np.concatenate([client.embed(text, instance="exact", truncate=True) for text in texts[:20]])

    assert np.abs(crowd[:20] - alone).max() < 2e-6


@pytest.mark.clause("M1.8-rows")
def test_rows_that_cannot_be_served_fail_alone(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.embed_arrow(["fine", None, "", "word " * 5000, "fine"], instance="exact", truncate=False)

    assert sorted(answer.errors) == [1, 2, 3]
    assert np.array_equal(answer.vectors[0], answer.vectors[4])
    assert "must have less than 256 tokens" in str(answer.errors[3])


@pytest.mark.clause("N-model-id")
def test_a_model_id_routes_to_an_instance_of_it(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        assert client.embed("hello", model=MINILM).shape == (1, 384)
        with pytest.raises(TeimgrError, match="no/such-model"):
            client.embed("hello", model="no/such-model")
        with pytest.raises(InstanceNotFound, match="nobody"):
            client.embed("hello", instance="nobody")


def test_info_tokenize_and_decode_answer_over_the_multiplexer(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        info = client.info(instance="exact")
        tokens = client.tokenize("What is déjà vu?", instance="exact")
        text = client.decode([token.id for token in tokens], instance="exact")

    assert (info.model_id, info.dtype, info.kind, info.max_input_length) == (MINILM, "float32", "embedding", 256)
    assert [token.special for token in tokens] == [True] + [False] * (len(tokens) - 2) + [True]
    spans = [(token.start, token.stop) for token in tokens if not token.special]
    assert spans[0] == (0, 4)
    assert spans[-1] == (17, 18)  # bytes: both accented letters take two
    assert text == "what is deja vu?"


@pytest.mark.clause("M1.6-cost-metadata")
def test_unary_replies_carry_timings_as_metadata_and_headers(daemon: DaemonProcess) -> None:
    request = multiplexer_pb2.EmbedRequest(
        target=multiplexer_pb2.Target(instance_name="exact"), request=tei_pb2.EmbedRequest(inputs="hello world")
    )
    with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
        embed = channel.unary_unary(
            "/tei_multiplexer.v1.TeiMultiplexer/Embed",
            request_serializer=multiplexer_pb2.EmbedRequest.SerializeToString,
            response_deserializer=tei_pb2.EmbedResponse.FromString,
        )
        reply, call = embed.with_call(request, timeout=30)
        headers = dict(call.initial_metadata())

    assert (reply.metadata.compute_chars, reply.metadata.compute_tokens) == (11, 4)
    assert reply.metadata.total_time_ns >= reply.metadata.inference_time_ns > 0
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-tokens"] == "4"
    assert int(headers["x-total-time"]) >= 0


@pytest.mark.clause("M1.8-noop")
def test_noop_answers_zeros_of_the_real_dimension_and_knows_its_instances(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.embed_arrow(["a", None, "b"], instance="exact", noop=True)
        with pytest.raises(InstanceNotFound):
            client.embed_arrow(["a"], instance="nobody", noop=True)

    assert answer.vectors.shape == (3, 384)
    assert not answer.vectors.any()


def test_dimensions_cut_before_normalising(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        whole = client.embed("cut me", instance="exact")[0]
        cut = client.embed("cut me", instance="exact", dimensions=64)[0]
        with pytest.raises(InvalidInput, match="smaller than the maximum"):
            client.embed("cut me", instance="exact", dimensions=385)
        with pytest.raises(EmptyInput):
            client.embed("", instance="exact")

    assert np.allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-6)


def test_the_daemon_and_the_mux_never_load_torch(daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    muxes = [process for process in daemon.processes() if "teimgr.mux.process" in process.cmdline()]
    assert len(muxes) == 1
    for process in (psutil.Process(daemon.process.pid), *muxes):
        loaded = {Path(entry.path).name for entry in process.memory_maps()}
        assert not any(name.startswith("libtorch") for name in loaded), process.cmdline()


def test_two_instances_share_the_cores_fairly(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        threads = {instance.name: instance.details["threads"] for instance in client.list()}

    cores = len(psutil.Process().cpu_affinity())
    assert threads["exact"] == threads["fast"] == max(1, cores // 2)


def test_ready_health_and_metrics_tell_of_the_fleet(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        assert client.ready()
        assert client.health().status == "healthy"
    with urllib.request.urlopen(daemon.api + "/metrics", timeout=10) as reply:
        metrics = reply.read().decode()
    assert 'tei_manager_instances_created_total{instance="exact"' in metrics
    with urllib.request.urlopen(instance_url(daemon, "exact") + "/metrics", timeout=10) as reply:
        assert "te_embed_count" in reply.read().decode()


@pytest.mark.clause("M2.7-slice", "M5.2-log")
def test_the_workers_log_is_served(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        lines = client.logs("exact").lines

    assert any("worker ready" in line for line in lines)
    assert all(json.loads(line)["level"] for line in lines if line.startswith("{"))
