"""The node agent: forks workers from its host's nursery on request of worker actors, and describes the host.

It serves a unix socket in the run directory, with one JSON object per line. One connection of an
actor is one worker:

    in    {"op": "launch", "spec"}        fork a worker
          {"op": "launch mux", "spec"}    start a mux, which is held as a worker is; "launch mux beside" one that
                                            listens on the same port
          {"op": "claim", "incarnation"}  after a restart of the agent: a worker that was forked before
          {"op": "facts", "fleet"}        answered by {"facts"}, `NodeFacts`; the agent learns `FleetFacts`
          {"op": "hosts"}                 of a worker that needs a model: {"hosts", "models_from"}
                                            (`models/neighbours.py`)
          {"op": "leave"}                 answered by {"workers"} as they become fewer, and {"left"}
    out   {"worker"}                      `HeldWorker`; the connection stays open while it lives
          {"exit"}                        it has ended; its files are removed
          {"error"}

When an actor dies, its connection closes and its worker is killed, since the fleet no longer uses it. Workers survive a
restart of the agent; those that no actor claims in time are ended.

`NodeMuxes` starts the muxes of the host, and finds them again after a restart of the agent. The daemon sends a mux's
configuration without what belongs to the host: folder, certificate, and the socket on which it listens for the daemon.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from teimgr.cluster.messages import (
    LINE_LIMIT_BYTES,
    FleetFacts,
    HeldWorker,
    NodeFacts,
    agent_socket,
    exit_to_dict,
    read_message,
)
from teimgr.config.mux import MuxConfig
from teimgr.config.sections import address_on_host
from teimgr.control.launch.launcher import LocalLauncher, LocalWorker
from teimgr.control.launch.mux_launcher import BESIDE, LocalMux, MuxPaths, MuxRunFile, spawn_mux
from teimgr.control.launch.process_handle import Exit, LaunchFailed, look_up, new_incarnation
from teimgr.errors import TeimgrError
from teimgr.files import write_atomically
from teimgr.http.server import address_of, bind
from teimgr.spec import WorkerSpec, known
from teimgr.wire.fleet_tls import write_removed
from teimgr.wire.json_messages import write_line

_BACKLOG = 16
_LOG_MAX_BYTES, _LOG_KEEP = 10 << 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxFacts:
    """A mux in the list of its agent: `spec` as the daemon sent it, `address` where it listens for the daemon."""

    name: str
    incarnation: str
    address: str
    spec: str


class NodeMux:
    """One mux on this host, by its process."""

    def __init__(self, process: LocalMux, paths: MuxPaths, facts: MuxFacts) -> None:
        self.name = facts.name
        self.incarnation = facts.incarnation
        self.address = facts.address
        self.spec_json = facts.spec
        self.pid = process.pid
        self.socket = process.socket
        self.log_path = process.log_path
        self.started_at = process.started_at
        self._process = process
        self._paths = paths

    async def wait(self) -> Exit:
        """Wait until the process has ended and its files are removed."""
        exit = await self._process.wait()
        self._paths.remove()
        _facts_file(self._paths).unlink(missing_ok=True)
        return exit

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """Like `ProcessHandle.stop`."""
        await self._process.stop(grace_s, sigterm=sigterm)
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class NodeMuxes:
    """Starts muxes here. They listen for the daemon on `link_address`, with the certificate in `identity_dir`."""

    def __init__(self, run_dir: Path, log_dir: Path, node: str, link_address: str, identity_dir: Path) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._node = node
        self._link_address = link_address
        self._identity_dir = str(identity_dir)

    def launch(self, spec: str, *, beside: bool = False) -> NodeMux:
        """Start a mux of a spec, `mux_spec`; `beside` another one, which has its port.

        Raises:
            OSError: it cannot be started.
            TeimgrError, ValueError, KeyError, TypeError: the spec is not one, or the address is not of this host.
        """
        values = json.loads(spec)
        name, known_by, incarnation = str(values["name"]), str(values["known_by"]), new_incarnation()
        paths = MuxPaths(self._run_dir, f"{name}-{incarnation}")
        with bind(self._link_address, 0, "link_address") as listener:
            listener.listen(_BACKLOG)
            config = replace(
                MuxConfig.from_json(values["config"]),
                run_dir=str(self._run_dir),
                control_socket=str(paths.socket),
                node=self._node,
                identity_dir=self._identity_dir,
                incarnation=incarnation,
                control_fd=listener.fileno(),
            )
            facts = MuxFacts(name=name, incarnation=incarnation, address=address_of(listener), spec=spec)
            write_atomically(_facts_file(paths), json.dumps(asdict(facts)).encode())
            more = (BESIDE,) if beside else ()
            log_path = self._log_path(name)
            process = spawn_mux(paths, config, known_by, log_path, _LOG_MAX_BYTES, _LOG_KEEP, more=more)
        return NodeMux(process, paths, facts)

    def find(self) -> list[NodeMux]:
        """The live muxes of an earlier agent; the files of others are removed. Raises OSError."""
        found = []
        for path in self._run_dir.glob("mux-*.json"):
            paths = MuxPaths(self._run_dir, path.stem)
            run_file = MuxRunFile.read(paths.run_file)
            pidfd = run_file.open_pidfd() if run_file else None
            if run_file is None or pidfd is None:
                paths.remove()
                path.unlink(missing_ok=True)
                continue
            facts = MuxFacts(**known(MuxFacts, json.loads(path.read_text())))
            log_path, started_at = self._log_path(facts.name), run_file.process.started_at
            process = LocalMux(run_file.pid, pidfd, None, paths.socket, log_path, 0, started_at, True)
            found.append(NodeMux(process, paths, facts))
        return found

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"_{name}.log"


def mux_spec(name: str, known_by: str, config: MuxConfig) -> str:
    """What the daemon sends to start a mux; a running one with another spec has to be replaced."""
    return json.dumps({"name": name, "known_by": known_by, "config": config.to_json()})


def _facts_file(paths: MuxPaths) -> Path:
    return paths.folder / f"{paths.name}.json"


CLAIM_LIMIT_S = 15.0
"""How long after the agent's start an actor may claim a worker of an earlier agent."""
_LEFTOVER_GRACE_S = 5.0
_OWN_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_FLEET_LIMIT_S = 5.0

