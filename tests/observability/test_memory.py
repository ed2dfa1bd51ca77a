"""The limit of open files, the private memory of a forked process, and garbage collections during imports."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys

import pytest

from teimgr.control.launch.mux_launcher import _MALLOC
from teimgr.observability.memory import young_collections_alone

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


GROWS = """
import time
from teimgr.observability.memory import map_large_buffers
map_large_buffers()
freed = bytearray(31 << 20)  # after which the C library would keep buffers of this size in its heap
del freed
kept, part, longest = [], b"x" * 65536, []
for _ in range(3):
    body, times = bytearray(), []
    for _ in range(64 * 16):
        began = time.thread_time()
        body += part
        times.append(time.thread_time() - began)
        kept.append(bytes(200))
    longest.append(max(times))
print(min(longest))
"""


def test_a_body_that_grows_to_64_mib_is_not_copied() -> None:
    """From the heap it is, for 40 ms and more as it comes to 32 MiB."""
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.015


WRITES_WHAT_IT_SHARES = """
import os
from teimgr.observability.memory import PrivateMemory
shared = bytearray(os.urandom(1 << 20)) * 32
if not (child := os.fork()):
    memory = PrivateMemory()
    first = memory.read()
    for at in range(0, len(shared) // 2, 4096):
        shared[at] = 1
    print(memory.read(calls=1) - first >> 20, memory.read(calls=1) - first >> 20, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_memory_that_a_forked_process_writes_is_its_own_from_its_first_call_on() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES_WHAT_IT_SHARES], capture_output=True, text=True, check=True)
    assert all(15 <= int(mib) <= 18 for mib in done.stdout.split()), done.stdout


OUTLIVES_ITS_PARENT = """
import os, sys
from teimgr.observability.memory import PrivateMemory, private_bytes, proc_sizes
read, write = os.pipe()
shared = bytearray(os.urandom(1 << 20)) * 32
if not (parent := os.fork()):
    if not os.fork():
        parent, memory = os.getppid(), PrivateMemory()
        first = [memory.read(calls) for calls in range(int(sys.argv[1]))] or [0]
        os.close(write)
        while os.read(read, 1) or os.getppid() == parent:
            pass
        own = bytearray(os.urandom(1 << 20)) * 8
        kernel = private_bytes(proc_sizes("self", "smaps_rollup"))
        print(memory.read(1000) - first[-1] >> 20, kernel >> 20, flush=True)
        os._exit(0)
    os._exit(os.close(write) or len(os.read(read, 1)))
shared = None
os.close(write) or os.wait()
"""


@pytest.mark.parametrize("readings", [0, 1, 2])
def test_memory_that_was_shared_with_an_ended_parent_is_not_its_own(readings: int) -> None:
    """The kernel calls 32 MiB private that it has since the fork; it has taken 8 MiB itself."""
    command = [sys.executable, "-c", OUTLIVES_ITS_PARENT, str(readings)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, by_the_kernel = map(int, done.stdout.split())
    assert 7 <= taken <= 10, done.stdout
    assert by_the_kernel >= 40, done.stdout


def test_no_garbage_collection_of_everything_comes_during_imports() -> None:
    before = gc.get_threshold()
    with young_collections_alone():
        whole = gc.get_stats()[2]["collections"]
        kept = [[number] for number in range(100 * before[0] * before[1])]
        assert gc.get_stats()[2]["collections"] == whole
    assert kept
    assert gc.get_threshold() == before


# Chunks below the threshold of mmap, of which every thousandth stays: the heap cannot shrink at its end.
PEAK = """
import time
from teimgr.observability.memory import resident_bytes
from teimgr.observability.memory import MemoryReturn

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
assert until(lambda: returning.trims)  # a second time, if the first fell into the allocations
assert resident_bytes() > first + 50 * 2**20, "the memory in use went"
trims = returning.trims
in_use = in_use[::250]  # the rest is free, between chunks that are in use
assert resident_bytes() > first + 50 * 2**20, "it is given back by itself: nothing is tested"
work(0.11)
assert until(lambda: resident_bytes() < first * 1.1 + 2**20), (first, resident_bytes())
assert until(lambda: returning.trims > trims)
returning.stop()

slow = MemoryReturn(1.0, 1e9)  # the peak is over when it first looks
kept = peak()[::250]
assert until(lambda: resident_bytes() < first * 1.1 + 4 * 2**20), "growth counts without work"
slow.stop()
"""


@pytest.mark.parametrize("malloc", [{}, _MALLOC], ids=["daemon", "mux"])
def test_an_idle_process_gives_the_memory_of_a_peak_back(malloc: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        env={"MALLOC_TRIM_THRESHOLD_": "1000000000", **malloc},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
