"""State of models on demand: phase, waiting calls and value of each `Model`; `Fleet` has all of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from teimgr.control.residence.events import Decision, Refusal, Refuse, Serve, Terms
from teimgr.errors import Code
from teimgr.wire.tenants.table import leaves_room

RATE_MEMORY_S = 300.0
"""Time constant of a model's call rate: the weight of a call falls to 1/e in this time."""
UNMEASURED_LOAD_S = 1.0
"""Assumed load time of a model that was never loaded."""
_GIB = 2**30


class Phase(Enum):
    """Phase of a model's residence in memory."""

    UNLOADED = auto()
    ROOM = auto()  # waits for memory
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Wish:
    """The stay in seconds requested by a tenant's calls, None for the declared one; `at` is the last call's time."""

    seconds: float | None
    at: float


class WaitingCall(NamedTuple):
    """A waiting call: its deadline on the policy's clock, None without one, and its tenant."""

    deadline: float | None
    key: int


@dataclass(slots=True)
class Model:
    """One model and the calls that wait for it, in order of arrival.

    `serving` are calls that have a loaded model and have not ended. `since` is the start of the phase, `used_at` the
    time of the last call, `hits` the weighted number of calls at `hits_at`.
    """

    name: str
    terms: Terms
    phase: Phase = Phase.UNLOADED
    since: float = 0.0
    used_at: float = 0.0
    waiting: dict[int, WaitingCall] = field(default_factory=dict)
    serving: set[int] = field(default_factory=set)
    under_way: int = 0
    hits: float = 0.0
    hits_at: float = 0.0
    reason: str = ""  # of the failure, as in the error of its calls; `code` is that error's
    code: Code | None = None
    retry_at: float | None = None  # after a failure; None: never
    bytes: int = 0  # held on its device, as last reported
    needed_bytes: int = 0  # in phase ROOM
    free_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)  # by each model of that device
    devices: tuple[str, ...] = ()  # its device, or those it would be loaded on, if known
    is_outdated: bool = False  # memory was released since these figures were reported
    evicted_for: str | None = None
    peace: tuple[str, float] | None = None  # model that this one must not evict, and until when
    load_began: float | None = None
    wanted_until: float = 0.0  # for a refused call that may retry
    wishes: dict[int, Wish] = field(default_factory=dict)  # by tenant, until the model is unloaded
    last_key: int = 0  # tenant of the last call
    is_reported: bool = False  # the owner has reported the load
    loaded_for: int = 0  # calls that waited for the last load
    calls: int = 0  # since the last load
    is_growing: bool = False  # loaded, while one more worker waits for memory

    def is_wanted(self, now: float) -> bool:
        """True if a call waits for it, or a refused call is about to retry."""
        return bool(self.waiting) or now < self.wanted_until or not self.terms.on_demand or self.is_growing

    def has_place(self, key: int, most: int) -> bool:
        """True if a further call of a key may wait, where `most` of all keys may: a key leaves room for others."""
        held = len(self.waiting)
        own = sum([call.key == key for call in self.waiting.values()]) if 2 * held >= most else held
        return leaves_room(key, own, held, most - held - 1)

    @property
    def may_go(self) -> bool:
        """True if it is unloaded here at all."""
        return self.terms.on_demand and not self.terms.pinned

    @property
    def waits_for_room(self) -> bool:
        return self.phase is Phase.ROOM or self.is_growing

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way or self.serving or self.waiting)

    @property
    def is_used_again(self) -> bool:
        """True if calls have come since its load beside those that waited for it."""
        return self.calls > self.loaded_for

    @property
    def load_s(self) -> float:
        return UNMEASURED_LOAD_S if self.terms.load_s is None else self.terms.load_s

    def rate(self, now: float) -> float:
        """Recent calls per second."""
        return self.hits * math.exp((self.hits_at - now) / RATE_MEMORY_S) / RATE_MEMORY_S

    def value(self, now: float) -> float:
        """Return the value of keeping it: seconds of reload saved per second, for each GiB of its memory."""
        return self.load_s * self.rate(now) / max(self.bytes or self.needed_bytes, 1) * _GIB

    def stay(self) -> tuple[float, float | None]:
        """Until when it stays without calls, and the seconds that a tenant has asked for, None: as declared.

        The longest of what the tenants want, each from its own last call.
        """
        if not self.wishes:
            return self.used_at + self._stays_s(None), None
        last = Wish(self.wishes[self.last_key].seconds, self.used_at)
        longest = max((last, *self.wishes.values()), key=lambda wish: wish.at + self._stays_s(wish.seconds))
        return longest.at + self._stays_s(longest.seconds), longest.seconds

    def _stays_s(self, asked_s: float | None) -> float:
        return asked_s if asked_s is not None else self.terms.idle_timeout_s or math.inf

    def keep(self, key: int, seconds: float, now: float) -> None:
        """A tenant's call asks that it stay for so long."""
        self.wishes[key], self.last_key = Wish(seconds, now), key

    def called_by(self, keys: Iterable[int], now: float) -> None:
        """These tenants have called it; what they want is what they have asked for, or as declared."""
        if not self.wishes:
            return
        for key in keys:
            before = self.wishes.get(key)
            self.wishes[key] = Wish(None if before is None else before.seconds, now)
            if self._stays_s(self.wishes[key].seconds) >= self._stays_s(self.wishes[self.last_key].seconds):
                self.last_key = key

    def use(self, now: float) -> None:
        self.used_at = now

    def declare(self, terms: Terms) -> None:
        """Other terms; a load time that was measured is kept where they have none."""
        self.terms = replace(terms, load_s=self.terms.load_s) if terms.load_s is None else terms

    def fail(self, reason: str, retry_at: float | None, code: Code | None) -> None:
        if code is None:
            reason = f"Instance '{self.name}' is not running (status: failed): {reason}"
        self.reason, self.retry_at, self.code = reason, retry_at, code

    def want_until(self, at: float) -> None:
        """A refused call may retry until then."""
        self.wanted_until = max(self.wanted_until, at)

    def begin_load(self, now: float) -> None:
        """It is to be loaded, from now or from an earlier moment on."""
        self.load_began = now if self.load_began is None else self.load_began

    def grow(self, is_growing: bool) -> None:
        """One more worker of a loaded model waits for memory, or does not any more."""
        self.is_growing = is_growing
        self.load_began, self.retry_at = None, None

    def confirm_load(self) -> None:
        self.is_reported = True

    def retry_from(self, at: float | None) -> None:
        self.retry_at = at

    def lack(self, needed_bytes: int, free_bytes: int, held: Mapping[str, int]) -> None:
        """Its device has too little for it; 0 bytes: not asked yet."""
        self.needed_bytes, self.free_bytes, self.held = needed_bytes, free_bytes, held
        self.is_outdated = needed_bytes == 0

    def go_to(self, *devices: str | None) -> None:
        """It needs memory of these devices; without one it is as before."""
        self.devices = tuple(each for each in devices if each is not None) or self.devices

    def may_share(self, other: Model | None) -> bool:
        """True if both need memory of one device, for all that is known."""
        if other is None or not self.devices or not other.devices:
            return True
        return not {*self.devices}.isdisjoint(other.devices)

    def doubt(self) -> None:
        """Memory was released: what its device had for it is outdated."""
        self.is_outdated = True

    def hold(self, count: int) -> None:
        """It holds `count` bytes of a device that has too little for another model."""
        self.bytes = count

    def yield_to(self, other: str | None) -> None:
        """It is unloaded for another model; None: for none."""
        self.evicted_for = other

    def spare(self, winner: str, until: float) -> None:
        """It has lost a war: it does not evict the winner until then."""
        self.peace = (winner, until)

    def spared(self, now: float) -> tuple[str | None, float]:
        """The model that this one does not evict, as it has lost a war against it, and for how many seconds more."""
        if self.peace is None or now >= self.peace[1]:
            return None, 0.0
        return self.peace[0], self.peace[1] - now

    def begin_stay(self) -> None:
        """It is loaded, for the calls that wait."""
        self.loaded_for, self.calls = len(self.waiting), 0

    def serve(self, calls: int) -> None:
        """Its workers report further calls."""
        self.calls += calls

    def ends_calls(self, under_way: int) -> bool:
        """Its workers report the calls under way; whether it was busy and is no longer."""
        was_busy, self.under_way = self.is_busy, under_way
        return was_busy and not self.is_busy

    def stay_loaded(self, now: float) -> None:
        """It was to be unloaded and has calls: it stays as if nothing had been asked, loaded since it was before."""
        self.phase, self.evicted_for = Phase.LOADED, None
        self.under_way = max(1, self.under_way)
        self.use(now)

    def count(self, calls: float, now: float) -> None:
        self.hits = self.rate(now) * RATE_MEMORY_S + calls
        self.hits_at = self.used_at = now


