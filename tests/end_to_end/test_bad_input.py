"""Bad input over REST and gRPC: each its own typed error, and the daemon goes on unharmed."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.daemon_process import MINILM, DaemonProcess

from teimgr.errors import InvalidConfig
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"


def rest(
    daemon: DaemonProcess, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> Any:
    """(status, decoded body) of one REST call."""
    request = urllib.request.Request(daemon.api + path, body, {"content-type": kind}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(autouse=True)
def unharmed(daemon: DaemonProcess) -> Iterator[None]:
    """After every test here the daemon answers and no worker was restarted."""
    yield
    with daemon.client() as client:
        assert client.health().status == "healthy"
        assert client.embed("still there", instance="exact").shape == (1, 384)
        assert [instance.restarts for instance in client.list() if instance.name in ("exact", "fast")] == [0, 0]


@pytest.mark.clause("M2.4-unknown-field", "M2.4-duplicate-name", "M2.4-extra-args")
@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b"{", 400, None, "JSON"),
        (b'{"name": "x"}', 422, None, "model_id"),
        (b'{"name": "x", "model_id": "m", "modle": 1}', 422, None, "modle"),
        (b'{"name": "x", "model_id": 7}', 422, None, "model_id"),
        (b'{"name": "x", "model_id": "m", "port": 70000}', 422, None, "port"),
        (b'{"name": "../etc", "model_id": "m"}', 422, "INVALID_INSTANCE_NAME", "path separators"),
        (b'{"name": "", "model_id": "m"}', 422, "INVALID_INSTANCE_NAME", "empty"),
        (b'{"name": "exact", "model_id": "m"}', 409, "INSTANCE_EXISTS", "exact"),
        (b'{"name": "x", "model_id": "m", "gpu_id": 99}', 400, "INVALID_GPU_ID", "Invalid GPU ID 99"),
        (b'{"name": "x", "model_id": "m", "extra_args": ["--dtyp", "float16"]}', 400, "INVALID_CONFIG", "--dtype"),
    ],
    ids=lambda value: value[:44].decode() if isinstance(value, bytes) else "",
)
def test_create_refuses(daemon: DaemonProcess, body: bytes, status: int, code: str | None, says: str) -> None:
    found, answer = rest(daemon, "POST", "/instances", body)

    assert found == status
    assert says in answer["error"]
    assert answer["timestamp"].endswith("Z")
    assert code is None or answer["code"] == code


@pytest.mark.clause("M2.4-duplicate-port")
def test_a_port_that_is_taken_is_named_with_its_holder(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        port = client.get("exact").port

    taken = rest(daemon, "POST", "/instances", json.dumps({"name": "x", "model_id": "m", "port": port}).encode())
    own = rest(
        daemon, "POST", "/instances", json.dumps({"name": "x", "model_id": "m", "port": daemon.api_port}).encode()
    )

    assert taken[0] == own[0] == 422
    assert taken[1]["code"] == own[1]["code"] == "PORT_CONFLICT"
    assert "exact" in taken[1]["error"]


@pytest.mark.clause("M2.2-shape")
@pytest.mark.parametrize(
    ("method", "path", "kind", "status"),
    [
        ("GET", "/instances/nobody", "application/json", 404),
        ("DELETE", "/instances/nobody", "application/json", 404),
        ("POST", "/instances/exact/start", "application/json", 409),
        ("GET", "/instances/..%2Fdaemon/logs", "application/json", 422),
        ("GET", "/nowhere", "application/json", 404),
        ("PUT", "/instances", "application/json", 405),
        ("POST", "/instances", "text/plain", 415),
        ("GET", "/instances/exact/logs?start=first", "application/json", 400),
    ],
)
def test_other_routes_refuse_in_the_same_shape(
    daemon: DaemonProcess, method: str, path: str, kind: str, status: int
) -> None:
    found, answer = rest(daemon, method, path, b"{}" if method == "POST" else None, kind)

    assert found == status
    assert set(answer) == {"error", "code", "timestamp"}


def test_a_body_over_the_limit_is_refused(daemon: DaemonProcess) -> None:
    body = json.dumps({"name": "x", "model_id": "m" * 3_000_000}).encode()

    assert rest(daemon, "POST", "/instances", body)[0] == 413


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"config.json": "{ not json"}, "config.json is not valid JSON"),
        ({"config.json": '{"model_type": "no-such-architecture"}', "tokenizer.json": "{}"}, "length limit"),
        ({}, "has no config.json"),
    ],
    ids=["broken", "unknown", "empty"],
)
def test_a_model_whose_files_tell_that_it_cannot_be_served_is_refused_at_creation(
    daemon: DaemonProcess, tmp_path: Path, content: dict[str, str], says: str
) -> None:
    folder = written(tmp_path / "model", content)
    with daemon.client() as client, pytest.raises(InvalidConfig, match=says):
        client.create("broken", str(folder))


def test_a_model_directory_that_is_missing_is_refused_at_creation(daemon: DaemonProcess, tmp_path: Path) -> None:
    with daemon.client() as client, pytest.raises(InvalidConfig, match=f"no such directory: {tmp_path}/model"):
        client.create("missing", str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "neither a directory here nor in the hub cache")],
    ids=["unknown id"],
)
def test_a_model_that_cannot_load_fails_for_good_with_the_reason(
    daemon: DaemonProcess, tmp_path: Path, content: dict[str, str] | None, says: str
) -> None:
    folder = "nobody/has-this" if content is None else written(tmp_path / "model", content)
    with daemon.client() as client:
        client.create("broken", str(folder))
        try:
            reason = await_failure(daemon, "broken")
            with pytest.raises(Exception, match="broken"):
                client.embed("hello", instance="broken")
        finally:
            client.delete("broken")

    assert says in reason


def written(folder: Path, content: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    return folder


def test_weights_cut_short_fail_for_good(daemon: DaemonProcess, tmp_path: Path, minilm_folder: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(minilm_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with daemon.client() as client:
        client.create("cut", str(folder))
        try:
            assert f"{weights} ends too soon" in await_failure(daemon, "cut")
        finally:
            client.delete("cut")


def await_failure(daemon: DaemonProcess, name: str) -> str:
    """The reason, once the instance has failed for good."""
    from teimgr.errors import ModelLoadFailed

    with daemon.client() as client, pytest.raises(ModelLoadFailed):
        client.wait_until_running(name, deadline_s=60)
    status, view = rest(daemon, "GET", f"/instances/{name}")
    assert (status, view["status"]) == (200, "failed")
    return str(view["reason"])


# gRPC


@pytest.fixture(scope="module")
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}", options) as opened:
        yield opened


def refusal(channel: grpc.Channel, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
    """Status and text of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(SERVICE + method)(request, timeout=30)
    error = caught.value
    assert isinstance(error, grpc.Call)
    return error.code(), error.details() or ""


