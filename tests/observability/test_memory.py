"""The limit of open files; the memory that a cgroup leaves."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from teimgr.observability.memory import cgroup_free_bytes

CODE = """
import resource
from teimgr.observability.memory import max_connections, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), max_connections())
"""


def test_the_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4000)
    done = subprocess.run([sys.executable, "-c", CODE.format(hard=hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard), str(hard // 2)]


V2 = ("", "memory.max", "memory.current", "inactive_file")
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, files: tuple[str, ...], limit: str, use: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[1]).write_text(f"{limit}\n")
    (folder / files[2]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[3]} {cache}\n")


@pytest.mark.parametrize(("files", "line"), [(V2, "0::{}\n"), (V1, "4:memory:{}\n1:cpu:/other\n0::/\n")])
def test_the_least_that_a_limit_leaves_counts(tmp_path: Path, files: tuple[str, ...], line: str) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    base = root / files[0]
    group(base / "slice", files, "1000", 700, 100)
    group(base / "slice" / "unit", files, "max" if files is V2 else str(2**63 - 4096), 300, 0)
    own.write_text(line.format("/slice/unit"))
    assert cgroup_free_bytes(root, own) == 400

    group(base, files, "500", 600, 0)  # a container: the path is that of the host, our limit is at the mount point
    own.write_text(line.format("/docker/0123"))
    assert cgroup_free_bytes(root, own) == 0


def test_without_a_limit_nothing_is_known(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert cgroup_free_bytes(tmp_path, own) is None
    own.write_text("0::/\n")
    assert cgroup_free_bytes(tmp_path, own) is None


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup of this host with a limit of 256 MiB."""
    made = Path("/sys/fs/cgroup/memory/teimgr-test")
    try:
        made.mkdir(exist_ok=True)
        (made / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError:
        pytest.skip("cgroups of version 1 cannot be made here")
    yield made
    made.rmdir()


def test_the_limit_of_a_real_cgroup_is_seen_by_the_planner(limited: Path) -> None:
    code = "from teimgr.placement.planner import free_memory_bytes as free; print(free())"
    inside = ["sh", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(inside, capture_output=True, text=True, check=True)

    assert 0 < int(done.stdout) <= 256 << 20
