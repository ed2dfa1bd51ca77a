"""`python -m bench NAME`: run one scenario. A scenario is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

SCENARIOS = {
    "engine": "bulk texts/s: sentence-transformers, the bare engine, the daemon",
    "peers": "bulk texts/s in process beside OpenVINO and ONNX Runtime, where they are installed",
    "forward": "the native forward against the model's own, with native attention and with torch's operators",
    "start": "create, restart after a kill, memory of a first and a second worker",
    "mux": "latency of single queries, idle and beside bulk work; requests per second",
    "neighbours": "bulk texts/s of one instance alone, beside an idle and beside a busy one",
    "front": "requests per second by interface and callers, with the CPU time of every process",
    "guard": "ratios that must not fall below their bounds, in half a minute",
    "fidelity": "every kind of model against the library it was made with: cosines and differences",
    "gpu": "bulk texts/s on CUDA: sentence-transformers and the bare engine",
}


def main() -> int:
    """Run the command line."""
    lines = [f"  {name:10}{meaning}" for name, meaning in SCENARIOS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="python -m bench NAME [options]   (NAME --help shows its options)",
        description="Scenarios:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=SCENARIOS, metavar="NAME")
    name: str = parser.parse_args(sys.argv[1:2]).name
    scenario = importlib.import_module(f"bench.{name}")
    command = argparse.ArgumentParser(prog=f"python -m bench {name}", description=SCENARIOS[name])
    scenario.arguments(command)
    status: int = scenario.run(command.parse_args(sys.argv[2:]))
    return status


if __name__ == "__main__":
    sys.exit(main())
