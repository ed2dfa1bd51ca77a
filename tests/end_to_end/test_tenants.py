"""Quotas of keys by a real daemon with two muxes and two workers: exact under calls in parallel, kept over restarts."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import models
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.polling import until

from teimgr.errors import DailyTokensExceeded
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

ADMIN = "admin-" + "k" * 24
KEYS: dict[str, dict[str, Any]] = {
    "daily": {"tokens_per_day": 3001},
    "rate": {"tokens_per_second": 1, "burst_tokens": 60},
    "shadow": {"tokens_per_day": 10, "shadow": True},
    "little": {"tokens_per_day": 100},
    "free": {},
}
EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed"


def key_of(name: str) -> str:
    return f"{name}-{'k' * 24}"


def auth() -> dict[str, object]:
    tables: list[dict[str, object]] = [{"name": "admin", "key": ADMIN, "rights": ["admin", "read"]}]
    tables += [{"name": name, "key": key_of(name), "rights": ["inference"], **more} for name, more in KEYS.items()]
    return {"enabled": True, "providers": ["api_keys"], "api_keys": tables}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with WarmDaemonProcess(mux_processes=2, auth=auth()) as running, running.client(api_key=ADMIN) as client:
        client.create("a", str(models.build_static(tmp_path_factory.mktemp("models") / "model")), replicas=2)
        client.wait_until_running("a", deadline_s=60)
        yield running


def post(daemon: DaemonProcess, key: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.api_port, timeout=60)
    try:
        headers = {"authorization": f"Bearer {key_of(key)}", "content-type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        content, found = reply.read(), {name.lower(): value for name, value in reply.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")  # some dialects refuse in plain words
        return reply.status, found, json.loads(content) if is_json else content
    finally:
        connection.close()


def embed(daemon: DaemonProcess, key: str, text: str) -> tuple[int, dict[str, str], Any]:
    return post(daemon, key, "/v1/embeddings", {"model": "a", "input": text})


def embed_by_grpc(daemon: DaemonProcess, key: str, text: str, address: str = "127.0.0.1") -> tuple[str, dict[str, str]]:
    """The name of the status, and the trailers or, of an answer, the headers."""
    request = multiplexer_pb2.EmbedRequest(target={"instance_name": "a"}, request={"inputs": text})
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"{address}:{daemon.grpc_port}", options) as channel:
        call = channel.unary_unary(EMBED)
        metadata = (("authorization", f"Bearer {key_of(key)}"),)
        try:
            _, done = call.with_call(request.SerializeToString(), metadata=metadata, timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            return error.code().name, dict(error.trailing_metadata())
        return "OK", dict(done.initial_metadata())


def usage(daemon: DaemonProcess, by: str = "key") -> dict[Any, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.api_port, timeout=60)
    connection.request("GET", f"/usage?by={by}", headers={"authorization": f"Bearer {ADMIN}"})
    rows = json.loads(connection.getresponse().read())["usage"]
    connection.close()
    return {tuple(row[name] for name in by.split(",")): row for row in rows}


def run_command(daemon: DaemonProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "teimgr", *arguments, "--url", daemon.api, "--api-key", ADMIN]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_daily_quota_is_exact_under_256_calls_at_a_time_of_both_protocols(daemon: DaemonProcess) -> None:
    text = "river " * 6
    cost = embed(daemon, "free", text)[2]["usage"]["total_tokens"]
    limit = KEYS["daily"]["tokens_per_day"]

    def call(number: int) -> tuple[str, int]:
        if number % 4 == 0:
            status, metadata = embed_by_grpc(daemon, "daily", text)
            code = metadata.get("x-teimgr-code", "")
            return ("OK", cost) if status == "OK" else (f"{status} {code}", 0)
        code, headers, body = embed(daemon, "daily", text)
        return ("OK", body["usage"]["total_tokens"]) if code == 200 else (f"{code} {headers['x-teimgr-code']}", 0)

    with ThreadPoolExecutor(256) as pool:
        found = list(pool.map(call, range(1200)))

    assert sum(tokens for _, tokens in found) == limit // cost * cost
    assert set(Counter(outcome for outcome, _ in found)) == {
        "OK",
        "429 DAILY_TOKENS_EXCEEDED",
        "RESOURCE_EXHAUSTED DAILY_TOKENS_EXCEEDED",
    }
    with daemon.client(api_key=key_of("daily")) as client, pytest.raises(DailyTokensExceeded) as refused:
        client.embed_arrow(["river " * 6] * 50, instance="a")
    assert refused.value.retry_after_s is None or refused.value.retry_after_s > 0
    row = usage(daemon)["daily",]
    assert (row["tokens"], row["calls"], row["texts"]) == (limit // cost * cost, limit // cost, limit // cost)
    assert row["refused"] > 1200 - limit // cost


def test_retry_after_is_the_true_wait_and_a_call_over_the_burst_is_never_served(daemon: DaemonProcess) -> None:
    text = "river " * 9
    first = embed(daemon, "rate", text)
    cost = first[2]["usage"]["total_tokens"]
    calls = [embed(daemon, "rate", text) for _ in range(60 // cost)]

    status, headers, body = calls[-1]
    assert (first[0], status) == (200, 429)
    missing = (60 // cost + 1) * cost - 60
    assert missing - 5 <= int(headers["retry-after"]) <= missing
    assert (body["error"]["type"], body["error"]["code"]) == ("tokens", "rate_limit_exceeded")
    assert headers["x-ratelimit-limit-tokens"] == "60"
    assert 60 % cost <= int(headers["x-ratelimit-remaining-tokens"]) <= 60 % cost + 5
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert headers["x-teimgr-code"] == "TOKEN_RATE_EXCEEDED"
    status, headers, body = embed(daemon, "rate", "river " * 100)
    assert (status, headers["x-teimgr-code"], "retry-after" in headers) == (413, "CALL_OVER_QUOTA", False)
    assert "burst of 60" in body["error"]["message"]
    status, trailers = embed_by_grpc(daemon, "rate", text)
    assert (status, trailers["x-teimgr-code"]) == ("RESOURCE_EXHAUSTED", "TOKEN_RATE_EXCEEDED")
    assert int(trailers["grpc-retry-pushback-ms"]) > 1000


def test_other_keys_do_not_notice_and_a_shadow_refuses_nothing(daemon: DaemonProcess) -> None:
    statuses = {embed(daemon, key, "river " * 9)[0] for key in ("free", "shadow") for _ in range(10)}

    assert statuses == {200}
    assert usage(daemon)["shadow",]["shadowed"] >= 9


TWO = ["river " * 7, "a lake and a river"]
_LISTED = ("/v1/embeddings", "/jina/v1/embeddings", "/vllm/v1/embeddings", "/voyage/v1/embeddings", "/vllm/pooling")
_OF_INSTANCE = ("/instances/a/v1/embeddings", "/infinity/embeddings", "/embeddings")
DIALECTS: dict[str, dict[str, Any]] = {
    **{path: {"model": "a", "input": TWO} for path in (*_LISTED, *_OF_INSTANCE, "/api/embed")},
    "/cohere/v1/embed": {"model": "a", "texts": TWO, "input_type": "search_document"},
    "/v2/embed": {"model": "a", "texts": TWO, "input_type": "search_document", "embedding_types": ["float"]},
    "/v1/encode/a": {"items": [{"text": text} for text in TWO]},
    "/instances/a/embed": {"inputs": TWO},
    "/instances/a/similarity": {"inputs": {"source_sentence": TWO[0], "sentences": TWO[1:]}},
}
ONE_TEXT: dict[str, dict[str, Any]] = {
    "/api/embeddings": {"model": "a", "prompt": TWO[0]},
    "/weaviate/a/vectors": {"text": TWO[0]},
    "/instances/a/embed": {"inputs": TWO[0]},
}


def counted(daemon: DaemonProcess) -> Counter[str]:
    row = usage(daemon).get(("free",), {})
    return Counter({name: row.get(name, 0) for name in ("tokens", "texts", "calls")})


def test_every_dialect_counts_the_same_tokens_and_a_refused_call_none(daemon: DaemonProcess) -> None:
    tokens_of = {
        text: embed(daemon, "free", text)[2]["usage"]["total_tokens"] for text in TWO
    }  # as a client of OpenAI is told
    found = {}
    for bodies, texts in ((DIALECTS, TWO), (ONE_TEXT, TWO[:1])):
        expected = Counter(tokens=sum(tokens_of[text] for text in texts), texts=len(texts), calls=1)
        for path, body in bodies.items():
            before = counted(daemon)
            status, _, _ = post(daemon, "free", path, body)
            if (status, new := counted(daemon) - before) != (200, expected):
                found[path] = status, new
    assert found == {}

    before = counted(daemon)
    assert embed_by_grpc(daemon, "free", TWO[0])[0] == "OK"
    assert counted(daemon) - before == Counter(tokens=tokens_of[TWO[0]], texts=1, calls=1)

    before = counted(daemon)
    for path in (*DIALECTS, *ONE_TEXT):
        assert post(daemon, "free", path, {"model": "a", "inputs": 7, "input": 7})[0] >= 400
    assert counted(daemon) == before


def test_every_dialect_refuses_a_used_up_quota_by_the_same_code_and_each_is_counted(daemon: DaemonProcess) -> None:
    first = [post(daemon, "little", "/v1/embeddings", DIALECTS["/v1/embeddings"])[0] for _ in range(9)]
    assert set(first) == {200, 429}
    replies = {path: post(daemon, "little", path, body)[:2] for path, body in DIALECTS.items()}
    refused = {path: (status, headers.get("x-teimgr-code")) for path, (status, headers) in replies.items()}
    assert refused == dict.fromkeys(DIALECTS, (429, "DAILY_TOKENS_EXCEEDED"))
    assert all(int(headers["retry-after"]) > 0 for _, headers in replies.values())
    row = usage(daemon)["little",]
    assert (row["calls"], row["refused"]) == (first.count(200), first.count(429) + len(DIALECTS))


def test_usage_is_the_clients_own_count_and_outlives_workers_and_daemon(daemon: DaemonProcess) -> None:
    before = usage(daemon, "key,model").get(("free", next(iter(usage(daemon, "model")))[0]), Counter())
    model = next(iter(usage(daemon, "model")))[0]
    own = sum(embed(daemon, "free", "river " * count)[2]["usage"]["total_tokens"] for count in range(1, 20))
    status, _, body = post(daemon, "free", "/v1/embeddings", {"model": "a", "input": ["one", "two", "three " * 50]})
    own += body["usage"]["total_tokens"]

    after = usage(daemon, "key,model")["free", model]
    assert status == 200
    assert after["tokens"] - before["tokens"] == own
    assert (after["texts"] - before["texts"], after["calls"] - before["calls"]) == (22, 20)

    all_rows = usage(daemon, "key,instance,model")
    with daemon.client(api_key=ADMIN) as client:
        client.stop("a")
        assert usage(daemon, "key,instance,model") == all_rows
    rows = json.loads(run_command(daemon, "usage", "--by", "key,model", "--json"))["usage"]
    assert {row["key"]: row["tokens"] for row in rows} == {key: row["tokens"] for (key,), row in usage(daemon).items()}
    until(lambda: (Path(daemon.folder) / "usage.json").exists(), "the file of usage", 30)
    daemon.stop()
    daemon.start()
    assert usage(daemon, "key,instance,model") == all_rows
    with daemon.client(api_key=ADMIN) as client:
        client.start("a")
        client.wait_until_running("a", deadline_s=60)
    assert embed(daemon, "daily", "river " * 6)[0] == 429  # the day is not over
