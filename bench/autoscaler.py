"""Simulation of the autoscaling policy over scenarios of load: replicas, waiting work, overshoot, changes of direction.

`bench/autoscaler_scenarios.json` has the scenarios, which the tests use too. Load is in replicas: 2.4 is what two and
a half replicas compute. Arrivals are noisy, with a fixed seed; a replica serves after its start time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.report import RESULTS, publish
from teimgr.control.capacity.policy import FILL_DOWN, Reading, Seen, Terms, decide

SCENARIOS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "autoscaler_scenarios.json").read_text(encoding="utf-8")
)
RATE = 1000.0
START_S = 5.0
_NOISE = 0.15
_STEP_S = 2.0


@dataclass(frozen=True, slots=True)
class Run:
    """A scenario's course, step by step: load in replicas, replicas, seconds of waiting work; and decisions."""

    load: list[float]
    replicas: list[int]
    waiting_s: list[float]
    reasons: list[tuple[float, str]]

    @property
    def needed(self) -> int:
        """The replicas that the greatest load needs."""
        return math.ceil(max(self.load) / FILL_DOWN)

    @property
    def overshoot(self) -> int:
        return max(0, max(self.replicas) - self.needed)

    @property
    def turns(self) -> int:
        """Changes of direction: up after down, and down after up."""
        moves = [1 if b > a else -1 for a, b in pairwise(self.replicas) if a != b]
        return sum(a != b for a, b in pairwise(moves))


def load_at(scenario: Mapping[str, Any], at: float) -> float:
    """The load of a scenario at a second, in replicas."""
    if wave := scenario.get("wave"):
        middle, swing = (wave["high"] + wave["low"]) / 2, (wave["high"] - wave["low"]) / 2
        return float(middle - swing * math.cos(2 * math.pi * at / wave["period"]))
    points = scenario["load"]
    for (t0, y0), (t1, y1) in pairwise(points):
        if t0 <= at < t1:
            return float(y0 + (y1 - y0) * (at - t0) / (t1 - t0))
    return float(points[-1][1])


def simulate(scenario: Mapping[str, Any], seed: int = 1) -> Run:
    """Run the policy over a scenario."""
    rng, shared, gain = random.Random(seed), scenario.get("shared_host", False), scenario.get("gain", 1.0)
    terms = Terms(
        max_replicas=10, start_s=START_S, down_delay_s=scenario.get("down_delay_s", 120.0), shared_device=shared
    )
    seen, run = Seen(), Run([], [], [], [])
    replicas, queued, pending = 1, 0.0, None
    for step in range(int(scenario["seconds"] / _STEP_S)):
        at = step * _STEP_S
        if pending and at >= pending[0]:
            replicas, pending = pending[1], None
        load = load_at(scenario, at)
        arrived = max(0.0, rng.gauss(load, _NOISE * load)) * RATE * _STEP_S
        room = RATE * (1 + (replicas - 1) * gain) * _STEP_S
        computed = min(queued + arrived, room)
        queued += arrived - computed
        seen, decision = decide(
            terms, seen, Reading(at, replicas, queued, arrived, computed, computed / room * replicas * _STEP_S)
        )
        if pending is None and decision.wanted != replicas:
            run.reasons.append((at, decision.reason))
            if decision.wanted < replicas:
                replicas = decision.wanted
            else:
                pending = (at + START_S, decision.wanted)
        run.load.append(load)
        run.replicas.append(replicas)
        run.waiting_s.append(queued / RATE)
    return run


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scenario, with other noise (5)")


def run(options: argparse.Namespace) -> int:
    """Simulate all scenarios; a table, and a plot of each one's first run. 1 where a bound is broken."""
    rows, data, broken = [], [], 0
    for name, scenario in SCENARIOS.items():
        runs = [simulate(scenario, seed) for seed in range(options.seeds)]
        overshoot, turns = max(each.overshoot for each in runs), max(each.turns for each in runs)
        broken += overshoot > 1 or turns > scenario["turns"]
        most = max(max(each.replicas) for each in runs)
        waits_s = sorted(wait for each in runs for wait in each.waiting_s)
        p99_s = waits_s[int(len(waits_s) * 0.99)]
        mean = sum(sum(each.replicas) / len(each.replicas) for each in runs) / len(runs)
        rows.append([name, most, overshoot, turns, scenario["turns"], f"{p99_s:.1f}", f"{mean:.2f}"])
        reasons = [[at, reason] for at, reason in runs[0].reasons]
        data.append({"scenario": name, "overshoot": overshoot, "turns": turns, "waiting_p99_s": p99_s})
        data[-1]["decisions"] = reasons
        stem = name.replace(" ", "-")
        (RESULTS / f"autoscaler-{stem}.svg").write_text(plot(name, runs[0]), encoding="utf-8")
    header = ["scenario", "most replicas", "overshoot", "turns", "allowed", "waiting p99, s", "mean replicas"]
    facts = {"start of a replica": f"{START_S:g} s", "noise of arrivals": f"{_NOISE:.0%}", "runs": options.seeds}
    publish("autoscaler", facts, header, rows, {"rows": data})
    return 1 if broken else 0


def plot(title: str, run: Run) -> str:
    """Load and replicas over time as an SVG document."""
    width, height, top = 720, 220, max(*run.load, *run.replicas)

    def path(values: list[Any]) -> str:
        points = [
            (40 + i * (width - 60) / len(values), height - 30 - y * (height - 70) / top) for i, y in enumerate(values)
        ]
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points[:: max(1, len(points) // 700)])

    style = "text{font:13px system-ui,sans-serif;fill:#777}polyline{fill:none;stroke-width:2}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><style>{style}</style>',
        f'<text x="40" y="20">{title}: load (orange) and replicas (blue), most {top:.1f}, '
        f"{len(run.load) * _STEP_S:,.0f} s</text>",
        f'<polyline stroke="#d1783f" points="{path(run.load)}"/>',
        f'<polyline stroke="#3f6fd1" points="{path(run.replicas)}"/></svg>',
    ]
    return "\n".join(lines) + "\n"
