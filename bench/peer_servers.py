"""The servers that `bench servers` compares: how each is started, awaited, measured and ended.

Infinity (0.0.78), TEI (1.9.3) and tei-manager (0.12.0) have been run by this. The command of vLLM is written after its
documents and sources and has not been run.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.fleet import Fleet
from bench.front import INSTANCE, MUX_SERVICE
from bench.load import LoadTask
from bench.machine import cpu_s
from bench.progress import say
from teimgr.client import Client
from teimgr.errors import TeimgrError

ONE, FLOAT, BASE64 = "/v1/embeddings", "/v1/embeddings float × 64", "/v1/embeddings base64 × 64"
MUX, ARROW = "mux Embed", "mux EmbedArrow × 64"
BATCH_TEXTS = 64


@dataclass(frozen=True)
class Peer:
    """How a server is started: the option that gives its program, and the program's arguments.

    What is not set is the program's default: batch size, threads and, but for rows named after it, precision.
    """

    option: str
    arguments: tuple[str, ...]


_INFINITY = (
    *("v2", "--model-id", "{model}", "--served-model-name", INSTANCE, "--host", "127.0.0.1", "--port", "{port}"),
    *("--url-prefix", "/v1", "--engine", "torch", "--device", "cpu"),
    "--no-bettertransformer",  # which needs a package that transformers of today does not work with
)
_ROUTER = ("--hostname", "127.0.0.1", "--max-client-batch-size", str(BATCH_TEXTS))  # 32 texts by default
PEERS = {
    "infinity": Peer("infinity", _INFINITY),
    "infinity, bfloat16": Peer("infinity", (*_INFINITY, "--dtype", "bfloat16")),
    "tei": Peer("tei", ("--model-id", "{model}", "--port", "{port}", *_ROUTER)),
    "tei-manager": Peer("tei-manager", ("--port", "{manager}")),
    "vllm": Peer(
        "vllm",
        (
            *("serve", "{model}", "--served-model-name", INSTANCE, "--host", "127.0.0.1", "--port", "{port}"),
            *("--runner", "pooling"),
        ),
    ),
}
"""tei-manager gets addresses and folders in its environment, and the router's arguments with `POST /instances`. All its
loads go to its multiplexer: its instances speak gRPC alone, and nothing else of it computes."""

PROGRAMS = {"infinity": "infinity_emb", "tei": "text-embeddings-router", "tei-manager": "tei-manager", "vllm": "vllm"}
_STOP_S = 5.0
_CALL_S = 60.0
_LAST_WORDS = 400


class NotStarted(RuntimeError):
    """A server ended, or gave no vectors in time."""


@dataclass
class Server:
    """A server: its process, where each load goes, and the vectors it gave of the sample."""

    process: psutil.Process
    tasks: dict[str, LoadTask]
    vectors: Any = None

    def family(self) -> list[psutil.Process]:
        """Its process and everything it started that still runs."""
        with suppress(psutil.Error):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """CPU seconds of its whole process tree."""
        used = 0.0
        for member in self.family():
            with suppress(OSError):  # ended since
                used += cpu_s(member.pid)
        return used

    def take_vectors(self, texts: Sequence[str]) -> None:
        """Ask for the vectors of a sample, and forget the loads in base64 where the server does not answer in it.

        Raises:
            NotStarted: it refused, or gave something else.
            OSError: it does not listen.
        """
        if ONE not in self.tasks:
            address = f"127.0.0.1:{self.tasks[MUX].port}"
            try:
                with Client(grpc=address, timeout_s=_CALL_S) as client:
                    self.vectors = np.asarray(client.embed(list(texts), instance=INSTANCE))
            except TeimgrError as error:
                raise NotStarted(f"{address}: {error}") from error
            return
        port = self.tasks[ONE].port
        self.vectors = np.array([row["embedding"] for row in _rows(_post(port, ONE, openai_body(texts)))])
        try:
            encoded = _rows(_post(port, ONE, openai_body(texts[:1], "base64")))[0]["embedding"]
            base64.b64decode(encoded, validate=True)
        except (NotStarted, TypeError, ValueError):
            self.tasks.pop(BASE64, None)


def own_server(running: Fleet, texts: Sequence[str]) -> Server:
    """The daemon, whose instance runs."""
    found = Server(running.process, _http_tasks(running.api_port) | _mux_tasks(running.grpc_port))
    found.take_vectors(texts)
    return found


@contextmanager
def launched(
    peer: str, program: Path, further: Sequence[str], model: Path, folder: Path, router: Path | None
) -> Iterator[Callable[[Sequence[str], float], Server]]:
    """A started process of a peer, ended with all that it started when the block ends.

    Gives a function that waits until the server has given the vectors of some texts, or raises `NotStarted` after so
    many seconds. `router` is the program that tei-manager starts.

    Raises:
        OSError: the program cannot be run.
    """
    port, manager, grpc, metrics = _free_ports(4)
    arguments = [each.format(model=model, port=port, manager=manager) for each in PEERS[peer].arguments]
    if peer != "tei-manager":
        arguments += further
    log = folder / f"{peer}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=_environ(folder, grpc, metrics, router),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt from the terminal is for this process, which ends the server
        )
    server = None
    try:
        server = Server(psutil.Process(process.pid), _mux_tasks(grpc) if peer == "tei-manager" else _http_tasks(port))

        def ready(texts: Sequence[str], seconds: float) -> Server:
            end = time.monotonic() + seconds
            if peer == "tei-manager":
                extra = [*_ROUTER, *further]
                body = {"name": INSTANCE, "model_id": str(model), "port": port, "prometheus_port": metrics}
                content = json.dumps(body | {"extra_args": extra}).encode()
                _awaited(lambda: _post(manager, "/instances", content), process, end, log)
            _awaited(lambda: server.take_vectors(texts), process, end, log)
            return server

        yield ready
    finally:
        _stop(process, server)


def openai_body(texts: str | Sequence[str], form: str = "float") -> bytes:
    """The body of a request to /v1/embeddings."""
    return json.dumps({"model": INSTANCE, "input": texts, "encoding_format": form}).encode()


def _environ(folder: Path, grpc: int, metrics: int, router: Path | None) -> dict[str, str]:
    environ = dict(os.environ)
    environ.pop("PYTHONPATH", None)  # the program has libraries of its own
    return environ | {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PROMETHEUS_PORT": str(metrics),  # TEI's
        "TEI_MANAGER_GRPC_PORT": str(grpc),
        "TEI_MANAGER_STATE_FILE": str(folder / "tei-manager.toml"),
        "TEI_MANAGER_LOG_DIR": str(folder),
        "TEI_BINARY_PATH": str(router or PROGRAMS["tei"]),
    }


def _awaited(call: Callable[[], object], process: subprocess.Popen[bytes], end: float, log: Path) -> None:
    """Call until the server answers."""
    reason = "no answer"
    while time.monotonic() < end:
        if process.poll() is not None:
            reason = f"ended with status {process.returncode}"
            break
        try:
            call()
        except (OSError, http.client.HTTPException, NotStarted) as error:
            reason = f"{type(error).__name__}: {error}"
            time.sleep(0.1)
        else:
            return
    words = " ".join(log.read_text(errors="replace").split())[-_LAST_WORDS:]
    raise NotStarted(f"{reason}; the end of its log: {words or 'empty'}")


def _stop(process: subprocess.Popen[bytes], server: Server | None) -> None:
    """End the server and what it started, also where an interrupt comes meanwhile."""
    family = server.family() if server else []
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session is its own
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        process.wait()


def _http_tasks(port: int) -> dict[str, LoadTask]:
    return {load: LoadTask("http", port, ONE) for load in (ONE, FLOAT, BASE64)}


def _mux_tasks(port: int) -> dict[str, LoadTask]:
    rpcs = {MUX: "Embed", ARROW: "EmbedArrow"}
    return {load: LoadTask("grpc", port, f"{MUX_SERVICE}{rpc}") for load, rpc in rpcs.items()}


def _rows(content: bytes) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = sorted(json.loads(content)["data"], key=lambda row: row["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotStarted(f"no embeddings: {content[:200]!r}") from error
    return rows


def _post(port: int, path: str, body: bytes) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_CALL_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
    finally:
        connection.close()
    if reply.status not in (200, 201):
        raise NotStarted(f"{path}: {reply.status} {content[:200]!r}")
    return content


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def cosines(one: Any, other: Any) -> Any:
    """Of each vector with its counterpart; none where their widths differ."""
    if one.shape != other.shape:
        say(f"vectors of shape {one.shape} beside {other.shape}")
        return np.array([np.nan])
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
