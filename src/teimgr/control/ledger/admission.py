"""Admission of loads: no worker is launched before the ledger has granted its memory.

Loads are judged one at a time, by the ledger and a new report of the system. A load that will fit once others have
loaded waits for them. A load that does not fit fails with the reason, and its supervisor tries again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from teimgr.control.ledger.footprints import Footprints, ModelOptions
from teimgr.control.ledger.ledger import Footprint, Ledger, Overrun, Place, Reservation, Shortage, needed_on
from teimgr.errors import OutOfDeviceMemory
from teimgr.spec import WorkerSpec

log = logging.getLogger(__name__)

_ADOPTED_READ_S = 2.0  # a load's wait for the first readings of adopted workers
_UNREAD = Footprint(host_bytes=0, source="assumed")

Relief = Callable[[str, int, int, Mapping[str, int], str], Awaitable[bool]]
"""Makes room for a refused load, such as by an eviction; True if the load should be judged again.

Arguments: the instance, the bytes it needs, the bytes free, the bytes each instance holds on the device, the device.
"""
Outgrown = Callable[[str, int, Mapping[str, int], str], None]
"""Called if the budget of a device is exceeded: the instance that grew, the excess bytes, the bytes each instance holds
on the device, the device."""


class Admission:
    """The ledger of the running fleet. `refresh` reports the system's figures to it."""

    def __init__(self, ledger: Ledger, footprints: Footprints, refresh: Callable[[], Awaitable[object]]) -> None:
        self.ledger = ledger
        self.footprints = footprints
        self._refresh = refresh
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)  # by host
        self._unread: set[Reservation] = set()  # adopted workers that have not reported their memory yet
        self._claims: list[tuple[Place, Footprint]] = []  # of waiting loads
        self._promised: dict[tuple[str, int], Reservation] = {}
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._relief: Relief | None = None
        self._outgrown: Outgrown = lambda instance, excess_bytes, held, device: None

    def relieve_by(self, relief: Relief) -> None:
        """Ask `relief` to make room before a load is refused."""
        self._relief = relief

    def tell_outgrown(self, hearer: Outgrown) -> None:
        """Tell `hearer` at each reading that finds a budget passed."""
        self._outgrown = hearer

    async def look(self, spec: ModelOptions, roots: Sequence[str] | None) -> None:
        """Look at the heads of a model's files, and hear what adopted workers take; then `take` need not wait."""
        await self.footprints.look(spec, roots)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ADOPTED_READ_S):
                await self._all_read.wait()

    async def promise(self, spec: WorkerSpec, device_kind: str) -> Shortage | None:
        """Reserve for a worker before its supervisor does, whose `take` then gets it; else why it does not fit."""
        await self.look(spec, spec.model_roots)
        await self._refresh()
        self.break_promise(spec.name, spec.replica)
        footprint, place = self.footprints.known(spec, device_kind), Place(spec.host, spec.gpu)
        found = reserve(self.ledger, spec.name, spec.replica, footprint, place)
        if isinstance(found, Shortage):
            return found
        self._promised[spec.name, spec.replica] = found
        return None

    def break_promise(self, instance: str, replica: int) -> None:
        """Give back what was promised to a worker, if it has not taken it."""
        if (promised := self._promised.pop((instance, replica), None)) is not None:
            self.release(promised)

    @asynccontextmanager
    async def held_for(self, spec: WorkerSpec, device_kind: str) -> AsyncIterator[None]:
        """Reserve for a worker without a supervisor while the block runs; nothing is evicted for it, nor waited for.

        Raises:
            OutOfDeviceMemory: it does not fit now.
        """
        if shortage := await self.promise(spec, device_kind):
            raise OutOfDeviceMemory(shortage.reason)
        try:
            yield
        finally:
            self.break_promise(spec.name, spec.replica)

    async def take(self, spec: WorkerSpec, device_kind: str) -> Reservation:
        """Reserve what a worker will take, at once where it fits and no other load waits; `release` must follow.

        Raises:
            OutOfDeviceMemory: it does not fit, and no load that is under way changes that.
        """
        place = Place(spec.host, spec.gpu)
        footprint = self.footprints.known(spec, device_kind)
        promised = self._promised.pop((spec.name, spec.replica), None)
        if promised is not None and promised.place == place:
            return promised
        if promised is not None:
            self.release(promised)
        claim = place, footprint
        self._claims.append(claim)
        try:
            return await self._granted(spec, footprint, place)
        except BaseException:
            self._wake_next(place.host)  # it may have been woken in place of the next one
            raise
        finally:
            self._claims.remove(claim)

    def claimed(self, device: str) -> int:
        """Bytes that loads wait for on a device: placed there, and not reserved yet."""
        return sum(needed_on(footprint, place, device) for place, footprint in self._claims if device in place)

    async def _granted(self, spec: WorkerSpec, footprint: Footprint, place: Place) -> Reservation:
        if self._waiting[place.host]:
            await self._change(place.host, is_first=False)
        while True:
            found = reserve(self.ledger, spec.name, spec.replica, footprint, place)
            if isinstance(found, Reservation):
                self._wake_next(place.host)
                return found
            if found.may_pass:
                await self._change(place.host, is_first=True)
            else:
                self._wake_next(place.host)  # relief may take long; the next load may fit now
                held = self.ledger.held_on(found.device)
                if self._relief is None or not await self._relief(
                    spec.name, found.needed_bytes, found.free_bytes, held, found.device
                ):
                    raise OutOfDeviceMemory(found.reason)
            await self._refresh()

    def adopt(self, spec: WorkerSpec) -> Reservation:
        """Book a worker of an earlier daemon; loads wait a moment for its first reading."""
        place = Place(spec.host, spec.gpu)
        reservation = self.ledger.hold(spec.name, spec.replica, _UNREAD, place, is_settled=True)
        self._unread.add(reservation)
        self._all_read.clear()
        return reservation

    def settle(
        self, reservation: Reservation, spec: WorkerSpec, device_kind: str, private: int, on_card: int
    ) -> Overrun | None:
        """Take a reading of a worker's private and device memory. The result is as that of `Ledger.settle`.

        The first one is that of an idle worker, so room for its largest batch is added, and it counts no less than what
        earlier workers of the model grew to.
        """
        before = reservation.footprint
        is_first = not reservation.is_settled or reservation in self._unread
        host = private + self.footprints.room_for_a_batch(spec, device_kind) if is_first else private
        surplus = max(0, before.loading_bytes - before.host_bytes)
        measured = Footprint(
            host_bytes=host, device_bytes=on_card, loading_bytes=host + surplus if surplus else 0, source="measured"
        )
        was_known = before is not _UNREAD and before.source != "assumed"
        most = self.footprints.learn(spec, device_kind, measured, is_first=is_first)
        now = Footprint(host_bytes=private, device_bytes=on_card)
        overrun = self.ledger.settle(reservation, most if is_first else measured, now)
        self._has_read(reservation)
        for device in dict.fromkeys((reservation.place.device, reservation.place.host)):
            if excess_bytes := self.ledger.excess(device):
                self._outgrown(spec.name, excess_bytes, self.ledger.held_on(device), device)
        self._wake()
        return overrun if was_known else None

    def settle_as_reserved(self, reservation: Reservation) -> None:
        """Keep the reservation of a loaded worker that does not report its memory."""
        if not reservation.is_settled or reservation in self._unread:
            self._has_read(reservation)
            self.ledger.settle(reservation, reservation.footprint)
            self._wake()

    def release(self, reservation: Reservation) -> None:
        """Give back what a worker held, as its process is gone."""
        self._has_read(reservation)
        self.ledger.release(reservation)
        self._wake()

    def _has_read(self, reservation: Reservation) -> None:
        self._unread.discard(reservation)
        if not self._unread:
            self._all_read.set()

    async def _change(self, host: str, *, is_first: bool) -> None:
        """Return after a settlement or release; of several that wait at a host, the first one does."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting[host]
        if is_first:
            queue.appendleft(changed)
        else:
            queue.append(changed)
        try:
            await changed
        except asyncio.CancelledError:
            if changed.done() and not changed.cancelled():
                self._wake_next(host)
            raise
        finally:
            if changed in queue:
                queue.remove(changed)

    def _wake(self) -> None:
        for host in tuple(self._waiting):
            self._wake_next(host)

    def _wake_next(self, host: str) -> None:
        changed = next((each for each in self._waiting[host] if not each.done()), None)
        if changed is not None:
            changed.set_result(None)


def reserve(ledger: Ledger, instance: str, replica: int, footprint: Footprint, place: Place) -> Reservation | Shortage:
    """Like `Ledger.reserve`, but a load of unknown size, which may be small, may try if no other load is under way."""
    found = ledger.reserve(instance, replica, footprint, place)
    if isinstance(found, Reservation) or footprint.source != "assumed":
        return found
    if ledger.is_loading(found.device):
        return replace(found, may_pass=True)
    return ledger.hold(instance, replica, footprint, place)
