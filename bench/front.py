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
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import corpus, weights
from bench.contest import Child, ChildFailed, child
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.load import LoadTask
from bench.machine import busy_s, cpu_s, revision
from bench.progress import partial, rounds, say
from bench.report import publish
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

HEADER = (
    *("load", "callers", "calls/s", "× median", "× low", "× high", "CPU ×", "CPU low", "CPU high"),
    *("p50 ms", "p99 ms", "max ms"),
    *("daemon µs", "mux µs", "worker µs", "client µs", "foreign cores"),
)
INSTANCE = "bench"
_BATCH_TEXTS = 64
_BATCH_CALLERS = 8
_STREAMED_PART = 10  # of the bulk job: a message for each text takes longer
_AT_SOCKET = ", Unix socket"
MUX_SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64, 256], help="of single texts (1 8 64 256)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one load, after half a second of warm-up (2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, with every load once in each (3)")
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
        Load("/v1/embeddings float × 64", _BATCH_CALLERS, _BATCH_TEXTS),
        Load("/v1/embeddings base64 × 64", _BATCH_CALLERS, _BATCH_TEXTS),
        Load("mux EmbedArrow × 64", _BATCH_CALLERS, _BATCH_TEXTS),
        Load("EmbedArrow by the client", 1, options.bulk),
        Load("EmbedStream by the client", 1, options.bulk // _STREAMED_PART),
    ]
    loads = [load for load in every if not options.only or any(part in load.name for part in options.only)]
    wanted = {(load.over_tcp, load.callers) for load in loads}
    loads = [load for load in every if load in loads or (load.name, load.callers) in wanted]
    checkouts = {"here": None} | ({"against": options.against} if options.against else {})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = weights.random_static(folder / "static", weights.minilm())
        targets = {
            name: Target(
                stack, stack.enter_context(fleet(path)), model, texts, options.bulk, folder / name, checkout=path
            )
            for name, path in checkouts.items()
        }
        # The other checkout may have no Unix sockets.
        turns = [(name, load) for load in loads for name in targets if not load.over_tcp or name == "here"]
        passes: dict[tuple[str, Load], list[dict[str, float]]] = {}
        failures: dict[tuple[str, Load], str] = {}
        with partial():
            for number in rounds(options.rounds):
                in_turn = turns if number % 2 else turns[::-1]
                for turn in (turn for turn in in_turn if turn not in failures):
                    _measure(turn, targets, options.seconds, passes, failures)
    rows = [_row(load, name, passes) for name, load in turns if (name, load) in passes]
    facts = {
        "model": "a table of 30,522 × 256 random numbers with MiniLM's tokenizer, one replica",
        "texts": f"{len(texts)} of 4 to 14 words (digest {corpus.digest(texts)}), one a call, or as the load names",
        "method": f"{options.rounds} rounds, each load {options.seconds:g} s in each, in turn; medians; × is the calls "
        "per second here over those of the other checkout, or at a Unix socket over those at the port, in the same "
        "round: median, and the bounds between which the median of further rounds lies with 95 % (of fewer than six "
        "rounds the lowest and the highest); every other round is in the reverse order",
        "columns": "µs are CPU time per call of each process (of the bulk load per text); CPU × is that of all server "
        "processes of the other checkout, or of the calls to the port, over that here; the load generator shares the "
        "cores",
    }
    if options.against:
        facts["against"] = revision(options.against)
    data = [
        {"load": load.name, "callers": load.callers, "checkout": name, "passes": passes[name, load]}
        for name, load in passes
    ]
    if failures:
        failed = (f"{_label(*turn)} with {turn[1].callers} callers: {reason}" for turn, reason in failures.items())
        facts["failed"] = "; ".join(failed)
    publish("front", facts, HEADER, rows, {"rows": data})
    return int(bool(failures))


def _measure(
    turn: tuple[str, Load],
    targets: dict[str, Target],
    seconds: float,
    passes: dict[tuple[str, Load], list[dict[str, float]]],
    failures: dict[tuple[str, Load], str],
) -> None:
    """One load at one checkout; one that fails is not tried again."""
    name, load = turn
    try:
        found = targets[name].measure(load, seconds)
    except ChildFailed as error:
        failures[turn] = str(error)
        say(f"  {_label(name, load)}, {load.callers} callers: FAILED: {error}")
        return
    passes.setdefault(turn, []).append(found)
    say(f"  {_label(name, load)}, {load.callers} callers: {found['calls'] / found['seconds']:,.0f} calls/s")


def _label(name: str, load: Load) -> str:
    return load.name if name == "here" else f"{load.name} (the other checkout)"


