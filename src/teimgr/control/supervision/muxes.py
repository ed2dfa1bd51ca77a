"""Supervision of the mux processes: launched or adopted, fed with the routes, restarted with backoff.

A mux that ends or does not answer is killed and started again, and raises an alarm until its successor answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from teimgr.config.mux import MuxConfig
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import MuxDisconnected, MuxLink, MuxLost, MuxStopping
from teimgr.control.launch.mux_launcher import LocalMuxLauncher, MuxHandle, MuxLauncher
from teimgr.control.launch.process_handle import Exit, LaunchFailed
from teimgr.control.supervision.crash_reports import MUX, Crash, CrashReports
from teimgr.control.supervision.lifecycle import WORKING_LIMIT_S, Backoff
from teimgr.control.supervision.work_meter import WorkMeter
from teimgr.errors import InvalidConfig, TeimgrError, Unavailable
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.http.auth.tls_files import Stamp, TlsFiles
from teimgr.http.server import bind
from teimgr.http.unix_listener import check_free, remove_stale
from teimgr.observability.logs import STACKS_SIGNAL, rotate_regularly
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.telemetry import exporting
from teimgr.spec import RouteEntry
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.routing.router import Directory

log = logging.getLogger(__name__)

_RUN_FILE = re.compile(r"mux-(\d+)\.run")
_FORCED_S = 1.0
_RECONNECT_PAUSE_S = 0.1
_ADOPTION_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class MuxTimeouts:
    """Limits in seconds: until the control link accepts, until a late answer raises an alarm, until it counts as lost,
    and that while its threads work; and the interval of the polls."""

    connect_limit_s: float = 20.0
    alarm_after_s: float = 2.0
    answer_limit_s: float = 10.0
    working_limit_s: float = WORKING_LIMIT_S
    interval_s: float = 5.0


class MuxSupervisor:
    """Keeps one mux process alive while `run` runs; `alarm` is what is wrong with it now."""

    def __init__(
        self,
        launcher: MuxLauncher,
        directory: Directory,
        metrics: DaemonMetrics,
        crash_reports: CrashReports,
        policy: PolicyInForce | None = None,
        timeouts: MuxTimeouts | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.launcher = launcher
        self.name = launcher.name
        self.alarm: str | None = None
        self._directory = directory
        self._policy = policy or PolicyInForce(Policy())
        self._metrics = metrics
        self._timeouts = timeouts or MuxTimeouts()
        self._backoff = backoff or Backoff(max_s=10.0, stable_after_s=10.0)
        self._process: MuxHandle | None = None
        self._draining: dict[asyncio.Task[Exit | None], MuxHandle] = {}
        self._forced: set[asyncio.Task[Exit | None]] = set()
        self._crash_reports = crash_reports
        self._routes: int | None = None  # the version of the oldest that the process may use; None: it has none yet
        self._routes_changed = asyncio.Event()
        self._is_fed = False

    @property
    def state(self) -> str:
        """`serving`, `starting`, or what is wrong."""
        return self.alarm or ("serving" if self._is_fed else "starting")

    async def adopt(self) -> bool:
        """Take over the live mux of an earlier daemon; one with another configuration is stopped.

        Raises:
            Unavailable: it cannot be looked for now, as for lack of descriptors; the mux serves on.
        """
        try:
            self._process = await self.launcher.adopt()
        except OSError as error:
            raise Unavailable(f"the mux of an earlier daemon cannot be looked for: {error}") from error
        if self._process is None:
            return False
        facts = {"mux": self.name, "pid": self._process.pid}
        if self._process.is_current:
            log.info("adopted a running mux", extra=facts)
            self._set_routes(0)
            return True
        log.info("replacing a mux with another configuration", extra=facts)
        await self.stop(grace_s=1)
        return False

    async def run(self) -> None:
        """Keep a live mux that has the latest snapshot, until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            reason, process = await self._run_once(), self._process
            exit = await self._end()
            reason += "" if exit is None or exit.status is None else f" (exit status {exit.status})"
            was_stable = time.monotonic() - began >= self._backoff.stable_after_s
            failures = 1 if was_stable else failures + 1
            pause_s = self._backoff.delay_s(failures)
            self.alarm = f"{self.name} is being started again: {reason}; see {self.launcher.log_name}"
            self._metrics.mux_gone(self.name)
            if process is not None:
                _, writing = self._crash_reports.report(self._crash(process, exit, reason))
                await writing
            log.error("mux lost: %s", reason, extra={"mux": self.name, "again_in_s": pause_s})
            await asyncio.sleep(pause_s)

    async def routes_confirmed(self) -> None:
        """Return when no mux process uses older routes than those of now: it has confirmed them, or is gone, which one
        that does not answer is after some seconds.
        """
        wanted = self._directory.version
        while self._routes is not None and self._routes < wanted:
            await self._routes_changed.wait()

    def _set_routes(self, version: int | None) -> None:
        self._routes = version
        changed, self._routes_changed = self._routes_changed, asyncio.Event()
        changed.set()

    async def stop(self, grace_s: float) -> None:
        """Let the mux finish its calls, at most `grace_s`, then end it. Call after `run` was cancelled."""
        await asyncio.gather(self._end(grace_s + 1), *self._draining)
        self.launcher.clean_up()

    def force_stop(self) -> None:
        for process in (self._process, *self._draining.values()):
            if process is not None:
                # At a second SIGTERM it exits without waiting for calls; one that hangs is killed.
                task = asyncio.create_task(self._end_process(process, _FORCED_S), name=f"forced end of {self.name}")
                self._forced.add(task)
                task.add_done_callback(self._forced.discard)

    def _crash(self, process: MuxHandle, exit: Exit | None, reason: str) -> Crash:
        return Crash(
            instance=f"{MUX}-{self.launcher.host}" if self.launcher.host else MUX,
            replica=self.launcher.number,
            pid=process.pid,
            started_at=process.started_at,
            status=exit.status if exit else None,
            reason=reason,
            log=exit.log if exit else None,
        )

    async def _run_once(self) -> str:
        """Launch the mux unless one was adopted, and serve it until it is lost; the result is why."""
        try:
            process = self._process = self._process or await self.launcher.launch()
            return await self._serve(process)
        except MuxStopping as error:  # its successor starts beside it
            process, self._process = self._process, None  # type: ignore[assignment]
            self._set_routes(None)  # it takes no new calls
            task = asyncio.create_task(self._end_process(process, error.grace_s + 1, sigterm=False))
            self._draining[task] = process
            task.add_done_callback(self._draining.pop)
            return str(error)
        except (MuxLost, LaunchFailed, OSError) as error:
            return str(error)
        except TeimgrError as error:
            return error.message
        except Exception as error:  # a defect of ours must not leave the fleet without a mux
            log.exception("supervision of a mux failed", extra={"mux": self.name})
            return repr(error)

    async def _serve(self, process: MuxHandle) -> str:
        ended = asyncio.ensure_future(process.wait())
        feeding = asyncio.ensure_future(self._feed(process))
        try:
            await asyncio.wait({ended, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await feeding
            exit = ended.result()
            return f"it ended: {exit.report.message}" if exit.report else "it ended"
        finally:
            for task in (ended, feeding):
                task.cancel()
            await asyncio.gather(ended, feeding, return_exceptions=True)

    async def _feed(self, process: MuxHandle) -> None:
        """Keep a control link to the mux: where one that has worked breaks, the mux may live, and another is made.

        Raises:
            MuxLost: always, at the end.
        """
        link: MuxLink | None = None
        while True:
            late = asyncio.get_running_loop().call_later(self._timeouts.alarm_after_s, self._on_disconnected)
            if link is None:  # it is being started, which takes its time
                late.cancel()
            try:
                link = await process.connect(self._timeouts.connect_limit_s)
            finally:
                late.cancel()
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

        One line of JSON per message, as `mux/control.py` has them. The mux answers in order, so an answer also
        acknowledges the snapshot before it.

        Raises:
            MuxLost: always, at the end.
        """
        limits = self._timeouts
        changed = asyncio.Event()
        changes: list[tuple[str, RouteEntry | None]] = []

        def on_route(name: str, entry: RouteEntry | None) -> None:
            changes.append((name, entry))
            changed.set()

        certificates = _SentCertificates(self.launcher.tls)
        unsubscribe = (self._directory.subscribe(on_route), self._policy.subscribe(changed.set))
        link.send(
            **certificates.news(),
            policy=self._policy.now.to_json(),
            snapshot=self._directory.snapshot().to_json(),
        )
        version = self._directory.version
        if self._routes is None:
            self._set_routes(version)
        request, problem = "stats", None
        try:
            while True:
                late = asyncio.get_running_loop().call_later(limits.alarm_after_s, self._on_late)
                try:
                    async with WorkMeter(self._process) as meter:
                        answer = await link.ask(
                            request, limits.answer_limit_s, meter.has_worked, limits.working_limit_s
                        )
                finally:
                    late.cancel()
                self._set_routes(version)
                self._is_fed = True
                if request == "stats":
                    problem = answer.get("alarm") or certificates.alarm
                    self._metrics.mux_stats(self.name, answer)
                self.alarm = f"{self.name}: {problem}" if problem else None
                request = "ack" if await link.wait(changed, limits.interval_s) else "stats"
                if request == "ack":
                    changed.clear()
                    sent = ", ".join(
                        f"[{json.dumps(name)}, {entry.to_json() if entry else 'null'}]" for name, entry in changes
                    )
                    changes.clear()
                    link.send(policy=self._policy.now.to_json(), changes=f"[{sent}]")
                    version = self._directory.version
                elif news := certificates.news():
                    link.send(**news)
        finally:
            for leave in unsubscribe:
                leave()

    def _on_late(self) -> None:
        self.alarm = f"{self.name} has given no answer for {self._timeouts.alarm_after_s:g} s"
        log.warning("mux is late with an answer", extra={"mux": self.name})
        if self._process is not None:
            self._process.send_signal(STACKS_SIGNAL)

    def _on_disconnected(self) -> None:
        self.alarm = f"{self.name} has had no control connection for {self._timeouts.alarm_after_s:g} s"

    async def _end(self, grace_s: float = 0) -> Exit | None:
        """End the present process; the result is how it ended, where that is known."""
        exit = await self._end_process(self._process, grace_s) if self._process is not None else None
        self._process = None
        self._is_fed = False
        self._set_routes(None)
        return exit

    async def _end_process(self, process: MuxHandle, grace_s: float, *, sigterm: bool = True) -> Exit | None:
        try:
            return await process.stop(grace_s, sigterm=sigterm)
        except LaunchFailed as error:
            log.error("mux cannot be ended", extra={"mux": self.name, "reason": str(error)})
            return None


class _SentCertificates:
    """The content of TLS files for a mux that cannot read them: at first, and after a change.

    Files are replaced one after the other, so a change counts once it is the same at two looks.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self.alarm: str | None = None
        self._files = files
        self._sent: Stamp | None = None
        self._seen: Stamp | None = None

    def news(self) -> dict[str, str]:
        """`{"tls": JSON}` where there is something to send, else empty.

        Raises:
            MuxLost: they cannot be used, and none were before.
        """
        if self._files is None:
            return {}
        stamp, settled = self._files.stamp(), self._sent is None
        settled |= stamp == self._seen
        self._seen = stamp
        if stamp == self._sent and stamp is not None:
            self.alarm = None
        if not settled or (stamp == self._sent and stamp is not None):
            return {}
        try:
            pems = self._files.pems()
        except InvalidConfig as error:
            if self._sent is None:
                raise MuxLost(f"its TLS files cannot be used: {error.message}") from error
            self.alarm = f"the TLS files have changed and cannot be used, the former ones serve on: {error.message}"
            return {}
        self._sent, self.alarm = stamp, None
        texts = {"cert": pems.cert.decode(), "key": pems.key.decode(), "ca": pems.ca.decode() if pems.ca else None}
        return {"tls": json.dumps(texts)}


def mux_config(number: int, settings: Settings, identity: FleetIdentity | None = None) -> MuxConfig:
    """The configuration of a mux on this host; `identity` is that of this node in a fleet of several hosts."""
    files = settings.tls_files
    return MuxConfig(
        host=settings.grpc_host,
        port=settings.grpc_port,
        control_socket=str(settings.run_dir / f"mux-{number}.sock"),
        max_message_bytes=settings.grpc_max_message_size_mb * 2**20,
        max_parallel_streams=settings.grpc_max_parallel_streams,
        request_timeout_s=float(settings.grpc_request_timeout_secs),
        orphan_grace_s=float(settings.orphan_grace_secs),
        run_dir=str(settings.run_dir),
        tls=files,
        otel=exporting(settings, f"mux-{number}"),
        processes=settings.mux_processes,
        socket=str(settings.grpc_socket.absolute()) if settings.grpc_socket and number == 0 else "",
        socket_mode=settings.socket_permissions,
        log_level=settings.log_level,
        node=identity.node if identity else "",
        identity_dir=str(identity.folder) if identity else "",
    )


def mux_configs(settings: Settings) -> list[MuxConfig]:
    """Those of all muxes of one host."""
    return [mux_config(number, settings) for number in range(settings.mux_processes if settings.grpc_enabled else 0)]


def local_launcher(number: int, settings: Settings, identity: FleetIdentity | None = None) -> LocalMuxLauncher:
    """The launcher of a mux on this host; `identity` as `mux_config`."""
    config = mux_config(number, settings, identity)
    return LocalMuxLauncher(number, config, settings.log_dir, settings.log_max_bytes, settings.log_keep)


class MuxHosts(Protocol):
    """The muxes that there shall be on other hosts."""

    def wanted(self) -> Mapping[str, MuxLauncher]:
        """Their launchers by name; the same object for as long as it is the same mux."""

    async def changed(self) -> None:
        """Return when `wanted` may have changed."""

    async def end_surplus(self) -> None:
        """End those of an earlier daemon that are not wanted. Raises Unavailable: that cannot be done now."""


class Muxes:
    """The mux processes of the settings: supervised within `running`, ended by `stop`. `hosts` has those of others."""

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        metrics: DaemonMetrics,
        policy: PolicyInForce | None = None,
        identity: FleetIdentity | None = None,
        hosts: MuxHosts | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        count = settings.mux_processes if settings.grpc_enabled else 0
        crash_reports = CrashReports(settings.log_dir / "crashes")
        self._supervisor: Callable[[MuxLauncher], MuxSupervisor] = lambda launcher: MuxSupervisor(
            launcher, directory, metrics, crash_reports, policy
        )
        self._local: Callable[[int], MuxSupervisor] = lambda number: self._supervisor(
            local_launcher(number, settings, identity)
        )
        self._hosts = hosts
        self._remote: dict[MuxSupervisor, asyncio.Task[None]] = {}
        self._leaving: dict[MuxSupervisor, asyncio.Task[None]] = {}
        self._log_paths = [settings.log_dir / f"_mux-{number}.log" for number in range(count)]
        self._supervisors = [self._local(number) for number in range(count)]
        self._socket = settings.grpc_socket.absolute() if count and settings.grpc_socket else None
        directory.confirm_by(self.routes_confirmed)

    @property
    def _all(self) -> list[MuxSupervisor]:
        return [*self._supervisors, *self._remote, *self._leaving]

    def alarms(self) -> list[str]:
        return [each.alarm for each in self._all if each.alarm]

    def states(self) -> dict[str, str]:
        """What the muxes of each host do, by its name, which is "" for this one: `serving`, `starting` or an alarm."""
        found: dict[str, str] = {}
        for each in self._all:
            state = each.state if each not in self._leaving else "leaving"
            before = found.setdefault(each.launcher.host, state)
            found[each.launcher.host] = state if before == "serving" else before
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Adopt or launch them, and supervise them while the body runs; the processes go on after it.

        Raises:
            PortConflict: another program listens on the gRPC port or on `grpc_socket`.
            InvalidConfig: nothing can listen on them.
        """
        await self._end_surplus()
        adopted = [await each.adopt() for each in self._supervisors]
        if self._supervisors and not any(adopted):  # beside an adopted mux the others can bind the same port
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
        """Supervise the muxes of hosts as they join, and end those of hosts that leave."""
        has_ended_surplus = False
        while True:
            if not has_ended_surplus:
                try:
                    await hosts.end_surplus()
                    has_ended_surplus = True
                except TeimgrError as error:
                    log.warning("surplus muxes of other hosts are not ended yet", extra={"reason": error.message})
            wanted = hosts.wanted()
            for each in [each for each in self._remote if wanted.get(each.name) is not each.launcher]:
                self._leaving[each] = asyncio.create_task(self._end(each, self._remote.pop(each)))
            present = {each.name for each in (*self._remote, *self._leaving)}
            for name in wanted.keys() - present:
                supervisor = self._supervisor(wanted[name])
                self._remote[supervisor] = asyncio.create_task(self._adopt_and_run(supervisor), name=name)
            await hosts.changed()

    async def _adopt_and_run(self, supervisor: MuxSupervisor) -> None:
        while True:
            try:
                await supervisor.adopt()
                break
            except TeimgrError as error:
                log.warning("no mux adopted", extra={"mux": supervisor.name, "reason": error.message})
                await asyncio.sleep(_ADOPTION_PAUSE_S)
        await supervisor.run()

    async def _end(self, supervisor: MuxSupervisor, task: asyncio.Task[None]) -> None:
        """End the mux of a host that leaves or is lost; its calls have the grace of all."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await supervisor.stop(self._settings.graceful_shutdown_timeout_secs)
        except Exception:
            log.exception("mux of another host could not be stopped", extra={"mux": supervisor.name})
        self._metrics.mux_gone(supervisor.name)
        del self._leaving[supervisor]

    async def routes_confirmed(self) -> None:
        """Return when all route by the directory as it is now."""
        await asyncio.gather(*(each.routes_confirmed() for each in self._all))

    async def stop(self, grace_s: float) -> None:
        """Let each finish its calls, at most `grace_s`, then end it. Call after `running`."""
        ending = [*self._supervisors, *self._remote]
        results = await asyncio.gather(*(each.stop(grace_s) for each in ending), return_exceptions=True)
        for each, result in zip(ending, results, strict=True):
            if isinstance(result, Exception):
                log.error("mux could not be stopped", extra={"mux": each.name}, exc_info=result)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        if self._socket is not None:
            remove_stale(self._socket)  # of a mux that was killed

    def force_stop(self) -> None:
        for each in self._all:
            each.force_stop()

    async def _end_surplus(self) -> None:
        """End muxes of an earlier daemon with more of them: without updates they would send calls to dead workers."""
        found = [_RUN_FILE.fullmatch(path.name) for path in self._settings.run_dir.glob("mux-*.run")]
        for number in sorted({int(match[1]) for match in found if match}):
            if number >= len(self._supervisors):
                surplus = self._local(number)
                await surplus.adopt()
                await surplus.stop(grace_s=1)
