"""Failures of a cluster of three hosts in network namespaces: `python -m tests.faults.cluster [--report FOLDER]`.

Needs root and Ray. The daemon is on the first host, workers on all; a caller embeds without a pause. Of each failure:
when the fleet has all its workers again, how many calls failed, and the longest time without an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from teimgr.client import Client
from teimgr.errors import TeimgrError
from teimgr.launch.process_handle import look_up
from tests.support import long_run
from tests.support.cluster_node import NodeProcess
from tests.support.daemon_process import WarmDaemonProcess, cluster_table, kill_ray
from tests.support.host_network import HostNetwork
from tests.support.models import build
from tests.support.network_namespace import reason_for_none
from tests.support.polling import until
from tests.support.results import markdown, write

LIMIT_S = 240.0
REPLICAS = 3
_NAMES = ("two", "three")


class Caller:
    """Embeds without a pause from `with` to the end of the block, and counts."""

    def __init__(self, daemon: WarmDaemonProcess) -> None:
        self.answers = self.failures = 0
        self.longest_gap_s = 0.0
        self.kinds: set[str] = set()
        self._daemon = daemon
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        with self._daemon.client(timeout_s=5) as client:
            while not self._ends.is_set():
                try:
                    client.embed("a call during the failure", instance="fleet")
                    self.answers += 1
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
                except TeimgrError as error:
                    self.failures += 1
                    self.kinds.add(error.code.name)
        self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)


@dataclass
class Outcome:
    """What one failure did; times in seconds."""

    failure: str
    whole_again_s: float
    answers: int
    failed: int
    codes: str
    longest_gap_s: float
    note: str = ""


class Fleet:
    """The daemon, two joined hosts, and an instance with a replica on each of the three."""

    def __init__(self, network: HostNetwork, store: str) -> None:
        table = cluster_table(network.head, "one", store=store)
        self.daemon = WarmDaemonProcess(cluster=table, orphan_grace_secs=60, restart_backoff_secs=0.5)
        self.spaces = dict(zip(_NAMES, network.hosts, strict=True))
        self.nodes: dict[str, NodeProcess] = {}

    def open(self) -> None:
        self.daemon.start()
        for name, space in self.spaces.items():
            node = self.nodes[name] = NodeProcess(self.daemon, name, space.address)
            node.program = "teimgr"
            node.within = space.within(self.daemon.folder / "run")
            node.start()
        with self.daemon.client() as client:
            until(lambda: self.hosts(client) == {"one", *_NAMES}, "all hosts", LIMIT_S)
            client.create("fleet", str(build("bert", self.daemon.folder / "model")), replicas=REPLICAS, dtype="float32")
        self.whole({"one", *_NAMES})

    def close(self) -> None:
        for name, space in self.spaces.items():
            space.kill_all()
            if process := self.nodes[name].process if name in self.nodes else None:
                process.wait()
        kill_ray(self.daemon.folder / "run")
        self.daemon.close()

    def hosts(self, client: Client) -> set[str]:
        return {each["name"] for each in client.hosts()["hosts"] if not each["problem"]}

    def held(self, client: Client, host: str) -> int:
        """How many workers the agent of a host has, as it reports."""
        return next((each["workers"] for each in client.hosts()["hosts"] if each["name"] == host), 0)

    def workers(self) -> dict[int, str]:
        """Pid and host of each live, ready worker."""
        with self.daemon.client() as client:
            found: list[dict[str, Any]] = list(client.get("fleet").details["workers"])
        return {each["pid"]: each["node"] for each in found if each["pid"] and each["state"] == "running"}

    def whole(self, hosts: set[str] | None = None, without: int | None = None) -> dict[int, str]:
        """Wait for all replicas, on `hosts` where given, none of them the process `without`."""

        def holds() -> dict[int, str] | None:
            try:
                found = self.workers()
            except TeimgrError:
                return None
            right = len(found) == REPLICAS and without not in found and (hosts is None or set(found.values()) == hosts)
            return found if right else None

        return until(holds, f"{REPLICAS} workers", LIMIT_S) or {}

    def on(self, host: str) -> int:
        """The pid of a worker on a host."""
        return next(pid for pid, node in self.workers().items() if node == host)

    def spread(self) -> None:
        """All hosts are there, and each has a replica again."""
        with self.daemon.client() as client:
            until(lambda: self.hosts(client) == {"one", *_NAMES}, "all hosts", LIMIT_S)
            if set(self.workers().values()) != {"one", *_NAMES}:
                client.restart("fleet")
        self.whole({"one", *_NAMES})


def worker_killed(fleet: Fleet) -> str:
    pid = fleet.on("two")
    os.kill(pid, signal.SIGKILL)
    fleet.whole(without=pid)
    return ""


def agent_killed(fleet: Fleet) -> str:
    before = fleet.workers()
    fleet.nodes["two"].kill()
    fleet.nodes["two"].start()
    until(lambda: fleet.nodes["two"].log().count("host joins") > 1, "the next agent", LIMIT_S)
    with fleet.daemon.client() as client:
        until(lambda: fleet.held(client, "two") == 1, "the worker with the next agent", LIMIT_S)
    assert fleet.whole() == before
    return "the same workers"


def daemon_killed(fleet: Fleet) -> str:
    before = fleet.workers()
    fleet.daemon.kill()
    fleet.daemon.start()
    assert fleet.whole() == before
    return "the same workers"


def network_cut(fleet: Fleet) -> str:
    pid, space = fleet.on("two"), fleet.spaces["two"]
    began = time.monotonic()
    space.cut()
    try:
        fleet.whole({"one", "three"}, without=pid)
        elsewhere = time.monotonic() - began
        lived_on = bool(look_up(pid))
    finally:
        space.heal()
    healed = time.monotonic()
    until(lambda: not look_up(pid), "the end of the worker that was cut off", LIMIT_S)
    ended = time.monotonic() - healed
    assert pid not in fleet.workers()
    state = "lived on while cut off" if lived_on else "had ended"
    return f"elsewhere after {elsewhere:.1f} s; the old worker {state}, gone {ended:.1f} s after the healing"


def node_lost(fleet: Fleet) -> str:
    pid = fleet.on("three")
    fleet.spaces["three"].kill_all()
    fleet.nodes["three"].kill()
    fleet.whole({"one", "two"}, without=pid)
    return ""


def ray_of_the_head_killed(fleet: Fleet) -> str:
    before = fleet.workers()
    run_file = fleet.daemon.folder / "run" / "ray.run"
    os.kill(json.loads(run_file.read_text())["pid"], signal.SIGKILL)
    own = next(pid for pid, node in before.items() if node == "one")
    after = fleet.whole(without=own)
    kept = sorted(node for pid, node in after.items() if pid in before)
    return f"workers that stayed: {', '.join(kept) or 'none'}"


FAILURES: dict[str, Callable[[Fleet], str]] = {
    "worker killed": worker_killed,
    "agent of a host killed, started again": agent_killed,
    "daemon killed, started again": daemon_killed,
    "network of a host cut, then healed": network_cut,
    "all processes of a host killed": node_lost,
    "Ray of the head killed": ray_of_the_head_killed,
}


def measure(fleet: Fleet, name: str, store: str) -> Outcome:
    """Do one failure under load."""
    with Caller(fleet.daemon) as caller:
        until(lambda: caller.answers, "the first answer")
        began = time.monotonic()
        note = FAILURES[name](fleet)
        whole = time.monotonic() - began
    codes = ", ".join(sorted(caller.kinds))
    title = f"{name}, store = {store}" if FAILURES[name] is ray_of_the_head_killed else name
    return Outcome(title, round(whole, 1), caller.answers, caller.failures, codes, round(caller.longest_gap_s, 2), note)


def run(store: str, names: list[str]) -> list[Outcome]:
    """The failures that are named, on one fleet, one after the other."""
    found = []
    with HostNetwork(len(_NAMES)) as network:
        fleet = Fleet(network, store)
        try:
            fleet.open()
            for name in names:
                outcome = measure(fleet, name, store)
                print(json.dumps(asdict(outcome)), flush=True)
                found.append(outcome)
                if name == "all processes of a host killed":
                    fleet.nodes["three"].start()
                if name != names[-1]:
                    fleet.spread()
        except BaseException:
            print(fleet.daemon.log(20), *(node.log()[-2000:] for node in fleet.nodes.values()), sep="\n")
            raise
        finally:
            fleet.close()
    return found


def main() -> int:
    """Run, print, write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cluster", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAILURES, default=list(FAILURES), help="failures (all)")
    parser.add_argument("--stores", nargs="+", default=["memory", "rocksdb"], help="of Ray's tables (both)")
    parser.add_argument("--report", type=Path, help="folder for cluster-failures.md and .json")
    options = parser.parse_args()
    if reason := reason_for_none():
        print(f"not here: {reason}")
        return 2
    outcomes: list[Outcome] = []
    for store in options.stores:
        last = "Ray of the head killed"
        names = options.only if store == options.stores[0] else [name for name in options.only if name == last]
        outcomes += run(store, names) if names else []
    if options.report:
        header = ["failure", "whole again s", "calls answered", "calls failed", "codes", "longest gap s", "note"]
        lines = ["A daemon and two joined hosts in network namespaces of one machine, three replicas, one caller.", ""]
        lines += markdown(header, [list(asdict(each).values()) for each in outcomes])
        write(
            options.report, "cluster-failures", "Failures of a cluster", lines, {"outcomes": [*map(asdict, outcomes)]}
        )
    return 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
