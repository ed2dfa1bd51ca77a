"""CPU threads by load: those of idle neighbours are used, busy ones keep their share, killed ones hold nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from teimgr.engine import core_load
from teimgr.engine.core_load import CoreLoad

WAIT_S = 20.0
# Computes for ever, in batches of 10 ms on four threads; prints once there is a load to read.
BUSY = """
import sys, time
from pathlib import Path
from teimgr.engine.core_load import CoreLoad
load, began = CoreLoad(Path(sys.argv[1])), time.monotonic()
while True:
    with load.computing(4):
        time.sleep(0.01)
    if began and time.monotonic() - began > 0.5:
        print(flush=True)
        began = 0.0
"""


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def busy(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_its_file_has_its_place_on_the_disk_before_it_is_mapped(path: Path) -> None:
    """A page without one would be the end of a worker by SIGBUS once the disk is full."""
    with path.open("wb") as sparse:
        sparse.truncate(core_load._BYTES)  # as an earlier version left it
    assert path.stat().st_blocks == 0

    CoreLoad(path).close()

    assert path.stat().st_blocks * 512 >= core_load._BYTES


def test_a_worker_beside_idle_ones_has_all_cores(path: Path) -> None:
    mine, _, _ = (CoreLoad(path) for _ in range(3))

    assert mine.threads(1, 4) == 4
    assert mine.threads(2, 2) == 2  # the key `threads` is exact


def test_a_busy_neighbour_gets_its_share_back_and_leaves_it_when_it_ends(
    path: Path, busy: subprocess.Popen[bytes]
) -> None:
    mine = CoreLoad(path)

    assert mine.threads(1, 4) == 2
    assert mine.threads(3, 4) == 3  # own threads are kept beside any load
    busy.send_signal(signal.SIGKILL)  # in a batch, most likely
    busy.wait(WAIT_S)

    until(lambda: mine.threads(1, 4) == 4)


def test_a_neighbour_with_a_query_now_and_then_costs_nothing(path: Path) -> None:
    mine, other = CoreLoad(path), CoreLoad(path)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        with other.computing(1):
            pass

    assert mine.threads(1, 4) == 4


def test_a_batch_that_takes_long_is_a_load_before_it_ends(path: Path) -> None:
    mine, other = CoreLoad(path), CoreLoad(path)

    with other.computing(4):
        until(lambda: mine.threads(1, 4) == 2)


def test_batches_of_two_threads_count_together_until_the_last_one_ends(path: Path) -> None:
    mine, other = CoreLoad(path), CoreLoad(path)
    begun, end = threading.Event(), threading.Event()

    def query() -> None:
        with other.computing(1):
            begun.set()
            assert end.wait(WAIT_S)

    querying = threading.Thread(target=query)
    with other.computing(3):
        querying.start()
        assert begun.wait(WAIT_S)
        until(lambda: mine.threads(0, 8) == 4)  # what four threads leave of eight cores
        end.set()
        querying.join(WAIT_S)
        until(lambda: mine.threads(0, 8) == 5)


def test_a_batch_within_which_a_query_is_computed_counts_until_it_ends(path: Path) -> None:
    mine, other = CoreLoad(path), CoreLoad(path)

    with other.computing(3):
        with other.computing(1):
            pass
        until(lambda: mine.threads(0, 8) == 5)
    with other.computing(1):
        until(lambda: mine.threads(0, 8) == 7)


def test_slots_are_free_again_after_a_close(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_load, "_SLOTS", 2)
    monkeypatch.setattr(core_load, "_BYTES", 64)
    first, second, without = (CoreLoad(path) for _ in range(3))

    assert [each.threads(1, 4) for each in (first, second, without)] == [4, 4, 1]
    with without.computing(1):
        pass
    first.close()

    assert CoreLoad(path).threads(1, 4) == 4


def test_a_load_of_before_the_host_was_restarted_counts_as_none(path: Path) -> None:
    mine = CoreLoad(path)
    mine._table[7, [core_load._LOAD, core_load._WRITTEN]] = 4.0, time.monotonic() + 3600  # that clock began anew

    assert mine.threads(1, 4) == 4


def test_it_is_not_closed_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read after the close would ask for the locks of a descriptor that may be another file's by then."""
    mine, other = CoreLoad(path), CoreLoad(path)
    now = time.monotonic()
    other._table[other._slot, [core_load._RUNNING, core_load._SINCE]] = (
        4.0,
        now - 3600,
    )  # a long batch: its lock is asked for
    closing = threading.Thread(target=mine.close)
    is_taken, open_while_read = mine._is_taken, list[bool]()

    def is_taken_while_it_is_closed(slot: int) -> bool:
        closing.start()
        closing.join(0.2)  # in vain, or it has closed the file
        open_while_read.append(closing.is_alive() and mine._slot is not None)
        return is_taken(slot)

    monkeypatch.setattr(mine, "_is_taken", is_taken_while_it_is_closed)
    assert mine.threads(1, 4) == 2
    closing.join(WAIT_S)

    assert open_while_read == [True]
    assert mine._slot is None
    assert mine.threads(1, 4) == 1


def test_a_file_that_cannot_be_made_is_an_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with pytest.raises(OSError, match="No such file"):
        CoreLoad(tmp_path / "missing" / "cores")

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
