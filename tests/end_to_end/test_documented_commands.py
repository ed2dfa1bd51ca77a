"""The curl and grpcurl commands of tei-manager's documentation, in its order, against a real daemon.

Only ports, and the ids of models that are too large for a test, differ from the documentation's text.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.docsite.forked_commands import write_programs
from tests.support.credentials import Authority, needs_openssl
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess
from tests.support.models import build_splade
from tests.support.polling import until

LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(300)
MODEL = MINILM.replace("/", "%2F")


class Shell:
    """Runs the documented commands with this daemon's ports in them."""

    def __init__(self, daemon: DaemonProcess, splade: Path) -> None:
        self.daemon = daemon
        self.splade = splade
        self.tools = daemon.folder / "bin"
        write_programs(self.tools, "grpcurl")

    def run(self, command: str, status: int = 0) -> str:
        """What a command prints."""
        ports = {":9000": f":{self.daemon.api_port}", ":9001": f":{self.daemon.grpc_port}"}
        for documented, ours in ports.items():
            command = command.replace(documented, ours)
        words = shlex.split(command)
        if words[0] == "grpcurl":
            words[0] = str(self.tools / "grpcurl")
        else:
            words[1:1] = ["-s", "-S"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == status, done.stdout + done.stderr + self.daemon.log()
        return done.stdout if status == 0 else done.stderr

    def json(self, command: str) -> Any:
        return json.loads(self.run(command))

    def until(self, command: str, status: str) -> Any:
        """The JSON of a command, once its `status` is this one."""

        def reached() -> Any:
            found = self.json(command)
            assert found["status"] in (status, "starting", "stopping"), found
            return found["status"] == status and found

        return until(reached)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    splade = build_splade("distilbert", tmp_path / "splade", layout="plain")
    with WarmDaemonProcess() as daemon:
        yield Shell(daemon, splade)


def arrow(*texts: str) -> str:
    """The texts as the documentation has them: one column `text`, as an IPC stream in base64."""
    table = pa.table({"text": list(texts)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def column(reply: dict[str, str], name: str) -> list[Any]:
    with pa.ipc.open_stream(base64.b64decode(reply["arrowIpc"])) as reader:
        return reader.read_all()[name].to_pylist()  # type: ignore[no-any-return]


@pytest.mark.clause("M7.5-curl", "M7.5-grpcurl", "M7.5-port")
def test_the_documented_commands_work_in_their_order(shell: Shell) -> None:
    the_daemon_is_alive(shell)
    instances_are_created(shell)
    instances_are_shown_stopped_and_started(shell)
    logs_are_sliced(shell)
    models_are_managed(shell)
    http_embeds_on_the_port_of_an_instance(shell)
    grpc_calls_work_from_reflection(shell)


def wait_for_port(port: int) -> None:
    """Return once somebody listens there: REST answers a moment before the multiplexer does."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens)


def the_daemon_is_alive(shell: Shell) -> None:
    assert shell.json("curl http://localhost:9000/health")["status"] == "healthy"
    assert "tei_manager_instances_count 0" in shell.run("curl http://localhost:9000/metrics")


def instances_are_created(shell: Shell) -> None:
    create = "curl -X POST http://localhost:9000/instances -H 'Content-Type: application/json' -d"
    made = shell.json(f"""{create} '{{"name": "my-model", "model_id": "{MINILM}"}}'""")
    assert (made["name"], made["status"]) == ("my-model", "starting")
    more = '"max_batch_tokens": 32768, "max_concurrent_requests": 1024'
    refused = shell.json(f"""{create} '{{"name": "big", "model_id": "{MINILM}", "gpu_id": 99, {more}}}'""")
    assert refused["code"] == "INVALID_GPU_ID"
    made = shell.json(f"""{create} '{{"name": "big", "model_id": "{MINILM}", {more}}}'""")
    assert (made["max_batch_tokens"], made["max_concurrent_requests"]) == (32768, 1024)
    made = shell.json(f"""{create} '{{"name": "splade", "model_id": "{shell.splade}", "pooling": "splade"}}'""")
    assert made["pooling"] == "splade"


def instances_are_shown_stopped_and_started(shell: Shell) -> None:
    listed = shell.json("curl http://localhost:9000/instances")
    assert [each["name"] for each in listed] == ["my-model", "big", "splade"]
    for name in ("my-model", "big", "splade"):
        shell.until(f"curl http://localhost:9000/instances/{name}", "running")
    assert shell.json("curl -X POST http://localhost:9000/instances/big/stop")["status"] == "stopped"
    assert shell.json("curl -X POST http://localhost:9000/instances/big/start")["status"] == "starting"
    shell.until("curl http://localhost:9000/instances/big", "running")
    shell.json("curl -X POST http://localhost:9000/instances/big/restart")
    shell.until("curl http://localhost:9000/instances/big", "running")
    assert shell.json("curl -X DELETE http://localhost:9000/instances/big")["name"] == "big"


def logs_are_sliced(shell: Shell) -> None:
    logs = "http://localhost:9000/instances/my-model/logs"
    whole = shell.json(f"curl {logs}")
    assert whole["total_lines"] == len(whole["lines"]) > 0
    first = shell.json(f"curl '{logs}?start=0&end=10'")
    assert first["lines"] == whole["lines"][:10]
    assert shell.json(f"curl '{logs}?start=-100'")["lines"] == whole["lines"][-100:]


def models_are_managed(shell: Shell) -> None:
    add = "curl -X POST http://localhost:9000/models -H 'Content-Type: application/json' -d"
    assert shell.json(f"""{add} '{{"model_id": "{MINILM}"}}'""")["model_id"] == MINILM
    assert MINILM in [model["model_id"] for model in shell.json("curl http://localhost:9000/models")]
    assert shell.json(f"curl http://localhost:9000/models/{MODEL}")["model_id"] == MINILM
    # Nothing here reaches a hub: the model is on this machine already, or the refusal says why it cannot be had.
    fetched = shell.json(f"curl -X POST http://localhost:9000/models/{MODEL}/download")
    assert fetched.get("model_id") == MINILM or fetched["code"]
    loaded = shell.json(f"curl -X POST http://localhost:9000/models/{MODEL}/load")
    assert loaded.get("model_id") == MINILM or loaded["code"]


def http_embeds_on_the_port_of_an_instance(shell: Shell) -> None:
    port = shell.json("curl http://localhost:9000/instances/my-model")["port"]
    post = f"curl -X POST http://localhost:{port}/embed -H 'Content-Type: application/json' -d"
    (vector,) = shell.json(f"""{post} '{{"inputs": "Hello world"}}'""")
    assert len(vector) == 384


def grpc_calls_work_from_reflection(shell: Shell) -> None:
    call = "grpcurl -plaintext"
    mux = "localhost:9001 tei_multiplexer.v1.TeiMultiplexer"
    assert "tei_multiplexer.v1.TeiMultiplexer" in shell.run(f"{call} localhost:9001 list").split()
    target = '"target": {"instance_name": "my-model"}'
    request = '"request": {"inputs": "Hello world", "truncate": true, "normalize": true}'
    embedded = shell.json(f"{call} -d '{{{target}, {request}}}' {mux}/Embed")
    assert len(embedded["embeddings"]) == 384
    bare = shell.json(f"""{call} -d '{{{target}, "request": {{"inputs": "Hello world"}}}}' {mux}/Embed""")
    assert len(bare["embeddings"]) == 384
    info = shell.json(f"{call} -d '{{{target}}}' {mux}/Info")
    assert info["modelId"] == MINILM
    splade = '"target": {"instance_name": "splade"}'
    sparse = shell.json(f"""{call} -d '{{{splade}, "request": {{"inputs": "Hello"}}}}' {mux}/EmbedSparse""")
    assert sparse["sparseEmbeddings"]
    ipc = arrow("Hello", "world")
    table = shell.json(f"""{call} -d '{{{target}, "arrow_ipc": "{ipc}", "truncate": true}}' {mux}/EmbedArrow""")
    assert [len(row) for row in column(table, "embeddings")] == [384, 384]
    table = shell.json(f"""{call} -d '{{{splade}, "arrow_ipc": "{ipc}"}}' {mux}/EmbedSparseArrow""")
    assert len(column(table, "sparse_embeddings")) == 2
    nobody = '"target": {"instance_name": "missing"}'
    refused = shell.run(f"""{call} -d '{{{nobody}, "request": {{"inputs": "x"}}}}' {mux}/Embed""", status=64 + 5)
    assert "Code: NotFound" in refused


@pytest.mark.clause("M7.5-grpcurl")
@needs_openssl
def test_the_grpcurl_commands_with_certificates(tmp_path: Path) -> None:
    """`-cacert`, `-cert` and `-key` in place of `-plaintext`, as docs/MTLS.md has them."""
    authority = Authority(tmp_path / "certs")
    authority.server()
    authority.sign("client", "/O=Search/CN=client")
    folder = authority.folder
    files = {"ca_cert": "ca.pem", "server_cert": "server.pem", "server_key": "server.key"}
    mtls = {key: str(folder / name) for key, name in files.items()}
    with WarmDaemonProcess(auth={"enabled": True, "providers": ["mtls"], "mtls": mtls}) as daemon:
        shell = Shell(daemon, tmp_path)
        call = f"grpcurl -cacert {folder / 'ca.pem'} -cert {folder / 'client.pem'} -key {folder / 'client.key'}"
        wait_for_port(daemon.grpc_port)
        listed = shell.run(f"{call} localhost:9001 list").split()
        assert "tei_multiplexer.v1.TeiMultiplexer" in listed
        embed = "localhost:9001 tei_multiplexer.v1.TeiMultiplexer/Embed"
        nobody = """'{"target": {"instance_name": "missing"}, "request": {"inputs": "x"}}'"""
        assert "Code: NotFound" in shell.run(f"{call} -d {nobody} {embed}", status=64 + 5)
        stranger = f"grpcurl -cacert {folder / 'ca.pem'}"
        assert "Code: Unavailable" in shell.run(f"{stranger} localhost:9001 list", status=64 + 14)
        curl = f"curl --cacert {folder / 'ca.pem'} --cert {folder / 'client.pem'} --key {folder / 'client.key'}"
        assert shell.json(f"{curl} https://localhost:9000/health")["status"] == "healthy"
