"""Restart of the daemon without downtime: the running daemon starts its successor, which takes over once it is ready.

    SIGUSR2 or POST /daemon/restart
    old: starts the same command line, and serves on                new: imports, reads the configuration, binds what
                                                                         the old one does not listen on
    old: leaves its listeners, gives up the state file              new: reports that it is ready
         and the run directory; workers and muxes serve on
    old: gives the word                                             new: adopts workers and muxes, serves
    old: answers the requests it has begun, ends

Clients that connect during the change wait in the backlog of the listening sockets, which both processes hold. Open
HTTP/1 connections are passed on between two requests, but not with TLS, whose state is in the old process. If the
successor does not become ready, nothing changes. If it ends after that without reading the word, the old process
executes its own command line again. The two processes exchange JSON and descriptors over a socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from teimgr import __version__
from teimgr.daemon.parent import LINK, become_parent, unblock_signals
from teimgr.errors import TeimgrError, Unavailable, UpdateFailed
from teimgr.observability.request_context import ORDERED_BY
from teimgr.worker.connection_queue import RECEIVE_END, SEND_END, ConnectionQueue

CONTROL = "_TEIMGR_SUCCESSION_FD"
"""Environment variable with the descriptor of the successor's end of the socket pair."""

READY_LIMIT_S = 120.0
"""Time limit for a successor to become ready, including its imports."""
_EXIT_LIMIT_S = 5.0
_WORD_LIMIT_S = 60.0  # from ready to the word: the old daemon finishes the commands it has accepted
_MESSAGE_BYTES = 64 << 10
_MAX_DESCRIPTORS = 250  # the kernel allows 253 per message; the successor binds the ports of further instances again
_SENT_POLL_S = 0.05

log = logging.getLogger(__name__)


def inherited(variable: str) -> socket.socket | None:
    """Return the socket whose descriptor an environment variable has. Removes the variable, so no child inherits it."""
    number = os.environ.pop(variable, "")
    if not number.isdigit():
        return None
    found = socket.socket(fileno=int(number))
    found.set_inheritable(False)
    return found


class Predecessor:
    """The daemon that this one replaces: its listening sockets by name, and its word to begin."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        content, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        message: dict[str, Any] = json.loads(content) if content else {}
        names: list[str] = message.get("sockets", [])
        self.ports: Mapping[str, str] | None = message.get("ports")
        """The `other_ports` of the predecessor; None if it does not send them."""
        self._sockets: dict[str, socket.socket] = dict(
            zip(names, [socket.socket(fileno=each) for each in descriptors], strict=False)
        )
        self._queue: ConnectionQueue | None = None

    @classmethod
    def from_environment(cls) -> Predecessor | None:
        """Return the predecessor, or None if this daemon was not started by one."""
        control = inherited(CONTROL)
        return None if control is None else cls(control)

    def take(self, name: str) -> socket.socket | None:
        """Return the listening socket of this name, or None; the caller owns it."""
        return self._sockets.pop(name, None)

    def take_all(self, prefix: str) -> dict[str, socket.socket]:
        """Return the listening sockets with this prefix, by the rest of their names; the caller owns them."""
        names = [name for name in self._sockets if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._sockets.pop(name) for name in names}

    def refuse(self, reason: str) -> None:
        """Tell the predecessor why this daemon cannot take over."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"error": reason[:2000]}).encode())

    async def word(self, facts: Mapping[str, str]) -> None:
        """Report that this daemon is ready, and wait for the predecessor's word. Then this daemon owns the state.

        Raises:
            Unavailable: the predecessor has ended, or did not give its word in time.
        """
        ends = {int(name): self._sockets.pop(name) for name in (str(RECEIVE_END), str(SEND_END))}
        self._queue = ConnectionQueue(ends)
        for sock in self._sockets.values():  # of ports that are not configured any more
            sock.close()
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        ready = {**facts, "version": __version__}
        await loop.sock_sendall(self._control, json.dumps({"ready": ready}).encode())
        try:
            async with asyncio.timeout(_WORD_LIMIT_S):
                if not await loop.sock_recv(self._control, _MESSAGE_BYTES):
                    raise Unavailable("the previous daemon ended before it handed over")
        except TimeoutError:
            raise Unavailable(f"the previous daemon did not hand over within {_WORD_LIMIT_S:g} s") from None

    def serve(self, take: Callable[[socket.socket], None]) -> None:
        """Have `take` serve the open connections that the predecessor passes on, until it has ended."""
        queue, loop = self._queue, asyncio.get_running_loop()
        assert queue is not None

        def take_one(_: int, connection: socket.socket) -> None:
            take(connection)

        queue.serve(take_one)

        def on_end() -> None:
            loop.remove_reader(self._control)
            self._control.close()
            queue.take_last(take_one)
            queue.close()

        loop.add_reader(self._control, on_end)  # it gets readable only when it closes: no message follows


