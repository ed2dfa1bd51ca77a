"""`bench front`: requests per second and latency by interface and callers, with the CPU time of every process.

The model is a look-up table, so that what is measured is everything around a model. With `--against` a daemon of
another checkout answers the same calls in turn.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.load import LoadTask
from bench.machine import busy_s, cpu_s
from bench.report import publish
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2

HEADER = (
    *("load", "callers", "calls/s", "× median", "× low", "× high", "CPU ×", "p50 ms", "p99 ms", "max ms"),
    *("daemon µs", "mux µs", "worker µs", "client µs", "foreign cores"),
)
INSTANCE = "bench"
_BATCH_TEXTS = 64
_BATCH_CALLERS = 8
_AT_SOCKET = ", Unix socket"
MUX_SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64, 256], help="of single texts (1 8 64 256)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one load, after half a second of warm-up (3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, with every load once in each (5)")
    parser.add_argument("--bulk", type=int, default=60_000, help="texts of the bulk job (60,000)")
    parser.add_argument("--only", nargs="+", default=[], metavar="LOAD", help="loads with one of these in their name")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in turns")


@dataclass(frozen=True)
class Load:
    """One kind of call at one number of callers, of `texts` each; `over_tcp` is the load with the same calls to the
    port, of one to a Unix socket."""

    name: str
    callers: int
    texts: int = 1
    over_tcp: str = ""


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    texts = corpus.queries(4096)
    every = [
        *(Load("/embed", callers) for callers in options.callers),
        *(
            load
            for name in ("/v1/embeddings", "mux Embed")
            for callers in options.callers
            for load in (Load(name, callers), Load(f"{name}{_AT_SOCKET}", callers, over_tcp=name))
        ),
        Load("/v1/embeddings base64 × 64", _BATCH_CALLERS, _BATCH_TEXTS),
        Load("mux EmbedArrow × 64", _BATCH_CALLERS, _BATCH_TEXTS),
        Load("EmbedArrow by the client", 1, options.bulk),
    ]
    loads = [load for load in every if not options.only or any(part in load.name for part in options.only)]
    wanted = {(load.over_tcp, load.callers) for load in loads}
    loads = [load for load in every if load in loads or (load.name, load.callers) in wanted]
    checkouts = {"here": None} | ({"against": options.against} if options.against else {})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = weights.random_static(folder / "static", weights.minilm())
        targets = {
            name: Target(stack, stack.enter_context(fleet(checkout)), model, texts, options.bulk, folder / name)
            for name, checkout in checkouts.items()
        }
        passes: dict[tuple[str, Load], list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for load in loads:
                for name, target in targets.items():
                    if load.over_tcp and name != "here":
                        continue  # the other checkout may have no Unix sockets
                    passes.setdefault((name, load), []).append(target.measure(load, options.seconds))
    rows = [_row(load, name, passes) for load in loads for name in targets if (name, load) in passes]
    facts = {
        "model": "a table of 30,522 × 256 random numbers with MiniLM's tokenizer, one replica",
        "texts": f"{len(texts)} of 4 to 14 words (digest {corpus.digest(texts)}), one a call, or as the load names",
        "method": f"{options.rounds} rounds, each load {options.seconds:g} s in each, in turn; medians; × is the calls "
        "per second here over those of the other checkout, or at a Unix socket over those at the port, in the same "
        "round: median, lowest and highest",
        "columns": "µs are CPU time per call of each process (of the bulk load per text); CPU × is that of all server "
        "processes of the other checkout, or of the calls to the port, over that here; the load generator shares the "
        "cores",
    }
    data = [
        {"load": load.name, "callers": load.callers, "checkout": name, "passes": passes[name, load]}
        for name, load in passes
    ]
    publish("front", facts, HEADER, rows, {"rows": data})
    return 0


class Target:
    """A daemon with one static model, and the load generators that call it."""

    def __init__(
        self, stack: ExitStack, running: Fleet, model: Path, texts: Sequence[str], bulk: int, folder: Path
    ) -> None:
        running.client.create(INSTANCE, str(model))
        running.client.wait_until_running(INSTANCE, deadline_s=120)
        self._pids = running.pids(INSTANCE)
        port = running.client.get(INSTANCE).port
        folder.mkdir()
        self._stack, self._folder = stack, folder
        batches = [texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS)]
        openai = LoadTask("http", running.api_port, "/v1/embeddings")
        in_base64 = {"model": INSTANCE, "encoding_format": "base64"}
        self._tasks: dict[str, tuple[LoadTask | Task, list[bytes]]] = {
            "/embed": (LoadTask("http", port, "/embed"), [_json({"inputs": text}) for text in texts]),
            "/v1/embeddings": (openai, [_json({"model": INSTANCE, "input": text}) for text in texts]),
            "mux Embed": (
                LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}Embed"),
                [embed_request(text) for text in texts],
            ),
            f"mux Embed{_AT_SOCKET}": (
                LoadTask("grpc", 0, f"{MUX_SERVICE}Embed", str(running.grpc_socket)),
                [embed_request(text) for text in texts],
            ),
            f"/v1/embeddings{_AT_SOCKET}": (
                LoadTask("http", 0, "/v1/embeddings", str(running.api_socket)),
                [_json({"model": INSTANCE, "input": text}) for text in texts],
            ),
            "/v1/embeddings base64 × 64": (openai, [_json({"input": batch} | in_base64) for batch in batches]),
            "mux EmbedArrow × 64": (
                LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow"),
                [arrow_request(batch) for batch in batches],
            ),
            "EmbedArrow by the client": (Task("served", grpc=running.grpc, instance=INSTANCE), []),
        }
        self._children: dict[str, Child] = {}
        self._bulk = [texts[index % len(texts)] for index in range(bulk)]

    def measure(self, load: Load, seconds: float) -> dict[str, float]:
        """One load: its figures, and CPU seconds of every process."""
        entrant = self._children.get(load.name) or self._start(load.name)
        before, busy = {name: cpu_s(pid) for name, pid in self._pids.items()}, busy_s()
        if isinstance(self._tasks[load.name][0], Task):
            answer = entrant.ask("pass")
            answer["calls"] = answer["all_calls"] = load.texts
        else:
            answer = entrant.ask("run", {"callers": load.callers, "seconds": seconds})
        used = {f"{name}_cpu_s": cpu_s(pid) - before[name] for name, pid in self._pids.items()}
        foreign_s = busy_s() - busy - sum(used.values()) - answer["cpu_seconds"]
        return answer | used | {"foreign_cores": max(0.0, foreign_s / answer["seconds"])}

    def _start(self, name: str) -> Child:
        task, bodies = self._tasks[name]
        entrant = self._children[name] = self._stack.enter_context(child(task))
        file = self._folder / f"{len(self._children)}.json"
        if isinstance(task, Task):
            file.write_text(json.dumps(self._bulk))
            entrant.ask("texts", str(file))
        else:
            file.write_text(json.dumps([base64.b64encode(body).decode() for body in bodies]))
            entrant.ask("requests", str(file))
        return entrant


def _row(load: Load, name: str, passes: dict[tuple[str, Load], list[dict[str, float]]]) -> list[Any]:
    own = passes[name, load]

    def median(of: str) -> float | None:
        values = [each[of] for each in own if of in each]
        return statistics.median(values) if values else None

    def cost_us(of: str) -> float:
        return statistics.median(each[of] / each["all_calls"] * 1e6 for each in own)

    rates = [each["calls"] / each["seconds"] for each in own]
    label = load.name if name == "here" else f"{load.name} (the other checkout)"
    factors: list[float | None] = [None, None, None, None]
    to_port = Load(load.over_tcp, load.callers)
    if other := passes.get(("here", to_port) if load.over_tcp else ("against", load)) if name == "here" else None:
        theirs = [each["calls"] / each["seconds"] for each in other]
        paired = [here / there for here, there in zip(rates, theirs, strict=True)]
        less = [_server_cpu_s(there) / _server_cpu_s(here) for here, there in zip(own, other, strict=True)]
        factors = [statistics.median(paired), min(paired), max(paired), statistics.median(less)]
    times = [median("p50_ms"), median("p99_ms"), median("max_ms")]
    costs = [cost_us(f"{process}_cpu_s") for process in ("daemon", "mux", "worker")]
    return [
        *(label, load.callers, statistics.median(rates), *factors, *times),
        *(*costs, cost_us("cpu_seconds"), median("foreign_cores")),
    ]


def _server_cpu_s(each: dict[str, float]) -> float:
    """CPU seconds of all server processes per call."""
    return sum(each[f"{process}_cpu_s"] for process in ("daemon", "mux", "worker")) / each["all_calls"]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def embed_request(text: str) -> bytes:
    """The message of an Embed."""
    message = multiplexer_pb2.EmbedRequest()
    message.target.instance_name = INSTANCE
    message.request.inputs = text
    return message.SerializeToString()


def arrow_request(texts: Sequence[str]) -> bytes:
    """The message of an EmbedArrow, of one batch."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    message = multiplexer_pb2.EmbedArrowRequest(arrow_ipc=sink.getvalue().to_pybytes(), normalize=True)
    message.target.instance_name = INSTANCE
    return message.SerializeToString()
