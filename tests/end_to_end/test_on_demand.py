"""Models on demand: a call of any surface has its model loaded and is answered; what only looks loads none."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import models
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess
from tests.support.hub_server import files_of, lay_out
from tests.support.polling import until

from teimgr.client import Client
from teimgr.spec import State
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

SERVICE = "/tei_multiplexer.v1.TeiMultiplexer"
NAMES = ("a", "b")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmDaemonProcess]:
    """Two on-demand instances, `a` and `b`, of small models; two multiplexers."""
    with WarmDaemonProcess(mux_processes=2, on_demand={"models": ["sentence-transformers/*"]}) as running:
        with running.client() as client:
            for seed, name in enumerate(NAMES):
                folder = models.build("bert", tmp_path_factory.mktemp(name), seed=seed)
                client.create(name, str(folder), load="on_demand", idle_timeout_secs=1)
        running.await_grpc()
        yield running


@pytest.fixture
def client(daemon: WarmDaemonProcess) -> Iterator[Client]:
    """Of a daemon whose instances have become idle and are unloaded."""
    with daemon.client() as client:
        until(lambda: {client.get(name).status for name in NAMES} == {State.UNLOADED}, "idle unload")
        yield client


def post(daemon: DaemonProcess, path: str, body: Any, limit_s: float = 120.0) -> tuple[int, Any, dict[str, str]]:
    request = urllib.request.Request(
        f"{daemon.api}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), dict(error.headers)


def embed_by_grpc(daemon: WarmDaemonProcess, name: str, timeout_s: float = 60.0) -> list[float]:
    inner = tei_pb2.EmbedRequest(inputs="rain")
    request = multiplexer_pb2.EmbedRequest(target={"instance_name": name}, request=inner)
    with grpc.insecure_channel(daemon.grpc.removeprefix("http://")) as channel:
        call = channel.unary_unary(f"{SERVICE}/Embed", response_deserializer=tei_pb2.EmbedResponse.FromString)
        return list(call(request.SerializeToString(), timeout=timeout_s).embeddings)


def by_http(path: str, **body: Any) -> Callable[[WarmDaemonProcess], None]:
    def call(daemon: WarmDaemonProcess) -> None:
        status, answer, _ = post(daemon, path, body)
        assert status == 200, answer

    return call


def by_grpc(daemon: WarmDaemonProcess) -> None:
    assert len(embed_by_grpc(daemon, "a")) == models.WIDTH


def by_stream(daemon: WarmDaemonProcess) -> None:
    inner = tei_pb2.EmbedRequest(inputs="rain")
    request = multiplexer_pb2.EmbedRequest(target={"instance_name": "a"}, request=inner)
    with grpc.insecure_channel(daemon.grpc.removeprefix("http://")) as channel:
        call = channel.stream_stream(f"{SERVICE}/EmbedStream")
        assert len(list(call(iter([request.SerializeToString()] * 3), timeout=60))) == 3


def by_arrow(daemon: WarmDaemonProcess) -> None:
    with daemon.client() as client:
        assert client.embed_arrow(["rain", "fog"], instance="a").vectors.shape == (2, models.WIDTH)


SURFACES = {
    "openai": by_http("/v1/embeddings", model="a", input="rain"),
    "cohere": by_http("/v2/embed", model="a", texts=["rain"], input_type="search_query", embedding_types=["float"]),
    "ollama": by_http("/api/embed", model="a", input="rain"),
    "grpc": by_grpc,
    "stream": by_stream,
    "arrow": by_arrow,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_a_call_of_each_surface_loads_its_model(daemon: WarmDaemonProcess, client: Client, surface: str) -> None:
    SURFACES[surface](daemon)
    assert client.get("a").status is State.RUNNING
    assert client.get("b").status is State.UNLOADED


def test_calls_share_one_load(daemon: WarmDaemonProcess, client: Client) -> None:
    before = client.get("a").restarts
    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(SURFACES["openai" if number % 2 else "grpc"], daemon) for number in range(32)]
        for call in calls:
            call.result(timeout=120)
    assert client.get("a").restarts == before
    log = (daemon.folder / "daemon.log").read_text()
    [*_, last] = [json.loads(line) for line in log.splitlines() if '"unload' in line or '"load"' in line]
    assert last["message"] == "load"


def test_what_only_looks_loads_nothing(daemon: WarmDaemonProcess, client: Client) -> None:  # 12
    for path in ("/", "/v1/models", "/health", "/ready", "/health/ready", "/health/all", "/metrics", "/instances"):
        with urllib.request.urlopen(f"{daemon.api}{path}", timeout=30) as answer:
            answer.read()
    assert {client.get(name).status for name in NAMES} == {State.UNLOADED}
    assert client.ready()
    with urllib.request.urlopen(f"{daemon.api}/v1/models", timeout=30) as answer:
        cards = {card["id"]: (card["state"], card["residence"]) for card in json.loads(answer.read())["data"]}
    assert cards["a"] == cards["b"] == ("available", "loadable")


def test_other_terms_of_a_loaded_model_are_in_force_at_once(daemon: WarmDaemonProcess, client: Client) -> None:
    """They counted from its next change of state on: a pinned model was unloaded, one made idle stayed for ever."""
    SURFACES["openai"](daemon)
    client.update("a", pinned=True)
    by_http("/v1/embeddings", model="b", input="rain")(daemon)
    until(lambda: client.get("b").status is State.UNLOADED, "idle unload of the model that was called later")
    assert client.get("a").status is State.RUNNING
    client.update("a", pinned=False)
    until(lambda: client.get("a").status is State.UNLOADED, "idle unload once it is not pinned any more")


def test_a_users_stop_holds_and_a_start_loads(daemon: WarmDaemonProcess, client: Client) -> None:
    client.stop("a")
    assert client.get("a").status is State.STOPPED
    status, _, _ = post(daemon, "/v1/embeddings", {"model": "a", "input": "rain"})
    assert status == 503
    with pytest.raises(grpc.RpcError, match="stopped"):
        embed_by_grpc(daemon, "a")
    client.start("a")
    client.wait_until_running("a")
    assert client.get("a").status is State.RUNNING


def test_a_load_that_fails_for_good_is_told_without_a_time_to_come_again(
    daemon: WarmDaemonProcess, client: Client, tmp_path: Path
) -> None:
    (models.build("bert", tmp_path) / "model.safetensors").write_bytes(b"broken")
    client.create("broken", str(tmp_path), load="on_demand")
    try:
        for _ in range(2):
            status, answer, headers = post(daemon, "/v1/embeddings", {"model": "broken", "input": "rain"})
            assert status == 500, answer
            assert "retry-after" not in {name.lower() for name in headers}
            assert "not running (status: failed)" in answer["error"]["message"]
            with pytest.raises(grpc.RpcError) as failed:
                embed_by_grpc(daemon, "broken")
            assert failed.value.code() is grpc.StatusCode.INTERNAL
    finally:
        client.delete("broken")


def test_a_model_whose_hub_cannot_be_reached_is_tried_by_calls_alone(tmp_path: Path) -> None:
    """It was started again and again without end, and each of its calls waited for its whole deadline."""
    files = files_of(models.build("bert", tmp_path / "built"))
    daemon = DaemonProcess()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environ = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home")}
    try:
        with daemon.start(environ).client() as client:
            client.create("far", "org/far", load="on_demand")
            status, answer, headers = post(daemon, "/v1/embeddings", {"model": "far", "input": "rain"})
            assert (status, "cannot be fetched" in answer["error"]["message"]) == (503, True), answer
            assert 1 <= int({name.lower(): it for name, it in headers.items()}["retry-after"]) <= 30
            failed = client.get("far")
            assert (failed.status, failed.restarts) == (State.FAILED, 2)
            until(lambda: client.get("far").status is State.UNLOADED, "the end of the pause", 60)
            assert (client.get("far").pid, client.get("far").restarts) == (None, 2)
            assert "cannot be fetched" in (client.get("far").reason or "")
            lay_out(tmp_path / "home" / "hub", "org/far", files)
            assert post(daemon, "/v1/embeddings", {"model": "far", "input": "rain"})[0] == 200
            assert client.get("far").reason is None
    finally:
        daemon.close()


def test_ollamas_keep_alive(daemon: WarmDaemonProcess, client: Client) -> None:
    asked = {"model": "a", "input": "rain"}
    status, first, headers = post(daemon, "/api/embed", asked | {"keep_alive": "1h"})
    assert (status, 0 < first["load_duration"] < first["total_duration"]) == (200, True), first
    assert "x-teimgr-keep-alive" not in headers
    by_http("/v1/embeddings", model="b", input="rain")(daemon)
    until(lambda: client.get("b").status is State.UNLOADED, "b is idle")
    with urllib.request.urlopen(f"{daemon.api}/api/ps") as answer:
        [running] = json.loads(answer.read())["models"]
    left = datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)
    assert 2**20 < running["size"] < 2**30
    assert (running["name"], timedelta(minutes=50) < left <= timedelta(hours=1)) == ("a:latest", True), running

    status, last, _ = post(daemon, "/api/embed", asked | {"keep_alive": 0})
    assert (status, last["load_duration"], last["embeddings"]) == (200, 0, first["embeddings"])
    until(lambda: client.get("a").status is State.UNLOADED, "keep_alive 0")

    assert post(daemon, "/api/embed", asked | {"keep_alive": -1})[0] == 200
    assert post(daemon, "/api/generate", {"model": "a", "keep_alive": 0})[0] == 200  # `ollama stop`
    until(lambda: client.get("a").status is State.UNLOADED, "ollama stop")


@pytest.mark.parametrize("surface", ["openai", "grpc"])
def test_a_model_id_of_the_allow_list_is_loaded_without_an_instance(daemon: WarmDaemonProcess, surface: str) -> None:
    with daemon.client() as client:
        assert MINILM not in {each.model_id for each in client.list()}
        if surface == "openai":
            by_http("/v1/embeddings", model=MINILM, input="rain")(daemon)
            status, answer, _ = post(daemon, "/v1/embeddings", {"model": "owner/other", "input": "rain"})
            assert status == 404, answer
        else:
            inner = tei_pb2.EmbedRequest(inputs="rain")
            request = multiplexer_pb2.EmbedRequest(target={"model_id": MINILM}, request=inner)
            with grpc.insecure_channel(daemon.grpc.removeprefix("http://")) as channel:
                call = channel.unary_unary(f"{SERVICE}/Embed", response_deserializer=tei_pb2.EmbedResponse.FromString)
                assert len(call(request.SerializeToString(), timeout=60).embeddings) == 384
        [made] = [each for each in client.list() if each.model_id == MINILM]
        assert (made.load, made.idle_timeout_secs, made.status) == ("on_demand", 600, State.RUNNING)
        client.delete(made.name)


MADE_UP = "sentence-transformers/made-up"


def test_an_id_of_the_allow_list_that_no_model_has_is_not_found_in_each_dialect(daemon: WarmDaemonProcess) -> None:
    """It was 500, as of a model that is broken."""
    bodies = {
        "/v1/embeddings": {"model": MADE_UP, "input": "rain"},
        "/api/embed": {"model": MADE_UP, "input": "rain"},
        "/v2/embed": {"model": MADE_UP, "texts": ["rain"], "input_type": "search_query"},
    }
    found = {path: post(daemon, path, body) for path, body in bodies.items()}
    assert {path: status for path, (status, _, _) in found.items()} == dict.fromkeys(bodies, 404), found
    openai, ollama, cohere = (answer for _, answer, _ in found.values())
    assert openai["error"]["code"] == "model_not_found", openai
    assert all(MADE_UP in told for told in (openai["error"]["message"], ollama["error"], cohere["message"]))
    request = multiplexer_pb2.EmbedRequest(target={"model_id": MADE_UP}, request=tei_pb2.EmbedRequest(inputs="rain"))
    with grpc.insecure_channel(daemon.grpc.removeprefix("http://")) as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(f"{SERVICE}/Embed")(request.SerializeToString(), timeout=60)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    with daemon.client() as client:
        [made] = [each for each in client.list() if each.model_id == MADE_UP]
        assert (made.status, made.restarts) == (State.FAILED, 0)
        client.delete(made.name)


MANY = tuple("cdefgh")
BUDGET_MIB = 65  # for two of them at a time: each is measured at 24 to 30


def test_six_models_on_memory_for_two_lose_no_call(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random calls of four callers over HTTP and gRPC: every answer is its model's own, and the budget is kept."""
    settings = {"host_memory_budget_mib": BUDGET_MIB, "inference_timeout_secs": 200}
    with WarmDaemonProcess(**settings) as daemon, daemon.client() as client:
        for seed, name in enumerate(MANY):
            folder = models.build("bert", tmp_path_factory.mktemp(name), seed=seed)
            client.create(name, str(folder), load="on_demand", max_batch_tokens=512)
        daemon.await_grpc()
        alone = {name: embed_by_grpc(daemon, name, timeout_s=200.0) for name in MANY}
        assert len({tuple(vector) for vector in alone.values()}) == len(MANY)

        def call(seed: int) -> str | None:
            """None where the answer is right; else what came instead."""
            chance = random.Random(seed)
            name = chance.choice(MANY)
            if chance.random() < 0.5:
                status, answer, _ = post(daemon, "/v1/embeddings", {"model": name, "input": "rain"}, 300.0)
                vector = answer["data"][0]["embedding"] if status == 200 else None
                wrong = f"{status} {answer}"
            else:
                vector, wrong = embed_by_grpc(daemon, name, timeout_s=200.0), "another vector"
            is_right = vector is not None and vector == pytest.approx(alone[name], abs=1e-5)
            return None if is_right else f"{name}: {wrong}"

        loaded: list[int] = []
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call, seed) for seed in range(40)]
            while not all(each.done() for each in calls):
                loaded.append(sum(each.status is State.RUNNING for each in client.list()))
                time.sleep(0.05)
            assert [each.result() for each in calls if each.result() is not None] == []
        assert max(loaded) <= 2
        with urllib.request.urlopen(f"{daemon.api}/events?last=1000", timeout=30) as answer:
            events = json.loads(answer.read())
        evicted = [event["reason"] for event in events if event["event"] == "evicted"]
        assert len(evicted) >= len(MANY) - 2
        assert all(
            re.fullmatch(r"evicted [c-h]: value \S+ [<=>] \S+, resident \S+ s; for [c-h]", each) for each in evicted
        )
        assert not [event for event in events if event["event"] in ("crashed", "failed")]
