"""Threads of the native library: as many as wanted, off the caller's CPU, gone with their caller, none after a fork."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.helper_threads import helpers, run
from tests.support.native import needs_native_library
from tests.support.polling import eventually

from teimgr.engine.fidelity import dtype_speed
from teimgr.engine.native_library import LEVELS, native_library

LIMIT_S = 20

pytestmark = [needs_native_library, pytest.mark.skipif(sys.platform != "linux", reason="its threads are Linux's")]


def on_a_thread(target: Callable[[], object]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_body_runs_on_every_thread_at_once(threads: int) -> None:
    meeting = threading.Barrier(threads, timeout=LIMIT_S)
    seen: list[int] = []

    def body() -> None:
        meeting.wait()  # broken by a thread that is missing
        seen.append(threading.get_native_id())

    for _ in range(3):
        run(body, threads)

    assert len(seen) == 3 * threads
    assert len(set(seen)) == threads
    assert threading.get_native_id() in seen


def test_a_caller_waits_for_helpers_that_have_begun_and_for_no_others() -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_native_id()

    def body() -> None:
        if threading.get_native_id() == caller:
            assert begun.wait(LIMIT_S)
            goes_on.set()
        else:
            begun.set()
            assert goes_on.wait(LIMIT_S)
            ended.set()

    run(body, 2)
    assert ended.is_set()

    for _ in range(1000):  # most end before a helper is awake
        run(lambda: None, 2)


def test_helpers_stay_off_the_cpu_of_their_caller() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one CPU")
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    masks: dict[int, set[int]] = {}

    def body() -> None:
        meeting.wait()
        masks[threading.get_native_id()] = os.sched_getaffinity(0)

    run(body, 2)

    own = masks.pop(threading.get_native_id())
    (helper,) = masks.values()
    assert own == allowed
    assert len(helper) == len(allowed) - 1
    assert helper < allowed


def test_helpers_follow_the_cpus_of_their_caller_and_those_not_wanted_are_left_alone() -> None:
    """However many sleep, each that is moved takes a system call."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("one CPU")
    moved: list[dict[int, set[int]]] = []

    def caller() -> None:
        foreign = helpers()
        os.sched_setaffinity(0, {first})
        run(threading.Barrier(6, timeout=LIMIT_S).wait, 6)
        own = helpers() - foreign
        for cpu in (*others, first):
            os.sched_setaffinity(0, {cpu})
            before = {one: os.sched_getaffinity(one) for one in own}
            run(threading.Barrier(2, timeout=LIMIT_S).wait, 2)
            after = {one: os.sched_getaffinity(one) for one in own}
            moved.append({one: after[one] for one in own if after[one] != before[one]})

    on_a_thread(caller)

    assert [list(one.values()) for one in moved] == [[{cpu}] for cpu in (*others, first)]
    assert len({helper for one in moved for helper in one}) == 1  # the one that a call for two wants


async def test_helpers_end_with_the_thread_that_they_help() -> None:
    before = helpers()
    alive: list[set[int]] = []

    def caller() -> None:
        run(lambda: None, 4)
        alive.append(helpers())

    on_a_thread(caller)

    assert len(alive[0] - before) == 3
    await eventually(lambda: not (alive[0] - before) & helpers())


def test_a_forked_process_has_helpers_of_its_own() -> None:
    script = """
import os, threading
from tests.engine.helper_threads import run
def meet():
    meeting = threading.Barrier(2, timeout=20)
    run(meeting.wait, 2)
    assert not meeting.broken
meet()
child = os.fork()
meet()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_a_caller_works_alone_where_no_thread_can_be_made() -> None:
    """As under a limit on processes; helpers that there are go on, and others come once the limit is gone."""
    script = """
import resource, threading
from pathlib import Path
from tests.engine.helper_threads import helpers, run
def count(threads):
    found = []
    run(lambda: found.append(threading.get_native_id()), threads)
    return len(set(found))
def limit(most):
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
threading.stack_size(0)
limit(used + (4 << 20))  # a stack has 8 MiB
assert count(4) == 1 and not helpers()
limit(resource.RLIM_INFINITY)
meeting = threading.Barrier(4, timeout=20)
run(meeting.wait, 4)
assert len(helpers()) == 3 and not meeting.broken
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT])
def test_a_fault_of_a_helper_prints_the_stacks_of_python(number: signal.Signals) -> None:
    """By the kernel's rule a fault of a thread that blocks its signal ends the process without any handler."""
    raised = f"signal.pthread_kill(threading.get_ident(), {number:d})"
    script = f"""
import ctypes, faulthandler, signal, threading
from tests.engine.helper_threads import run
faulthandler.enable()
caller, meeting = threading.get_native_id(), threading.Barrier(2, timeout=20)
def body():
    meeting.wait()
    if threading.get_native_id() == caller:
        meeting.wait()  # for ever: the helper has ended the process
    else:
        fail()
def fail():
    {"ctypes.memset(0, 0, 1)" if number is signal.SIGSEGV else raised}
run(body, 2)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )

    assert ended.returncode == -number
    assert "Fatal Python error" in ended.stderr
    assert "in fail" in ended.stderr


@pytest.mark.skipif("avx_vnni" not in LEVELS, reason="of x86-64")
def test_bytes_are_summed_in_32_bits_if_the_kernel_shows_avx_vnni() -> None:
    library, flags = native_library(), Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n")[0].split()
    assert library is not None
    assert library.byte_sum_bits(LEVELS.index("avx_vnni")) == (32 if "avx_vnni" in flags else 16)


@pytest.mark.skipif("amx" not in LEVELS, reason="of x86-64")
@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (errno.EPERM, "the CPU has AMX, but the kernel refuses its tiles: arch_prctl: Operation not permitted"),
        (-1, "the CPU has AMX, but the virtual machine shows no tiles of it"),
        (0, ""),
    ],
)
def test_why_tiles_are_refused_is_logged_and_said_with_the_instructions(
    refusal: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(ctypes.CDLL):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.attention_level = lambda: LEVELS.index("avx512_bf16")
            self.tiles_refusal = lambda: refusal

    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    monkeypatch.delenv("TEIMGR_NATIVE", raising=False)
    with caplog.at_level(logging.WARNING):
        found = native_library.__wrapped__()
    monkeypatch.setattr(dtype_speed, "native_library", lambda: found)

    assert [record.getMessage() for record in caplog.records] == ([f"{why}; avx512_bf16 is used"] if why else [])
    assert dtype_speed._instructions()[0] == "avx512_bf16" + (f" ({why})" if why else "")
