"""The memory ledger: reservations on each host and card, and whether one more load fits.

It has no clock, I/O or lock; the event loop owns it. A worker holds a `Reservation` from before its load until its
process has exited:

    reserve(instance, replica, footprint, place)  before the load: a Reservation, or a Shortage with the reason
    settle(reservation, measured)                 after the first batch: the measured figure replaces the predicted one
    release(reservation)                          after the process has exited

    judge(footprint, place)                       the result of `reserve`, without a reservation
    free(device)                                  bytes available to one more load
    excess(device)                                bytes that workers hold beyond the budget
    report(device, total, free)                   the system's figures, which include other programs
    copy()                                        a copy in which a plan tries decisions

A device is a host by its name ("" in a fleet of one host) or a card by its UUID. A load fits if its footprint is at
most the smaller of two figures: the budget minus all reservations, and the free memory reported by the system minus
the part of the reservations that the report does not show yet. So no byte is promised twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

HEADROOM_BYTES = 128 << 20
"""Part of the reported free memory of a host that stays unused. A budget has no headroom."""
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a worker: `host_bytes` private to its process, `device_bytes` on its card.

    `loading_bytes` is the peak on the host during the load, or 0 if it is not higher. `source`: measured on an earlier
    worker of the model, predicted from the headers of its weights, or assumed because its files are not here yet.
    """

    host_bytes: int
    device_bytes: int = 0
    loading_bytes: int = 0
    source: Literal["measured", "predicted", "assumed"] = "predicted"

    @property
    def peak_bytes(self) -> int:
        """On the host, until it is loaded."""
        return max(self.host_bytes, self.loading_bytes)


