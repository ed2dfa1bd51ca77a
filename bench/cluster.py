"""`bench cluster`: what a call costs through a link to another host, beside the same call through a unix socket.

One worker process, which listens on both, and two mux processes: one on the worker's node, which uses the socket, and
one on another node, which uses TCP and mutual TLS. With `--namespace` the worker is in a network namespace of its own,
so the remote link crosses a virtual wire and not loopback alone.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import corpus, weights
from bench.contest import Child, child
from bench.front import INSTANCE, MUX_SERVICE, arrow_request, embed_request
from bench.load import LoadTask
from bench.machine import busy_s, cpu_s
from bench.report import publish
from teimgr.cluster.authority import FleetAuthority
from teimgr.config.mux import MuxConfig
from teimgr.spec import RouteEntry, RoutingSnapshot, State, WorkerEndpoint, WorkerSpec
from teimgr.wire.fleet_tls import FleetName, write_identity
from teimgr.wire.frames import HEADER, FrameType, Method, pack_header, unpack_header

HEADER_ROW = (
    *("model", "load", "callers", "local calls/s", "remote calls/s", "remote ÷ local", "least", "most"),
    *("local p50 ms", "remote p50 ms", "local p99 ms", "remote p99 ms"),
    *("mux µs more", "worker µs more", "foreign cores"),
)
_BATCH_TEXTS = 64
_LIMIT_S = 120.0
_HERE, _THERE = "head", "gpu-1"
_WIRE = ("10.213.7.1", "10.213.7.2")
_WARM_S = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=7, help="pairs of passes of each load (7)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one pass (3)")
    parser.add_argument("--namespace", action="store_true", help="the worker in a network namespace of its own; root")


@dataclass(frozen=True)
class Load:
    """One kind of call at one number of callers."""

    name: str
    path: str
    callers: int
    bodies: Sequence[bytes]


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts = corpus.queries(2048)
    queries, batches = [embed_request(text) for text in texts], [arrow_request(each) for each in _batches(texts)]
    loads = {
        "static": (
            Load("one query", "Embed", 1, queries),
            Load("queries", "Embed", 64, queries),
            Load("EmbedArrow × 64", "EmbedArrow", 1, batches),
            Load("EmbedArrow × 64", "EmbedArrow", 8, batches),
        ),
        "MiniLM": (
            Load("one query", "Embed", 1, queries),
            Load("EmbedArrow × 64", "EmbedArrow", 2, batches),
        ),
    }
    rows, data = [], []
    with tempfile.TemporaryDirectory(prefix="t") as name:
        folder = Path(name)
        models = {"static": weights.random_static(folder / "static", weights.minilm()), "MiniLM": weights.minilm()}
        for model, path in models.items():
            with ExitStack() as stack:
                nodes = stack.enter_context(_nodes(folder / f"nodes-{model}", path, options.namespace))
                for load in loads[model]:
                    pairs = _measure(nodes, load, options)
                    rows.append(_row(model, load, pairs))
                    data.append({"model": model, "load": load.name, "callers": load.callers, "pairs": pairs})
    wire = "a network namespace (veth)" if options.namespace else "loopback"
    facts = {
        "models": "static: a table of 30,522 × 256 random numbers, nothing but the path; MiniLM: all-MiniLM-L6-v2",
        "texts": f"{len(texts)} of 4 to 14 words (digest {corpus.digest(texts)}), one a call, or in batches of 64",
        "paths": f"client → mux → worker; local: unix socket; remote: TCP and TLS 1.3 of both ends over {wire}",
        "method": f"{options.rounds} pairs of passes of {options.seconds:g} s, each first in turn; medians; the ratio "
        "is that of a pair: median, least, most; µs more are CPU time per call of mux and worker, remote less local",
    }
    publish("cluster", facts, HEADER_ROW, rows, {"rows": data})
    return 0


@dataclass(frozen=True)
class Nodes:
    """The processes: ports of the muxes and pids, by link."""

    ports: dict[str, int]
    mux_pids: dict[str, int]
    worker_pid: int


@contextmanager
def _nodes(folder: Path, model: Path, namespace: bool) -> Iterator[Nodes]:
    """A worker on the node gpu-1, a mux beside it, and a mux on the node head."""
    authority = FleetAuthority(folder / "ca")
    for node in (_HERE, _THERE):
        write_identity(folder / node, *authority.issue_own(FleetName(node)), authority.authorities())
    with ExitStack() as stack:
        prefix, host = stack.enter_context(_namespace()) if namespace else ([], "127.0.0.1")
        path = str(folder / "w.sock")
        worker = stack.enter_context(_worker(folder, path, model, prefix, host))
        endpoint = _await_ready(path)
        entry = RouteEntry(INSTANCE, str(model), State.RUNNING, None, 1, (endpoint,))
        muxes = {
            link: stack.enter_context(_mux(folder, node, entry))
            for link, node in (("local", _THERE), ("remote", _HERE))
        }
        pids = {link: process.pid for link, (process, _) in muxes.items()}
        yield Nodes({link: port for link, (_, port) in muxes.items()}, pids, worker.pid)


@contextmanager
def _worker(folder: Path, path: str, model: Path, prefix: list[str], host: str) -> Iterator[subprocess.Popen[bytes]]:
    spec = WorkerSpec(
        name=INSTANCE,
        model_id=str(model),
        threads=os.cpu_count() or 1,
        host=_THERE,
        link_address=host,
        identity_dir=str(folder / _THERE),
    )
    with socket.socket(socket.AF_UNIX) as listener, (folder / "worker.log").open("wb") as log:
        listener.bind(path)
        listener.listen()
        command = [
            sys.executable,
            "-m",
            "teimgr.worker.process",
            str(listener.fileno()),
            "bench",
            str(folder),
            spec.to_json(),
        ]
        process = subprocess.Popen(prefix + command, stdout=log, stderr=log, pass_fds=[listener.fileno()])
    with _ended(process):
        yield process


@contextmanager
def _mux(folder: Path, node: str, entry: RouteEntry) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A mux with the route, and its port."""
    control = folder / f"{node}.sock"
    config = MuxConfig(
        host="127.0.0.1", port=0, control_socket=str(control), node=node, identity_dir=str(folder / node)
    )
    file = folder / f"{node}.json"
    file.write_text(config.to_json())
    with (folder / f"{node}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "teimgr.mux.process", str(file)], stdout=log, stderr=log)
    with _ended(process), _connected(control) as daemon:
        daemon.sendall(f'{{"snapshot": {RoutingSnapshot((entry,)).to_json()}, "stats": true}}\n'.encode())
        with daemon.makefile() as answers:
            yield process, int(json.loads(answers.readline())["port"])


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    end = time.monotonic() + _LIMIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise RuntimeError("the mux did not come up")
        time.sleep(0.02)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.settimeout(_LIMIT_S)
        daemon.connect(str(path))
        yield daemon


@contextmanager
def _namespace() -> Iterator[tuple[list[str], str]]:
    """A namespace behind a virtual wire: how to run a command in it, and its address."""
    name = f"teimgr-bench-{os.getpid()}"
    here, there = f"tb{os.getpid() % 100_000}a", f"tb{os.getpid() % 100_000}b"
    inside = ["ip", "netns", "exec", name]
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _run("ip", "addr", "add", f"{_WIRE[0]}/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*inside, "ip", "addr", "add", f"{_WIRE[1]}/24", "dev", there)
        _run(*inside, "ip", "link", "set", there, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield inside, _WIRE[1]
    finally:
        _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _await_ready(path: str) -> WorkerEndpoint:
    """Watch the worker until it is ready; its endpoint."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_LIMIT_S)
        link.connect(path)
        link.sendall(pack_header(0, FrameType.REQUEST, Method.WATCH, 1))
        while True:
            header = unpack_header(_receive(link, HEADER.size))
            facts = json.loads(_receive(link, header.length))
            if facts["state"] == "failed":
                raise RuntimeError(facts["reason"])
            if facts["state"] == "ready":
                return WorkerEndpoint(path, facts["incarnation"], facts["node"], facts["address"])


def _receive(link: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = link.recv(size - len(received))
        if not part:
            raise RuntimeError("the worker ended")
        received += part
    return received


def _measure(nodes: Nodes, load: Load, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Pairs of passes, of which the local one is the first in every other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / "requests.json"
        file.write_text(json.dumps([base64.b64encode(body).decode() for body in load.bodies]))
        callers = {}
        for link, port in nodes.ports.items():
            callers[link] = stack.enter_context(child(LoadTask("grpc", port, MUX_SERVICE + load.path)))
            callers[link].ask("requests", str(file))
            callers[link].ask("run", {"callers": load.callers, "seconds": _WARM_S})
        pairs = []
        for number in range(options.rounds):
            order = ("local", "remote") if number % 2 == 0 else ("remote", "local")
            pair = {link: _pass(nodes, link, callers[link], load, options.seconds) for link in order}
            pairs.append(pair)
            rates = {link: each["calls"] / each["seconds"] for link, each in pair.items()}
            print(f"  {load.name} {load.callers}: {rates['remote'] / rates['local']:.3f}", file=sys.stderr)
        return pairs


def _pass(nodes: Nodes, link: str, caller: Child, load: Load, seconds: float) -> dict[str, float]:
    pids = {"mux": nodes.mux_pids[link], "worker": nodes.worker_pid}
    before, busy = {name: cpu_s(pid) for name, pid in pids.items()}, busy_s()
    answer = caller.ask("run", {"callers": load.callers, "seconds": seconds})
    used = {f"{name}_cpu_s": cpu_s(pid) - before[name] for name, pid in pids.items()}
    foreign_s = busy_s() - busy - sum(used.values()) - answer["cpu_seconds"]
    return answer | used | {"foreign_cores": max(0.0, foreign_s / answer["seconds"])}


def _row(model: str, load: Load, pairs: list[dict[str, dict[str, float]]]) -> list[Any]:
    def median(link: str, of: str) -> float:
        return statistics.median(pair[link][of] for pair in pairs)

    def more_us(process: str) -> float:
        costs = [{link: each[f"{process}_cpu_s"] / each["all_calls"] for link, each in pair.items()} for pair in pairs]
        return 1e6 * statistics.median(cost["remote"] - cost["local"] for cost in costs)

    rates = [{link: each["calls"] / each["seconds"] for link, each in pair.items()} for pair in pairs]
    ratios = [rate["remote"] / rate["local"] for rate in rates]
    return [
        *(model, load.name, load.callers),
        *(statistics.median(rate[link] for rate in rates) for link in ("local", "remote")),
        *(statistics.median(ratios), min(ratios), max(ratios)),
        *(median(link, of) for of in ("p50_ms", "p99_ms") for link in ("local", "remote")),
        *(more_us("mux"), more_us("worker")),
        statistics.median(each["foreign_cores"] for pair in pairs for each in pair.values()),
    ]


def _batches(texts: Sequence[str]) -> list[Sequence[str]]:
    return [texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS)]
