"""A clock that is ahead or late, for the processes of one host of a cluster: a C library to preload; needs gcc.

Ray's own processes keep the right time: they wait for moments of the clock in the kernel, which the library does not
reach.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

AHEAD = "TEIMGR_TEST_CLOCK_AHEAD_S"
_RAYS_OWN = "RAY_AUTH_MODE"  # which `cluster/ray_process.py` sets for all processes of Ray
_SOURCE = f"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead_s;

__attribute__((constructor)) static void read_ahead(void) {{
    const char *text = getenv("{AHEAD}");
    ahead_s = text && !getenv("{_RAYS_OWN}") ? atol(text) : 0;
}}

int clock_gettime(clockid_t clock, struct timespec *now) {{
    long status = syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s;
    return (int)status;
}}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}}

time_t time(time_t *result) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}}
"""


@cache
def _library(folder: Path) -> Path:
    path = folder / "other_clock.so"
    compiler = shutil.which("gcc")
    assert compiler, "needs gcc"
    command = [compiler, "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=_SOURCE, text=True, check=True, timeout=60)
    return path


def clock_ahead(folder: Path, seconds: int) -> Mapping[str, str]:
    """Environment of processes whose clock is ahead by `seconds`, or late; the library is made in `folder`."""
    return {AHEAD: str(seconds), "LD_PRELOAD": str(_library(folder))}
