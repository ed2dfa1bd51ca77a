"""Admission of loads to the memory of hosts and cards: no worker is launched before the ledger has granted its memory.

One load is judged at a time, by the ledger and by a fresh report of the system. One that will fit once others have
loaded waits for them; one that does not fit fails with the reason, and its supervisor tries again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from teimgr.control.ledger.footprints import Footprints
from teimgr.control.ledger.ledger import Footprint, Ledger, Overrun, Place, Refusal, Reservation
from teimgr.errors import OutOfDeviceMemory
from teimgr.spec import WorkerSpec

log = logging.getLogger(__name__)

_ADOPTED_READ_S = 2.0  # how long a load waits for the first readings of workers of an earlier daemon
_UNREAD = Footprint(host_bytes=0, source="assumed")

Relief = Callable[[WorkerSpec, Refusal], Awaitable[bool]]
"""Makes room for a refused load, as by an eviction; True where it is to be judged again."""


class Admission:
    """The ledger of the fleet in use. `refresh` has the system's figures reported."""

    def __init__(self, ledger: Ledger, footprints: Footprints, refresh: Callable[[], Awaitable[object]]) -> None:
        self.ledger = ledger
        self.footprints = footprints
        self._refresh = refresh
        self._waiting: set[asyncio.Future[None]] = set()
        self._unread: set[Reservation] = set()  # adopted workers that have not said yet what they take
        self._relief: Relief | None = None

    def relieve_by(self, relief: Relief) -> None:
        """Ask `relief` to make room before a load is refused."""
        self._relief = relief

    def report(self, device: str, label: str, total: int | None, free: int | None, *, is_card: bool = False) -> None:
        """As `Ledger.report`."""
        self.ledger.report(device, label, total, free, is_card=is_card)

    async def take(self, spec: WorkerSpec, device_kind: str) -> Reservation:
        """Reserve what a worker will take; `release` must follow.

        Raises:
            OutOfDeviceMemory: it does not fit, and no load that is under way changes that.
        """
        place = Place(spec.host, spec.gpu)
        footprint = await self.footprints.of(spec, device_kind, spec.model_roots)
        await self._adopted_are_read()
        while True:
            await self._refresh()
            found = self.ledger.reserve(spec.name, spec.replica, footprint, place)
            if isinstance(found, Reservation):
                return found
            if footprint.source == "assumed" and not self.ledger.is_loading(found.device):
                return self.ledger.hold(spec.name, spec.replica, footprint, place)  # it may be small: alone it may try
            if found.may_pass or footprint.source == "assumed":
                await self._change()
            elif self._relief is None or not await self._relief(spec, found):
                raise OutOfDeviceMemory(found.reason)

    def adopt(self, spec: WorkerSpec) -> Reservation:
        """Book a worker of an earlier daemon; loads wait a moment for its first reading."""
        place = Place(spec.host, spec.gpu)
        reservation = self.ledger.hold(spec.name, spec.replica, _UNREAD, place, is_settled=True)
        self._unread.add(reservation)
        return reservation

    def settle(
        self, reservation: Reservation, spec: WorkerSpec, device_kind: str, private: int, on_card: int
    ) -> Overrun | None:
        """Take a reading of a worker's private and device memory. The result is as that of `Ledger.settle`.

        The first one is that of an idle worker, so room for its largest batch is added.
        """
        before = reservation.footprint
        is_first = not reservation.is_settled or reservation in self._unread
        host = private + self.footprints.room_for_a_batch(spec, device_kind) if is_first else private
        surplus = max(0, before.loading_bytes - before.host_bytes)
        measured = Footprint(
            host_bytes=host, device_bytes=on_card, loading_bytes=host + surplus if surplus else 0, source="measured"
        )
        was_known = before is not _UNREAD and before.source != "assumed"
        overrun = self.ledger.settle(reservation, measured)
        self._unread.discard(reservation)
        if is_first or overrun:
            self.footprints.learn(spec, device_kind, reservation.footprint)
        self._wake()
        return overrun if was_known else None

    def settle_as_reserved(self, reservation: Reservation) -> None:
        """A worker that does not say what it takes, and is loaded: what it has reserved stays."""
        if not reservation.is_settled or reservation in self._unread:
            self._unread.discard(reservation)
            self.ledger.settle(reservation, reservation.footprint)
            self._wake()

    def release(self, reservation: Reservation) -> None:
        """Give back what a worker held, as its process is gone."""
        self._unread.discard(reservation)
        self.ledger.release(reservation)
        self._wake()

    async def _adopted_are_read(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ADOPTED_READ_S):
                while self._unread:
                    await self._change()

    async def _change(self) -> None:
        """Return after the next settlement or release."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await changed
        finally:
            self._waiting.discard(changed)

    def _wake(self) -> None:
        for changed in tuple(self._waiting):
            if not changed.done():
                changed.set_result(None)
