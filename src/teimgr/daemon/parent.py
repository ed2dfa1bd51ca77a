"""The parent of a daemon, `python -m teimgr.daemon.parent <pid> <descriptor>`: keeps a process id while daemons change.

It passes signals on, reaps orphans, and exits with the daemon's status. It is PID 1 of a container (init), and what a
daemon becomes once its successor serves: the shell, container runtime or supervisor that started the daemon waits for
that process, and would take its exit for the end of the service.

PID 1 must reap the orphans of the whole container, and the kernel gives it no default actions for signals: a SIGTERM
would be lost until the daemon has installed its handlers. A separate parent is simpler than a daemon that reaps
orphans while libraries wait for their own children.

Parent and daemon share a socket pair. A daemon sends the pid of its successor over it before it exits. It kills itself
when the other end closes; otherwise it would run on unknown to its starter after its parent was killed.
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
"""Environment variable with the descriptor of the daemon's end of the socket pair."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 32


def leave_pid_1() -> None:
    """If this process is PID 1, continue in a child. PID 1 never returns, and exits with the child's status.

    Call it before the first thread. The child has its own session. Otherwise a Ctrl-C in the terminal would reach it
    twice, and a second SIGINT stops without grace.
    """
    if os.getpid() != 1:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    block_signals()  # before the fork, so that no signal is lost
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
    """Block the signals that the parent passes on. Call it before their handlers are removed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)


def unblock_signals() -> None:
    """Unblock the signals; pending ones are delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def become_parent(child: int, link: socket.socket) -> NoReturn:
    """Replace this program with the parent of `child`, which needs little memory. `link` leads to the child."""
    block_signals()
    link.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, "-P", "-m", __name__, str(child), str(link.fileno())])


def _stay(child: int, link: socket.socket) -> NoReturn:
    """Be the parent of `child` and of each successor named over `link`; exit with the status of the last."""
    link.setblocking(False)
    number: int = signal.SIGCHLD  # `child` may have ended before SIGCHLD was blocked
    daemons: dict[int, int | None] = {child: None}  # exit statuses of those reaped here; the last daemon serves
    while True:
        if successor := _successor(link):
            daemons[successor] = daemons.pop(successor, None)  # moved to the end; an earlier daemon may serve again
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):  # the successor has ended, its predecessor has not
                os.kill([*daemons][-1], number)  # an unreaped child keeps its pid
        elif (status := _reap(daemons)) is not None:
            os._exit(status if status >= 0 else 128 - status)
        number = signal.sigwait(_AWAITED)


def _successor(link: socket.socket) -> int | None:
    """Return the pid of a successor that was named since the last call, or None."""
    try:
        return int(link.recv(_MESSAGE_BYTES) or 0) or None
    except (BlockingIOError, ValueError):
        return None


def _reap(daemons: dict[int, int | None]) -> int | None:
    """Reap all ended children. Return the exit status once no daemon is left, negative for a signal; None before.

    It is the status of the last daemon. If its predecessor has reaped it, the predecessor exits with the same status.
    """
    with suppress(ChildProcessError):  # no child is left
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
    # The next successor is the child of a child. Once the child exits, this process adopts it, not PID 1.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _stay(int(child), socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
