"""`bench monsters`: inputs that cost more than their bytes suggest, on each surface, beside another caller's queries.

The table has a line for each monster and surface: what the monster got, and what the queries of another caller waited
meanwhile, beside what they wait alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench import monster_inputs as inputs
from bench import weights
from bench.contest import Child, child
from bench.fleet import Fleet, fleet
from bench.progress import partial, rounds, say
from bench.report import publish
from bench.steady import OK, SteadyCall, SteadyTask

HEADER = (
    *("monster", "surface", "checkout", "MiB", "monster got", "s", "windows", "queries", "failed", "p50 ms", "p99 ms"),
    *("idle p50 ms", "idle p99 ms", "p99 ÷ idle", "probes missed", "replaced"),
)
_INSTANCE, _RANKER = "bench", "ranker"
_REST_MAX, _MAX_PORT, _GRPC_MAX = 32 * 2**20 - 4096, 2_000_000 - 4096, 40 * 2**20 - 4096
_EMBED = f"{inputs.MUX_SERVICE}Embed"
_LIMIT_S = 60.0
_TARGET = 2.0  # × of the idle p99
_MIN_S = 2.0  # of a window, so that there are queries in it
_KEEP_IDLE_S = 1.0
_QUERY = "how long does the harbour stay open"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rate", type=float, default=20.0, help="queries a second of the other caller (20)")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds of queries without monsters (10)")
    parser.add_argument("--share", type=float, default=1.0, help="of the largest bodies (1)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, with every monster once in each (1)")
    parser.add_argument("--again", type=int, default=2, help="more windows of what was beyond the target at first (2)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="monsters or surfaces with one of these")
    parser.add_argument("--model", type=Path, metavar="DIR", help="another model than all-MiniLM-L6-v2")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, measured in turns")


@dataclass(frozen=True)
class Monster:
    """A call: over http to `port` of the fleet, or over grpc to the mux; `make` gives path and body of some bytes."""

    name: str
    surface: str
    kind: str
    port: str
    most: int
    make: Callable[[int], tuple[str, bytes]]


def monsters() -> Iterator[Monster]:
    """All of them, at each surface that takes them."""
    for name, text in inputs.TEXTS.items():
        yield from _texts(name, text)
    for name, odd in inputs.ODD_JSON.items():
        yield _http(name, "/v1/embeddings", lambda size, odd=odd: ("/v1/embeddings", odd(_INSTANCE, size)))
    for name, broken in inputs.BROKEN_JSON.items():
        yield _http(f"broken: {name}", "/v1/embeddings", lambda size, broken=broken: ("/v1/embeddings", broken(size)))
        yield _port(f"broken: {name}", "/embed", lambda size, broken=broken: ("/embed", broken(size)))
    for name, fields in inputs.FIELDS.items():
        yield _grpc(name, "Embed", lambda size, fields=fields: (_EMBED, fields(_INSTANCE, size)))
    for name, stream in inputs.ARROW.items():
        yield _grpc(f"Arrow: {name}", "EmbedArrow", lambda size, stream=stream: _arrow(stream(size)), 16 * 2**20)


def _arrow(stream: bytes) -> tuple[str, bytes]:
    return f"{inputs.MUX_SERVICE}EmbedArrow", inputs.arrow_message(_INSTANCE, stream)


def _texts(name: str, text: Callable[[int], str]) -> Iterator[Monster]:
    for call in ("/v1/embeddings", "/v2/embed", "/vllm/tokenize", "/instances/…/embed"):
        yield _http(name, call, lambda size, call=call: inputs.json_bodies(_INSTANCE, text(size))[call])
    yield _http(name, "/v1/rerank", lambda size: inputs.rerank_bodies(_RANKER, text(size))["/v1/rerank, document"])
    for call in ("/embed", "/tokenize"):
        yield _port(name, call, lambda size, call=call: inputs.port_bodies(text(size))[call])
    for call in ("Embed", "EmbedArrow", "Tokenize"):
        yield _grpc(name, call, lambda size, call=call: inputs.mux_messages(_INSTANCE, text(size))[call])
    yield _grpc(name, "Rerank", lambda size: inputs.rerank_message(_RANKER, text(size)))


def _http(name: str, call: str, make: Callable[[int], tuple[str, bytes]]) -> Monster:
    return Monster(name, f"REST {call}", "http", "api", _REST_MAX, make)


def _port(name: str, call: str, make: Callable[[int], tuple[str, bytes]]) -> Monster:
    return Monster(name, f"instance port {call}", "http", "instance", _MAX_PORT, make)


def _grpc(name: str, call: str, make: Callable[[int], tuple[str, bytes]], most: int = _GRPC_MAX) -> Monster:
    return Monster(name, f"mux {call}", "grpc", "mux", most, make)


@dataclass
class Found:
    """What one monster got at one checkout, and the queries meanwhile: latencies in ms, and outcomes that are no OK."""

    got: str = ""
    seconds: float = 0.0
    mib: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    probes_missed: int = 0
    replaced: list[str] = field(default_factory=list)

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.latencies_ms or [0.0], 99))


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    chosen = [
        each for each in monsters() if not options.only or any(w in f"{each.name} {each.surface}" for w in options.only)
    ]
    checkouts = {"this": None} | ({"other": options.against} if options.against else {})
    found: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    idle: dict[str, list[float]] = {name: [] for name in checkouts}
    with ExitStack() as open_, partial():
        served = {name: open_.enter_context(_served(path, options)) for name, path in checkouts.items()}
        for name, each in served.items():
            idle[name] += each.idle(options.idle)

        def measure(monster: Monster, names: Iterable[str]) -> None:
            path, body = monster.make(round(monster.most * options.share))
            for name in names:
                idle[name] += served[name].idle(_KEEP_IDLE_S)
                measured = served[name].beside(monster, path, body)
                found[monster.name, monster.surface, name].append(measured)
                what = f"{monster.name}, {monster.surface}, {name}"
                say(f"  {what}: {measured.got}, at most {max(measured.latencies_ms, default=0.0):.0f} ms")

        for _ in rounds(options.rounds):
            for monster in chosen:
                measure(monster, served)
        for monster in chosen:
            late = [name for name in served if _is_beyond(found[monster.name, monster.surface, name], idle[name])]
            for _ in range(options.again):
                measure(monster, late)
    records = [record(key, windows, idle[key[2]]) for key, windows in found.items() if windows]
    facts = {
        "model": f"{options.model or 'all-MiniLM-L6-v2'}, one instance; a reranker of its shape with random weights",
        "queries": f"{options.rate:g} a second of another caller, in turns unary Embed through the mux and "
        "/v1/embeddings, and as many of /health on the instance's port over a new connection each; a latency begins "
        "when the schedule names the call",
        "monsters": f"one call each at {options.share:g} of the largest body of its surface, {_LIMIT_S:g} s at most, "
        "by a client in the idle scheduling class: it shares these cores, and would have a machine of its own",
        "idle": f"{options.idle:g} s before the first monster, and {_KEEP_IDLE_S:g} s before each",
        "windows": f"a call whose queries were beyond the target is made {options.again} times more; its latencies are "
        "those of the window with the median p99, its failures those of all",
        "target": f"p99 within {_TARGET:g} × of idle, no query failed, no probe missed, no process replaced",
    }
    rows = [[record[key] for key in _KEYS] for record in records]
    publish("monsters", facts, HEADER, rows, {"rows": records})
    return 0


_KEYS = (
    *("monster", "surface", "checkout", "mib", "got", "seconds", "windows", "queries", "failed", "p50_ms", "p99_ms"),
    *("idle_p50_ms", "idle_p99_ms", "of_idle", "probes_missed", "replaced"),
)


def _is_beyond(windows: Sequence[Found], idle: Sequence[float]) -> bool:
    return _median(windows).p99_ms > _TARGET * float(np.percentile(idle or [0.0], 99))


def _median(windows: Sequence[Found]) -> Found:
    """The window with the median p99, the better one of two in the middle."""
    return sorted(windows, key=lambda each: each.p99_ms)[(len(windows) - 1) // 2]


def record(key: tuple[str, str, str], windows: Sequence[Found], idle: Sequence[float]) -> dict[str, Any]:
    """A line of the table: latencies of the median window, failures of all of them."""
    found = _median(windows)
    p50, p99 = float(np.percentile(found.latencies_ms or [0.0], 50)), found.p99_ms
    idle_p50, idle_p99 = np.percentile(idle or [0.0], (50, 99)).tolist()
    failed = [each for window in windows for each in window.failed]
    replaced = [each for window in windows for each in window.replaced]
    return {
        **dict(zip(("monster", "surface", "checkout"), key, strict=True)),
        "mib": found.mib,
        "got": found.got,
        "seconds": found.seconds,
        "queries": len(found.latencies_ms),
        "windows": len(windows),
        "failed": len(failed),
        "p50_ms": p50,
        "p99_ms": p99,
        "idle_p50_ms": idle_p50,
        "idle_p99_ms": idle_p99,
        "of_idle": p99 / idle_p99 if idle_p99 else None,
        "probes_missed": sum(each.probes_missed for each in windows),
        "replaced": ", ".join(sorted(set(replaced))) or "none",
        "failures": sorted(set(failed)),
    }


class Served:
    """A daemon with both instances, and the other caller's queries."""

    def __init__(self, running: Fleet, queries: Child) -> None:
        self._running, self._queries = running, queries
        self._ports = {"api": running.api_port, "mux": running.grpc_port, "instance": self._get(_INSTANCE).port}
        self._lives, self._missed = self._state()

    def idle(self, seconds: float) -> list[float]:
        """Latencies in ms of the queries in a time without monsters."""
        began = time.monotonic()
        time.sleep(seconds)
        return [latency_ms for _, latency_ms, _ in self._taken(began, time.monotonic())]

    def beside(self, monster: Monster, path: str, body: bytes) -> Found:
        """One monster, and what it cost the queries."""
        began = time.monotonic()
        send = _grpc_call if monster.kind == "grpc" else _http_call
        with ThreadPoolExecutor(1, initializer=_step_back) as client:
            got = client.submit(asyncio.run, send(self._ports[monster.port], path, body)).result()
        seconds = time.monotonic() - began
        time.sleep(max(0.2, _MIN_S - seconds))
        calls = self._taken(began, time.monotonic())
        found = Found(got, seconds, len(body) / 2**20, [latency_ms for _, latency_ms, _ in calls])
        found.failed = [f"{name} {outcome}" for name, _, outcome in calls if outcome != OK]
        lives, missed = self._state()
        found.replaced = [name for name, life in lives.items() if life != self._lives[name]]
        found.probes_missed = missed - self._missed
        if found.replaced:
            for name in (_INSTANCE, _RANKER):
                self._running.client.wait_until_running(name, deadline_s=120)
            lives, missed = self._state()
        self._lives, self._missed = lives, missed
        return found

    def _get(self, name: str) -> Any:
        return self._running.client.get(name)

    def _state(self) -> tuple[dict[str, Any], int]:
        """Process ids and restarts, and the number of failed probes."""
        found = {name: self._get(name) for name in (_INSTANCE, _RANKER)}
        muxes = sorted(each.pid for each in self._running.muxes())
        lives: dict[str, Any] = {name: (each.pid, each.restarts) for name, each in found.items()} | {"mux": muxes}
        page = asyncio.run(_http_page(self._ports["api"], "/metrics"))
        missed = [line for line in page.splitlines() if line.startswith("tei_manager_health_check_failures_total")]
        return lives, sum(int(float(line.rpartition(" ")[2])) for line in missed)

    def _taken(self, began: float, until: float) -> list[tuple[str, float, str]]:
        """Name, latency in ms and outcome of the calls that were due in a time, once they have ended."""
        done: list[Any] = []
        while True:
            taken = self._queries.ask("take")
            done += taken["calls"]
            if all(due > until for _, due in taken["waiting"]):
                return [(name, ms, outcome) for name, due, ms, outcome in done if began <= due <= until]
            time.sleep(0.05)


