"""`python -m bench NAME`: run one scenario, or `all`. A scenario is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
import time

from bench import LIMITS_S, SCENARIOS, progress

# What `all` runs: scenarios with their options.
_ALL: dict[str, tuple[str, ...]] = {
    "engine": (),
    "peers": (),
    "peers-base": ("--shape", "base"),
    "peers-xlm-r-reranker": ("--shape", "xlm-r-reranker"),
    "peers-splade": ("--shape", "splade"),
    "peers-modernbert": ("--shape", "modernbert"),
    "peers-qwen3": ("--shape", "qwen3"),
    "latency": (),
    "forward": (),
    "rerank": (),
    "stages": (),
    "start": (),
    "mux": (),
    "bimodal": (),
    "neighbours": (),
    "front": (),
    "growth": (),
    "fidelity": (),
    "guard": (),
    "html": (),
}
_INTERRUPTED = 130
_END_S = 300.0  # beyond its limit a scenario writes what it has and stops its servers


def main() -> int:
    """Run the command line."""
    lines = [
        f"  {name:12}{meaning}" + (f" (at most {LIMITS_S[name]:g} s)" if name in LIMITS_S else "")
        for name, meaning in SCENARIOS.items()
    ]
    lines.append(f"  {'all':12}{', '.join(_ALL)}, one after the other, each in a process of its own")
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
    """Every scenario in a process of its own, so that one that fails, or changes its process, changes no other."""
    command = argparse.ArgumentParser(prog="python -m bench all", description="All scenarios that need no card.")
    command.add_argument("--only", nargs="+", choices=tuple(_ALL), default=tuple(_ALL), help="these of them")
    command.add_argument("--skip", nargs="+", choices=tuple(_ALL), default=[], help="not these")
    parsed = command.parse_args(options)
    statuses: dict[str, int] = {}
    interrupts: list[int] = []
    for name in (name for name in _ALL if name in parsed.only and name not in parsed.skip):
        began = time.monotonic()
        progress.say(f"{name}, at most {_limit_s(name):g} s")
        statuses[name] = _in_own_process(name, interrupts)
        progress.say(f"{name} ended with status {statuses[name]} after {time.monotonic() - began:.0f} s")
        if interrupts:
            break
    print("\n".join(f"{name}: {'done' if not status else f'status {status}'}" for name, status in statuses.items()))
    return max(statuses.values(), default=0)


def _in_own_process(name: str, interrupts: list[int]) -> int:
    """Its status; signals are added to `interrupts` and end the scenario, which writes what it has."""
    command = [sys.executable, "-m", "bench", name.partition("-")[0], *_ALL[name]]
    with subprocess.Popen(command, start_new_session=True) as process:

        def pass_on(number: int, frame: object) -> None:
            interrupts.append(number)
            process.send_signal(signal.SIGINT)

        former = [(number, signal.signal(number, pass_on)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            return process.wait(_limit_s(name) + _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return 1
        finally:
            for number, handler in former:
                signal.signal(number, handler)


def _limit_s(name: str) -> float:
    return LIMITS_S[name.partition("-")[0]]


if __name__ == "__main__":
    sys.exit(main())
