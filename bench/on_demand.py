"""`bench on_demand`: the first answer of an unloaded model, of a loaded one, and of two in turn with memory for one."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from bench import weights
from bench.fleet import Fleet, fleet
from bench.progress import partial, say
from bench.report import publish
from teimgr.spec import State

HEADER = ("call", "calls", "p50 s", "p99 s", "longest s")
_TEXT = "How long does the first answer take?"
_LIMIT_S = 120.0
_LOOK_S = 0.005


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=50, help="calls of each kind (50)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    model = str(weights.minilm())
    taken: dict[str, list[float]] = {"unloaded": [], "loaded": [], "in turn, memory for one": []}
    with partial():
        with fleet() as running:
            predicted = takes(running, model)
            running.client.create("a", model, load="on_demand")
            _seconds(running, "a")  # the fork server has imported torch, the weights are in the page cache
            for _ in range(options.rounds):
                taken["loaded"].append(_seconds(running, "a"))
            for _ in range(options.rounds):
                _unload(running, "a")
                taken["unloaded"].append(_seconds(running, "a"))
            say(f"unloaded: {_quantile(taken['unloaded'], 0.5):.3f} s p50")
            budget_mib = predicted["loading_bytes"] + takes(running, model)["host_bytes"] // 4 >> 20  # for one
        with fleet(host_memory_budget_mib=str(budget_mib)) as running:
            for name in "ab":
                running.client.create(name, model, load="on_demand")
                _seconds(running, name)
            for number in range(options.rounds):
                taken["in turn, memory for one"].append(_seconds(running, "ab"[number % 2]))
                if running.client.get("ba"[number % 2]).status is State.RUNNING:
                    raise RuntimeError(f"{budget_mib} MiB hold both models")
            say(f"in turn: {_quantile(taken['in turn, memory for one'], 0.5):.3f} s p50")
    facts = {
        "model": "all-MiniLM-L6-v2, dtype auto, weights in the page cache, POST /v1/embeddings with one text",
        "unloaded": "from the call to its answer, the load included; the model was unloaded by keep_alive 0",
        "in turn": f"two instances under {budget_mib} MiB, for one: each call has the other model evicted",
    }
    rows = [[name, len(each), _quantile(each, 0.5), _quantile(each, 0.99), max(each)] for name, each in taken.items()]
    publish("on_demand", facts, HEADER, rows, {"seconds": taken})
    return 0


def takes(running: Fleet, model: str) -> dict[str, int]:
    """The memory of one worker by a plan: predicted before the first one has loaded, then measured."""
    [worker] = running.client.plan([{"name": "planned", "model_id": model}])["workers"]
    return {name: worker[name] for name in ("host_bytes", "loading_bytes")}


def _seconds(running: Fleet, name: str) -> float:
    began = time.perf_counter()
    _post(running, "/v1/embeddings", {"model": name, "input": _TEXT})
    return time.perf_counter() - began


def _unload(running: Fleet, name: str) -> None:
    _post(running, "/api/embed", {"model": name, "input": _TEXT, "keep_alive": 0})
    _until(lambda: running.client.get(name).status is State.UNLOADED)


def _post(running: Fleet, path: str, body: dict[str, Any]) -> None:
    """Raises OSError: another status than 200."""
    address = f"http://127.0.0.1:{running.api_port}{path}"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        answer.read()


def _until(holds: Callable[[], bool]) -> None:
    """Raises RuntimeError: it does not come."""
    end = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError("the model is not unloaded")
        time.sleep(_LOOK_S)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
