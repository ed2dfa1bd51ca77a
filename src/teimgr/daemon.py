"""The daemon: builds every part once, starts them in order, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence

import uvloop

from teimgr import __version__, logs
from teimgr.access import PolicyInForce
from teimgr.auth import policy_of
from teimgr.configuration import Source
from teimgr.control.gpus import GpuInventory
from teimgr.control.manager import Manager
from teimgr.control.registry.registry import Registry
from teimgr.control.store import Store
from teimgr.directory import Directory
from teimgr.errors import TeimgrError
from teimgr.front.app import create_app
from teimgr.front.gpus import GpuBoard
from teimgr.front.inference import InferenceDoor
from teimgr.front.scrape import Scraper
from teimgr.front.tls import RestTls
from teimgr.launch.local import LocalLauncher, LocalOptions
from teimgr.listening import bind
from teimgr.metrics import Metrics
from teimgr.muxes import Muxes
from teimgr.settings import Settings

log = logging.getLogger(__name__)

EXIT_REFUSED = 1


def main(settings: Settings, source: Source) -> int:
    """Run the daemon until a signal ends it; the result is the exit status."""
    logs.setup(settings.log_level, settings.log_format)
    try:
        return uvloop.run(Daemon(settings, source).run())
    except TeimgrError as error:
        log.critical("cannot start: %s", error.message, extra={"code": error.code.name})
        return EXIT_REFUSED


class Daemon:
    """All parts of one daemon, told by `settings`; a reload reads `source` again. Setting `stopping` ends it."""

    def __init__(self, settings: Settings, source: Source) -> None:
        self.settings = settings
        self.source = source
        self.metrics = Metrics()
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
        self.inference = InferenceDoor(settings, self.directory, self.metrics)
        self.board = GpuBoard(gpus, self.manager.list)
        self.scraper = Scraper(self.directory)
        self.metrics.sources += (self.scraper.page, self.board.page)

    async def run(self) -> int:
        """Start, serve, stop."""
        for warning in self.settings.warnings():
            log.warning(warning)
        self.settings.prepare_folders()
        listener = bind(self.settings.api_host, self.settings.api_port)
        app = create_app(
            self.manager,
            self.settings,
            self.metrics,
            self.alarms,
            self.manager.booted.is_set,
            self.models,
            self.inference,
            self.board,
            self.policy,
        )
        with self._signals():
            try:
                await self.manager.restore()
                await self.models.start()
                async with self.tls.serving(app, listener):
                    await self.manager.boot()
                    # They are fed only now: a mux of an earlier daemon serves what it knows until adoption is over.
                    async with self.muxes.running():
                        log.info("daemon ready", extra={"version": __version__, **self.addresses()})
                        await self.stopping.wait()
                        await self.models.close()  # first of all: callers that wait for a download need not
            finally:
                await self._stop()
        return 0

    def alarms(self) -> Sequence[str]:
        """What needs a person, but for what the manager says itself."""
        return (*self.tls.alarms(), *self.muxes.alarms(), *self.models.alarms())

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
        log.info("stopped")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks for an orderly end, a second one ends the waiting."""
        loop = asyncio.get_running_loop()
        hurrying: set[asyncio.Task[None]] = set()

        def on_signal() -> None:
            if self.stopping.is_set() and not hurrying:
                hurrying.add(loop.create_task(self._hurry()))
            self.stopping.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _hurry(self) -> None:
        log.warning("asked again: stopping without grace")
        self.muxes.hurry()
        await self.manager.shutdown(at_once=True)