@dataclass(slots=True)
class Fleet:
    """All models by name, and the state reported by their owner and callers."""

    models: dict[str, Model] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    active: dict[str, Model] = field(default_factory=dict)
    """Models that are loaded, ending, or waiting for memory; only these change by time or by other models."""
    clashes: dict[frozenset[str], deque[tuple[float, str]]] = field(default_factory=dict)

    def due(self) -> float | None:
        """When a `Tick` may change something; None: never, without another event."""
        return min((at for model in self.active.values() for at in due_times(model)), default=None)


def idle_until(model: Model) -> float | None:
    """When a loaded model goes because it has no calls; None for one that stays."""
    may_go = model.phase is Phase.LOADED and model.may_go and not model.is_busy
    until, _ = model.stay() if may_go else (math.inf, None)
    return until if until < math.inf else None


def due_times(model: Model) -> Iterator[float]:
    if (goes_at := idle_until(model)) is not None:
        yield goes_at
    if model.waits_for_room and model.retry_at is not None:
        yield model.retry_at
    if model.phase is Phase.ROOM and model.terms.on_demand and not model.waiting:
        yield model.wanted_until


def enter(fleet: Fleet, model: Model, phase: Phase, now: float, *, keep_since: bool = False) -> None:
    """Change the phase of a model; one that goes out of memory or is served forgets the load it has begun."""
    model.phase = phase
    model.retry_at = None
    if model.is_growing:
        model.grow(False)
    if not keep_since:
        model.since = now
    if phase in (Phase.LOADED, Phase.UNLOADED, Phase.FAILED, Phase.STOPPED):
        model.load_began, model.wanted_until = None, 0.0
    if phase not in (Phase.LOADING, Phase.ROOM):
        model.is_reported = False
    if phase is not Phase.UNLOADING:
        model.under_way = 0
    if phase in (Phase.UNLOADED, Phase.FAILED, Phase.STOPPED):
        model.wishes.clear()
    if phase in (Phase.ROOM, Phase.LOADED, Phase.UNLOADING):
        fleet.active[model.name] = model
    else:
        fleet.active.pop(model.name, None)


