"""The figures of every worker, asked for over links of their own when somebody reads the page of metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from teimgr import catalogue
from teimgr.directory import Directory, Endpoint
from teimgr.errors import TeimgrError
from teimgr.exposition import Page, Sample, added, unpack
from teimgr.route.links import LinkLimits
from teimgr.route.replica import Replica
from teimgr.wire.frames import Flag, Method

log = logging.getLogger(__name__)

LIMIT_S = 1.0
MAX_AGE_S = 1.0


class Scraper:
    """Asks all workers of the directory at once, each for at most `limit_s`, and remembers for `max_age_s`.

    A worker that is gone is in no directory, so nobody waits for it; one that does not answer is left out of the page.
    Workers of one instance are added up.
    """

    def __init__(self, directory: Directory, limit_s: float = LIMIT_S, max_age_s: float = MAX_AGE_S) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._max_age_s = max_age_s
        self._workers: dict[Endpoint, Replica] = {}
        self._reading = asyncio.Lock()
        self._page: Page = {}
        self._read_at = float("-inf")

    async def page(self) -> Page:
        """The figures, at most `max_age_s` old; callers at the same time share one round."""
        async with self._reading:
            if time.monotonic() - self._read_at >= self._max_age_s:
                self._page = await self._read()
                self._read_at = time.monotonic()
        return self._page

    async def close(self) -> None:
        """Close the links."""
        workers, self._workers = tuple(self._workers.values()), {}
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _read(self) -> Page:
        asked = self._known()
        pages = await asyncio.gather(*(self._ask(name, worker) for name, worker in asked))
        told = [page for page in pages if page is not None]
        counts = {"given": len(told), "missing": len(pages) - len(told)}
        answers = [Sample("", {"answer": answer}, count) for answer, count in counts.items()]
        return {catalogue.WORKER_ANSWERS: answers, **added(told)}

    def _known(self) -> list[tuple[str, Replica]]:
        """The workers of the directory, by the name of their instance; those that left it lose their links."""
        entries = self._directory.snapshot().entries
        before, self._workers = self._workers, {}
        found = []
        for entry in entries:
            for endpoint in entry.endpoints:
                worker = before.pop(endpoint, None) or Replica(entry.name, endpoint, LinkLimits())
                self._workers[endpoint] = worker
                found.append((entry.name, worker))
        for worker in before.values():
            worker.retire()
        return found

    async def _ask(self, instance: str, worker: Replica) -> Page | None:
        if not worker.usable:
            return None
        try:
            call = await worker.start(Method.METRICS, b"", Flag.NONE, self._limit_s)
            reply = await call.answer
            return unpack(json.loads(reply.payload), instance=instance)
        except (TeimgrError, ValueError) as error:
            log.debug("no figures of a worker", extra={"instance": instance, "reason": str(error)})
            return None
