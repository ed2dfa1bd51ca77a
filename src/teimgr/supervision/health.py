"""Health probes: a worker runs a known text through its device. At intervals, or on demand for a whole instance."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from teimgr.directory import Directory, WorkerEndpoint
from teimgr.errors import TeimgrError, Unavailable
from teimgr.launch.control_link import ControlLink
from teimgr.wire.frames import Method


class Prober:
    """Probes one worker repeatedly; a worker that has run batches since the last probe is healthy without one."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._batches: int | None = None

    async def probe(self, link: ControlLink | None) -> None:
        """Return when the worker is known to be healthy.

        Raises:
            TeimgrError: it is not; the message is the reason.
        """
        if link is None:
            raise Unavailable("the worker's control link is down")
        before, self._batches = self._batches, await self._count(link)
        if before is not None and self._batches > before:
            return
        await link.call(Method.PROBE, timeout_s=self._timeout_s)
        # The probe itself may have been a batch: count again, or the next round would take it for work.
        self._batches = await self._count(link)

    async def _count(self, link: ControlLink) -> int:
        reply = await link.call(Method.STATS, timeout_s=self._timeout_s)
        try:
            return int(json.loads(reply)["batches"])
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"the worker's counters cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one worker's probe; `problem` is None for a healthy worker."""

    incarnation: str
    seconds: float
    problem: str | None


class FleetProber:
    """Probes the workers that the directory lists, each over a control link of its own."""

    def __init__(self, directory: Directory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    async def probe(self, name: str) -> list[ProbeResult]:
        """A result for each worker of the instance that serves; none where the instance does not run."""
        entries = [entry for entry in self._directory.snapshot().entries if entry.name == name]
        return list(await asyncio.gather(*(self._probe(each) for entry in entries for each in entry.endpoints)))

    async def _probe(self, endpoint: WorkerEndpoint) -> ProbeResult:
        begun, problem = time.monotonic(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                link = await ControlLink.open(Path(endpoint.socket), lambda status: None, lambda: None)
                try:
                    await Prober(self._timeout_s).probe(link)
                finally:
                    link.close()
        except TeimgrError as error:
            problem = error.message
        except TimeoutError:
            problem = f"no proof within {self._timeout_s:g} s"
        return ProbeResult(endpoint.incarnation, time.monotonic() - begun, problem)
