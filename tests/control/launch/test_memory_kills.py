"""Kills by the kernel for memory: whose death they explain, and what the kernel really does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.support.cgroups import V1, V2, cgroup, memory_cgroup
from tests.support.fakes.worker import fake_id

from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.launch.memory_kills import CLAIM_S, MemoryKills
from teimgr.control.ledger.system_memory import CgroupMemory
from teimgr.errors import Code
from teimgr.spec import WorkerSpec

__all__ = ["memory_cgroup"]
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(("files", "line"), [(V2, "0::/unit\n"), (V1, "4:memory:/unit\n")])
def test_each_kill_that_the_kernel_counts_explains_one_death(tmp_path: Path, files: tuple[str, ...], line: str) -> None:
    unit = tmp_path / "cgroup" / files[0] / "unit"
    cgroup(unit, files, limit=str(1400 << 20), kills=4)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text(line)
    (tmp_path / "meminfo").write_text("MemTotal: 24000000 kB\n")
    now = [0.0]
    group, kills = CgroupMemory(5, tmp_path / "cgroup", tmp_path), MemoryKills(lambda: now[0])
    kills.watch(group)
    assert kills.explain(group, KILLED, 5, "worker") is None, "a kill before it was watched, and one by a person"

    cgroup(unit, files, limit=str(1400 << 20), kills=5)
    assert kills.explain(group, 1, 5, "worker") is None, "it ended by itself"
    report = kills.explain(group, KILLED, 1229 << 20, "worker")
    assert report is not None
    assert (report.code, report.permanent) == (Code.KILLED_FOR_MEMORY, False)
    assert (
        report.message
        == "killed by the kernel for memory: the cgroup allows 1.4 GiB, the worker held 1.2 GiB (KILLED_FOR_MEMORY)"
    )
    assert kills.explain(group, KILLED, 5, "worker") is None, "the kill has explained a death"

    cgroup(unit, files, limit=str(1400 << 20), kills=6)
    kills._look(kills._found.values())
    now[0] += CLAIM_S + 1
    assert kills.explain(group, KILLED, 5, "worker") is None, "the kill was of another process"

    cgroup(unit, files, limit=str(1400 << 20), kills=7)
    report = kills.explain(group, None, 0, "worker")
    assert report is not None, "an adopted worker has no status"
    assert report.message == "killed by the kernel for memory: the cgroup allows 1.4 GiB (KILLED_FOR_MEMORY)"


async def test_a_worker_that_a_real_cgroup_has_killed_says_so(launcher: LocalLauncher, memory_cgroup: Path) -> None:
    await launcher.nursery.ready()
    (memory_cgroup / "cgroup.procs").write_text(str(launcher.nursery.pid))
    killed = await launcher.launch(WorkerSpec(name="a", model_id=fake_id("large=400")))
    exit = await killed.wait()
    by_hand = await launcher.launch(WorkerSpec(name="a", model_id=fake_id("")))
    by_hand.send_signal(signal.SIGKILL)
    plain = await by_hand.wait()

    assert exit.report is not None
    assert exit.report.code is Code.KILLED_FOR_MEMORY
    head, _, held = exit.report.message.rpartition(" held ")
    assert head == "killed by the kernel for memory: the cgroup allows 256 MiB, the worker"
    assert 150 <= int(held.removesuffix(" MiB (KILLED_FOR_MEMORY)")) <= 256
    assert (plain.status, plain.report) == (KILLED, None)