log = logging.getLogger(__name__)

Held = LocalWorker | NodeMux


class Agent:
    """Serves `agent.sock` in the run directory of `launcher`, which is started before. `facts` describes the host.

    Workers listen for other hosts on `link_address`, with the certificate in `identity_dir`; `muxes` are those of the
    host, where it may have any. On another host than the head, whose address in the fleet is `head_address` then, they
    have the instance's port at the address that `address_on_host` names.
    """

    def __init__(
        self,
        launcher: LocalLauncher,
        run_dir: Path,
        facts: Callable[[], Awaitable[NodeFacts]],
        link_address: str,
        identity_dir: Path,
        muxes: NodeMuxes | None = None,
        head_address: str = "",
    ) -> None:
        self.socket = agent_socket(run_dir.absolute())
        self.leaving = asyncio.Event()
        """Set by a `leave`: the host shall take no more workers, and end when it has none."""
        self.fleet = FleetFacts()
        """From the last question of the daemon for facts."""
        self._launcher = launcher
        self._run_dir = run_dir.absolute()
        self._facts = facts
        self._link_address = link_address
        self._identity_dir = identity_dir
        self._muxes = muxes
        self._head_address = head_address
        self._unclaimed: dict[str, Held] = {}
        self._ended: dict[int, Exit] = {}
        self._server: asyncio.Server | None = None
        self._claims: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._held: set[Held] = set()
        self._launching = 0
        self._number_changed = asyncio.Event()
        self._hosts_known = asyncio.Event()
        self._learned = asyncio.Event()

    @property
    def models_bytes_per_s(self) -> int:
        """Rate limit of this host for sending model files."""
        return self.fleet.models_mb_per_sec << 20

    @property
    def workers(self) -> int:
        """The number of live workers, including those that wait to be claimed."""
        return sum(isinstance(each, LocalWorker) for each in (*self._held, *self._unclaimed.values()))

    def port_of(self, incarnation: str) -> tuple[str, int] | None:
        """Return where the instance's port of a worker is reached on this host; None if the worker is not here."""
        for each in (*self._held, *self._unclaimed.values()):
            if isinstance(each, LocalWorker) and each.incarnation == incarnation:
                host = each.spec.port_host or each.spec.instance_host
                return _OWN_ADDRESS.get(host, host), each.spec.port
        return None

    async def listed(self, host: str) -> None:
        """Wait until the daemon has this host among those where it may place workers."""
        while host not in dict(self.fleet.services or ()):
            self._learned.clear()
            await self._learned.wait()

    async def emptied(self, limit_s: float) -> bool:
        """Wait until all workers and muxes have ended; return whether that took at most `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self._held or self._unclaimed or self._launching:
                    self._number_changed.clear()
                    await self._number_changed.wait()
        except TimeoutError:
            return False
        return True

    async def stop_workers(self, grace_s: float) -> None:
        """Stop all workers and muxes in parallel. Each may finish its calls within the grace."""
        workers = [*self._held, *self._unclaimed.values()]
        for result in await asyncio.gather(*(each.stop(grace_s) for each in workers), return_exceptions=True):
            if isinstance(result, LaunchFailed):
                log.error("worker does not die", extra={"reason": str(result)})

    async def start(self) -> None:
        """Find the workers of an earlier agent, and listen.

        Raises:
            Unavailable: a run file cannot be read.
            OSError: the socket cannot be bound.
        """
        found = await self._launcher.find()
        workers: list[Held] = [each for each in found.alive if isinstance(each, LocalWorker)]
        muxes = self._muxes.find() if self._muxes else []
        self._unclaimed = {each.incarnation: each for each in (*workers, *muxes)}
        self._ended = {each.pid: each.exit for each in found.ended}
        self.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket), limit=LINE_LIMIT_BYTES)
        self.socket.chmod(0o600)
        self._claims = asyncio.create_task(self._end_unclaimed(), name="workers that no actor claims")

    async def close(self) -> None:
        """Stop serving. Actors and workers continue, and wait for the next agent."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._connections, *([self._claims] if self._claims else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.socket.unlink(missing_ok=True)

    async def _end_unclaimed(self) -> None:
        await asyncio.sleep(CLAIM_LIMIT_S)
        unclaimed, self._unclaimed = self._unclaimed, {}
        for worker in unclaimed.values():
            log.warning("ending an unclaimed worker", extra={"worker": _label(worker), "pid": worker.pid})
            with suppress(LaunchFailed):
                await worker.stop(_LEFTOVER_GRACE_S)
        self._number_changed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await read_message(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass  # the peer disconnected, or the agent ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """True if another request may follow on this connection."""
        match request:
            case {"op": "facts", "fleet": dict(fleet)}:
                self._learn(FleetFacts.from_dict(fleet))
                write_line(writer, facts=(await self._facts()).to_dict())
            case {"op": "facts"}:  # of `teimgr doctor`, which sends no list of nodes
                write_line(writer, facts=(await self._facts()).to_dict())
            case {"op": "hosts"}:
                await self._tell_hosts(writer)
            case {"op": "launch", "spec": str(spec)}:
                await self._launch(spec, reader, writer)
                return False
            case {"op": "launch mux" | "launch mux beside" as op, "spec": str(spec)}:
                await self._launch_mux(spec, op == "launch mux beside", reader, writer)
                return False
            case {"op": "claim", "incarnation": str(incarnation), "pid": int(pid)}:
                await self._claim(incarnation, pid, reader, writer)
                return False
            case {"op": "leave"}:
                await self._leave(writer)
                return False
            case _:
                write_line(writer, error=f"not a request: {str(request)[:200]}")
                return False
        await writer.drain()
        return True

    def _learn(self, fleet: FleetFacts) -> None:
        try:
            write_removed(self._identity_dir, fleet.removed)
        except OSError as error:
            log.error("the list of removed nodes cannot be written", extra={"reason": str(error)})
        if fleet.services is None:  # the daemon has just started
            fleet = replace(fleet, services=self.fleet.services)
        self.fleet = fleet
        if fleet.services is not None:
            self._hosts_known.set()
        self._learned.set()

    async def _tell_hosts(self, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_FLEET_LIMIT_S):
                await self._hosts_known.wait()
        except TimeoutError:
            write_line(writer, error="the daemon has not sent the list of hosts yet")
            return
        write_line(writer, hosts=self.fleet.services, models_from=self.fleet.models_from)

    async def _launch(self, spec: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_leaving(writer):
            return
        self._launching += 1  # a worker being forked counts as one of the host
        try:
            wanted = WorkerSpec.from_json(spec)
            own = replace(
                wanted,
                link_address=self._link_address,
                identity_dir=str(self._identity_dir),
                port_host=self._port_host(wanted.instance_host),
                agent_socket=str(self.socket),
            )
            worker = await self._launcher.launch(own)
            self._held.add(worker)
        except (LaunchFailed, TeimgrError, ValueError, TypeError) as error:
            write_line(writer, error=str(error))
            return
        finally:
            self._launching -= 1
            self._number_changed.set()
        await self._hold(worker, reader, writer)

    def _is_leaving(self, writer: asyncio.StreamWriter) -> bool:
        """Return whether the host is leaving; if so, send the reason to the peer."""
        if self.leaving.is_set():
            write_line(writer, error="this host is leaving the cluster")
        return self.leaving.is_set()

    def _port_host(self, instance_host: str) -> str | None:
        if not self._head_address:
            return None
        return address_on_host(instance_host, self._head_address, self._link_address)

    async def _launch_mux(
        self, spec: str, beside: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._muxes is None:
            write_line(writer, error="the daemon starts the muxes of this host itself")
            return
        if self._is_leaving(writer):
            return
        try:
            mux = self._muxes.launch(spec, beside=beside)
        except (OSError, TeimgrError, ValueError, KeyError, TypeError) as error:
            write_line(writer, error=str(error))
            return
        await self._hold(mux, reader, writer)

    async def _claim(
        self, incarnation: str, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if (worker := self._unclaimed.pop(incarnation, None)) is not None:
            await self._hold(worker, reader, writer)
        elif (exit := self._ended.pop(pid, None)) is not None:
            write_line(writer, exit=exit_to_dict(exit))
        else:
            write_line(writer, error="no such worker")

    async def _hold(self, worker: Held, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Report the exit of a worker to its actor, or kill the worker when the actor disconnects."""
        self._held.add(worker)
        gone = asyncio.ensure_future(reader.read(1))
        ended = asyncio.ensure_future(worker.wait())
        try:
            write_line(writer, worker=self._described(worker))
            await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.warning("worker's actor is gone", extra={"worker": _label(worker), "pid": worker.pid})
                await worker.stop(0)
            write_line(writer, exit=await asyncio.to_thread(exit_to_dict, await ended))
            with suppress(ConnectionError):
                await writer.drain()
        except asyncio.CancelledError:  # the agent ends; the next agent finds the worker by its run file
            raise
        except LaunchFailed as error:
            log.error("worker does not die", extra={"worker": _label(worker), "reason": str(error)})
        finally:
            self._held.discard(worker)
            self._number_changed.set()
            gone.cancel()
            ended.cancel()

    def _described(self, worker: Held) -> dict[str, Any]:
        process = look_up(worker.pid)
        held = HeldWorker(
            spec=worker.spec.to_json() if isinstance(worker, LocalWorker) else worker.spec_json,
            incarnation=worker.incarnation,
            pid=worker.pid,
            start_time=process.start_time if process else 0,
            socket=str(worker.socket),
            run_dir=str(self._run_dir),
            log_path=str(worker.log_path),
            started_at=worker.started_at,
            address="" if isinstance(worker, LocalWorker) else worker.address,
        )
        return asdict(held)

    async def _leave(self, writer: asyncio.StreamWriter) -> None:
        """Take no more workers, and report the remaining ones until all have ended."""
        self.leaving.set()
        while True:
            self._number_changed.clear()
            count = self.workers + self._launching
            write_line(writer, workers=count)
            await writer.drain()
            if not count:
                break
            await self._number_changed.wait()
        write_line(writer, left=True)
        await writer.drain()


def _label(worker: Held) -> str:
    return worker.spec.name if isinstance(worker, LocalWorker) else worker.name
