"""`bench declared`: a daemon of thousands of declared models: its start, its idle time, its memory, its list of models.

Most are loaded on demand and rest; some are loaded. The processes of the loaded ones are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from bench import weights
from bench.fleet import Fleet, fleet
from bench.machine import cpu_s
from bench.progress import partial, say
from bench.report import publish
from teimgr.control.supervision.store import render
from teimgr.spec import InstanceSpec, State

HEADER = ("what", "measured", "at most")
_LIST_MS, _IDLE_PERCENT, _MEMORY_MIB = 20.0, 2.0, 250.0
_FIRST_PORT = 20_000
_LOAD_S = 240.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--declared", type=int, default=5000, help="models declared on demand (5000)")
    parser.add_argument("--loaded", type=int, default=50, help="of these, loaded ones of a small model (50)")
    parser.add_argument("--seconds", type=float, default=30, help="of the idle time that is measured (30)")
    parser.add_argument("--lists", type=int, default=20, help="calls of /v1/models; the fastest counts (20)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a figure is above its limit."""
    with partial(), tempfile.TemporaryDirectory() as name:
        state = render(_specs(options.declared, options.loaded, str(_small_model(Path(name) / "model"))))
        ports = {"instance_port_start": _FIRST_PORT, "instance_port_end": _FIRST_PORT + options.declared + 100}
        began = time.monotonic()
        keys = {key: str(port) for key, port in ports.items()}
        keys["prometheus_port_start"] = str(_FIRST_PORT + 2 * options.declared)
        with fleet(state=state, listen_s=_LOAD_S, **keys) as running:
            daemon = psutil.Process(running.process.pid)
            rows: list[tuple[str, float, Any]] = [("seconds until it listens", time.monotonic() - began, "-")]
            rows.append(("processor seconds until it listens", cpu_s(daemon.pid), "-"))
            say(f"listens after {rows[0][1]:.1f} s")
            _await_loaded(running, options.loaded)
            rows.append(("/v1/models, ms", min(_list_s(running) for _ in range(options.lists)) * 1e3, _LIST_MS))
            before = cpu_s(daemon.pid)
            time.sleep(options.seconds)
            idle = (cpu_s(daemon.pid) - before) / options.seconds
            rows.append(("idle, % of a core", 100 * idle, _IDLE_PERCENT))
            rows.append(("memory of the daemon, MiB", daemon.memory_full_info().uss / 2**20, _MEMORY_MIB))
    facts = {"declared": options.declared, "loaded": options.loaded, "idle for": f"{options.seconds:g} s"}
    publish("declared", facts, HEADER, [list(row) for row in rows], {"figures": dict(row[:2] for row in rows)})
    return int(any(limit != "-" and measured > limit for _, measured, limit in rows))


def _specs(declared: int, loaded: int, model: str) -> list[InstanceSpec]:
    return [
        InstanceSpec(
            name=f"declared-{number}",
            model_id=model if number < loaded else f"org/model-{number}",
            load="eager" if number < loaded else "on_demand",
            max_batch_tokens=1024,
        )
        for number in range(declared)
    ]


def _small_model(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    weights.copy_tokenizer(folder, weights.minilm())
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**small), add_pooling_layer=False).save_pretrained(folder)
    return folder


def _await_loaded(running: Fleet, count: int) -> None:
    """Raises RuntimeError: they do not load."""
    end = time.monotonic() + _LOAD_S
    for number in range(count):  # one by one: a list of all would be work for the daemon
        while running.client.get(f"declared-{number}").status is not State.RUNNING:
            if time.monotonic() > end:
                raise RuntimeError(f"fewer than {count} instances run after {_LOAD_S:g} s")
            time.sleep(1)


def _list_s(running: Fleet) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{running.api_port}/v1/models", timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began
