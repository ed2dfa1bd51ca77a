"""Memory that a process gives back once it is idle; in processes of their own, whose heaps nothing else uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from teimgr.control.launch.mux_launcher import _MALLOC

# Chunks below the threshold of mmap, of which every thousandth stays: the heap cannot shrink at its end.
CODE = """
import time
from teimgr.observability.memory import resident_bytes
from teimgr.observability.memory_return import MemoryReturn

def peak():
    return [b"x" * (100_000 + n % 7) for n in range(1_000)]

def until(reached):
    end = time.monotonic() + 20
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
    return reached()

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

first = resident_bytes()
returning = MemoryReturn(0.05, 0.01)
in_use = peak()
work(0.02)
assert until(lambda: returning.trims == 1)
assert resident_bytes() > first + 50 * 2**20, "the memory in use went"
in_use = in_use[::250]  # the rest is free, between chunks that are in use
assert resident_bytes() > first + 50 * 2**20, "it is given back by itself: nothing is tested"
assert returning.trims == 1, "trimmed again without work"
work(0.11)
assert until(lambda: resident_bytes() < first * 1.1 + 2**20), (first, resident_bytes())
returning.stop()

slow = MemoryReturn(0.05, 1e9)
kept = peak()[::250]
assert until(lambda: resident_bytes() < first * 1.1 + 4 * 2**20), "growth counts without work"
slow.stop()
"""


@pytest.mark.parametrize("malloc", [{}, _MALLOC], ids=["daemon", "mux"])
def test_an_idle_process_gives_the_memory_of_a_peak_back(malloc: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"MALLOC_TRIM_THRESHOLD_": "1000000000", **malloc},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
