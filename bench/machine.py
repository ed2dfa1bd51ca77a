"""What a run ran on, and what it used: read from /proc, so that a bare interpreter will do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = (
    "teimgr",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "numpy",
    "grpcio",
    "pyarrow",
    "openvino",
    "onnxruntime",
    "nncf",
)
START = "TEIMGR_BENCH_START"
"""The variable by which `bench all` names the commit that it began at to its scenarios."""

_SETS = {
    "amx_bf16": "amx",
    "avx512_bf16": "avx512_bf16",
    "avx512f": "avx512",
    "avx_vnni": "avx_vnni",
    "avx2": "avx2",
    "bf16": "neon_bf16",
    "sve": "neon",
}
_TELLING_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "sve", "bf16")


def describe() -> dict[str, Any]:
    """Cores, CPU model, instruction sets that matter, memory, versions; nothing that names the host."""
    processor = _processor()
    flags = processor.get("flags", processor.get("Features", "")).split()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": processor.get("model name", platform.machine()),
        "instruction_sets": [flag for flag in _TELLING_FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "versions": versions(),
        "revision": revision(),
        **({"run_began_at": began} if (began := os.environ.get(START)) else {}),
    }


def vendor() -> str:
    """Who made the CPU, in the words of /proc/cpuinfo; "" if it does not say."""
    return _processor().get("vendor_id", "")


def instruction_set(machine: Mapping[str, Any]) -> str:
    """The instruction set of a described machine that decides how fast an engine is, such as `avx2`."""
    return next((name for flag, name in _SETS.items() if flag in machine["instruction_sets"]), "baseline")


def revision(checkout: Path | None = None) -> str:
    """The commit of a checkout (this one), with `-dirty` where its files differ from it, results aside: those of a run
    are written while it goes on. Empty where git cannot say.
    """
    git = ["git", "-C", str(checkout or Path(__file__).parent)]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)bench/results"]
    try:
        commit, changed = (
            subprocess.run([*git, *arguments], capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["describe", "--always"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}-dirty" if changed else commit


def versions() -> dict[str, str]:
    """The installed packages that decide a result."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def peak_rss_mib(pid: int) -> float:
    """The most memory a process ever had resident."""
    return _field(Path(f"/proc/{pid}/status"), "VmHWM:") / 1024


def unique_mib(pid: int) -> float:
    """Memory that would come back if the process ended now (USS)."""
    text = Path(f"/proc/{pid}/smaps_rollup")
    return (_field(text, "Private_Clean:") + _field(text, "Private_Dirty:")) / 1024


def busy_s() -> float:
    """CPU seconds that all cores have spent working since boot."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of one process with all its threads, past ones too.

    Raises:
        OSError: there is no such process.
    """
    # What clock_getcpuclockid(3) gives: to the nanosecond, where /proc/PID/stat counts ticks of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)


def _processor() -> dict[str, str]:
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _field(path: Path, name: str) -> float:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1])
    raise RuntimeError(f"{path.name} has no {name}")
