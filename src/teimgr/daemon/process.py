"""The daemon process: construction, start and stop of its parts, signals, reload."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from teimgr import __version__
from teimgr.api.batches import Batches
from teimgr.api.gateway.gateway import Gateway
from teimgr.api.page.page import Page
from teimgr.api.rest.app import RestTls, create_app, reconfigure
from teimgr.api.rest.hosts import GpuReport
from teimgr.api.rest.probes import Scraper, routes_calls
from teimgr.cluster.opening import open_cluster
from teimgr.config.auth import policy_of
from teimgr.config.settings import Settings
from teimgr.config.sources import Configuration, Source
from teimgr.control.background import KeptFile, in_background, kept_path
from teimgr.control.capacity.advisor import Advisor
from teimgr.control.capacity.autoscaler import Autoscaler
from teimgr.control.events.fleet_events import EventFile, EventLog, events_path
from teimgr.control.events.webhooks import Webhooks
from teimgr.control.launch.launcher import Launcher, LocalLauncher, LocalOptions
from teimgr.control.launch.mux_launcher import mux_configs
from teimgr.control.placement.hosts import GpuInventory, InventorySource, LeavingHosts, Preflight
from teimgr.control.registry.registry import Registry
from teimgr.control.residence.residence import Residence
from teimgr.control.sharing.tenants import TenantRegistry
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.muxes import Muxes
from teimgr.control.supervision.reload import Reloader
from teimgr.control.supervision.store import Store
from teimgr.control.supervision.worker_run import FleetProber
from teimgr.daemon.listeners import Listeners, Word, open_listeners, other_ports, serving_health, try_other_ports
from teimgr.daemon.parent import block_signals
from teimgr.daemon.succession import Follower, Predecessor, Succession
from teimgr.daemon.watches import ConfigWatch, DiskWatch, Notifier
from teimgr.errors import InvalidConfig, TeimgrError
from teimgr.files import ensure_home
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.http.server import Listener
from teimgr.models.hub import default_cache_folder
from teimgr.observability import catalogue, logs
from teimgr.observability.exposition import Page as MetricsPage
from teimgr.observability.exposition import Sample
from teimgr.observability.log_source import FleetLogs, LocalLogs
from teimgr.observability.loop_watchdog import LoopWatchdog
from teimgr.observability.memory import MemoryReturn, collect_garbage_rarely, map_large_buffers, raise_file_limit
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import ordered_by
from teimgr.observability.telemetry import exporting, open_telemetry
from teimgr.wire.gil import use_short_turns
from teimgr.wire.routing.directory import Directory

log = logging.getLogger(__name__)

EXIT_REFUSED = 1
QUIET_S = 1.0
"""Time limit for requests on connections that a successor cannot take over."""
LAST_GRACE_S = 1.0
"""Minimum time for workers to finish a batch and release their device and ports during a stop."""
# The process is killed this long after the grace; all phases of a shutdown together take less.
_END_LIMIT_S = 40.0
# Time limit for threads that still run after all phases.
_THREADS_LIMIT_S = 5.0


def main(configuration: Configuration, source: Source, predecessor: Predecessor | None = None) -> int:
    """Run the daemon until a signal ends it, and return the exit status. It takes over from `predecessor`, if given."""
    settings = configuration.settings
    logs.setup(settings.log_level, settings.log_format)
    if ensure_home(settings.state_file.parent):
        log.warning("this user has no home directory: HOME is set to %s, for model caches", os.environ["HOME"])
    raise_file_limit()
    try:
        daemon = Daemon(configuration, source, predecessor)
        status = uvloop.run(daemon.run())
        daemon.ended()
        return daemon.succession.leave(status)
    except TeimgrError as error:
        log.critical("cannot start: %s", error.message, extra={"code": error.code.name})
        if predecessor is not None:
            predecessor.refuse(error.message)
        return EXIT_REFUSED


class Daemon:
    """Composition root: constructs the parts, starts and stops them in order, applies a reload.

    `stopping` ends `run`. A reload reads `source` again. `predecessor` is the daemon that this one takes over from.
    """

    def __init__(self, configuration: Configuration, source: Source, predecessor: Predecessor | None = None) -> None:
        self.settings = settings = configuration.settings
        self.stopping = asyncio.Event()
        self._is_forced = self._reload_waits = False
        self._preflight: asyncio.Task[None] | None = None
        self._stop_began: float | None = None
        self._last_resort = threading.Timer(0, self._give_up)  # replaced and started by a stop
        self.notifier = Notifier()
        self.predecessor = predecessor
        self.facts = {name: str(getattr(settings, name).absolute()) for name in ("state_file", "run_dir")}
        self.facts["cluster.address"] = settings.cluster.address or ""
        self.succession = Succession(self.facts, self._take_over, self.notifier.environ)
        self.metrics = DaemonMetrics()
        self.watchdog: LoopWatchdog | None = None
        self.telemetry = open_telemetry(exporting(settings, "daemon"))
        self.directory = Directory()
        self.directory.set_defaults(settings.default_instances)
        self.tenants = TenantRegistry(settings.run_dir, settings.state_file)
        self.policy = PolicyInForce(policy_of(settings.auth))
        self.events = EventLog()
        self.event_file = EventFile(events_path(settings.state_file))
        self._build_processes(configuration, source)
        self._build_http()

    def _build_processes(self, configuration: Configuration, source: Source) -> None:
        """Build the parts that start and watch workers and muxes."""
        settings, gpus, leaving = self.settings, GpuInventory(), LeavingHosts()
        options = LocalOptions(
            run_dir=settings.run_dir,
            log_dir=settings.log_dir,
            log_max_bytes=settings.log_max_bytes,
            log_keep=settings.log_keep,
        )
        local = LocalLauncher(options)
        self.launcher: Launcher = local
        self.inventory: InventorySource = gpus
        self.cluster = open_cluster(settings, local, gpus, self.directory, leaving)
        if self.cluster is not None:
            self.launcher, self.inventory = self.cluster.launcher, self.cluster.inventory
        # A successor must not fail for one unusable GPU, since the workers on the other GPUs serve: it raises an alarm.
        self.preflight = Preflight("warn" if self.predecessor else settings.gpu_preflight, gpus, local.nursery.build)
        self.manager = Manager(
            settings,
            self.launcher,
            self.directory,
            Store(settings.state_file),
            self.inventory,
            self.metrics,
            events=self.events,
            leaving=leaving,
        )
        node_identity = self.cluster.node_identity if self.cluster else None
        hosts = self.cluster.mux_hosts(mux_configs(settings)) if self.cluster else None
        self.residence = Residence(self.manager, self.directory, self.tenants)
        self.manager.follow(self.residence.on_change)
        self.manager.memory.relieve_by(self.residence.relieve)
        self.manager.memory.tell_outgrown(self.residence.outgrown)
        self.manager.plan_evictions_by(self.residence.rehearsal)
        self.muxes = Muxes(
            settings,
            self.directory,
            self.metrics,
            self.policy,
            node_identity,
            hosts,
            loads=self.residence,
            tenants=self.tenants,
        )
        self.registry = Registry(
            settings,
            local,
            gpus,
            self.metrics,
            self.manager.list,
            booted=self.manager.booted,
            memory=self.manager.memory,
            host=self.cluster.head.host.name if self.cluster else "",
        )
        self.reloader = Reloader(source, configuration, self.manager, self._apply, self.events)
        self.config_watch = ConfigWatch(source.file, settings.config_watch_secs, self.reloader)

    def _build_http(self) -> None:
        """Build the parts behind REST, gateway and page, and their application."""
        settings = self.settings
        identity = self.cluster.identity if self.cluster else None
        self.tls = RestTls(settings.tls_files)
        self.gateway = Gateway(
            settings,
            self.directory,
            self.metrics,
            identity,
            self.manager.list,
            self.tenants.rate_state,
            self.residence,
        )
        self.manager.follow(self.gateway.on_change)
        self.batches = Batches(settings, self.gateway, self.policy, self.metrics) if settings.batches.enabled else None
        self.webhooks = Webhooks(self.events)
        self.gpu_report = GpuReport(self.inventory, self.manager.list, self._mux_states)
        self.scraper = Scraper(self.directory, identity=identity)
        self.scaling_figures = KeptFile(kept_path(settings.state_file))
        self.autoscaler = Autoscaler(self.manager, self.scraper.stats, self.scaling_figures)
        self.advisor = Advisor(
            self.manager,
            self.scraper.stats,
            self.manager.memory,
            self.inventory,
            self.scaling_figures,
            self.autoscaler.pays,
        )
        folders = {"state_file": settings.state_file.parent, "log_dir": settings.log_dir, "run_dir": settings.run_dir}
        folders["models"] = default_cache_folder()
        self.disks = DiskWatch({name: path.absolute() for name, path in folders.items()})
        parts = (self.scraper, self.gpu_report, self.tenants, self.autoscaler, self.disks, self.tls)
        others = (self.cluster.forwarding if self.cluster else None, self.batches)
        self.metrics.sources.extend(part.page for part in (*parts, *others) if part is not None)
        self.page = Page(settings, self.manager, self.scraper, self.inventory) if settings.page else None
        self._build_app()

    def _build_app(self) -> None:
        settings = self.settings
        self.app = create_app(
            self.manager,
            settings,
            self.metrics,
            self.alarms,
            self.manager.booted.is_set,
            registry=self.registry,
            gateway=self.gateway,
            gpu_report=self.gpu_report,
            tenants=self.tenants,
            autoscaler=self.autoscaler,
            advisor=self.advisor,
            policy=self.policy,
            event_log=self.events,
            live_probe=FleetProber(
                self.directory,
                float(settings.health_probe_timeout_secs),
                self.cluster.identity if self.cluster else None,
            ),
            reloader=self.reloader,
            telemetry=self.telemetry,
            batches=self.batches,
            page=self.page.routes() if self.page else None,
            enrolment=self.cluster.head.enrolment if self.cluster else None,
            restarter=self.succession,
            log_sources=FleetLogs(
                LocalLogs(settings.log_dir, self.cluster.head.host.name if self.cluster else ""),
                self.cluster.logs if self.cluster else tuple,
            ),
        )

    async def run(self) -> int:
        """Start all parts, serve until `stopping`, stop all parts.

        Start: REST port, instances of the state file, GPU preflight, registry, REST and webhooks, adoption and start of
        workers, muxes. Stop: downloads and trials, REST, muxes, workers. Workers end after all
        processes that call them.
        """
        with self._signals():  # the default action of SIGHUP would end the process
            return await self._run()

    async def _run(self) -> int:
        log.info("daemon starts", extra=self._places())
        use_short_turns()
        self.watchdog = LoopWatchdog("the daemon")
        self.metrics.sources.append(self._loop_page)
        for warning in (*self.settings.warnings(), *map(str, self.settings.missing_models())):
            log.warning(warning)
        self.settings.prepare_folders()
        self._keep_log()
        take = self.predecessor.take if self.predecessor else lambda name: None
        with open_listeners(self.settings, take) as listeners:
            try_other_ports(self.settings, self.predecessor.ports if self.predecessor else None)
            self.succession.offer(lambda: {**listeners.by_name, **self._forwarded_ports()}, other_ports(self.settings))
            await self._await_turn(listeners)
            self.succession.watch_parent()
            async with self._health_port(listeners.health) as health:
                return await self._serve(listeners, health)

    async def _serve(self, listeners: Listeners, health: Listener | None) -> int:
        try:
            await self._restore()
            serving = self.tls.serving(self.app, listeners.rest, self.app.state.direct, listeners.unix, listeners.more)
            async with (
                serving as server,
                self._giving_way(),
                self.webhooks.running(self.settings.webhooks),
                self.event_file.following(self.events),
                self._rotating_log(),
            ):
                if self.predecessor is not None:
                    self.predecessor.serve(server.take)
                if self.cluster is not None:
                    self.cluster.forwarding.start()
                residence = asyncio.create_task(self.residence.run(), name="residence of models")
                await self.manager.boot()
                await asyncio.to_thread(self.scaling_figures.load)
                self.autoscaler.restore()
                self.advisor.restore()
                scaling = asyncio.create_task(self.autoscaler.run(), name="autoscaling")
                advising = asyncio.create_task(self.advisor.run(), name="recommendations")
                disks = asyncio.create_task(self.disks.run(), name="watch of the disks")
                # Muxes of an earlier daemon use their last snapshot until then; a new one would lack these workers.
                await self.manager.adoption_over()
                async with (
                    self.muxes.running(),
                    self.page.running() if self.page else contextlib.nullcontext(),
                    self.batches.running() if self.batches else contextlib.nullcontext(),
                    self.tenants.running(),
                    self.config_watch.running(),
                ):
                    collect_garbage_rarely()
                    map_large_buffers()
                    MemoryReturn()
                    renewing = asyncio.create_task(self._renew(), name="processes of another version")
                    log.info("daemon ready", extra={"version": __version__, **self._addresses()})
                    async with self.notifier.serving(f"{len(self.manager.list())} instances"):
                        self.succession.serving.set()
                        await self.stopping.wait()
                    self._end_within(self.settings.graceful_shutdown_timeout_secs + _END_LIMIT_S)
                    if self.succession.is_taking_over:
                        self._leave_listeners(listeners, server, health)
                    self._stop_began = asyncio.get_running_loop().time()
                    self.events.close()  # ends requests that follow events or wait for a download
                    await self.registry.close()
                    for task in (scaling, advising, disks, renewing):
                        task.cancel()
                    if self.succession.is_taking_over:
                        self.residence.leave_to_next()
                    else:
                        residence.cancel()
                # Now that the control links have closed, waiting calls of muxes get no refusal and ask the successor.
                residence.cancel()
        finally:
            await self._stop()
        return 0

    async def _restore(self) -> None:
        """Read the state that an earlier daemon left, and start the preflight."""
        await self.manager.restore()
        self.events.restore(await asyncio.to_thread(self.event_file.read))
        self.policy.swap(self._policy_of(self.settings))  # after this process owns the state file
        self.events.note(self.manager.list())  # only later changes are events
        for notice in self.reloader.notices():
            log.warning(notice)
        self._preflight = asyncio.create_task(self.preflight.run(), name="preflight of the GPUs")
        if self.preflight.must_pass:
            await self._preflight
        await self.registry.start()
        if self.batches is not None:
            await self.batches.load()

    def _addresses(self) -> dict[str, str]:
        """Return the addresses of the ports, for the log."""
        settings = self.settings
        found = {"rest": f"{settings.api_host}:{settings.api_port}"}
        if settings.grpc_enabled:
            found["grpc"] = f"{settings.grpc_host}:{settings.grpc_port}"
        sockets = {name: getattr(settings, name) for name in ("api_socket", "grpc_socket")}
        return found | {name: str(path) for name, path in sockets.items() if path is not None}

    @contextlib.asynccontextmanager
    async def _health_port(self, sock: socket.socket | None) -> AsyncIterator[Listener | None]:
        """Answer probes on `health_port`, if it is set, from before the start until the workers have ended."""
        if sock is None:
            yield None
            return
        async with serving_health(sock, self._routing) as listener:
            yield listener

    def _routing(self) -> Word:
        if self.stopping.is_set():
            return "stopping"
        return "ready" if routes_calls(self.app, self.manager) else "starting"

    @property
    def _own_log(self) -> Path:
        return self.settings.log_dir / f"{logs.DAEMON}.log"

    def _keep_log(self) -> None:
        try:
            logs.keep_in_file(self._own_log, self.settings.log_max_bytes, self.settings.log_keep)
        except OSError as error:
            log.warning("the daemon's log is not written to a file: %s: %s", self._own_log, error.strerror)

    def _rotating_log(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep the log file of the daemon within its limit while the block runs."""
        limits = self.settings.log_max_bytes, self.settings.log_keep
        work = partial(logs.rotate_regularly, lambda: (self._own_log,), *limits)
        return in_background(work, "rotation of the daemon's log")

    async def _renew(self) -> None:
        """Replace adopted processes of another version after an upgrade; muxes first, since they route to workers."""
        await self.muxes.replaced()
        await self.manager.renew_workers()

    async def _await_turn(self, listeners: Listeners) -> None:
        """Wait until the predecessor hands over; until then it owns state file, run directory and Unix socket.

        Raises:
            Unavailable: the predecessor does not hand over.
        """
        if self.predecessor is None:
            return
        try:
            if self.cluster is not None:
                self.cluster.forwarding.inherit(self.predecessor.take_all)
                await self.cluster.head.prepare()
            await self.predecessor.word(self.facts)
        except BaseException:
            listeners.keep_files()
            raise
        log.info("taking over from the previous daemon")

    def _take_over(self, follower: Follower) -> None:
        """Hand over to a successor that is ready."""
        if self.succession.tells_supervisor:
            self.notifier.leave_to(follower.pid)
        self.stopping.set()

    def _leave_listeners(self, listeners: Listeners, server: Listener, health: Listener | None) -> None:
        """Leave new connections to the successor, and open ones that it can continue."""
        if health is not None:
            health.leave()
        listeners.keep_files()
        pass_on = None if self.settings.tls_files else self.succession.pass_on
        server.leave(pass_on, self.settings.graceful_shutdown_timeout_secs, 0 if pass_on else QUIET_S)
        if self.cluster is not None:
            self.cluster.forwarding.hand_over()

    def _forwarded_ports(self) -> Mapping[str, socket.socket]:
        return self.cluster.forwarding.listeners() if self.cluster is not None else {}

    @contextlib.asynccontextmanager
    async def _giving_way(self) -> AsyncIterator[None]:
        """Release what a successor needs after the block, before open requests end, and let the successor begin."""
        yield
        if not self.succession.is_taking_over:
            return
        await self._release()
        if (pid := self.succession.give_word()) is not None:
            log.info("the next daemon has taken over", extra={"successor": pid})

    async def _release(self) -> None:
        """Release the state file and the run directory. Workers and muxes keep serving, for the next daemon."""
        await self.registry.close()
        if self.batches is not None:
            await asyncio.to_thread(self.batches.close)
        await self.manager.release()
        await (self.launcher.close() if self.cluster is None else self.cluster.launcher.release())
        self.tenants.close()
        await self.scaling_figures.close()

    def _places(self) -> dict[str, object]:
        """Return the absolute paths of the daemon's files and folders, for the first line of the log."""
        file = self.reloader.source.file
        folders = {name: str(getattr(self.settings, name).absolute()) for name in ("state_file", "log_dir", "run_dir")}
        return {"version": __version__, "pid": os.getpid(), "config": file and str(file.absolute()), **folders}

    async def _stop(self) -> None:
        """End the muxes, then the workers, then the rest, after REST is closed. All phases share one grace.

        If a successor has taken over, it owns muxes and workers. If this daemon is a successor whose start failed,
        they keep serving too, and the next daemon adopts them.
        """
        await self.succession.cancel()
        grace_s, clock = self.settings.graceful_shutdown_timeout_secs, asyncio.get_running_loop().time
        ends = (self._stop_began or clock()) + grace_s
        is_left = self.succession.has_given_word
        has_failed = self.predecessor and not self.succession.serving.is_set() and not self.stopping.is_set()
        if is_left:
            await self.succession.all_passed_on(ends - clock())
            if self.cluster is not None:
                await self.cluster.forwarding.finished(ends - clock())
        if is_left or has_failed:
            await self.gateway.close()
            await self.scraper.close()
            if not is_left:
                await self._release()
            await asyncio.to_thread(self.telemetry.close)
            return
        log.info("stopping", extra={"grace_s": grace_s})
        await self.registry.close()
        if self.batches is not None:
            await asyncio.to_thread(self.batches.close)
        await self.gateway.close()
        await self.scraper.close()
        if self.manager.is_restored:  # otherwise the run directory may belong to another daemon
            await self.muxes.stop(max(0.0, ends - clock()))
        if self.cluster is not None:
            self.cluster.forwarding.leave()
        await self.manager.shutdown(within_s=max(LAST_GRACE_S, ends - clock()))
        if self.cluster is not None:
            await self.cluster.forwarding.close()
        await self.launcher.close()
        self.tenants.close()
        await self.scaling_figures.close()
        await asyncio.to_thread(self.telemetry.close)
        log.info("stopped")
        self._end_within(_THREADS_LIMIT_S)

    def _end_within(self, limit_s: float) -> None:
        """Kill the process after `limit_s`: a thread waiting for a disk cannot be cancelled, and Python awaits it."""
        self._last_resort.cancel()
        self._last_resort = threading.Timer(limit_s, self._give_up)
        self._last_resort.daemon = True
        self._last_resort.start()

    def _give_up(self) -> None:
        if select.select((), (2,), (), 0)[1]:  # not logged: the disk of the log may not respond
            os.write(2, b"the daemon did not end in time: a disk or a thread does not respond\n")
        os._exit(self.succession.leave(EXIT_REFUSED))

    def ended(self) -> None:
        """Cancel the forced exit, after the loop and its threads have ended."""
        self._last_resort.cancel()

    async def _force_stop(self) -> None:
        log.warning("second signal: stopping without grace")
        self._end_within(_END_LIMIT_S)
        self.muxes.force_stop()
        await self.manager.shutdown(at_once=True)

    def _mux_states(self) -> Mapping[str, str]:
        """Return the state of the muxes of each host, by the host's name in the fleet."""
        own = self.cluster.head.host.name if self.cluster else ""
        return {host or own: state for host, state in self.muxes.states().items()}

    async def _loop_page(self) -> MetricsPage:
        return {catalogue.LOOP_HELD: [Sample("", {}, self.watchdog.held if self.watchdog else 0)]}

    def alarms(self) -> Sequence[str]:
        """Return the alarms of all parts, without that of the state file."""
        parts = (
            self.watchdog,
            self.manager,
            self.tls,
            self.muxes,
            self.registry,
            self.preflight,
            self.webhooks,
            self.reloader,
            self.config_watch,
            self.tenants,
            self.disks,
            self.event_file,
            self.succession,
        )
        return [alarm for part in (*parts, self.batches, self.cluster, self.page) if part for alarm in part.alarms()]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals. SIGINT or SIGTERM: stop in order; a second one: stop without grace. SIGHUP: reload, or stop
        if the terminal is gone. SIGUSR2: restart.

        A reload waits until the daemon serves. Earlier it would change a fleet that is not restored yet, and its
        `READY=1` would tell systemd that the start is over. Once a successor is ready, signals are passed on to it. A
        SIGHUP during the successor's start is passed on too, since it may have read the configuration already.
        """
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def run(work: Coroutine[Any, Any, None]) -> None:
            task = loop.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        has_terminal = os.isatty(0)
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGINT: lambda: self._stop_by_signal(run),
            signal.SIGTERM: lambda: self._stop_by_signal(run),
            signal.SIGHUP: lambda: run(self._reload_by_signal(has_terminal)),
            signal.SIGUSR2: lambda: run(self._restart_by_signal()),
        }

        def on_signal(number: signal.Signals) -> None:
            if not self.succession.is_taking_over:
                handlers[number]()
                if number == signal.SIGHUP:
                    self.succession.send_signal(number)
            elif number != signal.SIGUSR2:  # a restart is already running
                self.succession.send_signal(number)

        for number in handlers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            if self.succession.has_given_word:
                block_signals()  # the parent that this process becomes unblocks them
            for number in handlers:
                loop.remove_signal_handler(number)

    def _stop_by_signal(self, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        if self.stopping.is_set() and not self._is_forced:
            self._is_forced = True
            run(self._force_stop())
        self.succession.refuse()  # a successor that becomes ready now would outlive the stop
        self.stopping.set()

    async def _reload_by_signal(self, has_terminal: bool) -> None:
        if has_terminal and not os.isatty(0):
            self.succession.refuse()
            self.stopping.set()
            return
        if self._reload_waits:
            return
        self._reload_waits = True
        await self.succession.serving.wait()
        self._reload_waits = False
        if self.stopping.is_set():
            return
        self.notifier.reloading()
        with ordered_by("SIGHUP"), contextlib.suppress(InvalidConfig):  # already logged, and an alarm
            await self.reloader.reload()
        self.notifier.send("READY=1")

    async def _restart_by_signal(self) -> None:
        with ordered_by("SIGUSR2"), contextlib.suppress(TeimgrError):  # already logged
            await self.succession.begin()

    def _policy_of(self, settings: Settings) -> Policy:
        keys = settings.auth.api_keys if settings.auth else ()
        return self.tenants.configure(policy_of(settings.auth), [key.tenant for key in keys])

    def _apply(self, settings: Settings) -> None:
        """Apply the keys of a reload that need no restart.

        Raises:
            InvalidConfig: an authentication file cannot be read; nothing was changed.
        """
        policy = self._policy_of(settings)
        logs.setup(settings.log_level, settings.log_format)
        self.policy.swap(policy)
        self.gateway.reconfigure(settings)
        self.directory.set_defaults(settings.default_instances)
        self.manager.reconfigure(settings)
        self.webhooks.configure(settings.webhooks)
        reconfigure(self.app, settings)
