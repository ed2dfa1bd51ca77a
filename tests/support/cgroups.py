"""Memory cgroups for tests: folders that look like one, and real ones of version 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from teimgr.control.ledger.system_memory import CgroupMemory

V2 = ("", "memory.max", "memory.current", "inactive_file", "memory.events")
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def cgroup(folder: Path, files: tuple[str, ...], *, limit: str, use: int = 0, cache: int = 0, kills: int = 0) -> None:
    """Write the files of a cgroup of one version; a quarter of the cache is used often."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[1]).write_text(f"{limit}\n")
    (folder / files[2]).write_text(f"{use}\n")
    active = files[3].replace("inactive", "active")
    (folder / "memory.stat").write_text(f"anon 5\n{files[3]} {cache - cache // 4}\n{active} {cache // 4}\n")
    (folder / files[4]).write_text(f"under_oom 0\noom 9\noom_kill {kills}\n")


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup of this host with a limit of 256 MiB; processes join by its file `cgroup.procs`."""
    made = Path(f"/sys/fs/cgroup/memory/teimgr-test-{os.getpid()}")
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError:
        pytest.skip("cgroups of version 1 cannot be made here")
    yield made
    home = CgroupMemory().groups[0][0]
    for pid in (made / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (home / "cgroup.procs").write_text(pid)
    made.rmdir()