def embed(target: dict[str, Any] | None, **request: Any) -> bytes:
    where = None if target is None else multiplexer_pb2.Target(**target)
    return multiplexer_pb2.EmbedRequest(target=where, request=tei_pb2.EmbedRequest(**request)).SerializeToString()


EXACT = {"instance_name": "exact"}


@pytest.mark.parametrize(
    ("request_bytes", "code", "says"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT, "Missing target"),
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, ""),
        (embed({}, inputs="a"), grpc.StatusCode.INVALID_ARGUMENT, "No routing specified"),
        (embed({"instance_name": ""}, inputs="a"), grpc.StatusCode.INVALID_ARGUMENT, "Instance name cannot be empty"),
        (embed({"instance_name": "missing"}, inputs="a"), grpc.StatusCode.NOT_FOUND, "Instance 'missing' not found"),
        (embed({"instance_index": 99}, inputs="a"), grpc.StatusCode.NOT_FOUND, "99"),
        (embed(EXACT, inputs=""), grpc.StatusCode.INVALID_ARGUMENT, "`inputs` cannot be empty"),
        (embed(EXACT, inputs="a", dimensions=0), grpc.StatusCode.INVALID_ARGUMENT, "`dimensions` should be positive"),
        (embed(EXACT, inputs="a", prompt_name="x"), grpc.StatusCode.INVALID_ARGUMENT, "`default-prompt-name`"),
        (embed(EXACT, inputs="word " * 400), grpc.StatusCode.INVALID_ARGUMENT, "less than 256 tokens. Given: 402"),
        (embed(EXACT, inputs="x" * 1_000_000), grpc.StatusCode.INVALID_ARGUMENT, "less than 64000 characters"),
    ],
    ids=lambda value: "" if isinstance(value, bytes | grpc.StatusCode) else value[:40],
)
def test_embed_refuses(channel: grpc.Channel, request_bytes: bytes, code: grpc.StatusCode, says: str) -> None:
    found, details = refusal(channel, "Embed", request_bytes)

    assert found is code, details
    assert says in details


def test_a_text_of_a_million_characters_is_cut_where_that_is_allowed(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        long = client.embed("word " * 200_000, instance="exact", truncate=True)
        cut = client.embed("word " * 300, instance="exact", truncate=True)

    assert (long == cut).all()


@pytest.mark.clause("M1.8-bad-input")
def test_garbage_arrow_is_refused_even_for_an_unknown_option(channel: grpc.Channel) -> None:
    request = multiplexer_pb2.EmbedArrowRequest(target=multiplexer_pb2.Target(**EXACT), arrow_ipc=b"garbage")

    code, details = refusal(channel, "EmbedArrow", request.SerializeToString())

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Invalid Arrow IPC" in details


@pytest.mark.clause("M1.10-size")
def test_a_message_of_50_mb_is_refused_naming_both_sizes(channel: grpc.Channel) -> None:
    code, details = refusal(channel, "Embed", embed(EXACT, inputs="x" * 50_000_000))

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "41943040" in details
    assert "500000" in details


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("EmbedSparse", {"inputs": "a"}),
        ("Predict", {"inputs": "a"}),
        ("PredictPair", {"inputs": ["a", "b"]}),
        ("Rerank", {"query": "a", "texts": ["b"]}),
    ],
)
def test_what_the_model_does_not_do_is_a_failed_precondition(
    channel: grpc.Channel, method: str, fields: dict[str, Any]
) -> None:
    request = getattr(multiplexer_pb2, f"{method}Request")(target=multiplexer_pb2.Target(**EXACT))
    for name, value in fields.items():
        place = getattr(request.request, name)
        place.extend(value) if isinstance(value, list) else setattr(request.request, name, value)

    assert refusal(channel, method, request.SerializeToString())[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_the_model_under_test_is_the_real_one(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        assert client.get("exact").model_id == MINILM
