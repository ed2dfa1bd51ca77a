"""A proof on demand: the workers of an instance each run a known text through their device, now."""

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
    """Asks one worker for proof, again and again; remembers how many batches it had done."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._batches: int | None = None

    async def prove(self, link: ControlLink | None) -> None:
        """Return when the worker has proved that its device works.

        Raises:
            TeimgrError: it has not; the message says what was wrong.
        """
        if link is None:
            raise Unavailable("the worker's control link is down")
        before, self._batches = self._batches, await self._count(link)
        if before is not None and self._batches > before:
            return
        await link.call(Method.PROBE, timeout_s=self._timeout_s)
        # The probe itself may have been a batch; the next round must not take it for work.
        self._batches = await self._count(link)

    async def _count(self, link: ControlLink) -> int:
        reply = await link.call(Method.STATS, timeout_s=self._timeout_s)
        try:
            return int(json.loads(reply)["batches"])
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"the worker's counters cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one worker's probe; `problem` is None where it proved itself."""

    incarnation: str
    seconds: float
    problem: str | None


class LiveProbe:
    """Asks the workers that the directory names, over a link of its own that is closed again."""

    def __init__(self, directory: Directory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    async def prove(self, name: str) -> list[Proof]:
        """One proof for each worker that serves; none where the instance does not run."""
        entries = [entry for entry in self._directory.snapshot().entries if entry.name == name]
        return list(await asyncio.gather(*(self._one(each) for entry in entries for each in entry.endpoints)))

    async def _one(self, endpoint: WorkerEndpoint) -> Proof:
        begun, problem = time.monotonic(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                link = await ControlLink.open(Path(endpoint.socket), lambda status: None, lambda: None)
                try:
                    await Prober(self._timeout_s).prove(link)
                finally:
                    link.close()
        except TeimgrError as error:
            problem = error.message
        except TimeoutError:
            problem = f"no proof within {self._timeout_s:g} s"
        return Proof(endpoint.incarnation, time.monotonic() - begun, problem)
