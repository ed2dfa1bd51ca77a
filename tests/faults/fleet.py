"""Cost of a large fleet: `python -m tests.faults.fleet --instances 10,100,1000 [--report FOLDER]`.

The real daemon over scripted workers, since a thousand real ones do not fit into the memory of a small machine: what a
worker costs is measured elsewhere, and what the daemon does for it is the same. For each size: processor time while
nothing happens, `GET /instances`, `/metrics` and the page of the fleet, and the adoption of all workers after a kill -9
of the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from bench.machine import cpu_s

from tests.faults import long_run
from tests.faults.results import markdown, write
from tests.support.daemon_process import DaemonProcess

IDLE_S = 20.0
SETTLE_S = 15.0
"""What the starts cause is over by then, such as new numbers of threads and routes."""
_READS = 5
_LIMIT_S = 300.0
_AT_ONCE = 8
# Of the tests' ports and of those that the system gives to clients, neither.
_PORTS, _METRICS_PORTS = 26_000, 29_000


async def measure(instances: int) -> dict[str, float]:
    """A daemon with so many instances, from creation to the end."""
    daemon = DaemonProcess(
        instance_port_start=_PORTS,
        instance_port_end=_PORTS + instances + 100,
        prometheus_port_start=_METRICS_PORTS,
        health_check_interval_secs=10,
        orphan_grace_secs=300,
    )
    daemon.program = "tests.faults.scripted_serve"
    daemon.start()
    found: dict[str, float] = {"instances": instances}
    timeout = aiohttp.ClientTimeout(_LIMIT_S)
    try:
        async with aiohttp.ClientSession(daemon.api, timeout=timeout) as http:
            began = time.monotonic()
            await _create(http, instances)
            await _running(http, instances)
            found["created_s"] = time.monotonic() - began
            found |= await _idle(daemon)
            for path in ("/instances", "/metrics", "/ui/fleet"):
                name = path.rpartition("/")[2]
                found[f"{name}_ms"], found[f"{name}_kib"] = await _read(http, path)
            before = await _pids(http)
        daemon.kill()
        began = time.monotonic()
        await asyncio.to_thread(daemon.start)
        found["listening_s"] = time.monotonic() - began
        async with aiohttp.ClientSession(daemon.api, timeout=timeout) as http:
            await _running(http, instances)
            found["adopted_s"] = time.monotonic() - began
            found["lost"] = float(len(before - await _pids(http)))
    except BaseException:
        print(daemon.log(20))
        raise
    finally:
        await asyncio.to_thread(daemon.close)
    return found


async def _create(http: aiohttp.ClientSession, instances: int) -> None:
    names = iter(range(instances))

    async def create() -> None:
        for number in names:
            async with http.post("/instances", json={"name": f"i{number:04}", "model_id": "fake"}) as reply:
                assert reply.status == 201, await reply.text()

    await asyncio.gather(*(create() for _ in range(_AT_ONCE)))


async def _running(http: aiohttp.ClientSession, instances: int) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while True:
            async with http.get("/instances?state=running") as reply:
                if len(await reply.json()) == instances:
                    return
            await asyncio.sleep(0.05 + instances / 5000)  # its list costs the daemon time


async def _pids(http: aiohttp.ClientSession) -> set[int]:
    async with http.get("/instances") as reply:
        return {each["pid"] for each in await reply.json()}


async def _idle(daemon: DaemonProcess) -> dict[str, float]:
    """Share of a core, and memory, of the daemon and the mux while nobody calls."""
    assert daemon.process is not None
    muxes = [
        child
        for child in psutil.Process(daemon.process.pid).children()
        if any("teimgr.mux" in word for word in child.cmdline())
    ]
    pids = {"daemon": daemon.process.pid, "mux": muxes[0].pid}
    await asyncio.sleep(SETTLE_S)
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(IDLE_S)
    found = {}
    for name, pid in pids.items():
        found[f"{name}_idle_percent"] = 100 * (cpu_s(pid) - before[name]) / IDLE_S
        found[f"{name}_mib"] = psutil.Process(pid).memory_info().rss / 2**20
    return found


async def _read(http: aiohttp.ClientSession, path: str) -> tuple[float, float]:
    """Best time of a few reads in ms, and the size in KiB."""
    times, size = [], 0
    for _ in range(_READS):
        began = time.monotonic()
        async with http.get(path) as reply:
            size = len(await reply.read())
            assert reply.status == 200, reply.status
        times.append(time.monotonic() - began)
    return 1000 * min(times), size / 1024


def report(results: list[dict[str, float]]) -> list[str]:
    """A line for each figure, a column for each size, and the growth from the first to the last."""
    names = [name for name in results[0] if name != "instances"]
    rows: list[tuple[Any, ...]] = []
    for name in names:
        values = [result.get(name, float("nan")) for result in results]
        growth = f"×{values[-1] / values[0]:.1f}" if values[0] else "–"
        rows.append((name.replace("_", " "), *values, growth))
    sizes = [f"{result['instances']:.0f} instances" for result in results]
    return ["Scripted workers under the real daemon.", "", *markdown(("", *sizes, "growth"), rows)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fleet", description=__doc__)
    parser.add_argument("--instances", default="10,100,1000", help="sizes, with commas between (10,100,1000)")
    parser.add_argument("--report", type=Path, help="folder for fleet.json and fleet.md")
    options = parser.parse_args()
    results = []
    for size in options.instances.split(","):
        results.append(asyncio.run(measure(int(size))))
        print({name: round(value, 2) for name, value in results[-1].items()}, flush=True)
    lines = report(results)
    print("\n".join(lines))
    if options.report:
        write(options.report, "fleet", "Cost of a fleet", lines, {"sizes": results})
    return 1 if any(result["lost"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
