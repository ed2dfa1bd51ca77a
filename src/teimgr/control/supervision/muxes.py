"""Supervises the mux processes with the workers' lifecycle table: launches or adopts them and sends them the routes.

A mux that exits or does not answer is restarted, with an alarm until its successor answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from teimgr.config.mux import DRAIN_S
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import MuxDisconnected, MuxLink, MuxLost, MuxStopping
from teimgr.control.launch.mux_launcher import MuxHandle, MuxLauncher, SentCertificates, local_launcher
from teimgr.control.launch.process_handle import Exit, ExitReport, LaunchFailed, WorkMeter
from teimgr.control.residence.mux_calls import LoadsForMux
from teimgr.control.sharing.leases import LeasesForMux
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.control.supervision.crash_reports import MUX, Crash, CrashReports
from teimgr.control.supervision.lifecycle import (
    Backoff,
    Command,
    Effect,
    Event,
    Exited,
    FailureCause,
    Observation,
    Phase,
    ProbeFailed,
    ProbeOk,
    RestartPolicy,
    WorkerDraining,
    WorkerFailed,
    WorkerHealth,
    WorkerReady,
    explain,
)
from teimgr.control.supervision.supervisor import LifecycleTask
from teimgr.errors import Code, TeimgrError, Unavailable
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.http.server import bind
from teimgr.http.unix_listener import check_free, remove_stale
from teimgr.observability.logs import STACKS_SIGNAL, rotate_regularly
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import RouteEntry
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.routing.directory import Directory
from teimgr.wire.routing.on_demand import NO_LOADS, ModelLoads

log = logging.getLogger(__name__)

_RUN_FILE = re.compile(r"mux-(\d+)\.run")
_FORCED_S = 1.0
_RECONNECT_PAUSE_S = 0.1
_ADOPTION_PAUSE_S = 2.0
_LAST_LINES_S = 1.0  # for what a mux has reported before it ended


MUX_POLICY = RestartPolicy(
    process="mux",
    failed_exit_limit_s=0.0,  # kill at once: a failed mux does not exit
    max_probe_failures=5,
    backoff=Backoff(max_s=10.0, stable_after_s=10.0),
)


@dataclass(frozen=True, slots=True)
class MuxTimeouts:
    """Seconds for the control link to connect and for a probe to be answered, and the interval of probes."""

    connect_limit_s: float = 20.0
    answer_limit_s: float = 2.0
    interval_s: float = 5.0


class MuxSupervisor(LifecycleTask):
    """Keeps one mux process alive while `run` runs; `alarm` is its current problem.

    One task per process, from launch or adoption to exit, sends events. Each request to the mux is a probe.
    """

    def __init__(
        self,
        launcher: MuxLauncher,
        directory: Directory,
        metrics: DaemonMetrics,
        crash_reports: CrashReports,
        policy: PolicyInForce | None = None,
        timeouts: MuxTimeouts | None = None,
        restarts: RestartPolicy = MUX_POLICY,
        loads: ModelLoads = NO_LOADS,
        tenants: TenantRegistry | None = None,
    ) -> None:
        super().__init__(restarts, {"mux": launcher.name})
        self._tenants = tenants if launcher.host else None  # muxes of this host read the table in shared memory
        self.launcher = launcher
        self.name = launcher.name
        self.alarm: str | None = None
        self._loads = loads
        self._directory = directory
        self._policy = policy or PolicyInForce(Policy())
        self._metrics = metrics
        self._timeouts = timeouts or MuxTimeouts()
        self._crash_reports = crash_reports
        self._tasks: asyncio.TaskGroup | None = None
        self._process: MuxHandle | None = None
        self._left: asyncio.Future[Exit] | None = None
        self._grace_s = 0.0  # for a process that another process stopped
        self._draining: dict[asyncio.Task[Exit | None], MuxHandle] = {}
        self._forced: set[asyncio.Task[Exit | None]] = set()
        self._replacing: asyncio.Task[None] | None = None
        self._prepared: MuxHandle | None = None  # already serving, beside the process that it replaces
        self._is_refused = False  # the adopted mux does not take the routes or rules of this version
        self._stale: str | None = None  # why a mux of another version or configuration was not replaced
        self._routes: int | None = None  # oldest version that the process may use
        self._routes_changed = asyncio.Event()
        self._is_fed = False
        self._problem: str | None = None  # reported in the last answer

    @property
    def state(self) -> str:
        """`serving`, `starting`, or the problem."""
        return self.alarm or ("serving" if self._is_fed else "starting")

    async def adopt(self) -> bool:
        """Take over the live mux of an earlier daemon; `run` replaces one of another version or configuration.

        Raises:
            Unavailable: it cannot be looked for now, for instance for lack of descriptors; the mux keeps serving.
        """
        try:
            self._process = await self.launcher.adopt()
        except OSError as error:
            raise Unavailable(f"cannot look for the mux of an earlier daemon: {error}") from error
        if self._process is None:
            return False
        facts = {"mux": self.name, "pid": self._process.pid, "is_current": self._process.is_current}
        log.info("adopted a running mux", extra=facts)
        self._set_routes(0)
        return True

    async def run(self) -> None:
        """Keep a mux alive and supplied with the latest snapshot, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            if self._process is not None:
                self._step(Command.ADOPT)
                self._begin()
                if not self._process.is_current:
                    replacing = self._replace(self._process)
                    self._replacing = self._tasks.create_task(replacing, name=f"successor of {self.name}")
            else:
                self._step(Command.START)
            while True:
                event: Observation = await self._next()
                self._record(event)
                self._step(event)

    async def replaced(self) -> None:
        """Return when a mux of another version or configuration has been replaced, and its successor has the routes."""
        if self._replacing is None:
            return
        await asyncio.wait({self._replacing})
        while self._prepared is not None or not self._is_fed:
            await self._routes_changed.wait()

    async def routes_confirmed(self) -> None:
        """Return when no mux process uses older routes than the present ones: it has confirmed them or has ended. A mux
        that does not answer is ended after some seconds.
        """
        wanted = self._directory.version
        while self._routes is not None and self._routes < wanted:
            await self._routes_changed.wait()

    def _set_routes(self, version: int | None) -> None:
        self._routes = version
        changed, self._routes_changed = self._routes_changed, asyncio.Event()
        changed.set()

    async def stop(self, grace_s: float) -> None:
        """Let the mux finish its calls for at most `grace_s`, then end it. Call this after `run` was cancelled."""
        for process in (self._process, self._prepared):
            if process is not None:
                self._drain(process, grace_s)
        await asyncio.gather(*self._draining)
        self.launcher.clean_up()

    def force_stop(self) -> None:
        for process in (self._process, self._prepared, *self._draining.values()):
            if process is not None:
                # The second SIGTERM makes it exit without waiting for calls. If it hangs, it is killed.
                task = asyncio.create_task(self._end(process, _FORCED_S), name=f"forced end of {self.name}")
                self._forced.add(task)
                task.add_done_callback(self._forced.discard)

    def _drain(self, process: MuxHandle, grace_s: float, *, sigterm: bool = True) -> None:
        """Let a process finish its calls; `force_stop` knows it until it has ended."""
        task = asyncio.create_task(self._end(process, grace_s + 1, sigterm=sigterm), name=f"end of {self.name}")
        self._draining[task] = process
        task.add_done_callback(self._draining.pop)
        self._forget_process()

    # Events and effects

    def _step(self, event: Event) -> None:
        for effect in self._advance(event):
            if effect is Effect.LAUNCH:
                self._begin()
            elif effect is Effect.TERMINATE and self._process is not None:
                self._let_end(self._process)
            elif effect is Effect.KILL and self._process is not None:
                assert self._tasks is not None
                self._tasks.create_task(self._kill(self._process), name=f"end of {self.name}")

    def _let_end(self, process: MuxHandle) -> None:
        """Start a successor while the process, which another process stopped, finishes its calls: its port is free."""
        self._drain(process, self._grace_s, sigterm=False)
        self._leave(Exit(None))

    async def _kill(self, process: MuxHandle) -> None:
        exit = await self._end(process, 0)
        self._leave(exit or Exit(None))  # even if it does not exit, its successor can bind the port

    def _leave(self, exit: Exit) -> None:
        """Stop waiting for the end of the process."""
        if self._left is not None and not self._left.done():
            self._left.set_result(exit)

    def _record(self, event: Observation) -> None:
        """Update what is shown; no decision depends on it."""
        match event:
            case ProbeOk():
                problem = self._problem or self._stale
                self.alarm = f"{self.name}: {problem}" if problem else None
            case ProbeFailed(reason) if self._replica.phase is Phase.RUNNING:  # probes may fail during the start
                self.alarm = reason
                log.warning("probe failed", extra={"mux": self.name, "reason": reason})
                if self._replica.health is WorkerHealth.GOOD and self._process is not None:
                    self._process.send_signal(STACKS_SIGNAL)
            case Exited(exit):
                reason = (self._replica.failure or explain(exit, "mux")).message
                self.alarm = f"{self.name} is restarting: {reason};  see {self.launcher.log_name}"
                self._metrics.mux_gone(self.name)
                if self._process is not None:
                    self._report_crash(self._process, exit, reason)
                self._forget_process()

    def _forget_process(self) -> None:
        self._process, self._is_fed = None, False
        self._set_routes(None)

    def _report_crash(self, process: MuxHandle, exit: Exit, reason: str) -> None:
        crash = Crash(
            instance=f"{MUX}-{self.launcher.host}" if self.launcher.host else MUX,
            replica=self.launcher.number,
            pid=process.pid,
            started_at=process.started_at,
            status=exit.status,
            reason=reason,
            log=exit.log,
        )
        _, writing = self._crash_reports.report(crash)
        assert self._tasks is not None
        self._tasks.create_task(writing, name=f"crash report of {self.name}")

    # The process

    def _begin(self) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._run_process(), name=f"process of {self.name}")

    async def _run_process(self) -> None:
        """Launch a mux unless one was adopted, and feed it until it ends or leaves; never raises."""
        try:
            if self._process is None:
                self._process = await self._launch()
            process = self._process
            exit = await self._serve(process)
        except (LaunchFailed, OSError, TeimgrError) as error:
            exit = Exit(None, ExitReport(Code.INTERNAL_ERROR, str(error), permanent=False))
        except Exception as error:  # the fleet needs a mux even after a defect
            log.exception("supervision of a mux failed", extra={"mux": self.name})
            exit = Exit(None, ExitReport(Code.INTERNAL_ERROR, repr(error), permanent=False))
            if self._process is not None:
                await self._end(self._process, 0)
        self._mailbox.put_nowait(Exited(exit, random.random()))

    async def _launch(self) -> MuxHandle:
        if self._replacing is not None:
            await asyncio.wait({self._replacing})
        prepared, self._prepared = self._prepared, None
        return prepared or await self.launcher.launch()

    async def _replace(self, old: MuxHandle) -> None:
        """Start a mux beside an adopted one of another version or configuration, which ends once the new one has the
        routes.

        Until then both accept connections, or they wait in the backlog of the new one.
        """
        while not (self._is_fed or self._is_refused):  # before the new mux takes the control socket's path
            if self._process is not old:  # it exited and is restarted in this version
                return
            await self._routes_changed.wait()
        try:
            new = self._prepared = await self.launcher.launch(beside=True)
            await self._give_routes(new)
        except (LaunchFailed, MuxLost, OSError, TeimgrError) as error:
            self._stale = f"it has another version or configuration, and its successor did not start: {error}"
            log.error("mux not replaced", extra={"mux": self.name, "reason": str(error)})
            failed, self._prepared = self._prepared, None
            if failed is not None:
                await self._end(failed, 0)
            self.launcher.record(old)
            return
        except asyncio.CancelledError:  # the next daemon adopts the new mux
            if self._prepared is not None:
                with suppress(MuxLost, OSError):
                    await self._give_routes(self._prepared)
                old.send_signal(signal.SIGTERM)
            raise
        log.info("replacing a mux without a gap", extra={"mux": self.name, "pid": old.pid, "successor": new.pid})
        old.send_signal(signal.SIGTERM)

    async def _give_routes(self, process: MuxHandle) -> None:
        """Send a new mux the present routes, by which it serves. Raises MuxLost."""
        async with asyncio.timeout(self._timeouts.connect_limit_s):
            link = await process.connect(self._timeouts.connect_limit_s)
            try:
                link.send(**self._rules(), snapshot=self._directory.snapshot().to_json())
                await link.ask("ack")
            finally:
                link.close()

    def _rules(self) -> dict[str, str]:
        """Who may call, and what their quotas are."""
        rules = {"policy": self._policy.now.to_json()}
        return rules if self._tenants is None else rules | {"terms": json.dumps(self._tenants.terms())}

    async def _serve(self, process: MuxHandle) -> Exit:
        ended = asyncio.ensure_future(process.wait())
        feeding = asyncio.create_task(self._keep_fed(process))
        left = self._left = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
            return left.result() if left.done() else ended.result()
        finally:
            for task in (ended, feeding):
                task.cancel()
            await asyncio.gather(ended, feeding, return_exceptions=True)

    async def _keep_fed(self, process: MuxHandle) -> None:
        post = self._mailbox.put_nowait
        try:
            await self._keep_link(process)
        except MuxStopping as error:
            self._grace_s = error.grace_s
            post(WorkerDraining())
        except MuxLost as error:
            has_successor = not process.is_current and await self._has_successor()
            post(WorkerDraining() if has_successor else WorkerFailed(FailureCause(str(error))))
        except Exception as error:
            log.exception("supervision of a mux failed", extra={"mux": self.name})
            post(WorkerFailed(FailureCause(repr(error))))

    async def _has_successor(self) -> bool:
        """Return whether another mux serves in place of an adopted one that cannot be fed, as it is older."""
        if self._replacing is None:
            return False
        self._is_refused, self._grace_s = True, DRAIN_S
        self._set_routes(self._routes)  # wakes the replacement
        await asyncio.wait({self._replacing})
        return self._prepared is not None

    async def _keep_link(self, process: MuxHandle) -> None:
        """Keep a control link to the mux: if a link breaks that has worked, the mux may be alive, so it connects again.

        Raises:
            MuxLost: always, at the end.
        """
        limits, post = self._timeouts, self._mailbox.put_nowait
        while True:
            late = ProbeFailed(
                f"{self.name} has had no control connection for {limits.answer_limit_s:g} s", missed=True
            )
            timer = asyncio.get_running_loop().call_later(limits.answer_limit_s, post, late)
            try:
                link = await process.connect(limits.connect_limit_s)
            finally:
                timer.cancel()
            post(WorkerReady())
            try:
                await self._feed_by(link)
            except MuxDisconnected as error:
                if not link.has_answered:
                    raise
                log.warning("connection to a mux lost", extra={"mux": self.name, "reason": str(error)})
            finally:
                link.close()
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _feed_by(self, link: MuxLink) -> None:
        """Push every change of policy and directory to the mux; poll its counters after each and at intervals.

        The messages are one line of JSON each, listed in `mux/control.py`. The mux answers in order, so an answer also
        acknowledges the snapshot before it.

        Raises:
            MuxLost: always, at the end.
        """
        changed = asyncio.Event()
        changes: list[tuple[str, RouteEntry | None]] = []

        def on_route(name: str, entry: RouteEntry | None) -> None:
            changes.append((name, entry))
            changed.set()

        certificates = SentCertificates(self.launcher.tls)
        unsubscribe = (self._directory.subscribe(on_route), self._policy.subscribe(changed.set))
        waiting = LoadsForMux(link, self._loads, self.routes_confirmed)
        leases = None if self._tenants is None else LeasesForMux(link, self._tenants)

        def take(message: dict[str, Any]) -> None:
            waiting.take(message)
            if leases is not None:
                leases.take(message)

        link.requests_go_to(take)
        link.send(**certificates.news(), **self._rules(), snapshot=self._directory.snapshot().to_json())
        version = self._directory.version
        if self._routes is None:
            self._set_routes(version)
        request = "stats"
        try:
            while True:
                answer = await self._ask(link, request)
                self._is_fed = True
                self._set_routes(version)
                if request == "stats":
                    self._problem = answer.get("alarm") or certificates.alarm
                    self._metrics.mux_stats(self.name, answer)
                self._mailbox.put_nowait(ProbeOk())
                request = "ack" if await link.wait(changed, self._timeouts.interval_s) else "stats"
                if request == "ack":
                    changed.clear()
                    sent = ", ".join(
                        f"[{json.dumps(name)}, {entry.to_json() if entry else 'null'}]" for name, entry in changes
                    )
                    changes.clear()
                    link.send(**self._rules(), changes=f"[{sent}]")
                    version = self._directory.version
                elif news := certificates.news():
                    link.send(**news)
        finally:
            waiting.close()
            if leases is not None:
                leases.close()
            for leave in unsubscribe:
                leave()

    async def _ask(self, link: MuxLink, request: str) -> dict[str, Any]:
        """Return the answer, however late: the events of failed probes end a mux that does not answer."""
        limit_s = self._timeouts.answer_limit_s
        answer = asyncio.create_task(link.ask(request))
        try:
            async with WorkMeter(self._process) as meter:
                while not (await asyncio.wait((answer,), timeout=limit_s))[0]:
                    reason = f"{self.name} has given no answer for {limit_s:g} s"
                    self._mailbox.put_nowait(ProbeFailed(reason, missed=True, works=await meter.has_worked()))
            return answer.result()
        finally:
            answer.cancel()

    async def _end(self, process: MuxHandle, grace_s: float, *, sigterm: bool = True) -> Exit | None:
        """Return how it ended; None if it did not. Its last calls are charged and counted."""
        leasing: set[asyncio.Task[None]] = set()
        if self._tenants is not None and grace_s > 0:
            leasing.add(asyncio.create_task(self._lease_on(process, self._tenants)))
        try:
            return await process.stop(grace_s, sigterm=sigterm)
        except LaunchFailed as error:
            log.error("mux could not be killed", extra={"mux": self.name, "reason": str(error)})
            return None
        finally:
            if leasing:
                await asyncio.wait(leasing, timeout=_LAST_LINES_S)
            for task in leasing:
                task.cancel()

    async def _lease_on(self, process: MuxHandle, tenants: TenantRegistry) -> None:
        """Charge and count the calls that a mux of another host still finishes, until its link ends."""
        try:
            link = await process.connect(self._timeouts.connect_limit_s)
        except MuxLost:
            return
        leases = LeasesForMux(link, tenants)
        link.requests_go_to(leases.take)
        try:
            link.send(terms=json.dumps(tenants.terms()))
            while True:
                with suppress(MuxStopping):
                    await link.ask("ack")  # else the mux takes the daemon for gone
                    await link.wait(asyncio.Event(), self._timeouts.interval_s)
        except MuxLost as error:
            log.debug("link of an ending mux closed", extra={"mux": self.name, "reason": str(error)})
        finally:
            leases.close()
            link.close()


