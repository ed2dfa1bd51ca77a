"""The daemon: builds every part once, starts them in order, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence

import uvloop
from fastapi import FastAPI

from teimgr import __version__
from teimgr.auth.policy import PolicyInForce
from teimgr.config.auth import policy_of
from teimgr.config.settings import Settings
from teimgr.config.sources import Configuration, Source
from teimgr.directory import Directory
from teimgr.errors import InvalidConfig, TeimgrError
from teimgr.events.fleet_events import EventLog
from teimgr.events.webhooks import Webhooks
from teimgr.gateway import Gateway
from teimgr.http_server import bind
from teimgr.launch.local import LocalLauncher, LocalOptions
from teimgr.observability import logs
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.telemetry import Telemetry, exporting
from teimgr.placement.gpus import GpuInventory
from teimgr.placement.preflight import Preflight
from teimgr.registry.registry import Registry
from teimgr.rest.app import create_app
from teimgr.rest.gpus import GpuBoard
from teimgr.rest.probes import Scraper
from teimgr.rest.tls import RestTls
from teimgr.supervision.health import LiveProbe
from teimgr.supervision.manager import Manager
from teimgr.supervision.muxes import Muxes
from teimgr.supervision.reload import Reloader
from teimgr.supervision.store import Store

log = logging.getLogger(__name__)

EXIT_REFUSED = 1


def main(configuration: Configuration, source: Source) -> int:
    """Run the daemon until a signal ends it; the result is the exit status."""
    settings = configuration.settings
    logs.setup(settings.log_level, settings.log_format)
    try:
        return uvloop.run(Daemon(configuration, source).run())
    except TeimgrError as error:
        log.critical("cannot start: %s", error.message, extra={"code": error.code.name})
        return EXIT_REFUSED


class Daemon:
    """All parts of one daemon, told by `configuration`; a reload reads `source` again. Setting `stopping` ends it."""

    def __init__(self, configuration: Configuration, source: Source) -> None:
        self.settings = settings = configuration.settings
        self.metrics = DaemonMetrics()
        self.directory = Directory()
        self.launcher = LocalLauncher(
            LocalOptions(
                run_dir=settings.run_dir,
                log_dir=settings.log_dir,
                log_max_bytes=settings.log_max_bytes,
                log_keep=settings.log_keep,
            )
        )
        self.stopping = asyncio.Event()
        self.policy = PolicyInForce(policy_of(settings.auth))
        self.tls = RestTls(settings.tls_files)
        self.muxes = Muxes(settings, self.directory, self.metrics, self.policy)
        gpus = GpuInventory()
        self.manager = Manager(settings, self.launcher, self.directory, Store(settings.state_file), gpus, self.metrics)
        self.models = Registry(
            settings, self.launcher, gpus, self.metrics, self.manager.list, booted=self.manager.booted
        )
        self.inference = Gateway(settings, self.directory, self.metrics)
        self.board = GpuBoard(gpus, self.manager.list)
        self.scraper = Scraper(self.directory)
        self.telemetry = Telemetry.open(exporting(settings, "daemon"))
        self.metrics.sources += (self.scraper.page, self.board.page)
        self.preflight = Preflight(settings.gpu_preflight, gpus, self.launcher.nursery.build)
        self.events = EventLog()
        self.webhooks = Webhooks(self.events)
        self.reloader = Reloader(source, configuration, self.manager, self._apply)
        self.app: FastAPI | None = None

    async def run(self) -> int:
        """Start, serve, stop."""
        for warning in self.settings.warnings():
            log.warning(warning)
        self.settings.prepare_folders()
        listener = bind(self.settings.api_host, self.settings.api_port)
        app = self.app = create_app(
            self.manager,
            self.settings,
            self.metrics,
            self.alarms,
            self.manager.booted.is_set,
            registry=self.models,
            gateway=self.inference,
            board=self.board,
            policy=self.policy,
            event_log=self.events,
            live_probe=LiveProbe(self.directory, float(self.settings.health_probe_timeout_secs)),
            reloader=self.reloader,
            telemetry=self.telemetry,
        )
        with self._signals():
            try:
                await self.manager.restore()
                self._watch()
                looking = asyncio.create_task(self.preflight.run(), name="preflight of the GPUs")
                if self.preflight.must_pass:
                    await looking
                await self.models.start()
                async with self.tls.serving(app, listener), self.webhooks.running(self.settings.webhooks):
                    await self.manager.boot()
                    # They are fed only now: a mux of an earlier daemon serves what it knows until adoption is over.
                    async with self.muxes.running():
                        log.info("daemon ready", extra={"version": __version__, **self.addresses()})
                        await self.stopping.wait()
                        self.events.close()  # who follows events or waits for a download need not any more
                        await self.models.close()
            finally:
                await self._stop()
        return 0

    def alarms(self) -> Sequence[str]:
        """What needs a person, but for what the manager says itself."""
        parts = (self.tls, self.muxes, self.models, self.preflight, self.webhooks, self.reloader)
        return [alarm for part in parts for alarm in part.alarms()]

    def addresses(self) -> dict[str, str]:
        """Where it listens."""
        found = {"rest": f"{self.settings.api_host}:{self.settings.api_port}"}
        if self.settings.grpc_enabled:
            found["grpc"] = f"{self.settings.grpc_host}:{self.settings.grpc_port}"
        return found

    async def _stop(self) -> None:
        """Both fronts are closed; let the workers finish, then everything else goes."""
        grace_s = self.settings.graceful_shutdown_timeout_secs
        log.info("stopping", extra={"grace_s": grace_s})
        await self.models.close()
        await self.inference.close()
        await self.scraper.close()
        await self.muxes.stop(grace_s)
        await self.manager.shutdown()
        await self.launcher.close()
        await asyncio.to_thread(self.telemetry.close)
        log.info("stopped")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks for an orderly end, a second one ends the waiting; SIGHUP is a reload."""
        loop = asyncio.get_running_loop()
        hurrying: set[asyncio.Task[None]] = set()
        reloads: set[asyncio.Task[None]] = set()

        def on_signal() -> None:
            if self.stopping.is_set() and not hurrying:
                hurrying.add(loop.create_task(self._hurry()))
            self.stopping.set()

        def on_hangup() -> None:
            reload = loop.create_task(self._reload())
            reloads.add(reload)
            reload.add_done_callback(reloads.discard)

        handlers = {signal.SIGINT: on_signal, signal.SIGTERM: on_signal, signal.SIGHUP: on_hangup}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    async def _reload(self) -> None:
        with contextlib.suppress(InvalidConfig):  # which the log and an alarm have said
            await self.reloader.reload()

    def _apply(self, settings: Settings) -> None:
        """Have what changes without a start be as a reload says.

        Raises:
            InvalidConfig: a key cannot be had any more; nothing has changed.
        """
        policy = policy_of(settings.auth)
        logs.setup(settings.log_level, settings.log_format)
        self.policy.swap(policy)
        self.inference.aliases = settings.aliases
        self.manager.tokens_per_gib = settings.auto_max_batch_tokens_per_gib
        self.webhooks.configure(settings.webhooks)
        if self.app is not None:
            self.app.state.settings = settings

    def _watch(self) -> None:
        """From here on changes of the fleet are events; how it is now is where they begin."""
        self.events.note(self.manager.list())
        self.manager.on_views_changed = self.events.note
        for notice in self.reloader.notices():
            log.warning(notice)

    async def _hurry(self) -> None:
        log.warning("asked again: stopping without grace")
        self.muxes.force_stop()
        await self.manager.shutdown(at_once=True)
