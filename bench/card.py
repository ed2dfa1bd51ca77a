"""`bench card`: everything worth knowing about a card, in one run of ten minutes on a bare machine without a network.

It needs torch, transformers, numpy and pytest, no installation of teimgr and no compiler. Each step is a process of its
own with a limit, so one that fails or hangs hides no other; what a step found is written when it ends.

`--carry DIR` prepares, on a machine with everything, what such a machine lacks: MiniLM's weights in half precision.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import weights
from bench.machine import describe

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / ".card"
"""Where a carried model is looked for."""
# Seconds for each step, those that teach most first; a step gets what is left of the whole at most.
STEPS = {
    "facts": 30,
    "fork": 60,
    "fidelity": 90,
    "forward": 120,
    "queries": 60,
    "bulk": 150,
    "faults": 60,
    "tests": 200,
}
_LEAST_S = 5.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--carry", type=Path, metavar="DIR", help="write what a bare machine needs to DIR, run nothing")
    parser.add_argument("--steps", default=",".join(STEPS), help="those to run (all)")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all steps (560)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to check the steps")
    parser.add_argument("--model", type=Path, help="a MiniLM instead of the carried or installed one")
    parser.add_argument("--out", type=Path, help="where card.json and card.log go ($OUT, else bench/results)")


def run(options: argparse.Namespace) -> int:
    """Run the steps and write their findings; the status is 1 where a step failed."""
    if options.carry is not None:
        return carry(options.carry)
    out: Path = options.out or Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": describe(), "device": options.device, "steps": {}}
    deadline = time.monotonic() + options.limit
    with (out / "card.log").open("w") as log:
        for step in options.steps.split(","):
            left_s = deadline - time.monotonic()
            result = (
                _run_step(step, options, min(STEPS[step], left_s), log) if left_s > _LEAST_S else {"failed": "time"}
            )
            found["steps"][step] = result
            (out / "card.json").write_text(json.dumps(found, indent=1) + "\n")
            print(f"{step}: {'FAILED, ' + str(result['failed']) if 'failed' in result else 'done'}", flush=True)
            print(json.dumps(result, indent=1), flush=True)
    return int(any("failed" in result for result in found["steps"].values()))


def carry(folder: Path) -> int:
    """Copy MiniLM with weights of half precision to `folder`/minilm, some 46 MB."""
    from safetensors.torch import load_file, save_file

    source, target = weights.minilm(), folder / "minilm"
    if target.exists():
        shutil.rmtree(target)
    kept = shutil.ignore_patterns("*.bin", "*.onnx", "*.h5", "*.ot", "*.safetensors", "onnx", "openvino", ".*")
    shutil.copytree(source, target, ignore=kept)
    tensors = {name: value.half().contiguous() for name, value in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {size / 1e6:.1f} MB")
    return 0


def _run_step(step: str, options: argparse.Namespace, limit_s: float, log: Any) -> dict[str, Any]:
    """What a step wrote as its last line, or why it failed; everything else that it wrote is in the log."""
    began = time.monotonic()
    model = options.model or (CARRIED / "minilm" if (CARRIED / "minilm").is_dir() else weights.minilm())
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bench.card_steps", step, options.device, str(model)]
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
