"""The step `served` of `bench card`: the figures that a user sees, through the real daemon and its worker."""

from __future__ import annotations

import base64
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench import corpus, weights
from bench.card_engine import Findings, LoadedEngine, corpora, latencies, matrix_rate, timed_s
from bench.machine import cpu_s

_PASSES = 2
_QUERY_S = 3.0
_START_S = 90.0
_PROFILED_S = 3
_IN_FLIGHT = 4  # calls of the client, each with `_ROWS` texts
_ROWS = 2048


class Server(Protocol):
    """Where texts go."""

    @property
    def pids(self) -> dict[str, int]:
        """What works for it, by name; empty where it is this process alone."""

    def bulk(self, texts: list[str], in_flight: int = _IN_FLIGHT) -> None:
        """Embed all texts; raises where one fails."""

    def queries(self, texts: list[str]) -> dict[str, Any]:
        """Milliseconds of single short queries, one after the other, by interface."""


def served(device: str, model: Path) -> None:
    """Through `EmbedArrow` and single calls: MiniLM, BERT-base and BERT-large with random weights, beside the matrix
    rate of the card. Where the daemon cannot run, the engine in this process stands in, and the step says so."""
    found, is_card = Findings(), device == "cuda"
    rate = matrix_rate() if is_card else None
    if rate is not None:
        found["bfloat16 TFLOP/s"] = rate / 1e12
    texts = corpora(is_card)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        models = {"minilm": model}
        for shape in ("base", "large"):
            models[shape] = weights.random_bert(Path(name) / shape, model, shape if is_card else "mini")
        ways: dict[str, Callable[[], Any]] = {"daemon": _daemon, "engine in process": lambda: _in_process(device)}
        for way, opened in ways.items():
            try:
                with opened() as start:
                    for shape, path in models.items():
                        began = time.perf_counter()
                        server = start(shape, path)
                        found[f"{way}, {shape}, seconds to start"] = round(time.perf_counter() - began, 2)
                        _measure(found, f"{way}, {shape}", server, path, texts, rate)
            except Exception as error:  # of any kind: what can be measured otherwise still is
                found[f"{way} failed"] = f"{type(error).__name__}: {error}"[-1500:]
            else:
                return
    raise RuntimeError("neither the daemon nor the engine could be measured")