class Place(NamedTuple):
    """Where a worker runs: its host ("" in a fleet of one host) and the UUID of its card, None for the CPU."""

    host: str = ""
    gpu: str | None = None

    @property
    def device(self) -> str:
        """The card, or the host for a worker on the CPU."""
        return self.host if self.gpu is None else self.gpu


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a load does not fit: the device, the bytes needed and the bytes free there.

    `may_pass`: it will fit once other loads have ended; the free bytes are then those after these loads.
    """

    device: str
    label: str
    needed_bytes: int
    free_bytes: int
    detail: str
    may_pass: bool = False

    @property
    def reason(self) -> str:
        """A sentence, the same in log, event, API and page."""
        return (
            f"needs {_mib(self.needed_bytes)} MiB of {self.label}, {self.free_bytes // _MIB} MiB are free"
            f" ({self.detail})"
        )


@dataclass(frozen=True, slots=True)
class Overrun:
    """A worker that uses more than its reservation, which was raised."""

    device: str
    reserved_bytes: int
    measured_bytes: int


@dataclass(slots=True, eq=False)
class Reservation:
    """The memory held by one worker. Only the ledger changes it."""

    instance: str
    replica: int
    place: Place
    footprint: Footprint
    is_settled: bool = False
    reading: Footprint | None = None  # last measured use
    shown: dict[str, int] = field(default_factory=dict)  # part of it in each device's last report

    def bytes_on(self, device: str) -> int:
        """Return the bytes that it holds of a device."""
        return needed_on(self.footprint, self.place, device, is_loaded=self.is_settled)

    def show(self, device: str) -> None:
        """The system has reported what is free of a device, after its last reading."""
        if self.reading is not None:
            self.shown[device] = needed_on(self.reading, self.place, device, is_loaded=True)


@dataclass(slots=True)
class Account:
    """One device: its budget and the system's figures; None if unknown."""

    device: str
    label: str
    budget_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    headroom_bytes: int = 0
    held: list[Reservation] = field(default_factory=list)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that workers hold of it."""
        return sum(each.bytes_on(self.device) for each in self.held)

    @property
    def is_limited(self) -> bool:
        """True if a budget or the system bounds it."""
        return self.budget_bytes is not None or self.free_bytes is not None

    def spare_bytes(self, *, as_if_loaded: bool = False) -> int:
        """Bytes still free: the smaller of budget minus reservations and of what the system reports.

        Of a limited device; may be negative.

        `as_if_loaded`: once the workers that load there have loaded.
        """
        limits = []
        if self.budget_bytes is not None:
            limits.append(self.budget_bytes - sum(self._taken(each, as_if_loaded) for each in self.held))
        if self.free_bytes is not None:
            hidden = (self._taken(each, as_if_loaded) - each.shown.get(self.device, 0) for each in self.held)
            limits.append(self.free_bytes - self.headroom_bytes - sum(max(0, size) for size in hidden))
        return min(limits)

    def _taken(self, held: Reservation, as_if_loaded: bool) -> int:
        return needed_on(held.footprint, held.place, self.device, is_loaded=as_if_loaded or held.is_settled)

    def detail(self, as_if_loaded: bool = False) -> str:
        """Its figures, as in a reason; `as_if_loaded` as of `spare_bytes`."""
        parts = [] if self.budget_bytes is None else [f"budget {self.budget_bytes // _MIB}"]
        parts.append(f"{_mib(sum(self._taken(each, as_if_loaded) for each in self.held))} reserved")
        if self.free_bytes is not None:
            kept = f", {self.headroom_bytes // _MIB} of them kept free" if self.headroom_bytes else ""
            parts.append(f"{self.free_bytes // _MIB} free by the system{kept}")
        return ", ".join(parts)


class Ledger:
    """The accounts of all devices. `host_budget` and `card_budget` apply to each host and card; None is unlimited.

    Without `refuses`, every load fits.
    """

    def __init__(self, host_budget: int | None = None, card_budget: int | None = None, *, refuses: bool = True) -> None:
        self._budgets = host_budget, card_budget
        self._refuses = refuses
        self._accounts: dict[str, Account] = {}

    @property
    def accounts(self) -> dict[str, Account]:
        """By device, for display."""
        return self._accounts

    def report(self, device: str, label: str, total: int | None, free: int | None, *, is_card: bool = False) -> None:
        """Take what the system says about a device now. The same figure again is the same reading, from a cache."""
        account = self._account(device, is_card=is_card)
        if free != account.free_bytes:
            for each in account.held:
                each.show(device)
        account.label, account.total_bytes, account.free_bytes = label, total, free

    def judge(self, footprint: Footprint, place: Place) -> Shortage | None:
        """Why one more worker does not fit there; None if it does."""
        for device in dict.fromkeys((place.device, place.host)) if self._refuses else ():
            account, needed = self._account(device, is_card=device == place.gpu), needed_on(footprint, place, device)
            if account.is_limited and needed > (free := account.spare_bytes()):
                later = account.spare_bytes(as_if_loaded=True)
                may_pass = needed <= later
                free = free if may_pass else later
                return Shortage(device, account.label, needed, max(0, free), account.detail(not may_pass), may_pass)
        return None

    def reserve(self, instance: str, replica: int, footprint: Footprint, place: Place) -> Reservation | Shortage:
        """Reserve what a worker is to take, before it is launched."""
        return self.judge(footprint, place) or self.hold(instance, replica, footprint, place)

    def hold(
        self, instance: str, replica: int, footprint: Footprint, place: Place, *, is_settled: bool = False
    ) -> Reservation:
        """Book a worker without judging it: one that is there already, as after an adoption."""
        reservation = Reservation(instance, replica, place, footprint, is_settled)
        for device in dict.fromkeys((place.device, place.host)):
            self._account(device, is_card=device == place.gpu).held.append(reservation)
        return reservation

    def settle(self, reservation: Reservation, measured: Footprint, now: Footprint | None = None) -> Overrun | None:
        """Replace what a worker has reserved by what it takes. Later measurements only raise it.

        `now` is what it takes at present, if that is less. The result has both figures where it takes more than it had
        reserved.
        """
        before, was_settled, now = reservation.footprint, reservation.is_settled, now or measured
        is_adopted = was_settled and reservation.reading is None
        overrun = self._overrun(reservation, measured)
        if was_settled:
            measured = replace(
                measured,
                host_bytes=max(before.host_bytes, measured.host_bytes),
                device_bytes=max(before.device_bytes, measured.device_bytes),
            )
        reservation.footprint, reservation.is_settled, reservation.reading = measured, True, now
        if is_adopted:  # each report is newer and includes it
            for device in (reservation.place.device, reservation.place.host):
                reservation.show(device)
        return overrun

    def release(self, reservation: Reservation) -> None:
        """Give back what a worker held, as its process is gone; a second time is nothing."""
        for device in dict.fromkeys((reservation.place.device, reservation.place.host)):
            held = self._accounts[device].held
            if reservation in held:
                held.remove(reservation)

    def release_unreported(self, reservation: Reservation) -> None:
        """Like `release`, in a copy: the system's figure rises by what it has seen, as no report will follow."""
        for device in dict.fromkeys((reservation.place.device, reservation.place.host)):
            account = self._accounts[device]
            if reservation in account.held and account.free_bytes is not None:
                account.free_bytes += reservation.shown.get(device, 0)
        self.release(reservation)

    def held_on(self, device: str) -> dict[str, int]:
        """The bytes of a device that each instance holds."""
        found: dict[str, int] = {}
        account = self._accounts.get(device)
        for each in account.held if account is not None else ():
            found[each.instance] = found.get(each.instance, 0) + each.bytes_on(device)
        return found

    def free(self, device: str) -> int | None:
        """Bytes that one more load may take of a device; None if neither a budget nor the system limits it."""
        account = self._accounts.get(device)
        return account.spare_bytes() if account is not None and account.is_limited else None

    def excess(self, device: str) -> int:
        """Bytes that workers hold of a device beyond its budget, as they have grown; 0 where that is not judged."""
        account = self._accounts.get(device)
        if account is None or account.budget_bytes is None or not self._refuses:
            return 0
        return max(0, account.reserved_bytes - account.budget_bytes)

    def reserved(self, device: str) -> int:
        """Bytes that workers hold of a device."""
        account = self._accounts.get(device)
        return account.reserved_bytes if account else 0

    def copy(self) -> Ledger:
        """The same accounts, in which reservations change nothing here."""
        made = Ledger(*self._budgets, refuses=self._refuses)
        twins: dict[int, Reservation] = {}
        for device, account in self._accounts.items():
            held = [twins.setdefault(id(each), replace(each, shown={**each.shown})) for each in account.held]
            made._accounts[device] = replace(account, held=held)
        return made

    def settle_all(self) -> None:
        """Have every worker that loads have loaded, as in a plan."""
        for account in self._accounts.values():
            for each in account.held:
                each.is_settled = True

    def is_loading(self, device: str) -> bool:
        """True if a worker there is not settled yet."""
        account = self._accounts.get(device)
        return account is not None and any(not each.is_settled for each in account.held)

    def held_by(self, instance: str) -> list[Reservation]:
        """The reservations of an instance's workers."""
        found = {id(each): each for account in self._accounts.values() for each in account.held}
        return [each for each in found.values() if each.instance == instance]

    def _account(self, device: str, *, is_card: bool = False) -> Account:
        if device not in self._accounts:
            label = f"GPU {device}" if is_card else f"host {device}" if device else "host memory"
            budget = self._budgets[is_card]
            headroom = 0 if is_card else HEADROOM_BYTES
            self._accounts[device] = Account(device, label, budget, headroom_bytes=headroom)
        return self._accounts[device]

    def _overrun(self, reservation: Reservation, measured: Footprint) -> Overrun | None:
        place = reservation.place
        for device in dict.fromkeys((place.device, place.host)):
            had, takes = reservation.bytes_on(device), needed_on(measured, place, device, is_loaded=True)
            if takes > had:
                return Overrun(device, had, takes)
        return None


def needed_on(footprint: Footprint, place: Place, device: str, *, is_loaded: bool = False) -> int:
    """Return a worker's bytes of a device at `place`: the most until it is loaded, then what it keeps."""
    if device == place.gpu:
        return footprint.device_bytes
    return footprint.host_bytes if is_loaded else footprint.peak_bytes


def _mib(size: int) -> int:
    """In whole MiB, rounded up: what is needed, where what is free is rounded down."""
    return -(-size // _MIB)
