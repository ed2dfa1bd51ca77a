"""Small batches on one thread while helpers are held up, and how long the library says that it waited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from teimgr.engine.core_load import HelperWaits
from teimgr.engine.native_library import native_library


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_thread_for_a_second_after_several_batches_were_held_up() -> None:
    clock = Clock()
    waits = HelperWaits(clock)

    for waited_s in (0.004, 0.0, 0.002):
        waits.note(waited_s)
        assert waits.threads(2) == 2
    waits.note(0.003)

    assert waits.threads(2) == 1
    clock.now += 0.99
    assert waits.threads(2) == 1
    clock.now += 0.02
    assert waits.threads(2) == 2
    waits.note(0.004)  # counted anew
    assert waits.threads(2) == 2


def test_short_waits_and_rare_long_ones_change_nothing() -> None:
    waits = HelperWaits(Clock())

    for _ in range(100):
        for waited_s in (0.02, 0.0009, 0.0, 0.0009):  # two of eight
            waits.note(waited_s)
        assert waits.threads(4) == 4


# A helper that gets SIGFPE pauses until it gets SIGILL. The forward that it is in then waits for it, and only that one.
HELD_UP = """
import ctypes, os, signal, threading, time
from pathlib import Path
import torch, transformers
from tests.engine.native_forward.test_kernel import MODELS, texts_of
from tests.engine.helper_threads import helpers
from teimgr.engine.batching.batch import pack
from teimgr.engine.native_forward.kernel import forward_kernel

libc = ctypes.CDLL(None)
libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
libc.signal(signal.SIGFPE, ctypes.cast(libc.pause, ctypes.c_void_p))
libc.signal(signal.SIGILL, ctypes.cast(libc.getpid, ctypes.c_void_p))
module = transformers.BertModel(MODELS["bert"], add_pooling_layer=False).eval().requires_grad_(False)
kernel, batch = forward_kernel(module, {}, torch.float32)[0], pack(texts_of([400]))
waits, ends = [], threading.Event()
kernel._helper_waits.note = waits.append

def compute():
    while not ends.is_set():
        kernel(batch, batch.position_ids, 2)

def send(number):
    assert libc.syscall(234, os.getpid(), helper, number) == 0  # tgkill

def until_computed(batches):
    # Without a core of its own, which would be the helper's.
    while len(waits) < batches:
        assert time.monotonic() < limit
        ends.wait(0.002)

limit = time.monotonic() + 30
computing = threading.Thread(target=compute, daemon=True)
computing.start()
until_computed(3)
(helper,) = helpers()
while max(waits) < 0.1:
    send(signal.SIGFPE)
    ends.wait(0.15)  # the other thread computes on, unless the helper was in its forward
    send(signal.SIGILL)
    until_computed(len(waits) + 3)
ends.set()
computing.join()
print(sorted(waits)[-1], sorted(waits)[len(waits) // 2])
"""


@pytest.mark.skipif(
    sys.platform != "linux" or native_library() is None, reason="the package was built without a compiler, or no Linux"
)
def test_a_forward_tells_how_long_it_waited_for_a_thread_that_stands_still() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELD_UP], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )

    assert ended.returncode == 0, ended.stderr
    longest, usual = map(float, ended.stdout.split())
    assert longest >= 0.1
    assert usual < 0.05