def _measure(
    found: Findings, name: str, server: Server, path: Path, texts: dict[str, list[str]], rate: float | None
) -> None:
    is_large = path.name == "large"
    if not is_large:
        found[f"{name}, one query, ms"] = server.queries(corpus.queries(256))
    for kind, chosen in texts.items():
        if kind == "mixed" or (is_large and kind != "up to 512 tokens"):
            continue
        chosen = chosen[: len(chosen) // 3] if is_large else chosen
        tokens = weights.count_tokens(path, chosen)
        server.bulk(chosen[: len(chosen) // 4])
        before = _cpu_s(server.pids)
        times = [timed_s(lambda: server.bulk(chosen)) for _ in range(_PASSES)]  # noqa: B023  called here
        took = {process: spent - before[process] for process, spent in _cpu_s(server.pids).items()}
        figures = {
            "tokens a text": round(tokens / len(chosen), 1),
            "tokens/s, median": round(tokens / statistics.median(times)),
            "tokens/s, best": round(tokens / min(times)),
            "cores in use": {process: round(spent / sum(times), 2) for process, spent in took.items()},
        }
        if not is_large:
            figures["tokens/s, 8 calls in flight"] = round(tokens / timed_s(lambda: server.bulk(chosen, 8)))  # noqa: B023
        if rate is not None:
            flop = flop_of_token(path, tokens / len(chosen))
            figures["of the bfloat16 matrix rate"] = round(tokens * flop / statistics.median(times) / rate, 3)
        found[f"{name}, {kind}"] = figures
        _profile(f"{name}, {kind}", server, chosen)
    if not is_large:
        with _kept_busy(server, texts["some 50 tokens"]):
            found[f"{name}, one query beside bulk, ms"] = server.queries(corpus.queries(256))


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in pids.items()}


@contextmanager
def _kept_busy(server: Server, texts: list[str]) -> Iterator[None]:
    """Embed `texts` again and again until the block ends."""
    stopped = threading.Event()

    def body() -> None:
        while not stopped.is_set():
            server.bulk(texts)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _profile(name: str, server: Server, texts: list[str]) -> None:
    """Stacks of the worker and the mux in bulk, folded, beside the findings; nothing where py-spy is not installed."""
    if shutil.which("py-spy") is None:
        return
    with _kept_busy(server, texts):
        spies = []
        for process in ("worker", "mux"):
            target = Path(os.environ["CARD_OUT"]) / f"{name}-{process}.folded".replace(", ", "-").replace(" ", "-")
            command = ["py-spy", "record", "-p", str(server.pids[process]), "-d", str(_PROFILED_S), "-r", "100"]
            spies.append(subprocess.Popen([*command, "-t", "-f", "raw", "-o", str(target)], stdout=subprocess.DEVNULL))
        for spy in spies:
            spy.wait(timeout=60)


def flop_of_token(path: Path, length: float) -> float:
    """FLOP of a BERT for each token of a text of `length`: linear layers, and attention's products."""
    config = json.loads((path / "config.json").read_text())
    hidden, layers, inner = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    return float(layers * (2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * length * hidden))


@contextmanager
def _daemon() -> Iterator[Callable[[str, Path], Server]]:
    """A running daemon; what comes out creates one instance after another and gives it."""
    from bench.fleet import fleet  # needs what a bare machine lacks

    with fleet() as running:
        names: list[str] = []

        def start(shape: str, path: Path) -> Server:
            for name in names:
                running.client.delete(name)
            running.client.create(shape, str(path))
            names[:] = [shape]
            running.client.wait_until_running(shape, deadline_s=_START_S)
            return _Instance(running, shape)

        yield start


class _Instance:
    """An instance of a running daemon."""

    def __init__(self, running: Any, name: str) -> None:
        self._running, self._name = running, name

    @property
    def pids(self) -> dict[str, int]:
        """The daemon, the mux, the worker, and this process."""
        return {**self._running.pids(self._name), "client": os.getpid()}

    def bulk(self, texts: list[str], in_flight: int = _IN_FLIGHT) -> None:
        """By teimgr's client."""
        found = self._running.client.embed_arrow(texts, instance=self._name, batch_rows=_ROWS, in_flight=in_flight)
        found.checked()

    def queries(self, texts: list[str]) -> dict[str, Any]:
        """At the worker's port, and through the mux."""
        from bench.contest import child
        from bench.front import MUX_SERVICE
        from bench.load import LoadTask
        from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

        def message(text: str) -> bytes:
            made = multiplexer_pb2.EmbedRequest()
            made.target.instance_name, made.request.inputs = self._name, text
            return bytes(made.SerializeToString())

        port = self._running.client.get(self._name).port
        loads = {
            "worker, /embed": (
                LoadTask("http", port, "/embed"),
                [json.dumps({"inputs": text}).encode() for text in texts],
            ),
            "mux, Embed": (
                LoadTask("grpc", self._running.grpc_port, f"{MUX_SERVICE}Embed"),
                [message(text) for text in texts],
            ),
        }
        found = {}
        for name, (task, bodies) in loads.items():
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file, child(task) as caller:
                json.dump([base64.b64encode(body).decode() for body in bodies], file)
                file.flush()
                caller.ask("requests", file.name)
                caller.ask("run", {"callers": 1, "seconds": 1.0})  # graphs are captured
                answer = caller.ask("run", {"callers": 1, "seconds": _QUERY_S})
                found[name] = {key: round(answer[key], 3) for key in ("p50_ms", "p99_ms", "calls")}
        return found


@contextmanager
def _in_process(device: str) -> Iterator[Callable[[str, Path], Server]]:
    """As `_daemon`, with engines in this process."""
    loaded: list[_Engine] = []

    def start(shape: str, path: Path) -> Server:
        for each in loaded:
            each.engine.close(1.0)
        loaded[:] = [_Engine(path, device, "auto", 32768)]
        return loaded[0]

    try:
        yield start
    finally:
        for each in loaded:
            each.engine.close(1.0)


class _Engine(LoadedEngine):
    pids: dict[str, int] = {}  # noqa: RUF012  no other process works for it

    def bulk(self, texts: list[str], in_flight: int = _IN_FLIGHT) -> None:
        """As one job."""
        job = self.run(texts)
        if job.errors:
            raise next(iter(job.errors.values()))

    def queries(self, texts: list[str]) -> dict[str, Any]:
        """As jobs."""
        latencies(self, texts)
        return {"engine": latencies(self, texts)}