class MuxHosts(Protocol):
    """The muxes that should run on other hosts."""

    def wanted(self) -> Mapping[str, MuxLauncher]:
        """Their launchers by name; a launcher is the same object as long as it is the same mux."""

    async def changed(self) -> None:
        """Return when `wanted` may have changed."""

    async def end_surplus(self) -> None:
        """End muxes of an earlier daemon that should not run. Raises Unavailable: that is not possible now."""


class Muxes:
    """All mux processes: supervised within `running`, ended by `stop`. `hosts` lists those on other hosts."""

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        metrics: DaemonMetrics,
        policy: PolicyInForce | None = None,
        identity: FleetIdentity | None = None,
        hosts: MuxHosts | None = None,
        loads: ModelLoads = NO_LOADS,
        tenants: TenantRegistry | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        count = settings.mux_processes if settings.grpc_enabled else 0
        crash_reports = CrashReports(settings.log_dir / "crashes")
        self._supervisor: Callable[[MuxLauncher], MuxSupervisor] = lambda launcher: MuxSupervisor(
            launcher, directory, metrics, crash_reports, policy, loads=loads, tenants=tenants
        )
        self._local: Callable[[int], MuxSupervisor] = lambda number: self._supervisor(
            local_launcher(number, settings, identity)
        )
        self._hosts = hosts
        self._remote: dict[MuxSupervisor, asyncio.Task[None]] = {}
        self._leaving: dict[MuxSupervisor, asyncio.Task[None]] = {}
        self._unfollowed = ""
        self._log_paths = [settings.log_dir / f"_mux-{number}.log" for number in range(count)]
        self._supervisors = [self._local(number) for number in range(count)]
        self._socket = settings.grpc_socket.absolute() if count and settings.grpc_socket else None
        directory.confirm_by(self.routes_confirmed)

    @property
    def _all(self) -> list[MuxSupervisor]:
        return [*self._supervisors, *self._remote, *self._leaving]

    def alarms(self) -> list[str]:
        found = [each.alarm for each in self._all if each.alarm]
        return [*found, f"muxes of other hosts are not supervised: {self._unfollowed}"] if self._unfollowed else found

    def states(self) -> dict[str, str]:
        """Return the state of each host's muxes by its name, "" for this host: `serving`, `starting` or an alarm."""
        found: dict[str, str] = {}
        for each in self._all:
            is_leaving = each in self._leaving
            if is_leaving and self._has_successor(each):
                continue
            state = "leaving" if is_leaving else each.state
            before = found.setdefault(each.launcher.host, state)
            found[each.launcher.host] = state if before == "serving" else before
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Adopt or launch them, and supervise them while the body runs; the processes go on after it.

        Raises:
            PortConflict: another program listens on the gRPC port or on `grpc_socket`.
            InvalidConfig: it is not possible to listen on them.
        """
        if self._supervisors:  # muxes that serve share their port
            bind(self._settings.grpc_host, self._settings.grpc_port, "grpc_port", is_shared=True).close()
        await self._end_surplus()
        adopted = [await each.adopt() for each in self._supervisors]
        if self._supervisors and not any(adopted):  # the port must be free without an adopted mux
            bind(self._settings.grpc_host, self._settings.grpc_port, "grpc_port").close()
        if self._socket is not None and not adopted[0]:
            check_free(self._socket, "grpc_socket")
        tasks = [asyncio.create_task(each.run(), name=each.name) for each in self._supervisors]
        rotation = rotate_regularly(lambda: self._log_paths, self._settings.log_max_bytes, self._settings.log_keep)
        tasks.append(asyncio.create_task(rotation, name="rotation of the muxes' logs"))
        if self._hosts is not None:
            tasks.append(asyncio.create_task(self._follow(self._hosts), name="muxes of other hosts"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            remote = [*self._remote.values()]
            for task in remote:
                task.cancel()
            await asyncio.gather(*remote, return_exceptions=True)

    async def _follow(self, hosts: MuxHosts) -> None:
        """Supervise the muxes of hosts that join, and end those of hosts that leave."""
        has_ended_surplus = False
        while True:
            try:
                if not has_ended_surplus:
                    await hosts.end_surplus()
                    has_ended_surplus = True
            except TeimgrError as error:
                log.warning("surplus muxes of other hosts not ended; trying again", extra={"reason": error.message})
            try:
                self._match(hosts.wanted())
                self._unfollowed = ""
                await hosts.changed()
            except Exception as error:  # hosts need a mux even after a defect
                if (problem := repr(error)) != self._unfollowed:
                    log.exception("supervision of the muxes of other hosts failed")
                self._unfollowed = problem
                await asyncio.sleep(_ADOPTION_PAUSE_S)

    def _match(self, wanted: Mapping[str, MuxLauncher]) -> None:
        """Begin to end the muxes of hosts that left, and to start those of hosts that joined."""
        for each in [each for each in self._remote if wanted.get(each.name) is not each.launcher]:
            self._leaving[each] = asyncio.create_task(self._end(each, self._remote.pop(each)))
        for name in wanted.keys() - {each.name for each in self._remote}:
            supervisor = self._supervisor(wanted[name])
            # A mux that is ending still has calls, so it is not adopted: its successor starts beside it.
            is_back = any(each.name == name for each in self._leaving)
            running = supervisor.run() if is_back else self._adopt_and_run(supervisor)
            self._remote[supervisor] = asyncio.create_task(running, name=name)

    async def _adopt_and_run(self, supervisor: MuxSupervisor) -> None:
        while True:
            try:
                await supervisor.adopt()
                break
            except Exception as error:  # hosts need a mux even after a defect
                reason = error.message if isinstance(error, TeimgrError) else repr(error)
                log.warning("adoption of a mux failed; trying again", extra={"mux": supervisor.name, "reason": reason})
                await asyncio.sleep(_ADOPTION_PAUSE_S)
        await supervisor.run()

    async def _end(self, supervisor: MuxSupervisor, task: asyncio.Task[None]) -> None:
        """End the mux of a host that leaves or is lost; its calls have the common grace."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await supervisor.stop(self._settings.graceful_shutdown_timeout_secs)
        except Exception:
            log.exception("mux of another host could not be stopped", extra={"mux": supervisor.name})
        del self._leaving[supervisor]
        if not self._has_successor(supervisor):
            self._metrics.mux_gone(supervisor.name)

    def _has_successor(self, leaving: MuxSupervisor) -> bool:
        """True if the host of a leaving mux has come back meanwhile."""
        return any(each.name == leaving.name for each in (*self._remote, *self._leaving) if each is not leaving)

    async def replaced(self) -> None:
        """Return when no mux of another version or configuration is being replaced."""
        await asyncio.gather(*(each.replaced() for each in self._all))

    async def routes_confirmed(self) -> None:
        """Return when all muxes use the directory as it is now."""
        await asyncio.gather(*(each.routes_confirmed() for each in self._all))

    async def stop(self, grace_s: float) -> None:
        """Let each mux finish its calls for at most `grace_s`, then end it. Call this after `running`."""
        ending = [*self._supervisors, *self._remote]
        results = await asyncio.gather(*(each.stop(grace_s) for each in ending), return_exceptions=True)
        for each, result in zip(ending, results, strict=True):
            if isinstance(result, Exception):
                log.error("mux could not be stopped", extra={"mux": each.name}, exc_info=result)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        if self._socket is not None:
            remove_stale(self._socket)  # left by a mux that was killed

    def force_stop(self) -> None:
        for each in self._all:
            each.force_stop()

    async def _end_surplus(self) -> None:
        """End surplus muxes of an earlier daemon: without updates they would send calls to dead workers."""
        found = [_RUN_FILE.fullmatch(path.name) for path in self._settings.run_dir.glob("mux-*.run")]
        for number in sorted({int(match[1]) for match in found if match}):
            if number >= len(self._supervisors):
                surplus = self._local(number)
                await surplus.adopt()
                await surplus.stop(grace_s=1)
