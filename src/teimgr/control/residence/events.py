"""Input and output of the residence policy: events, and decisions with their reasons.

A reason has the same text in the log, events, replies and the page. Only reasons of evictions and `Notice`s name other
models; `named_to` removes these names for callers, who may not see other models.
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
    """The declared properties of a model; `load_s` is its measured load time in seconds.

    Only models `on_demand` are loaded and unloaded by the policy. A `pinned` model stays once it is loaded.
    `idle_timeout_s` 0: no idle timeout.
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
    """The instance was created, or its terms have changed."""

    model: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Removed:
    """The instance was deleted."""

    model: str


@dataclass(frozen=True, slots=True)
class CallAsked:
    """A call waits for the model, at most until `deadline` on the policy's clock; None: without a limit.

    `devices` are the card and host on which the model would load, empty if unknown; `key` is the call's tenant.
    """

    call: int
    model: str
    deadline: float | None = None
    devices: tuple[str, ...] = ()
    key: int = ANONYMOUS


@dataclass(frozen=True, slots=True)
class Left:
    """The call has ended, was passed to a worker, or its caller disconnected."""

    call: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A call has requested how long the model stays after the last call, instead of `idle_timeout_s`.

    0: until it has no calls; infinite: until others need its memory. It replaces an earlier request of the same
    tenant, `key`, and does not shorten the stay requested by other tenants.
    """

    model: str
    seconds: float
    key: int = ANONYMOUS


@dataclass(frozen=True, slots=True)
class Used:
    """Report of a loaded model's workers: calls since the last report, and calls in flight.

    `keys` are the tenants of these calls, if known and if a tenant has requested how long the model stays.
    """

    model: str
    calls: int
    under_way: int
    keys: Iterable[int] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """Its workers are being started, for any reason."""

    model: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Its workers accept calls."""

    model: str


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load failed; it is tried again after `retry_s`, or never if None.

    `code` is the error code for calls if the reason concerns the caller, such as an unknown model.
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
    """The model has no worker and holds no memory; a call may load it."""

    model: str


@dataclass(frozen=True, slots=True)
class UserStopped:
    """A user has stopped the model, so calls do not load it."""

    model: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The model needs `needed_bytes` on a device with `free_bytes`; `held` are the bytes held by each model there."""

    model: str
    needed_bytes: int
    free_bytes: int
    held: Mapping[str, int]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A model exceeds its reservation, and all models together exceed the budget of a device by `excess_bytes`.

    `held` are the bytes held by each model there.
    """

    model: str
    excess_bytes: int
    held: Mapping[str, int]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """The model was not unloaded because it has calls."""

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

_MODEL = re.compile(r"'[^']*'|(?<=; for )\S+$")  # as written in a `Notice` and by `eviction_reason`


class Refusal(Enum):
    """Why a call is refused."""

    UNKNOWN = "unknown"
    STOPPED = "stopped"  # by a user
    FAILED = "failed"
    LATE = "late"  # the load takes longer than the call may wait
    QUEUE = "queue"  # too many waiting calls
    NO_ROOM = "no-room"  # not enough memory
    WAR = "war"  # two models keep evicting each other


@dataclass(frozen=True, slots=True)
class Load:
    """Start the workers of the model, or request its memory again after a refusal."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unload:
    """End the workers of the model if it has no calls; `evicted_for` is the model that needs its memory."""

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
    """The load of a model that was not started by a call fails for lack of memory."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Serve:
    """The call's model is loaded."""

    call: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call gets an error. `retry_after_s` None: a retry is useless. `code` is as in `LoadFailed`."""

    call: int
    why: Refusal
    reason: str
    retry_after_s: float | None = None
    code: Code | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about a model for the log, the events and the page."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """The models that prevent a load; only for the log, since callers may not see other models."""

    model: str
    holders: tuple[str, ...]


Decision = Load | Unload | Deny | Serve | Refuse | Notice | Held
