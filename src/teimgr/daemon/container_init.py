"""PID 1 of a container (init): runs the daemon as its child, passes signals on, reaps orphans.

The kernel gives PID 1 the orphans of the whole container, whose zombies it must reap, and no default actions for
signals: SIGTERM would be lost until the daemon has its handlers. A parent that does nothing else is simpler to keep
right than a daemon that reaps beside libraries that wait for their own children.
"""

from __future__ import annotations

import os
import signal

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_pid_1() -> None:
    """Where this process is PID 1, go on in a child; PID 1 itself stays in here and exits with the child's status.

    Call it before the first thread. The child has its own session: a Ctrl-C in the terminal would else reach it
    twice, which is the order to stop without grace.
    """
    if os.getpid() != 1:
        return
    awaited = {*_PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # before the fork, so that none is lost
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)  # not reaped yet, so the pid is its own
        elif (status := _reap(child)) is not None:
            os._exit(status if status >= 0 else 128 - status)


def _reap(child: int) -> int | None:
    """Reap everything that has ended; the exit status of `child` if it is among them, negative for a signal."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)
