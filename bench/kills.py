"""`bench kills`: models on demand that need 1 GiB more than a memory cgroup allows, and kills by the kernel."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.fleet import Fleet, fleet
from bench.forty.calls import Refused, post
from bench.forty.catalogue import KEYS, encoder
from bench.forty.watching import events_after
from bench.on_demand import takes
from bench.progress import say
from bench.report import publish
from teimgr.control.ledger.system_memory import CgroupMemory

HEADER = ("outcome", "calls")
_MIB = 2**20
_AT_ONCE = 4
_MODELS = 22  # of some 80 MiB each: 1 GiB more than so many at once
_CALLERS = 8
_PAUSE_S = 1.0  # of a caller that was refused
_TEXT = "Does the kernel kill a worker for this?"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--tries", type=int, default=200, help="loads under calls (200)")
    parser.add_argument("--minutes", type=float, default=30, help="end earlier, after so long (30)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 where the kernel has killed, or a call had no typed answer."""
    with tempfile.TemporaryDirectory(prefix="tk") as place:
        folders = [Path(place) / f"m{number:02}" for number in range(_MODELS)]
        for number, folder in enumerate(folders):
            encoder(folder, width=512, layers=2, seed=number)  # before: it is no memory of the daemon's
        names = [folder.name for folder in folders]
        with memory_cgroup() as group, fleet(listen_s=600.0, inference_timeout_secs="110") as running:
            for folder in folders:
                running.client.create(folder.name, str(folder), **KEYS)
            _call(running, names[0])  # the fork server has imported torch
            each_mib = takes(running, str(folders[0]))["host_bytes"] // _MIB
            used_mib = _used_mib(group)
            limit_mib = used_mib + _AT_ONCE * each_mib
            (group / "memory.limit_in_bytes").write_text(str(limit_mib * _MIB))
            say(f"{len(names)} models of {each_mib} MiB, the cgroup allows {limit_mib} MiB, {used_mib} of them used")
            before = CgroupMemory().kills()
            outcomes, events = _drive(running, names, options.tries, options.minutes * 60)
            kills = CgroupMemory().kills() - before
    crashed = [event for event in events if event["event"] == "crashed"]
    facts = {
        "models": f"{len(names)} on demand, {len(names) * each_mib} MiB by the ledger",
        "cgroup": f"{limit_mib} MiB in all, of which daemon, mux and fork server took {used_mib - each_mib}",
        "tries": f"{_loads(events)} loads, by {_CALLERS} callers at a time",
        "kernel": f"{kills} kills",
        "crashed": "; ".join(f"{event['instance']}: {event['reason']}" for event in crashed) or "none",
    }
    publish("kills", facts, HEADER, [[name, number] for name, number in outcomes.items()], {"kills": kills})
    return int(bool(kills or crashed or outcomes["broken"]))


@contextmanager
def memory_cgroup() -> Iterator[Path]:
    """Within the block this process is in a memory cgroup of version 1 of its own.

    Raises:
        OSError: cgroups of version 1 cannot be made here.
    """
    made, home = Path(f"/sys/fs/cgroup/memory/teimgr-kills-{os.getpid()}"), CgroupMemory().groups[0][0]
    made.mkdir()
    (made / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield made
    finally:
        for pid in (made / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (home / "cgroup.procs").write_text(pid)
        made.rmdir()


def _drive(running: Fleet, names: Sequence[str], loads: int, limit_s: float) -> tuple[Counter[str], list[Any]]:
    """Call models at random until so many were loaded; how the calls ended, and the events meanwhile."""
    draw, outcomes, end = random.Random(7), Counter[str](), time.monotonic() + limit_s
    events: list[Any] = events_after(running, 0)[-1:]

    def outcome(name: str) -> str:
        try:
            _call(running, name)
        except Refused as refusal:
            say(f"{name}: {refusal}")
            time.sleep(_PAUSE_S)
            return "refused with a reason"
        except OSError as error:
            say(f"{name}: {error}")
            return "broken"
        return "answered"

    with ThreadPoolExecutor(_CALLERS) as pool:
        while _loads(events) < loads and time.monotonic() < end:
            outcomes.update(pool.map(outcome, draw.choices(names, k=_CALLERS)))
            events += events_after(running, events[-1]["id"])
            say(f"{_loads(events)} loads: {dict(outcomes)}")
    return outcomes, events


def _loads(events: Sequence[Any]) -> int:
    return sum(int(event["count"]) for event in events if event["event"] == "running")


def _call(running: Fleet, name: str) -> Any:
    return post(running, "/v1/embeddings", {"model": name, "input": _TEXT})


def _used_mib(group: Path) -> int:
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.usage_in_bytes").read_text())
    return (used - int(stat["total_inactive_file"]) - int(stat["total_active_file"])) // _MIB
