"""Calls between the death of an only worker and its successor: they wait within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from teimgr.errors import DeadlineExceeded, Overloaded, Returning, Stopped, Unavailable
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.spec import RouteEntry, State, WorkerEndpoint
from teimgr.wire.protobuf import Target
from teimgr.wire.routing.on_demand import NO_LOADS, ReturningWorkers, WaitingCalls, call_when_ready
from teimgr.wire.routing.router import Router

RUNNING = RouteEntry(
    "a", "model", State.RUNNING, dimension=8, endpoints=(WorkerEndpoint("/run/one.sock", "one"),), serves=("dense",)
)
GONE = replace(RUNNING, state=State.STARTING, endpoints=(), reason="killed by SIGKILL")
BACK = replace(RUNNING, endpoints=(WorkerEndpoint("/run/two.sock", "two"),))
A = Target(instance_name="a")


def routed(entry: RouteEntry) -> Router:
    router = Router()
    router.apply("a", entry)
    return router


@pytest.mark.parametrize("target", [A, Target(model_id="model"), Target(instance_index=0)])
async def test_a_call_is_made_once_the_worker_is_back(target: Target) -> None:
    router = routed(GONE)
    with pytest.raises(Returning, match=r"status: starting\): killed by SIGKILL"):
        router.lease(target)

    async def call() -> str:
        async with ReturningWorkers(router, NO_LOADS, 60.0).loaded("a", None):
            with router.lease(target) as lease:
                return lease.instance

    waiting = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert not waiting.done()
    router.apply("a", BACK)
    assert await waiting == "a"


class LoadedModels:
    """Models on demand, each of which is loaded already; `rounds` counts the blocks."""

    rounds = 0

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        self.rounds += 1
        yield


async def test_a_call_to_a_loaded_model_on_demand_waits_for_its_worker_as_others_do() -> None:
    lost = replace(RUNNING, on_demand=True, endpoints=())
    router, models = routed(lost), LoadedModels()

    async def call(left_s: float | None) -> str:
        with router.lease(A) as lease:
            return lease.instance

    with pytest.raises(Returning) as missing:
        router.lease(A)
    waiting = asyncio.create_task(call_when_ready(ReturningWorkers(router, models, 60.0), missing.value, None, call))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    router.apply("a", replace(BACK, on_demand=True))
    assert await waiting == "a"
    assert models.rounds == 1

    router.apply("a", lost)
    for timeout_s, error in ((None, Unavailable), (0.01, DeadlineExceeded)):
        with pytest.raises(error):
            await call_when_ready(ReturningWorkers(router, models, 0.02), missing.value, timeout_s, call)


async def test_the_limit_and_the_deadline_end_the_wait() -> None:
    router = routed(GONE)
    for limit_s, timeout_s, error in (
        (0.0, None, Unavailable),
        (0.01, 60.0, Unavailable),
        (60.0, 0.01, DeadlineExceeded),
    ):
        with pytest.raises(error) as found:
            async with ReturningWorkers(router, NO_LOADS, limit_s).loaded("a", timeout_s):
                pass
        assert not isinstance(found.value, Returning), "it would be tried again"


async def test_one_that_will_not_come_back_is_not_waited_for() -> None:
    router = routed(GONE)

    async def call() -> None:
        async with ReturningWorkers(router, NO_LOADS, 60.0).loaded("a", None):
            router.lease(A)

    waiting = asyncio.create_task(call())
    await asyncio.sleep(0)
    router.apply("a", replace(GONE, state=State.STOPPED))
    with pytest.raises(Stopped):
        await waiting


def test_a_first_start_and_a_model_on_demand_are_no_return() -> None:
    with pytest.raises(Unavailable) as found:
        routed(replace(GONE, dimension=0)).lease(A)
    assert not isinstance(found.value, Returning)
    with pytest.raises(Unavailable) as found:
        routed(replace(GONE, on_demand=True)).lease(A)
    assert not isinstance(found.value, Returning)


async def test_the_bytes_of_calls_that_wait_are_bounded() -> None:
    workers = ReturningWorkers(routed(GONE), NO_LOADS, 60.0)
    with pytest.raises(Overloaded):
        async with workers.loaded("a", None, size_bytes=2**40):
            pass


def test_the_number_of_calls_that_wait_is_bounded_for_all_processes_together() -> None:
    calls = WaitingCalls("workers", processes=2048)
    for _ in range(2):  # two at a time
        with ExitStack() as stack:
            stack.enter_context(calls.one("a", 1))
            stack.enter_context(calls.one("a", 1))
            with pytest.raises(Overloaded, match="wait for workers, as for 'a'"):
                stack.enter_context(calls.one("a", 1))


def test_a_key_whose_calls_wait_leaves_room_for_those_of_others() -> None:
    calls = WaitingCalls("workers", processes=512)  # eight calls
    with ExitStack() as stack:

        def waiting_of(key: int, size_bytes: int) -> int:
            context = RequestContext("")
            context.belongs_to(key)
            with use_context(context):
                for count in range(9):
                    try:
                        stack.enter_context(calls.one("a", size_bytes))
                    except Overloaded as error:
                        assert "Too many calls of this key wait" in error.message
                        return count
            return 9

        assert waiting_of(1, 1) == 4
        assert waiting_of(2, 1) == 2
        assert waiting_of(3, 2**17) == 1
        assert waiting_of(1, 1) == 0
    with ExitStack() as stack:
        assert waiting_of(1, 2**17) == 2  # of 512 KiB
        assert waiting_of(2, 2**17) == 1