@contextmanager
def _served(checkout: Path | None, options: argparse.Namespace) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as kept, fleet(checkout) as running:
        model = options.model or weights.minilm()
        ranker = weights.random_reranker(Path(kept) / "ranker", model, "mini")
        for name, folder in ((_INSTANCE, model), (_RANKER, ranker)):
            running.client.create(name, str(folder))
        for name in (_INSTANCE, _RANKER):
            running.client.wait_until_running(name, deadline_s=120)
        port = running.client.get(_INSTANCE).port
        body = json.dumps({"model": _INSTANCE, "input": _QUERY}).encode()
        path, message = inputs.mux_messages(_INSTANCE, _QUERY)["Embed"]
        rate = options.rate / 2
        calls = (
            SteadyCall("Embed", "grpc", running.grpc_port, path, _packed(message), rate),
            SteadyCall("/v1/embeddings", "http", running.api_port, "/v1/embeddings", _packed(body), rate),
            SteadyCall("/health", "http", port, "/health", "", options.rate, fresh=True),
        )
        with child(SteadyTask(calls, limit_s=_LIMIT_S)) as queries:
            time.sleep(1.0)  # connections are made
            yield Served(running, queries)


def _step_back() -> None:
    """Leave the cores to whom else wants them: the thread is in the idle class, and those that it starts."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def _grpc_call(port: int, path: str, message: bytes) -> str:
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            await channel.unary_unary(path)(message, timeout=_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return OK


async def _http_call(port: int, path: str, body: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", ""))
    try:
        async with asyncio.timeout(_LIMIT_S):
            writer.write(head.encode() + body)
            line = await reader.readline()
    except TimeoutError:
        return "no answer"
    except OSError:
        return "reset"
    finally:
        writer.transport.abort()
    return line.split(b" ")[1].decode() if line.count(b" ") > 1 else "closed"


async def _http_page(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()
