"""Calls that wait, within limits: for an on-demand model (`call_when_ready`), or for a worker that is started again.

`ReturningWorkers` has them wait for the successor of an instance's only worker after that worker died.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

from teimgr.errors import DeadlineExceeded, NotLoaded, Overloaded, Returning, TeimgrError, Unavailable
from teimgr.observability.request_context import current_tenant
from teimgr.wire.routing.links import ConnectionLost
from teimgr.wire.routing.router import Router, RouterView, not_loaded
from teimgr.wire.tenants.table import ANONYMOUS, leaves_room

# A call fails if its model was unloaded this many times between the load and the call.
_ROUNDS = 4
_MAX_WAITING = 4096
_MAX_WAITING_BYTES = 256 * 2**20

ResultT = TypeVar("ResultT")


class ModelLoads(Protocol):
    """Loads models for calls: the daemon's `Residence`, or the mux's client of it."""

    def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AbstractAsyncContextManager[None]:
        """Context in which the model is loaded; entering it waits for the load. `size_bytes` is the size of the call.

        Raises:
            TeimgrError: the load is refused.
        """


class ModelStays(ModelLoads, Protocol):
    """Also decides how long models stay loaded: the daemon's `Residence`."""

    def keep(self, instance: str, seconds: float, key: int = ANONYMOUS) -> None:
        """Keep an on-demand model loaded for `seconds` after a tenant's last call; 0 unloads it once it has no calls.

        A tenant cannot shorten the stay that another one asked for.
        """

    def left_s(self, instance: str) -> float | None:
        """Return the seconds until a loaded model is unloaded if no call comes; None if it stays."""


class NoLoads:
    """Refuses each load, in a process without models on demand."""

    def keep(self, instance: str, seconds: float, key: int = ANONYMOUS) -> None:
        pass

    def left_s(self, instance: str) -> float | None:
        return None

    def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AbstractAsyncContextManager[None]:
        raise Unavailable(f"Instance '{instance}' is not loaded")


NO_LOADS = NoLoads()


class WaitingCalls:
    """Limits the number and the bytes of calls that wait for `what`; `processes` share the limits.

    One API key may use only a part of both limits, which leaves room for others (`leaves_room`).
    """

    def __init__(self, what: str, processes: int) -> None:
        self._what = what
        self._max_calls, self._max_bytes = _MAX_WAITING // processes, _MAX_WAITING_BYTES // processes
        self._calls: Counter[int] = Counter()  # keys are tenants
        self._bytes: Counter[int] = Counter()

    @contextmanager
    def one(self, instance: str, size_bytes: int) -> Iterator[None]:
        """Context in which a call for `instance` counts as waiting.

        Raises:
            Overloaded: too many calls wait, or too many of its key.
        """
        tenant = current_tenant()
        calls, held_bytes = self._calls.total(), self._bytes.total()
        calls_left, bytes_left = self._max_calls - calls - 1, self._max_bytes - held_bytes - size_bytes
        if not (
            leaves_room(tenant, self._calls[tenant], calls, calls_left)
            and leaves_room(tenant, self._bytes[tenant], held_bytes, bytes_left)
        ):
            own = "" if min(calls_left, bytes_left) < 0 else " of this key"
            raise Overloaded(f"Too many calls{own} wait for {self._what}, as for '{instance}'; try again later")
        self._calls[tenant] += 1
        self._bytes[tenant] += size_bytes
        try:
            yield
        finally:
            self._calls[tenant] -= 1
            self._bytes[tenant] -= size_bytes
            if not self._calls[tenant]:
                del self._calls[tenant], self._bytes[tenant]


def answer_call(answer: asyncio.Future[None] | None, error: TeimgrError | None) -> None:
    """Resume a call that waits for its model, or raise `error` in it; no-op if it no longer waits."""
    if answer is None or answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


async def call_when_ready(
    loads: ModelLoads,
    missing: NotLoaded,
    timeout_s: float | None,
    call: Callable[[float | None], Awaitable[ResultT]],
    size_bytes: int = 0,
) -> ResultT:
    """Make `call` once its model is loaded, passing it the remaining part of `timeout_s`.

    Raises:
        DeadlineExceeded: `timeout_s` has passed.
        TeimgrError: the load was refused, or the call failed.
    """
    clock = asyncio.get_running_loop().time
    ends = None if timeout_s is None else clock() + timeout_s
    for _ in range(_ROUNDS):
        async with loads.loaded(missing.instance, None if ends is None else ends - clock(), size_bytes):
            left_s = None if ends is None else ends - clock()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded
            try:
                return await call(left_s)
            except NotLoaded as error:
                missing = error
    raise missing


def as_unloaded(router: RouterView, instance: str, error: Unavailable) -> NotLoaded | None:
    """Convert the refusal of a worker whose on-demand model is being unloaded to NotLoaded; None for other errors."""
    if isinstance(error, NotLoaded):
        return error
    entry = router.find(instance)
    if isinstance(error, ConnectionLost) or entry is None or not entry.on_demand:
        return None
    return not_loaded(entry)


_LOOK_S = 0.25  # poll: a worker whose connection broke returns without a route change


class ReturningWorkers:
    """Lets calls of `router` wait for at most `limit_s` (0: not at all); `others` loads models on demand.

    `processes` share the limits on the number and the bytes of calls that wait.
    """

    def __init__(self, router: Router, others: ModelLoads, limit_s: float, processes: int = 1) -> None:
        self._router = router
        self._others = others
        self._limit_s = limit_s
        self._waiting = WaitingCalls("workers that are started again", processes)

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        """Context that is entered once a worker is back, or is no longer expected to come back.

        Raises:
            Unavailable: it was not back within the limit.
            DeadlineExceeded: `timeout_s` has passed.
            Overloaded: too many calls wait.
            TeimgrError: the load of an instance on demand is refused.
        """
        entry, clock = self._router.find(instance), asyncio.get_running_loop().time
        began = clock()
        async with AsyncExitStack() as stack:
            if entry is None or entry.on_demand:
                await stack.enter_async_context(self._others.loaded(instance, timeout_s, size_bytes))
            if isinstance(self._router.problem(instance), Returning):  # also a worker of a model loaded on demand
                with self._waiting.one(instance, size_bytes):
                    await self._back(instance, None if timeout_s is None else timeout_s - (clock() - began))
            yield

    async def _back(self, instance: str, timeout_s: float | None) -> None:
        clock = asyncio.get_running_loop().time
        has_deadline = timeout_s is not None and timeout_s <= self._limit_s
        ends = clock() + (timeout_s if timeout_s is not None and has_deadline else self._limit_s)
        while isinstance(error := self._router.problem(instance), Returning):
            if (left_s := ends - clock()) <= 0:
                raise DeadlineExceeded if has_deadline else Unavailable(error.message)
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S)):
                    await self._router.changed(instance)
            except TimeoutError:
                continue