@contextlib.contextmanager
def following() -> Iterator[Predecessor | None]:
    """Yield the predecessor of this process, if any. An error that ends the block is reported to it."""
    predecessor = Predecessor.from_environment()
    try:
        yield predecessor
    except BaseException as error:
        if predecessor is not None:
            predecessor.refuse(error.message if isinstance(error, TeimgrError) else f"{type(error).__name__}: {error}")
        raise


@dataclass(frozen=True, slots=True)
class Follower:
    """The report of a successor that is ready."""

    pid: int
    version: str


class Succession:
    """Starts this daemon's successor, and ends this process after it.

    `facts` must be the same in the successor, which finds what to adopt by the state file and the run directory.
    `environ` has the variables of a supervisor that were removed from the environment. Such a supervisor learns the new
    pid; others wait for the pid that they know. `take_over` is called once, when a successor is ready: this daemon must
    then leave and call `give_word`.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        take_over: Callable[[Follower], None],
        environ: Mapping[str, str],
        *,
        command: Sequence[str] | None = None,
        limit_s: float = READY_LIMIT_S,
    ) -> None:
        self._sockets: Callable[[], Mapping[str, socket.socket]] = dict
        self._ports: Mapping[str, str] = {}
        self._facts = dict(facts)
        self._take_over = take_over
        self._environ = dict(environ)
        self._failure: str | None = None
        self._command = [*(command or command_line())]
        self._limit_s = limit_s
        self._parent = inherited(LINK)
        self._link: socket.socket | None = None  # this process's end, if it becomes the parent of its successor
        self._queue: ConnectionQueue | None = None
        self._control: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._preparing: asyncio.Task[Follower] | None = None
        self._may_begin = True
        self._owes_reload = False
        self.serving = asyncio.Event()
        """Set when the start of this daemon is complete, so that it cannot fail any more."""
        self.is_taking_over = False
        """True once a successor is ready, to which this daemon hands over."""
        self.has_given_word = False
        self._is_word_lost = False
        self._is_to_end = False

    @property
    def tells_supervisor(self) -> bool:
        """True if a supervisor must learn the new pid, since no parent keeps the former one."""
        return bool(self._environ) and self._parent is None

    def offer(self, sockets: Callable[[], Mapping[str, socket.socket]], ports: Mapping[str, str]) -> None:
        """Set what a successor gets: the listening sockets at its start, by name, and other `ports`."""
        self._sockets, self._ports = sockets, ports

    def alarms(self) -> list[str]:
        return [self._failure] if self._failure else []

    def watch_parent(self) -> None:
        """Kill this process if its parent is killed. Workers and muxes keep serving; the next daemon adopts them."""
        if self._parent is not None:
            asyncio.get_running_loop().add_reader(self._parent, self._on_parent)

    def _on_parent(self) -> None:
        log.critical("the parent process was killed, so this daemon kills itself; workers and muxes keep serving")
        os.kill(os.getpid(), signal.SIGKILL)

    async def begin(self) -> Follower:
        """Start a successor and wait until it is ready. Concurrent calls wait for the same successor.

        Raises:
            UpdateFailed: the successor did not become ready; this daemon keeps serving.
            Unavailable: this daemon is ending.
        """
        if not self._may_begin:
            raise Unavailable("the daemon is ending")
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(), name="successor of the daemon")
            self._preparing.add_done_callback(self._on_prepared)
        return await asyncio.shield(self._preparing)

    def _on_prepared(self, preparing: asyncio.Task[Follower]) -> None:
        self._preparing = None
        if preparing.cancelled():
            return
        if (error := preparing.exception()) is not None:
            self._failure = f"the last restart of the daemon failed, and the old daemon keeps serving: {error}"
            log.error("restart failed", extra={"reason": str(error)})
            return

    def refuse(self) -> None:
        """Start no successor from now on, and end one that is not ready. Used when this daemon stops."""
        self._may_begin = False
        if self._preparing is not None:
            self._preparing.cancel()

    async def cancel(self) -> None:
        """Like `refuse`, and wait until the successor has ended."""
        self.refuse()
        if self._preparing is not None:
            await asyncio.wait({self._preparing})

    async def _prepare(self) -> Follower:
        try:
            self._start()
        except OSError as error:
            self._discard()
            raise UpdateFailed(f"The next daemon cannot be started: {error}") from error
        try:
            follower = await self._ready()
        except BaseException:
            child = self._child
            self._discard()
            await asyncio.to_thread(_end, child)
            raise
        facts = {"successor": follower.pid, "successor_version": follower.version, "by": ORDERED_BY.get()}
        log.info("the next daemon is ready and takes over", extra=facts)
        self.is_taking_over, self._may_begin = True, False  # set without an await, so `refuse` cannot come between
        self._take_over(follower)
        return follower

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._queue = ConnectionQueue({})
        with theirs, contextlib.ExitStack() as held:
            environ = {**os.environ, **self._environ, CONTROL: str(theirs.fileno())}
            passed = [theirs.fileno()]
            if self._parent is not None:
                link = self._parent
            elif self.tells_supervisor:
                link = None
            else:
                self._link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                held.enter_context(link)
            if link is not None:
                environ[LINK] = str(link.fileno())
                passed.append(link.fileno())
            ends = {str(name): sock for name, sock in self._queue.ends.items()}
            sockets = dict(islice({**ends, **self._sockets()}.items(), _MAX_DESCRIPTORS))
            message = json.dumps({"sockets": [*sockets], "ports": dict(self._ports)}).encode()
            socket.send_fds(self._control, [message], [each.fileno() for each in sockets.values()])
            # A new session, since a Ctrl-C in the terminal would reach it twice otherwise.
            self._child = subprocess.Popen(self._command, env=environ, pass_fds=passed, start_new_session=True)
            log.info("the next daemon is being started", extra={"successor": self._child.pid})

    async def _ready(self) -> Follower:
        assert self._control is not None
        assert self._child is not None
        self._control.setblocking(False)
        try:
            async with asyncio.timeout(self._limit_s):
                content = await asyncio.get_running_loop().sock_recv(self._control, _MESSAGE_BYTES)
        except TimeoutError:
            raise UpdateFailed(f"The next daemon was not ready within {self._limit_s:g} s") from None
        message: dict[str, Any] = json.loads(content) if content else {}
        if "ready" not in message:
            status = await asyncio.to_thread(_end, self._child)
            reason = message.get("error") or f"it ended with status {status}; see the output of this daemon"
            raise UpdateFailed(f"The next daemon did not start: {reason}")
        found = message["ready"]
        for name, value in self._facts.items():
            if found.get(name) != value:
                raise UpdateFailed(
                    f"The next daemon would use {name} = {found.get(name)!r} instead of {value!r}, and not find the "
                    "running workers. Stop the daemon and start it again"
                )
        return Follower(self._child.pid, str(found.get("version")))

    def _discard(self) -> None:
        for each in (self._control, self._link, self._queue):
            if each is not None:
                each.close()
        self._control = self._link = self._queue = self._child = None
        self._owes_reload = False

    def pass_on(self, connection: socket.socket) -> None:
        """Pass an open connection to the successor."""
        assert self._queue is not None
        self._queue.pass_on(0, connection)

    async def all_passed_on(self, limit_s: float) -> None:
        """Wait until the successor has all connections, at most `limit_s`. The rest end with this process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._queue is not None and self._queue.is_sending and not self._has_lost_word():  # noqa: ASYNC110
                    await asyncio.sleep(_SENT_POLL_S)

    def give_word(self) -> int | None:
        """Let the successor begin, after state and run files are released. Return its pid, or None if it has ended."""
        assert self._control is not None
        assert self._child is not None
        self.has_given_word = True
        try:
            self._control.send(b'{"begin": true}')
        except OSError as error:
            self._is_word_lost = True
            log.critical("the next daemon ended before it took over", extra={"reason": str(error)})
            return None
        self._tell_parent(self._child.pid)
        if self._owes_reload:
            self._child.send_signal(signal.SIGHUP)
        return self._child.pid

    def _tell_parent(self, pid: int) -> None:
        """Tell the parent which daemon serves from now on."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.send(str(pid).encode())

    def _has_lost_word(self) -> bool:
        """True if the successor ended before it took over: a socket that closes with unread messages is reset."""
        if not self._is_word_lost and self._control is not None:
            try:
                self._control.recv(1, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                self._is_word_lost = True
                log.critical("the next daemon ended before it took over", extra={"reason": "it did not read the word"})
                self._tell_parent(os.getpid())
            except OSError:  # the successor runs
                pass
        return self._is_word_lost

    def send_signal(self, number: int) -> None:
        """Pass a signal to the successor, if there is one: SIGHUP once it has the word, others at once."""
        if number == signal.SIGHUP and not self.has_given_word:
            self._owes_reload = self._child is not None  # before the word it may have no handler
        elif self._child is not None:
            self._is_to_end |= number in (signal.SIGTERM, signal.SIGINT)
            self._child.send_signal(number)

    def leave(self, status: int) -> int:
        """Return the exit status at the end of this process, or become the parent of the successor and not return.

        If the successor ended before it took over, execute the command line again, unless a supervisor has its pid.
        """
        if not self.has_given_word or self._child is None:
            return status
        if self._has_lost_word() and not self._is_to_end and not self.tells_supervisor:
            self._start_again()
        if (ended := self._child.poll()) is not None:
            return ended if ended >= 0 else 128 - ended
        if self._link is not None:
            become_parent(self._child.pid, self._link)
        return status

    def _start_again(self) -> NoReturn:
        """Execute the command line again in this process. The new daemon adopts the workers and muxes."""
        _end(self._child)  # frees its ports, and leaves the next program no unknown child
        environ = {**os.environ, **self._environ}
        if self._parent is not None:
            self._parent.set_inheritable(True)
            environ[LINK] = str(self._parent.fileno())
        unblock_signals()  # the mask is inherited, and a daemon starts with signals unblocked
        os.execvpe(self._command[0], self._command, environ)


def command_line() -> list[str]:
    """Return the command of this process. If it ran a script, the command starts with the script's path.

    If the path leads to another version now, such as by a changed symlink, this runs that version and its interpreter.
    """
    first, *rest = sys.orig_argv
    if rest and not rest[0].startswith("-") and os.access(rest[0], os.X_OK) and _is_script(Path(rest[0])):
        return rest
    return [first, *rest]


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _end(child: subprocess.Popen[bytes] | None) -> int | None:
    """Wait for a successor to end, kill it after 5 s, and return its exit status."""
    if child is None:
        return None
    try:
        return child.wait(_EXIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