class Target:
    """A daemon with one static model, and the load generators that call it; of another `checkout` with its client."""

    def __init__(
        self,
        stack: ExitStack,
        running: Fleet,
        model: Path,
        texts: Sequence[str],
        bulk: int,
        folder: Path,
        checkout: Path | None = None,
    ) -> None:
        running.client.create(INSTANCE, str(model))
        running.client.wait_until_running(INSTANCE, deadline_s=120)
        self._pids = running.pids(INSTANCE)
        port = running.client.get(INSTANCE).port
        folder.mkdir()
        self._stack, self._checkout, self._folder = stack, checkout, folder
        batches = [texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS)]
        openai = LoadTask("http", running.api_port, "/v1/embeddings")
        in_float: dict[str, Any] = {"model": INSTANCE}
        in_base64 = in_float | {"encoding_format": "base64"}
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
            "/v1/embeddings float × 64": (openai, [_json({"input": batch} | in_float) for batch in batches]),
            "/v1/embeddings base64 × 64": (openai, [_json({"input": batch} | in_base64) for batch in batches]),
            "mux EmbedArrow × 64": (
                LoadTask("grpc", running.grpc_port, f"{MUX_SERVICE}EmbedArrow"),
                [arrow_request(batch) for batch in batches],
            ),
            "EmbedArrow by the client": (Task("served", grpc=running.grpc, instance=INSTANCE), []),
            "EmbedStream by the client": (Task("streamed", grpc=running.grpc, instance=INSTANCE), []),
        }
        self._children: dict[str, Child] = {}
        self._bulk = [texts[index % len(texts)] for index in range(bulk)]

    def measure(self, load: Load, seconds: float) -> dict[str, float]:
        """One load: its figures, and CPU seconds of every process."""
        entrant = self._children.get(load.name) or self._start(load.name)
        before, busy, began = self.cpu_s(), busy_s(), time.perf_counter()
        if isinstance(self._tasks[load.name][0], Task):
            answer = entrant.ask("pass")
            answer["calls"] = answer["all_calls"] = load.texts
        else:
            answer = entrant.ask("run", {"callers": load.callers, "seconds": seconds})
        used = {f"{name}_cpu_s": now_s - before[name] for name, now_s in self.cpu_s().items()}
        foreign_s = busy_s() - busy - sum(used.values()) - answer["cpu_seconds"]
        return answer | used | {"foreign_cores": max(0.0, foreign_s / (time.perf_counter() - began))}

    def _start(self, name: str) -> Child:
        task, _ = self._tasks[name]
        entrant = self._children[name] = self._stack.enter_context(child(task, self._checkout))
        if isinstance(task, Task):
            part = _STREAMED_PART if task.kind == "streamed" else 1
            entrant.ask("texts", str(self.texts(self._bulk[: len(self._bulk) // part])))
        else:
            entrant.ask("requests", str(self.requests(name)))
        return entrant

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of every process."""
        return {name: cpu_s(pid) for name, pid in self._pids.items()}

    def requests(self, name: str) -> Path:
        """A file with the bodies of a load, for `bench.load`."""
        return self.texts([base64.b64encode(body).decode() for body in self._tasks[name][1]])

    def texts(self, texts: Sequence[str]) -> Path:
        """A file with these, for a child."""
        file = self._folder / f"{len(list(self._folder.iterdir()))}.json"
        file.write_text(json.dumps(list(texts)))
        return file


def _row(load: Load, name: str, passes: dict[tuple[str, Load], list[dict[str, float]]]) -> list[Any]:
    own = passes[name, load]

    def median(of: str) -> float | None:
        values = [each[of] for each in own if of in each]
        return statistics.median(values) if values else None

    def cost_us(of: str) -> float:
        return statistics.median(each[of] / each["all_calls"] * 1e6 for each in own)

    rates = [each["calls"] / each["seconds"] for each in own]
    factors: list[float | None] = [None] * 6
    to_port = Load(load.over_tcp, load.callers)
    if other := passes.get(("here", to_port) if load.over_tcp else ("against", load)) if name == "here" else None:
        theirs = [each["calls"] / each["seconds"] for each in other]
        paired = [here / there for here, there in zip(rates, theirs, strict=False)]  # of whole rounds
        less = [_server_cpu_s(there) / _server_cpu_s(here) for here, there in zip(own, other, strict=False)]
        factors = [statistics.median(paired), *bounds_of_median(paired)]
        factors += [statistics.median(less), *bounds_of_median(less)]
    times = [median("p50_ms"), median("p99_ms"), median("max_ms")]
    costs = [cost_us(f"{process}_cpu_s") for process in ("daemon", "mux", "worker")]
    return [
        *(_label(name, load), load.callers, statistics.median(rates), *factors, *times),
        *(*costs, cost_us("cpu_seconds"), median("foreign_cores")),
    ]


def _server_cpu_s(each: dict[str, float]) -> float:
    """CPU seconds of all server processes per call."""
    return sum(each[f"{process}_cpu_s"] for process in ("daemon", "mux", "worker")) / each["all_calls"]


def bounds_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The bounds between which the median of what the values are a sample of lies with 95 %, whatever its distribution
    is: order statistics; of fewer than six values the lowest and the highest."""
    ordered, count = sorted(values), len(values)
    outside, left_out = 0.5**count, 0  # the probability that so few values, or fewer, are below the median
    while (outside := outside + comb(count, left_out + 1) * 0.5**count) <= 0.025:
        left_out += 1
    return ordered[left_out], ordered[-1 - left_out]


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
