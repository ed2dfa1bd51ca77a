"""Overload: `python -m tests.faults.overload --minutes 5 [--times 10] [--report FOLDER]`.

First the capacity of one instance: the best of several numbers of callers, each of which calls again when answered, or
a second after it was refused. Then calls come at ten times that rate from a process of its own, whether or not earlier
ones were answered, over gRPC, the instance's port and the OpenAI endpoint. HTTP callers hang up after the deadline,
which they do not send: the instance's `max_queue_wait_secs` is below it. The model is the real all-MiniLM-L6-v2: the
callers share the processors, and a call to a tiny model costs them more than the fleet.
Goodput are the right answers within the deadline. A refusal must have a type and a time after which to call again, and
come at once. The exit status is 0 when the goodput is at least 90 % of the best, no process grows beyond its bound,
and the latency is back soon after.
Callers take processor time of this machine, which elsewhere they would not. So the best number of callers is measured
after the overload in turns with the same beside a process that takes as much time as the callers of the
overload and calls nobody; the median of the latter is the best to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from bench import weights

from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from tests.faults import long_run
from tests.faults.results import markdown, write
from tests.support.daemon_process import DaemonProcess
from tests.support.measures import processor_seconds, resident_mib

INSTANCE = "busy"
DEADLINE_S = 5.0
CALLERS = (8, 16, 64)
# One that is refused comes back after so long: calling again at once would lower the best that goodput is measured by.
_BURN_S = 0.002
_TURNS = 3
_PAUSE_S = 1.0
SHARE = 0.9
# Each call has so many texts of 64 words: costly for the worker, cheap for the client, which has ten times as many.
TEXTS = 16
_TEXT = " ".join(("rain", "harbour", "fog", "wind") * 16)
_REFUSED = (429, 503)
_serials = itertools.count()
_MAX_REFUSAL_MS = 1000.0
_MAX_GROWTH_MIB = 600.0  # beside the bytes in flight that are configured
_BACK_WITHIN_S = 10.0


@dataclass
class Load:
    """What callers saw. `latency_ms` by outcome; `untold` are refusals without a time to come back."""

    outcomes: Counter[str] = field(default_factory=Counter)
    latency_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    untold: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cores: float = 0.0
    """Processor time of the callers themselves, in seconds per second."""

    @property
    def goodput(self) -> float:
        return self.outcomes["answered"] / self.seconds

    def facts(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "goodput": round(self.goodput, 2),
            "cores_of_the_callers": round(self.cores, 3),
            "outcomes": dict(self.outcomes),
            "refused_without_a_time": dict(self.untold),
            "latency_ms": {
                outcome: {"p50": _at(values, 0.5), "p99": _at(values, 0.99)}
                for outcome, values in self.latency_ms.items()
            },
        }


class Caller:
    """The three surfaces of one instance."""

    def __init__(self, api: str, grpc_port: int, port: int, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._urls = (f"http://127.0.0.1:{port}/embed", f"{api}/v1/embeddings")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._embed = self.channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
        self.load = Load()

    async def call(self, number: int) -> str:
        """The outcome of one call."""
        surface = number % 3
        began = time.monotonic()
        try:
            texts = [f"{next(_serials)} {_TEXT}" for _ in range(TEXTS)]  # equal ones would be computed once
            outcome, told = await (self._over_grpc(texts) if surface == 0 else self._over_http(surface - 1, texts))
        except TimeoutError:  # the caller's own deadline
            outcome, told = "deadline", True
        except (aiohttp.ClientError, OSError) as error:
            outcome, told = type(error).__name__, True
        load = self.load
        load.outcomes[outcome] += 1
        load.latency_ms[outcome].append((time.monotonic() - began) * 1000)
        if not told:
            load.untold[("grpc", "port", "openai")[surface]] += 1
        return outcome

    async def _over_grpc(self, texts: list[str]) -> tuple[str, bool]:
        try:
            await self._embed(_arrow(texts), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "deadline", True
            refused = error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            told = any(key == "grpc-retry-pushback-ms" for key, _ in error.trailing_metadata() or ())
            return "refused" if refused else f"grpc {error.code().name}", told or not refused
        return "answered", True

    async def _over_http(self, which: int, texts: list[str]) -> tuple[str, bool]:
        body = {"model": INSTANCE, "input": texts} if which else {"inputs": texts, "truncate": True}
        headers = {"content-type": "application/json"}
        async with self._http.post(self._urls[which], data=json.dumps(body).encode(), headers=headers) as reply:
            await reply.read()
            if reply.status == 200:
                return "answered", True
            if reply.status == 504:
                return "deadline", True
            refused = reply.status in _REFUSED
            return "refused" if refused else f"HTTP {reply.status}", "retry-after" in reply.headers or not refused


def _arrow(texts: list[str]) -> bytes:
    import pyarrow as pa

    batch = pa.record_batch({"text": texts})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    message = multiplexer_pb2.EmbedArrowRequest(arrow_ipc=sink.getvalue().to_pybytes(), truncate=True)
    message.target.instance_name = INSTANCE
    return message.SerializeToString()


async def _offer(api: str, grpc_port: int, port: int, seconds: float, callers: int, rate: float) -> Load:
    """`callers` that call without a pause; or, where `rate` is not 0, so many calls a second."""
    timeout, limit = aiohttp.ClientTimeout(DEADLINE_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=limit) as http:
        caller = Caller(api, grpc_port, port, http)
        began = time.monotonic()

        async def again(number: int) -> None:
            while time.monotonic() - began < seconds:
                if await caller.call(number) == "refused":
                    await asyncio.sleep(_PAUSE_S)
                number += 1

        async with asyncio.TaskGroup() as tasks:
            if not rate:
                for number in range(callers):
                    tasks.create_task(again(number))
            number = 0
            while rate and (now := time.monotonic() - began) < seconds:
                while number < now * rate:
                    tasks.create_task(caller.call(number))
                    number += 1
                await asyncio.sleep(0.002)
        caller.load.seconds = time.monotonic() - began  # with the answers that were under way at the end
        caller.load.cores = time.process_time() / caller.load.seconds
        await caller.channel.close()
    return caller.load


async def _from_outside(daemon: DaemonProcess, port: int, seconds: float, callers: int, rate: float = 0) -> Load:
    """`_offer` in a process of its own."""
    arguments = [daemon.api, daemon.grpc_port, port, seconds, callers, rate]
    command = (sys.executable, "-m", "tests.faults.overload", "--offer", json.dumps(arguments))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    raw = json.loads(output)
    return Load(
        Counter(raw["outcomes"]),
        defaultdict(list, raw["latency_ms"]),
        Counter(raw["untold"]),
        raw["seconds"],
        raw["cores"],
    )


@asynccontextmanager
async def _burner(cores: float) -> AsyncIterator[None]:
    """A process that takes so much processor time."""
    command = (sys.executable, "-m", "tests.faults.overload", "--burn", str(max(cores, 0.001)))
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def _burn(cores: float) -> NoReturn:
    """Work for 2 ms at a time, about what a caller takes for a call, until killed."""
    while True:
        began, used = time.monotonic(), time.process_time()
        while time.process_time() < used + _BURN_S:
            json.loads(json.dumps([_TEXT] * TEXTS))
        time.sleep(max(0.0, _BURN_S / cores - (time.monotonic() - began)))


async def run(minutes: float, times: float) -> tuple[dict[str, Any], list[str]]:
    """Facts, and what falls short."""
    model = weights.minilm()
    daemon = DaemonProcess()
    await asyncio.to_thread(daemon.start)
    try:
        async with daemon.async_client(timeout_s=60) as client:
            made = await client.create(INSTANCE, str(model), dtype="float32", max_queue_wait_secs=int(DEADLINE_S - 2))
            await client.wait_until_running(INSTANCE, deadline_s=60)
        processes = [psutil.Process(daemon.process.pid), *daemon.processes()]  # type: ignore[union-attr]
        probe_s = max(3.0, min(30.0, minutes * 6))
        probes = {}
        for callers in CALLERS:
            probes[callers] = await _from_outside(daemon, made.port, probe_s, callers)
            print(f"{callers} callers: {probes[callers].facts()}", flush=True)
        callers, best = max(probes.items(), key=lambda probe: probe[1].goodput)
        before = resident_mib(processes)
        calm = await _from_outside(daemon, made.port, 3.0, 1)
        used = processor_seconds(processes)
        flood = asyncio.create_task(_from_outside(daemon, made.port, minutes * 60, 0, best.goodput * times))
        peak: Counter[str] = Counter()
        while not flood.done():
            await asyncio.wait({flood}, timeout=1.0)
            for name, mib in resident_mib(processes).items():
                peak[name] = max(peak[name], mib)  # type: ignore[assignment]
        overloaded = flood.result()
        cores = {
            name: round((total - used[name]) / overloaded.seconds, 3)
            for name, total in processor_seconds(processes).items()
        }
        began = time.monotonic()
        while (after := await _from_outside(daemon, made.port, 1.0, 1)).goodput < calm.goodput / 2:
            if time.monotonic() - began > 60:
                break
        back_s = time.monotonic() - began
        bests, besides = [best], []
        for _ in range(_TURNS):
            async with _burner(overloaded.cores - best.cores):
                besides.append(await _from_outside(daemon, made.port, probe_s, callers))
            bests.append(await _from_outside(daemon, made.port, probe_s, callers))
        best, beside = (sorted(runs, key=lambda run: run.goodput)[len(runs) // 2] for runs in (bests, besides))
        facts = {
            "best": best.facts(),
            "best beside as busy a process": beside.facts(),
            "all_bests": [round(run.goodput, 2) for run in bests],
            "all_bests_beside": [round(run.goodput, 2) for run in besides],
            "alone": calm.facts(),
            "model": "all-MiniLM-L6-v2",
            "offered_per_s": round(best.goodput * times, 1),
            "overloaded": overloaded.facts(),
            "afterwards": after.facts(),
            "normal_after_s": round(back_s, 1),
            "processes": {name: (mib, round(peak[name], 1), cores[name]) for name, mib in before.items()},
        }
        return facts, _shortfalls(beside, overloaded, back_s, before, peak)
    finally:
        await asyncio.to_thread(daemon.close)


def _shortfalls(best: Load, found: Load, back_s: float, before: dict[str, float], peak: Counter[str]) -> list[str]:
    short = []
    if found.goodput < SHARE * best.goodput:
        short.append(f"goodput {found.goodput:.1f} of {best.goodput:.1f} calls a second")
    if found.untold:
        short.append(f"refusals without a time to come back: {dict(found.untold)}")
    if (late := _at(found.latency_ms["refused"], 0.99)) > _MAX_REFUSAL_MS:
        short.append(f"refusals took up to {late:.0f} ms (p99)")
    if others := {each: n for each, n in found.outcomes.items() if each not in ("answered", "refused", "deadline")}:
        short.append(f"failures without a type: {others}")
    if back_s > _BACK_WITHIN_S:
        short.append(f"back to normal only after {back_s:.0f} s")
    short += [
        f"{name} grew from {mib:.0f} to {peak[name]:.0f} MiB"
        for name, mib in before.items()
        if peak[name] > mib + _MAX_GROWTH_MIB
    ]
    return short


def _at(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def _lines(facts: dict[str, Any], short: list[str], times: float) -> list[str]:
    rows: list[tuple[Any, ...]] = []
    for phase in ("best", "best beside as busy a process", "overloaded", "afterwards"):
        found = facts[phase]
        answered, refused = (found["latency_ms"].get(each, {}) for each in ("answered", "refused"))
        rows.append(
            (
                phase,
                found["goodput"],
                found["cores_of_the_callers"],
                *(found["outcomes"].get(each, 0) for each in ("answered", "refused", "deadline")),
                answered.get("p50"),
                answered.get("p99"),
                refused.get("p99"),
            )
        )
    heads = (
        "",
        "goodput, calls/s",
        "cores of the callers",
        "answered",
        "refused",
        "late",
        "answer p50, ms",
        "p99",
        "refusal p99, ms",
    )
    processes = [(name, *figures) for name, figures in facts["processes"].items()]
    return [
        f"{times:g} times the best rate, {facts['offered_per_s']} calls/s of {TEXTS} texts to {facts['model']}, "
        f"deadline {DEADLINE_S:g} s; "
        f"normal again after {facts['normal_after_s']} s.",
        "",
        *markdown(heads, rows),
        "",
        f"Of {len(facts['all_bests'])} and {len(facts['all_bests_beside'])} runs of the best in turn the medians: "
        f"{facts['all_bests']} alone, {facts['all_bests_beside']} beside the process.",
        "",
        *markdown(("process", "before, MiB", "most, MiB", "cores in the overload"), processes),
        "",
        *(f"* {each}" for each in short),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.overload", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of overload (5)")
    parser.add_argument("--times", type=float, default=10.0, help="how much is offered, in capacities (10)")
    parser.add_argument("--report", type=Path, help="folder for overload.json and overload.md")
    parser.add_argument("--offer", help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.burn:
        _burn(options.burn)
    if options.offer:
        print(json.dumps(vars(asyncio.run(_offer(*json.loads(options.offer))))))
        return 0
    facts, short = asyncio.run(run(options.minutes, options.times))
    lines = _lines(facts, short, options.times)
    print("\n".join(lines))
    if options.report:
        write(options.report, "overload", "Overload", lines, facts | {"shortfalls": short})
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
