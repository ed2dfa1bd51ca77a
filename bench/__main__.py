"""`python -m bench NAME`: run one scenario, or `all`. A scenario is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import LIMITS_S, SCENARIOS, progress, whole

_INTERRUPTED = 130


def main() -> int:
    """Run the command line."""
    lines = [
        f"  {name:12}{meaning}" + (f" (at most {LIMITS_S[name]:g} s)" if name in LIMITS_S else "")
        for name, meaning in SCENARIOS.items()
    ]
    lines.append(f"  {'all':12}{', '.join(whole.STEPS)}, one after the other, each in a process of its own")
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="python -m bench NAME [options]   (NAME --help shows its options)",
        description="Scenarios:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=(*SCENARIOS, "all"), metavar="NAME")
    name: str = parser.parse_args(sys.argv[1:2]).name
    return _all(sys.argv[2:]) if name == "all" else _run(name, sys.argv[2:])


def _run(name: str, options: list[str]) -> int:
    scenario = importlib.import_module(f"bench.{name}")
    command = argparse.ArgumentParser(prog=f"python -m bench {name}", description=SCENARIOS[name])
    scenario.arguments(command)
    if name not in LIMITS_S:
        status: int = scenario.run(command.parse_args(options))
        return status
    limit_s = LIMITS_S[name]
    command.add_argument("--limit", type=float, default=limit_s, help=f"seconds of the whole ({limit_s:g})")
    parsed = command.parse_args(options)
    try:
        with progress.limited(parsed.limit):
            status = scenario.run(parsed)
    except KeyboardInterrupt:
        progress.say("interrupted before anything was measured")
        return _INTERRUPTED
    return status or (_INTERRUPTED if progress.incomplete() else 0)


def _all(options: list[str]) -> int:
    command = argparse.ArgumentParser(prog="python -m bench all", description="All scenarios that need no card.")
    whole.arguments(command)
    return whole.run(command.parse_args(options), options)


if __name__ == "__main__":
    sys.exit(main())
