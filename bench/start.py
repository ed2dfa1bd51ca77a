"""`bench start`: how long an instance takes to serve, to come back after a kill, and what a worker weighs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

from bench import weights
from bench.fleet import Fleet, fleet
from bench.machine import peak_rss_mib, unique_mib
from bench.progress import partial, say
from bench.report import publish
from teimgr.client import Instance
from teimgr.spec import State

HEADER = ("worker", "create to running s", "first text after s", "kill -9 to running s", "USS MiB", "peak RSS MiB")
_LIMIT_S = 120.0
_LOOK_S = 0.005


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--workers", type=int, default=5, help="instances, created one after the other (5)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    model = str(weights.minilm())
    began = time.perf_counter()
    with fleet() as running:
        listening_s = time.perf_counter() - began
        records: list[dict[str, Any]] = []
        with partial():
            for name in (f"worker-{number + 1}" for number in range(options.workers)):
                records.append(_create(running, name, model))
                say(f"{name}: {records[-1]['running_s']:.2f} s to running")
            for record in records:
                record["restart_s"] = _restart(running, record["name"])
                say(f"{record['name']}: {record['restart_s']:.2f} s after its kill")
            for record in records:
                record |= _memory(running, record["name"])
    facts = {
        "model": "all-MiniLM-L6-v2, dtype auto, all workers alive at the end",
        "daemon listens after": f"{listening_s:.2f} s",
        "first worker": "created as soon as the daemon listens, so it waits for the nursery to import torch",
        "create to running": "from POST /instances to the first GET that says running, asked every 5 ms",
        "USS": "memory that comes back when the worker ends; after one text, all workers alive",
    }
    keys = ("name", "running_s", "first_text_s", "restart_s", "unique_mib", "peak_rss_mib")
    publish("start", facts, HEADER, [[record.get(key) for key in keys] for record in records], {"workers": records})
    return 0


def _create(running: Fleet, name: str, model: str) -> dict[str, Any]:
    began = time.perf_counter()
    running.client.create(name, model)
    _until_running(running, name, not_pid=None)
    running_s = time.perf_counter() - began
    running.client.embed("How long does the first text take?", instance=name)
    return {"name": name, "running_s": running_s, "first_text_s": time.perf_counter() - began}


def _restart(running: Fleet, name: str) -> float:
    """Seconds from the kill of the worker to the moment its successor serves."""
    pid = running.client.get(name).pid
    if pid is None:
        raise RuntimeError(f"{name} has no process to kill")
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    _until_running(running, name, not_pid=pid)
    elapsed_s = time.perf_counter() - began
    running.client.embed("Is it back?", instance=name)
    return elapsed_s


def _until_running(running: Fleet, name: str, not_pid: int | None) -> Instance:
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        instance = running.client.get(name)
        if instance.status is State.RUNNING and instance.pid != not_pid:
            return instance
        if instance.status is State.FAILED:
            break
        time.sleep(_LOOK_S)
    raise RuntimeError(f"{name} does not run: {instance.status.value}, {instance.reason}")


def _memory(running: Fleet, name: str) -> dict[str, float]:
    pid = running.client.get(name).pid
    if pid is None:
        raise RuntimeError(f"{name} has no process to look at")
    return {"unique_mib": unique_mib(pid), "peak_rss_mib": peak_rss_mib(pid)}
