"""Memory of this host and its cgroups, as the system reports it; the limit of a worker's; deaths for memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cgroups import V1, V2, cgroup, memory_cgroup

from teimgr.control.ledger.system_memory import (
    CLAIM_S,
    PAUSE_S,
    READINGS,
    CgroupMemory,
    MemoryKills,
    MemoryLimit,
    Verdict,
)

__all__ = ["memory_cgroup"]


def own(folder: Path, line: str) -> CgroupMemory:
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self" / "cgroup").write_text(line)
    return CgroupMemory(root=folder / "cgroup", proc=folder)


@pytest.mark.parametrize(("files", "line"), [(V2, "0::{}\n"), (V1, "4:memory:{}\n1:cpu:/other\n0::/\n")])
def test_the_least_that_a_limit_leaves_counts(tmp_path: Path, files: tuple[str, ...], line: str) -> None:
    base = tmp_path / "cgroup" / files[0]
    cgroup(base / "slice", files, limit="1000", use=700, cache=100)
    cgroup(base / "slice" / "unit", files, limit="max" if files is V2 else str(2**63 - 4096), use=300, kills=2)
    found = own(tmp_path, line.format("/slice/unit"))
    assert (found.free_bytes(), found.lowest(), found.kills()) == (400, (1000, 600), 2)

    # In a container the path is that of the host, and our limit is at the mount point.
    cgroup(base, files, limit="500", use=600, kills=3)
    found = own(tmp_path, line.format("/docker/0123"))
    assert (found.free_bytes(), found.lowest(), found.kills()) == (0, (500, 600), 3)


def test_without_a_cgroup_no_limit_is_known_and_the_host_counts_kills(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 5\noom_kill 7\n")
    for found in (CgroupMemory(root=tmp_path, proc=tmp_path), own(tmp_path, "0::/\n")):
        assert (found.free_bytes(), found.lowest(), found.kills()) == (None, None, 7)


def test_the_limit_of_a_real_cgroup_is_seen(memory_cgroup: Path) -> None:
    code = (
        "from teimgr.control.ledger import system_memory as it; print(it.free_memory_bytes(), it.host_memory()[0]);"
        "print(it.memory_label())"
    )
    inside = ["sh", "-c", f'echo $$ > {memory_cgroup}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", code]
    figures, label = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.splitlines()
    free, total = map(int, figures.split())

    assert 0 < free <= total == 256 << 20
    assert label == "host memory (the cgroup allows 256 MiB)"


BELOW, ABOVE = 99 << 20, 101 << 20
LIMIT = 100


def readings(limit: MemoryLimit, *sizes: int, now: float = 0.0) -> list[Verdict | None]:
    return [limit.read(0, size, LIMIT, now, fresh=False) for size in sizes]


def test_a_replica_that_stays_above_is_replaced_and_a_peak_is_not() -> None:
    limit = MemoryLimit()
    assert limit.read(0, BELOW, LIMIT, 0.0, fresh=True) is None

    assert readings(limit, *[ABOVE] * (READINGS - 1), BELOW) == [None] * READINGS
    assert readings(limit, *[ABOVE] * (READINGS + 1))[-2:] == [Verdict.REPLACE] * 2
    assert limit.problems([0]) == []


def test_two_replacements_have_a_pause_between_them() -> None:
    limit = MemoryLimit()
    readings(limit, *[ABOVE] * READINGS)
    limit.begin_pause(0, 0.0)

    limit.read(0, BELOW, LIMIT, 1.0, fresh=True)
    assert readings(limit, *[ABOVE] * 10, now=PAUSE_S - 1) == [None] * 10
    assert readings(limit, ABOVE, now=PAUSE_S) == [Verdict.REPLACE]


def test_a_model_that_is_larger_than_the_limit_is_a_problem_and_no_replacement() -> None:
    limit = MemoryLimit()
    assert limit.read(0, ABOVE, LIMIT, 0.0, fresh=True) is Verdict.TOO_LARGE

    assert readings(limit, *[ABOVE] * 10, now=2 * PAUSE_S) == [None] * 10
    assert limit.problems([0, 1]) == [
        "replica 0 has 101 MiB right after its start, more than max_rss_mib = 100: it is not replaced, since the next "
        "one would be as large"
    ]
    limit.read(0, ABOVE, 2 * LIMIT, 0.0, fresh=False)
    assert limit.problems([0]) == []


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
    cause = kills.explain(group, KILLED, 1229 << 20, "worker")
    assert (
        cause
        == "killed by the kernel for memory: the cgroup allows 1.4 GiB, the worker held 1.2 GiB (KILLED_FOR_MEMORY)"
    )
    assert kills.explain(group, KILLED, 5, "worker") is None, "the kill has explained a death"

    cgroup(unit, files, limit=str(1400 << 20), kills=6)
    kills._look(kills._found.values())
    now[0] += CLAIM_S + 1
    assert kills.explain(group, KILLED, 5, "worker") is None, "the kill was of another process"

    cgroup(unit, files, limit=str(1400 << 20), kills=7)
    cause = kills.explain(group, None, 0, "worker")  # an adopted worker has no status
    assert cause == "killed by the kernel for memory: the cgroup allows 1.4 GiB (KILLED_FOR_MEMORY)"
