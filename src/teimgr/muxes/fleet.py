"""All muxes of one daemon, and those an earlier daemon left that are not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator

from teimgr.access import PolicyInForce
from teimgr.directory import Directory
from teimgr.listening import bind
from teimgr.metrics import Metrics
from teimgr.muxes.keeper import MuxKeeper
from teimgr.settings import Settings

log = logging.getLogger(__name__)

_RUN_FILE = re.compile(r"mux-(\d+)\.run")


class Muxes:
    """As many mux processes as the settings want. `running` keeps them, `stop` ends them."""

    def __init__(
        self, settings: Settings, directory: Directory, metrics: Metrics, policy: PolicyInForce | None = None
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._metrics = metrics
        self._policy = policy
        wanted = settings.mux_processes if settings.grpc_enabled else 0
        self._keepers = [self._keeper(number) for number in range(wanted)]

    def alarms(self) -> list[str]:
        """What is wrong with them now."""
        return [keeper.alarm for keeper in self._keepers if keeper.alarm]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """They are kept while the body runs, and go on by themselves after it.

        Raises:
            PortConflict: a stranger listens on the gRPC port.
        """
        await self._end_leftovers()
        await self._adopt()
        tasks = [asyncio.create_task(keeper.run(), name=keeper.name) for keeper in self._keepers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, grace_s: float) -> None:
        """Let each finish its calls, at most `grace_s`, then end it. Call after `running`."""
        results = await asyncio.gather(*(keeper.stop(grace_s) for keeper in self._keepers), return_exceptions=True)
        for keeper, result in zip(self._keepers, results, strict=True):
            if isinstance(result, Exception):
                log.error("mux could not be stopped", extra={"mux": keeper.name}, exc_info=result)

    def hurry(self) -> None:
        """End a stop under way without waiting for calls."""
        for keeper in self._keepers:
            keeper.hurry()

    async def _adopt(self) -> None:
        adopted = [await keeper.adopt() for keeper in self._keepers]
        if self._keepers and not any(adopted):  # where one of ours listens, the others may join it
            bind(self._settings.grpc_host, self._settings.grpc_port).close()

    async def _end_leftovers(self) -> None:
        """A mux that nobody feeds would go on sending calls to instances that have long been elsewhere."""
        found = [_RUN_FILE.fullmatch(path.name) for path in self._settings.run_dir.glob("mux-*.run")]
        numbers = {int(match[1]) for match in found if match}
        leftovers = [self._keeper(number) for number in sorted(numbers) if number >= len(self._keepers)]
        for keeper in leftovers:
            await keeper.adopt()
            await keeper.stop(grace_s=1)

    def _keeper(self, number: int) -> MuxKeeper:
        return MuxKeeper(number, self._settings, self._directory, self._metrics, self._policy)
