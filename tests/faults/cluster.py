"""Failures of a cluster of three hosts in network namespaces: `python -m tests.faults.cluster [--report FOLDER]`.

Needs root and Ray. The daemon is on the first host; `fleet` has a replica on each host, `neighbour` its only one on the
third. A caller for each surface of the head and each instance calls all the time, and every vector is compared with the
reference. After each failure everything must become as it is wanted, with the invariants of a fault run (`soak.py`):
what was acknowledged is in the state file, no call was answered wrongly or without a typed error, and no process and no
run file is left. The exit status is 0 where none was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from teimgr import __version__
from teimgr.control.launch.process_handle import look_up
from teimgr.errors import NoHost
from tests.faults import long_run
from tests.faults.callers import CLUSTER_SURFACES, Callers
from tests.faults.catalogue import Kind
from tests.faults.cluster_world import HEAD, HOSTS, LIMIT_S, ClusterWorld
from tests.faults.host_network import HostNetwork
from tests.faults.other_clock import clock_ahead
from tests.faults.other_version import VERSION
from tests.faults.results import markdown, write
from tests.faults.soak import Report, inject
from tests.support.cluster import NodeProcess
from tests.support.network_namespace import reason_for_none
from tests.support.polling import eventually

_HEALS_WITHIN_S = 120.0
_MAX_S = 600.0
_SERVED_WITHIN_S = 60.0
_OTHER = "99.0"
AHEAD_S, LATE_S, TOO_LATE_S = 7200, -1800, -7200


async def worker_killed(world: ClusterWorld) -> None:
    world.end_worker(await world.on_host("two"))


async def agent_killed(world: ClusterWorld) -> None:
    before, node = await world.workers(), world.nodes["two"]
    joined = node.log().count("host joins")
    await asyncio.to_thread(node.kill)
    await asyncio.to_thread(node.start)
    await eventually(lambda: node.log().count("host joins") > joined, LIMIT_S)

    async def is_held() -> bool:
        return (await world.hosts()).get("two", {}).get("workers") == 1

    await eventually(is_held, LIMIT_S)
    assert await world.whole() == before
    world.note = "the same workers"


async def daemon_killed(world: ClusterWorld) -> None:
    before = await world.workers()
    world.daemon.kill()
    await asyncio.to_thread(world.daemon.start)
    assert await world.whole() == before
    world.note = "the same workers"


async def network_cut(world: ClusterWorld) -> None:
    await _cut(world, changes_model=False)


async def network_cut_and_model_changed(world: ClusterWorld) -> None:
    """The worker that was cut off has the old model: nobody may hear of it any more."""
    await _cut(world, changes_model=True)


async def _cut(world: ClusterWorld, *, changes_model: bool) -> None:
    pid, space, began = await world.on_host("two"), world.spaces["two"], time.monotonic()
    world.end(pid)
    space.cut()
    try:
        await world.whole({HEAD, "three"})
        told = [f"elsewhere after {time.monotonic() - began:.1f} s"]
        if changes_model:
            await _change_model(world)
            told.append("the model was changed meanwhile")
        told.append(f"the old worker {'lived on while cut off' if look_up(pid) else 'had ended'}")
    finally:
        space.heal()
    healed = time.monotonic()
    await world.gone(pid)
    told.append(f"gone {time.monotonic() - healed:.1f} s after the healing")
    assert pid not in await world.workers()
    await world.all_hosts()
    world.note = "; ".join(told)


async def model_changed(world: ClusterWorld) -> None:
    began = time.monotonic()
    await _change_model(world)
    world.note = f"acknowledged after {time.monotonic() - began:.1f} s"
    await world.whole(HOSTS)


async def _change_model(world: ClusterWorld) -> None:
    """From the acknowledgement on, no call that begins may be answered by the former model."""
    await world.switch_model("fleet")
    world.allowed["fleet"] = {world.wanted["fleet"].model}


async def host_lost(world: ClusterWorld) -> None:
    began = time.monotonic()
    await world.lose_host("three")
    await world.whole({HEAD, "two"})
    world.note = f"`fleet` whole elsewhere after {time.monotonic() - began:.1f} s; the host was started again then"
    await asyncio.to_thread(world.nodes["three"].start)
    await world.all_hosts()


async def ray_of_the_head_killed(world: ClusterWorld) -> None:
    before = await world.workers()
    await world.end_workers_of(*(HOSTS if world.store == "memory" else {HEAD}))
    run_file = world.daemon.folder / "run" / "ray.run"
    os.kill(json.loads(run_file.read_text())["pid"], signal.SIGKILL)
    after = await world.whole()
    kept = sorted(node for pid, node in after.items() if pid in before)
    world.note = f"workers that stayed: {', '.join(kept) or 'none'}"
    await world.all_hosts()


async def head_lost(world: ClusterWorld) -> None:
    """A daemon on another machine takes over the address; nothing is done on the other hosts."""
    await world.lose_head()
    began = time.monotonic()
    await world.replace_daemon(world.network.head)
    await world.whole()
    world.note = f"`fleet` whole {time.monotonic() - began:.1f} s after the start of the next daemon"
    await world.all_hosts()


async def head_lost_for_another_address(world: ClusterWorld) -> None:
    """The hosts join again by hand, one after an orderly end, one after a kill; their certificates are enough."""
    await world.lose_head()
    began = time.monotonic()
    address = world.network.replace_head()
    await world.replace_daemon(address)
    orderly, killed = world.nodes["two"], world.nodes["three"]
    assert orderly.process is not None
    left = orderly.log().count('"host leaves"')
    orderly.process.send_signal(signal.SIGTERM)
    await eventually(lambda: orderly.log().count('"host leaves"') > left, LIMIT_S)
    orderly.process.send_signal(signal.SIGTERM)  # nobody takes its workers
    await asyncio.to_thread(killed.kill)
    for node in (killed, orderly):
        await asyncio.to_thread(node.process.wait, LIMIT_S)  # type: ignore[union-attr]
        node.join_instead(world.daemon)
        await asyncio.to_thread(node.start)
    await world.all_hosts()
    world.note = f"all hosts there {time.monotonic() - began:.1f} s after the start of the next daemon"


async def clocks_apart(world: ClusterWorld) -> None:
    """The clock of a host is hours ahead, then half an hour late; one that is too late is refused in a sentence."""
    node, told = world.nodes["two"], []
    try:
        for ahead_s in (AHEAD_S, LATE_S):
            await world.lose_host("two")
            await world.whole({HEAD, "three"})  # the daemon has noticed, and takes the host that starts for another one
            node.environ = dict(clock_ahead(world.folder, ahead_s))
            await asyncio.to_thread(node.start)
            await world.all_hosts()
            await world.spread()
            shown = (await world.hosts())["two"]["clock_ahead_s"]
            assert abs(shown - ahead_s) < LIMIT_S, shown
            async with world.client() as client:
                uptimes = [each["uptime_secs"] for each in (await client.get("fleet")).details["workers"]]
            assert max(uptimes) < -LATE_S, uptimes
            told.append(f"{ahead_s:+} s: joined, shown as {shown:+.0f} s")
        await world.lose_host("two")
        node.environ = dict(clock_ahead(world.folder, TOO_LATE_S))
        await asyncio.to_thread(node.start)
        refused = await _refused(node, "this host's clock")
        told.append(f"{TOO_LATE_S:+} s: refused, {refused}")
    finally:
        node.environ = {}
    await asyncio.to_thread(node.start)
    await world.all_hosts()
    world.note = "; ".join(told)


async def disk_full(world: ClusterWorld) -> None:
    """Of a host: what runs there goes on, nothing is started there, and it is used again when there is room."""
    assert world.disk is not None
    pid, began = await world.on_host("two"), time.monotonic()
    world.disk.fill()
    try:
        world.end_worker(pid)  # at once: the daemon does not know yet
        await world.whole({HEAD, "three"})
        elsewhere = time.monotonic() - began
        problem = await world.problem_of("two")
        assert problem.startswith("its disk is full"), problem
        async with world.client(60.0) as client:
            try:
                await client.create("pinned", str(world.folder / "red"), node="two")
            except NoHost as error:
                assert "its disk is full" in error.message
            else:
                raise AssertionError("an instance was created on a host with a full disk")
    finally:
        world.disk.free()
    freed = time.monotonic()
    await world.all_hosts()
    world.note = f"elsewhere after {elsewhere:.1f} s; taken again {time.monotonic() - freed:.1f} s after there was room"


async def version_refused(world: ClusterWorld) -> None:
    """A host of another version of teimgr does not get in."""
    node = NodeProcess(world.daemon, "four", world.spaces["two"].address)
    node.program, node.environ = "tests.faults.other_version", {VERSION: _OTHER}
    node.within = world.nodes["two"].within
    await asyncio.to_thread(node.start)
    world.note = await _refused(node, f"versions differ from the daemon's: teimgr {__version__} (here {_OTHER})")
    assert set(await world.hosts()) == HOSTS


async def daemon_of_another_version(world: ClusterWorld) -> None:
    """As while a fleet is brought to another version: the head is first."""
    before, program = await world.workers(), world.daemon.program
    world.daemon.kill()
    try:
        world.daemon.program = "tests.faults.other_version"
        await asyncio.to_thread(world.daemon.start, {VERSION: _OTHER})
        for host in ("two", "three"):
            problem = await world.problem_of(host)
            assert problem.startswith("versions differ: teimgr "), problem
        assert await world.whole() == before
        world.end_worker(next(pid for pid, host in before.items() if host == "two"))
        after = await world.whole()
        assert "two" not in after.values(), after
        world.daemon.kill()
    finally:
        world.daemon.program = program
    await asyncio.to_thread(world.daemon.start)
    await world.all_hosts()
    world.note = "workers served on; the other hosts took no new ones until the versions were equal again"


async def _refused(node: NodeProcess, reason: str) -> str:
    """The sentence with which `node join` ends at once."""
    assert node.process is not None
    status = await asyncio.to_thread(node.process.wait, LIMIT_S)
    message = str(json.loads(node.log().splitlines()[-1])["message"])
    assert status == 1, message
    assert reason in message, message
    return f"“{message}”"


def _kind(
    failure: Callable[[ClusterWorld], Awaitable[None]],
    *,
    spares_neighbour: bool = True,
    spares_all: bool = False,
    takes_at_most_s: float = _MAX_S,
) -> Kind[ClusterWorld]:
    return Kind(failure, spares_neighbour, _HEALS_WITHIN_S, 1, spares_all, takes_at_most_s, _SERVED_WITHIN_S)


FAILURES: dict[str, Kind[ClusterWorld]] = {
    "worker killed": _kind(worker_killed),
    "agent of a host killed, started again": _kind(agent_killed, spares_all=True),
    "daemon killed, started again": _kind(daemon_killed, spares_neighbour=False),
    "model changed": _kind(model_changed, spares_all=True),
    "network of a host cut, then healed": _kind(network_cut),
    "network of a host cut, model changed, then healed": _kind(network_cut_and_model_changed),
    "disk of a host full": _kind(disk_full),
    "all processes of a host killed": _kind(host_lost, spares_neighbour=False),
    "host of another version": _kind(version_refused, spares_all=True),
    "daemon of another version": _kind(daemon_of_another_version, spares_neighbour=False),
    "clock of a host hours apart": _kind(clocks_apart, takes_at_most_s=3 * _MAX_S),
    "Ray of the head killed": _kind(ray_of_the_head_killed, spares_neighbour=False),
    "head lost, another one with its address": _kind(head_lost, spares_neighbour=False),
    "head lost, another one with another address": _kind(head_lost_for_another_address, spares_neighbour=False),
}
_BY_STORE = "Ray of the head killed"


@dataclass
class Outcome:
    """What one failure did; times in seconds. `failed` and `longest_gap_s` are of calls on `fleet`."""

    failure: str
    whole_again_s: float
    answers: int
    failed: int
    codes: str
    longest_gap_s: float
    load: float
    note: str = ""


async def measure(world: ClusterWorld, callers: Callers, name: str, report: Report) -> Outcome:
    """Do one failure under load, and check the invariants."""
    before, answers = callers.failures_of("fleet"), callers.replies.copy()
    callers.begin_gaps()
    world.note = ""
    whole_s = await inject(world, callers, name, FAILURES[name], report, report.faults.total() + 1)
    callers.end_gaps()
    failed = callers.failures_of("fleet") - before
    codes = sorted({kind for _, kind in failed})
    title = f"{name}, store = {world.store}" if name == _BY_STORE else name
    done = sum(n for (instance, _), n in (callers.replies - answers).items() if instance == "fleet")
    gap_s, load = callers.longest_gap_s.get("fleet", 0.0), os.getloadavg()[0]
    return Outcome(
        title, round(whole_s, 1), done, failed.total(), ", ".join(codes), round(gap_s, 2), round(load, 1), world.note
    )


async def run(folder: Path, store: str, names: Sequence[str]) -> tuple[list[Outcome], Report]:
    """The failures that are named, on one fleet, one after the other."""
    found: list[Outcome] = []
    report = Report(1)
    with HostNetwork(2) as network:
        world = await asyncio.to_thread(ClusterWorld.on, network, folder, store)
        try:
            await world.open()
            callers = Callers(world, CLUSTER_SURFACES)
            async with callers.calling(list(world.wanted)):
                await callers.all_served(LIMIT_S)
                for name in names:
                    await world.spread()
                    found.append(await measure(world, callers, name, report))
                    print(json.dumps(asdict(found[-1])), flush=True)
                    if world.breaches:
                        break
            report.texts = callers.texts
            for (_, surface), count in callers.replies.items():
                report.replies[surface] += count
            if not world.breaches:
                await world.end_in_order()
        except BaseException:
            print(world.log())
            raise
        finally:
            report.breaches = world.breaches
            if world.breaches:
                print(world.log(), *world.breaches, sep="\n")
            await asyncio.to_thread(world.close)
    return found, report


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each failure; of several trials the median and the longest."""
    rows = []
    for name in dict.fromkeys(each.failure for each in outcomes):
        those = [each for each in outcomes if each.failure == name]
        times = [each.whole_again_s for each in those]
        whole = f"{statistics.median(times):.1f}" + (f" (at most {max(times):.1f})" if len(times) > 1 else "")
        codes = ", ".join(sorted({code for each in those for code in each.codes.split(", ") if code}))
        failed, answers = sum(each.failed for each in those), sum(each.answers for each in those)
        loads = " to ".join(f"{load:.0f}" for load in sorted({min(e.load for e in those), max(e.load for e in those)}))
        gap = max(each.longest_gap_s for each in those)
        rows.append([name, len(those), whole, answers, failed, codes, f"{gap:.1f}", loads, those[-1].note])
    header = ["failure", "trials", "whole again s", "calls answered", "failed", "codes", "longest gap s", "load"]
    return markdown([*header, "note"], rows)


