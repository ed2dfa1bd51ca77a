"""Succession of daemons without a gap: the running daemon starts its successor, which takes over once it is ready.

    SIGUSR2 or POST /daemon/restart
    old: starts the same command line, and serves on                new: imports, reads the configuration, binds what
                                                                         the old one does not listen on
    old: leaves its listeners, gives up the state file              new: reports that it is ready
         and the run directory; workers and muxes serve on
    old: gives the word                                             new: adopts workers and muxes, serves
    old: answers the requests it has begun, ends

Clients that connect meanwhile wait in the backlog of the listening sockets, which both have. Open HTTP/1 connections
are passed on between two requests (not with TLS, whose state is in the old process). A successor that does not get
ready changes nothing; one that ends between ready and the word, or has not read it, is replaced by the old process,
which starts its command line again in its own place. The two have a socket pair, whose messages are JSON with
descriptors.
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
"""The variable with the descriptor of a successor's end of the socket pair."""

READY_LIMIT_S = 120.0
"""For the imports of a successor, and all else that it does before it is ready."""
_EXIT_LIMIT_S = 5.0
_WORD_LIMIT_S = 60.0  # from ready to the word: the old daemon finishes the commands it has accepted
_MESSAGE_BYTES = 64 << 10
_MAX_DESCRIPTORS = 250  # the kernel takes 253 a message; ports of instances beyond are bound again by the successor
_SENT_POLL_S = 0.05

log = logging.getLogger(__name__)


def inherited(variable: str) -> socket.socket | None:
    """The socket that a variable of the environment names, which is taken out: workers and muxes have no use for it."""
    number = os.environ.pop(variable, "")
    if not number.isdigit():
        return None
    found = socket.socket(fileno=int(number))
    found.set_inheritable(False)
    return found


class Predecessor:
    """The daemon that this one is to follow: its listening sockets by name, and its word to begin."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        content, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        message: dict[str, Any] = json.loads(content) if content else {}
        names: list[str] = message.get("sockets", [])
        self.ports: Mapping[str, str] | None = message.get("ports")
        """Where other processes or parts of it listen, by their keys; None of one that tells none."""
        self._sockets: dict[str, socket.socket] = dict(
            zip(names, [socket.socket(fileno=each) for each in descriptors], strict=False)
        )
        self._queue: ConnectionQueue | None = None

    @classmethod
    def from_environment(cls) -> Predecessor | None:
        """None for a daemon that follows none."""
        control = inherited(CONTROL)
        return None if control is None else cls(control)

    def take(self, name: str) -> socket.socket | None:
        """Its listening socket of this name; the caller owns it."""
        return self._sockets.pop(name, None)

    def take_all(self, prefix: str) -> dict[str, socket.socket]:
        """Its listening sockets whose names have this prefix, by the rest of their names; the caller owns them."""
        names = [name for name in self._sockets if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._sockets.pop(name) for name in names}

    def refuse(self, reason: str) -> None:
        """Tell it why this daemon cannot follow it."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"error": reason[:2000]}).encode())

    async def word(self, facts: Mapping[str, str]) -> None:
        """Say that this daemon is ready, and return at the predecessor's word, after which the state is this one's.

        Raises:
            Unavailable: it ended without one, or gives none.
        """
        ends = {int(name): self._sockets.pop(name) for name in (str(RECEIVE_END), str(SEND_END))}
        self._queue = ConnectionQueue(ends)
        for sock in self._sockets.values():  # of ports that the configuration has no more
            sock.close()
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        ready = {**facts, "version": __version__}
        await loop.sock_sendall(self._control, json.dumps({"ready": ready}).encode())
        try:
            async with asyncio.timeout(_WORD_LIMIT_S):
                if not await loop.sock_recv(self._control, _MESSAGE_BYTES):
                    raise Unavailable("the daemon that this one was to follow has ended")
        except TimeoutError:
            raise Unavailable(f"the daemon to follow gives no word within {_WORD_LIMIT_S:g} s") from None

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

        loop.add_reader(self._control, on_end)  # readable at its end alone: no message follows


