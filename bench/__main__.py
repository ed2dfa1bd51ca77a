"""`python -m bench NAME`: run one scenario, or `all`. A scenario is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import SCENARIOS

# What `all` runs, each with its defaults: 30 to 40 minutes on two cores with nothing else running.
_ALL = ("engine", "peers", "forward", "start", "mux", "neighbours", "front", "fidelity", "html")


def main() -> int:
    """Run the command line."""
    lines = [f"  {name:12}{meaning}" for name, meaning in SCENARIOS.items()]
    lines.append(f"  {'all':12}{', '.join(_ALL)}, one after the other")
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="python -m bench NAME [options]   (NAME --help shows its options)",
        description="Scenarios:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=(*SCENARIOS, "all"), metavar="NAME")
    name: str = parser.parse_args(sys.argv[1:2]).name
    if name == "all":
        return max(_run(each, []) for each in _ALL)
    return _run(name, sys.argv[2:])


def _run(name: str, options: list[str]) -> int:
    scenario = importlib.import_module(f"bench.{name}")
    command = argparse.ArgumentParser(prog=f"python -m bench {name}", description=SCENARIOS[name])
    scenario.arguments(command)
    status: int = scenario.run(command.parse_args(options))
    return status


if __name__ == "__main__":
    sys.exit(main())
