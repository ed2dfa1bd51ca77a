"""Health as proof: a quiet worker runs a known text through its device, a busy one shows that batches get done."""

from __future__ import annotations

import json

from teimgr.errors import Unavailable
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