@contextlib.contextmanager
def following() -> Iterator[Predecessor | None]:
    """The predecessor of this process, which gets an error that ends the block."""
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
    """The start of this daemon's successor, and the end of this process after it.

    `facts` must be the same in the successor: by the state file and the run directory it finds what it adopts.
    `environ` are variables of a supervisor that were taken out of the environment: it learns the new pid, while
    others wait for the one that they know. `take_over` is called once, when a successor is ready: this daemon is to
    leave, and to call `give_word`.
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
        self._link: socket.socket | None = None  # this process's end, as the parent of its successor
        self._queue: ConnectionQueue | None = None
        self._control: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._preparing: asyncio.Task[Follower] | None = None
        self._may_begin = True
        self._owes_reload = False
        self.serving = asyncio.Event()
        """Set when this daemon has started in full: no port and no file is refused it any more."""
        self.is_taking_over = False
        """Whether a successor is ready, to which this daemon leaves everything."""
        self.has_given_word = False
        self._is_word_lost = False
        self._is_to_end = False

    @property
    def tells_supervisor(self) -> bool:
        """True if a supervisor is to learn the new pid, as no parent keeps the former one."""
        return bool(self._environ) and self._parent is None

    def offer(self, sockets: Callable[[], Mapping[str, socket.socket]], ports: Mapping[str, str]) -> None:
        """Give a successor the listening sockets that there are at its start, by name, and tell it of other `ports`."""
        self._sockets, self._ports = sockets, ports

    def alarms(self) -> list[str]:
        return [self._failure] if self._failure else []

    def watch_parent(self) -> None:
        """Kill this process when its parent is killed: workers and muxes go on, and the next daemon adopts them."""
        if self._parent is not None:
            asyncio.get_running_loop().add_reader(self._parent, self._on_parent)

    def _on_parent(self) -> None:
        log.critical("the parent process was killed: ending like a daemon that was killed")
        os.kill(os.getpid(), signal.SIGKILL)

    async def begin(self) -> Follower:
        """Start a successor; returns when it is ready, and this daemon about to leave. Calls meanwhile wait for it too.

        Raises:
            UpdateFailed: it does not get ready; this daemon serves on.
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
            self._failure = f"the last restart of the daemon failed, and this one serves on: {error}"
            log.error("restart failed", extra={"reason": str(error)})
            return

    def refuse(self) -> None:
        """Begin none any more, and end one that is not ready: this daemon stops."""
        self._may_begin = False
        if self._preparing is not None:
            self._preparing.cancel()

    async def cancel(self) -> None:
        """Like `refuse`; returns when it has ended."""
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
        log.info("the next daemon is ready, and takes over", extra=facts)
        self.is_taking_over, self._may_begin = True, False  # in this step of the task: it cannot be refused any more
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
            # In a new session: a Ctrl-C in the terminal would else reach it twice.
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
            raise UpdateFailed(f"The next daemon is not ready within {self._limit_s:g} s") from None
        message: dict[str, Any] = json.loads(content) if content else {}
        if "ready" not in message:
            status = await asyncio.to_thread(_end, self._child)
            reason = message.get("error") or f"it ended with status {status}; its messages are where this daemon logs"
            raise UpdateFailed(f"The next daemon does not start: {reason}")
        found = message["ready"]
        for name, value in self._facts.items():
            if found.get(name) != value:
                raise UpdateFailed(
                    f"The next daemon would have {name} = {found.get(name)!r} and not {value!r}: it would not find "
                    "what this one has started. Stop the daemon and start it again"
                )
        return Follower(self._child.pid, str(found.get("version")))

    def _discard(self) -> None:
        for each in (self._control, self._link, self._queue):
            if each is not None:
                each.close()
        self._control = self._link = self._queue = self._child = None
        self._owes_reload = False

    # The word, and after it

    def pass_on(self, connection: socket.socket) -> None:
        """Give the successor an open connection."""
        assert self._queue is not None
        self._queue.pass_on(0, connection)

    async def all_passed_on(self, limit_s: float) -> None:
        """Return when the successor has every connection, or at the limit. Others end with this process."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._queue is not None and self._queue.is_sending and not self._has_lost_word():  # noqa: ASYNC110
                    await asyncio.sleep(_SENT_POLL_S)

    def give_word(self) -> int | None:
        """Let the successor begin; the result is its pid, None if it has ended. State and run files are free."""
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
        """Name the daemon that serves from now on."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.send(str(pid).encode())

    def _has_lost_word(self) -> bool:
        """Whether the successor ended before it took over: a connection whose messages were not read is reset."""
        if not self._is_word_lost and self._control is not None:
            try:
                self._control.recv(1, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                self._is_word_lost = True
                log.critical("the next daemon ended before it took over", extra={"reason": "it has not read the word"})
                self._tell_parent(os.getpid())
            except OSError:  # it lives
                pass
        return self._is_word_lost

    def send_signal(self, number: int) -> None:
        """Pass a signal on to the successor, if there is one: SIGHUP once it has the word, others at once."""
        if number == signal.SIGHUP and not self.has_given_word:
            self._owes_reload = self._child is not None  # which has no handler yet, or nothing to reload
        elif self._child is not None:
            self._is_to_end |= number in (signal.SIGTERM, signal.SIGINT)
            self._child.send_signal(number)

    def leave(self, status: int) -> int:
        """At the end of this process: the exit status, unless the process becomes its successor's parent.

        It starts again where the successor ended before it took over, if the process is still that of its supervisor.
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
        """Replace this program by its own command line, which adopts the workers and muxes that were left."""
        _end(self._child)  # its ports are free then, and the next program has no child that it does not know
        environ = {**os.environ, **self._environ}
        if self._parent is not None:
            self._parent.set_inheritable(True)
            environ[LINK] = str(self._parent.fileno())
        unblock_signals()  # as when it was started: one that came meanwhile ends it
        os.execvpe(self._command[0], self._command, environ)


def command_line() -> list[str]:
    """The command of this process, begun by the program's own file where there is one.

    A path that leads to another version now, as by a link that was moved, so starts that version, with its interpreter.
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
    """Kill a successor that was not to serve, unless it ends; its exit status."""
    if child is None:
        return None
    try:
        return child.wait(_EXIT_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