def main() -> int:
    """Run, print, write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cluster", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAILURES, default=list(FAILURES), help="failures (all)")
    parser.add_argument("--stores", nargs="+", default=["memory", "rocksdb"], help="of Ray's tables (both)")
    parser.add_argument("--trials", type=int, default=1, help="of each failure, one round after the other (1)")
    parser.add_argument("--report", type=Path, help="folder for cluster-failures.md and .json")
    options = parser.parse_args()
    if reason := reason_for_none():
        print(f"not here: {reason}")
        return 2
    outcomes: list[Outcome] = []
    breaches: list[str] = []
    texts = 0
    for store in options.stores:
        names = [name for name in options.only if store == options.stores[0] or name == _BY_STORE]
        if names:
            with tempfile.TemporaryDirectory(prefix="tf") as folder:
                found, report = asyncio.run(run(Path(folder), store, names * options.trials))
            outcomes += found
            breaches += report.breaches
            texts += report.texts
    print("\n".join([*table(outcomes), *(f"* {breach}" for breach in breaches)]))
    if options.report:
        lines = [
            "A daemon and two joined hosts in network namespaces of one machine; tiny models, three replicas and a "
            f"neighbour, ten callers. {len(outcomes)} failures, {texts:,} vectors compared with the reference, "
            f"{len(breaches)} broken invariants. `load` is the load average.",
            "",
            *table(outcomes),
            *(f"* {breach}" for breach in breaches),
        ]
        facts = {"outcomes": [*map(asdict, outcomes)], "breaches": breaches, "texts": texts}
        write(options.report, "cluster-failures", "Failures of a cluster", lines, facts)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