def serve_all(model: Model) -> Iterator[Decision]:
    """Serve the calls that wait for a loaded model."""
    for call in [*model.waiting]:
        del model.waiting[call]
        model.serving.add(call)
        yield Serve(call)


def refuse_all(
    fleet: Fleet, model: Model, why: Refusal, reason: str, retry_after_s: float | None, code: Code | None = None
) -> Iterator[Decision]:
    for call in [*model.waiting]:
        del model.waiting[call]
        fleet.calls.pop(call, None)
        yield Refuse(call, why, reason, retry_after_s, code)


def waiting_for_room(fleet: Fleet) -> list[Model]:
    """In the order in which they were asked for."""
    found = [each for each in fleet.active.values() if each.waits_for_room]
    return sorted(found, key=lambda each: each.load_began or 0.0)


def time_left_s(model: Model, now: float) -> float | None:
    """Return the seconds until the model serves, by its last load; None if that was not measured."""
    load_s = model.terms.load_s
    if load_s is None:
        return None
    if model.phase is Phase.LOADING:
        return max(0.0, model.since + load_s - now)
    if model.phase is Phase.ROOM and model.retry_at is not None:
        return max(0.0, model.retry_at - now) + load_s
    return load_s


def doing(model: Model) -> str:
    words = {Phase.LOADING: "being loaded", Phase.ROOM: "waiting for memory", Phase.UNLOADING: "being unloaded"}
    return words.get(model.phase, "not loaded")
