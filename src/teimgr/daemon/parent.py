"""The parent of a daemon, `python -m teimgr.daemon.parent <pid> <descriptor>`: keeps a process id while daemons change.

It passes signals on, reaps orphans, and exits with the daemon's status. It is PID 1 of a container (init), and what a
daemon becomes once its successor serves: the shell, container runtime or supervisor that started the daemon waits for
that process, and would take its exit for the end of the service.

The kernel gives PID 1 the orphans of the whole container, whose zombies it must reap, and no default actions for
signals: SIGTERM would be lost until the daemon has its handlers. A parent that does nothing else is simpler to keep
right than a daemon that reaps beside libraries that wait for their own children.

Parent and daemon have a socket pair. A daemon sends the pid of its successor over it before it exits, and kills itself
when the other end closes: else a parent that was killed would leave a daemon of which its starter knows nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

LINK = "_TEIMGR_PARENT_FD"
"""The variable with the descriptor of a daemon's end of the socket pair."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 32


def leave_pid_1() -> None:
    """Where this process is PID 1, go on in a child; PID 1 itself stays in here and exits with the child's status.

    Call it before the first thread. The child has its own session: a Ctrl-C in the terminal would else reach it
    twice, which is the order to stop without grace.
    """
    if os.getpid() != 1:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    block_signals()  # before the fork, so that none is lost
    child = os.fork()
    if child == 0:
        os.setsid()
        unblock_signals()
        ours.close()
        os.environ[LINK] = str(theirs.detach())
        return
    theirs.close()
    _stay(child, ours)


def block_signals() -> None:
    """Have signals wait until the parent passes them on; before their handlers are removed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)


def unblock_signals() -> None:
    """Have signals act at once, those too that came while they waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def become_parent(child: int, link: socket.socket) -> NoReturn:
    """Replace this program by the parent of `child`, which has the other end of `link`: a hundredth of the memory."""
    block_signals()
    link.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, "-P", "-m", __name__, str(child), str(link.fileno())])


def _stay(child: int, link: socket.socket) -> NoReturn:
    """Serve as the parent of `child`, and of each successor that it names over `link`; exit with its status."""
    link.setblocking(False)
    number: int = signal.SIGCHLD  # whose signal may have come before it was blocked
    daemons: dict[int, int | None] = {child: None}  # the last one serves; with the exit statuses of those reaped here
    while True:
        if successor := _successor(link):
            daemons[successor] = daemons.pop(successor, None)  # the last one: perhaps the one before, once more
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):  # a successor that is gone, whose predecessor has not exited yet
                os.kill([*daemons][-1], number)  # else not reaped yet, so the pid is its own
        elif (status := _reap(daemons)) is not None:
            os._exit(status if status >= 0 else 128 - status)
        number = signal.sigwait(_AWAITED)


def _successor(link: socket.socket) -> int | None:
    """The pid that a daemon has named as that of its successor since the last look."""
    try:
        return int(link.recv(_MESSAGE_BYTES) or 0) or None
    except (BlockingIOError, ValueError):
        return None


def _reap(daemons: dict[int, int | None]) -> int | None:
    """Reap everything that has ended; the exit status of the daemons once none is left, negative for a signal.

    It is that of the last one. Where its predecessor has reaped it, which so exits with its status, it is that one's.
    """
    with suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in daemons:
                daemons[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    if (status := [*daemons.values()][-1]) is not None:
        return status
    statuses = [each for each in daemons.values() if each is not None]
    return statuses[-1] if statuses and not any(_lives(pid) for pid, each in daemons.items() if each is None) else None


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _main(child: str, descriptor: str) -> NoReturn:
    block_signals()
    # The next successor is the child of a child, and an orphan once that exits: it comes here, and not to PID 1.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _stay(int(child), socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
