"""Input and output of the residence policy: events and decisions as data, with their reasons.

The words of a reason are the same in the log, in events, in replies and on the page. Only those of an eviction and of a
`Notice` name other models, and `named_to` leaves them out; callers of one model may not know of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from teimgr.errors import Code
from teimgr.spec import InstanceSpec
from teimgr.wire.tenants.table import ANONYMOUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is declared of a model; `load_s` are the seconds that its load takes, as measured.

    A model that is not `on_demand` is never loaded or unloaded here. One that is `pinned` stays once it is loaded.
    `idle_timeout_s` 0: it is not unloaded for being idle.
    """

    on_demand: bool = True
    pinned: bool = False
    idle_timeout_s: float = 0.0
    load_s: float | None = None


def terms_of(spec: InstanceSpec) -> Terms:
    """Return the declaration in an instance's spec."""
    return Terms(on_demand=spec.load == "on_demand", pinned=spec.pinned, idle_timeout_s=float(spec.idle_timeout_secs))


# Events


@dataclass(frozen=True, slots=True)
class Declared:
    """There is such an instance, or its terms have changed."""

    model: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Removed:
    """The instance does not exist any more."""

    model: str


@dataclass(frozen=True, slots=True)
class CallAsked:
    """A call waits for the model, at most until `deadline`, on the policy's clock; None: as long as it takes.

    `devices` are the card and host that the model would load on, none where that is not known; `key` is its tenant.
    """

    call: int
    model: str
    deadline: float | None = None
    devices: tuple[str, ...] = ()
    key: int = ANONYMOUS


@dataclass(frozen=True, slots=True)
class Left:
    """The call is over, was handed to a worker, or its caller has gone."""

    call: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A call has asked that the model stay for so long after its last call, in place of its `idle_timeout_s`.

    0: it goes when it has no calls; infinite: only for the memory of others. `key` is the tenant that has asked, whose
    earlier wish this one replaces; it shortens the stay of no other tenant.
    """

    model: str
    seconds: float
    key: int = ANONYMOUS


@dataclass(frozen=True, slots=True)
class Used:
    """What a loaded model's workers report: calls since the last report, and calls that are under way.

    `keys` are the tenants of those calls where a tenant has asked how long the model stays, and they are known.
    """

    model: str
    calls: int
    under_way: int
    keys: Iterable[int] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """Its workers are being started, for any cause."""

    model: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Its workers take calls."""

    model: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load failed; `retry_s` is when it is tried again, None for a failure that lasts.

    `code` is that of the error for calls, where the reason is one for callers, as there is no such model.
    """

    model: str
    reason: str
    retry_s: float | None = None
    code: Code | None = None


@dataclass(frozen=True, slots=True)
class Unloading:
    """Its workers are ending."""

    model: str


@dataclass(frozen=True, slots=True)
class Unloaded:
    """It has no worker and holds no memory; a call may load it."""

    model: str


@dataclass(frozen=True, slots=True)
class UserStopped:
    """A user has stopped it: no call loads it."""

    model: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A device has `free_bytes` for it, and it needs `needed_bytes` there; `held` is what each model holds of it."""

    model: str
    needed_bytes: int
    free_bytes: int
    held: Mapping[str, int]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A model takes more than it had reserved, and with it all take `excess_bytes` more than the budget of a device.

    `held` is what each model holds of it.
    """

    model: str
    excess_bytes: int
    held: Mapping[str, int]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """It was not unloaded, because it has calls."""

    model: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Declared
    | Removed
    | CallAsked
    | Left
    | Kept
    | Used
    | Loading
    | Loaded
    | LoadFailed
    | Unloading
    | Unloaded
    | UserStopped
    | NoRoom
    | Outgrown
    | Busy
    | Tick
)


# Decisions

_MODEL = re.compile(r"'[^']*'|(?<=; for )\S+$")  # in a `Notice`, and by `eviction_reason`


class Refusal(Enum):
    """Why a call is refused."""

    UNKNOWN = "unknown"  # no such instance
    STOPPED = "stopped"  # by a user
    FAILED = "failed"  # its load fails, and would again
    LATE = "late"  # its load takes longer than the call may wait
    QUEUE = "queue"  # too many calls wait for it
    NO_ROOM = "no-room"  # its memory is not to be had
    WAR = "war"  # it and another model would evict each other without end


@dataclass(frozen=True, slots=True)
class Load:
    """Start the workers of the model, or have its memory asked for again where that was too little."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unload:
    """End the workers of the model, if it has no calls; `evicted_for` another one that needs its memory."""

    model: str
    reason: str
    evicted_for: str | None = None


def eviction_reason(reason: str, evicted_for: str) -> str:
    """The reason of an `Unload` for another model, as in events and plans."""
    return f"{reason}; for {evicted_for}"


def named_to(covers: Callable[[str], bool], reason: str) -> str:
    """The reason of an eviction or a `Notice` for one who may know of the models alone that `covers` accepts."""
    return _MODEL.sub(lambda found: found[0] if covers(found[0].strip("'")) else "another instance", reason)


@dataclass(frozen=True, slots=True)
class Deny:
    """No room is made for the model, which others started; its load fails."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Serve:
    """The call's model is loaded."""

    call: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call gets an error. `retry_after_s` None: trying again changes nothing. `code` is as in `LoadFailed`."""

    call: int
    why: Refusal
    reason: str
    retry_after_s: float | None = None
    code: Code | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something for the log, the events and the page, about a model."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """No room can be made for the model, as these others stay: for the log, since callers may not know of them."""

    model: str
    holders: tuple[str, ...]


Decision = Load | Unload | Deny | Serve | Refuse | Notice | Held
