"""Router, replicas and links against real sockets, without the mux around them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.support.frame_worker import TIMINGS, FrameWorker, Request, echo, hold
from tests.support.mux_process import running
from tests.support.polling import eventually

from teimgr.errors import (
    Code,
    DeadlineExceeded,
    InferenceFailed,
    Overloaded,
    TooLarge,
    Unavailable,
    error_from_code,
)
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.spec import RoutingSnapshot
from teimgr.wire.frames import Flag, Method
from teimgr.wire.protobuf import Target
from teimgr.wire.routing import links
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.router import Router

A = Target(instance_name="a")
LIMITS = LinkLimits(max_message_bytes=1_000_000, max_inflight_bytes=100_000, max_waiting_bytes=1_200_000)


@pytest.fixture
async def route() -> AsyncIterator[Callable[..., Router]]:
    """A router over a snapshot of these entries."""
    async with contextlib.AsyncExitStack() as stack:

        def make(*entries: Any) -> Router:
            router = Router(LIMITS)
            stack.push_async_callback(router.close)
            router.update(RoutingSnapshot(entries))
            return router

        yield make


async def call(router: Router, payload: bytes = b"x", **options: Any) -> Any:
    with router.lease(A) as lease:
        return await lease.call(Method.EMBED, payload, **options)


def start(router: Router, payload: bytes = b"x", **options: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(call(router, payload, **options))


def replica(router: Router) -> Any:
    return next(iter(router._by_name.values())).replicas[0]


async def reconnected(router: Router) -> None:
    """Wait until reconnecting to a lost worker has ended."""
    while not replica(router).lost:  # noqa: ASYNC110
        await asyncio.sleep(0)  # our end of the link has not heard yet
    await replica(router)._reconnecting


@contextlib.contextmanager
def no_new_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_reply_comes_back_with_its_timings(route: Any, start_worker: Any) -> None:
    worker = await start_worker(lambda request: request.reply(b"answer", TIMINGS))

    assert await call(route(running("a", worker))) == (b"answer", TIMINGS)


async def test_the_request_carries_method_flags_and_remaining_time(route: Any, start_worker: Any) -> None:
    worker = await start_worker(echo)

    await call(route(running("a", worker)), b"text", flags=Flag.WAIT, timeout_s=20.0)
    request: Request = await worker.requests.get()

    assert (request.method, request.flags, request.payload) == (Method.EMBED, Flag.WAIT, b"text")
    assert 19_000 < request.header.deadline_ms <= 20_000


async def test_an_error_frame_is_raised_as_what_it_was(route: Any, start_worker: Any) -> None:
    worker = await start_worker(lambda request: request.fail(error_from_code(Code.OVERLOADED, "full up")))

    with pytest.raises(Overloaded, match=r"^full up$"):
        await call(route(running("a", worker)))


async def test_answers_find_their_calls_in_any_order(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))

    calls = [start(router, bytes([number])) for number in range(20)]
    for request in reversed([await worker.requests.get() for _ in calls]):
        request.reply(request.payload)

    assert [(await each).payload for each in calls] == [bytes([number]) for number in range(20)]


async def test_small_and_bulk_calls_have_a_connection_each(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))

    await asyncio.gather(*(call(router, flags=flags) for flags in (Flag.NONE, Flag.BULK, Flag.WAIT, Flag.BULK)))
    links = {request.flags: request.link for request in [await worker.requests.get() for _ in range(4)]}

    assert len(worker.links) == 2
    assert links[Flag.NONE] is links[Flag.WAIT] is not links[Flag.BULK]


async def test_cancelling_a_call_sends_a_cancel_frame_and_the_late_answer_is_dropped(
    route: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))
    task = start(router)
    request = await worker.requests.get()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await worker.cancels.get() == request.header.id
    request.reply(b"late")
    worker.script = echo
    assert (await call(router, b"next")).payload == b"next"
    assert replica(router).outstanding_calls == replica(router).outstanding_bytes == 0


async def test_a_passed_deadline_cancels_at_the_worker(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)

    with pytest.raises(DeadlineExceeded, match=r"^Request timeout$"):
        await call(route(running("a", worker)), timeout_s=0.02)

    assert await worker.cancels.get() == (await worker.requests.get()).header.id


async def test_a_lost_link_fails_every_call_in_flight_and_takes_the_replica_out(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))
    calls = [start(router, flags=flags) for flags in (Flag.NONE, Flag.BULK, Flag.NONE)]
    for _ in calls:
        await worker.requests.get()

    worker.drop()

    for each in calls:
        with pytest.raises(Unavailable, match=r"^Instance 'a' lost its worker"):
            await each
    with pytest.raises(Unavailable, match="status: restarting"):
        router.lease(A)


async def test_losing_one_link_closes_the_other(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    await call(router, flags=Flag.BULK)
    await call(router)

    worker.links[0].close()

    assert {await worker.lost.get(), await worker.lost.get()} == set(worker.links)


async def test_a_worker_alive_behind_lost_links_is_found_again(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    await call(router)

    worker.links[0].close()
    await worker.lost.get()
    await reconnected(router)

    assert (await call(router, b"again")).payload == b"again"
    assert (await call(router, b"bulk", flags=Flag.BULK)).payload == b"bulk"


async def test_a_worker_that_closes_every_link_is_asked_less_and_less_often(
    route: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RECONNECT_MAX_S", 0.2)
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    pauses = []

    for _ in range(3):
        await call(router)
        worker.links[-1].close()
        await worker.lost.get()
        await reconnected(router)
        pauses.append(replica(router)._reconnect_pause_s)

    assert pauses == [0.1, 0.2, 0.2]


async def test_a_dead_worker_takes_no_calls_until_it_listens_and_is_named_again(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    await call(router)
    worker.drop()
    await worker.lost.get()

    for _ in range(2):
        await reconnected(router)
        with pytest.raises(Unavailable, match="status: restarting"):
            router.lease(A)
        router.update(router.snapshot)
    await worker.listen()
    router.update(router.snapshot)
    await reconnected(router)

    assert (await call(router, b"back")).payload == b"back"


async def test_a_worker_out_of_reach_for_want_of_descriptors_is_not_lost(route: Any, start_worker: Any) -> None:
    router = route(running("a", await start_worker(echo)))

    with no_new_descriptors(), pytest.raises(Unavailable, match="Too many open files"):
        await call(router)

    assert (await call(router, b"now")).payload == b"now"


async def test_a_search_for_a_worker_goes_on_while_descriptors_are_short(
    route: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RECONNECT_MAX_S", 0.01)
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    await call(router)
    failed = asyncio.Event()
    new_link = replica(router)._new_link

    async def watched() -> Any:
        try:
            return await new_link()
        except OSError:
            failed.set()
            raise

    monkeypatch.setattr(replica(router), "_new_link", watched)
    worker.links[0].close()
    await worker.lost.get()
    with no_new_descriptors():
        await failed.wait()
    await reconnected(router)

    assert (await call(router, b"found")).payload == b"found"


async def test_a_closed_router_searches_no_more(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(echo)
    router = route(running("a", worker))
    await call(router)
    lost = replica(router)
    worker.links[0].close()
    while lost._reconnecting is None:  # noqa: ASYNC110
        await asyncio.sleep(0)

    await router.close()

    assert lost._reconnecting.done()
    assert lost.is_closed


async def test_a_worker_that_leaves_the_directory_answers_what_it_has_then_loses_its_links(
    route: Any, start_worker: Any
) -> None:
    old: FrameWorker = await start_worker(hold)
    new: FrameWorker = await start_worker(echo)
    router = route(running("a", old))
    task = start(router)
    request = await old.requests.get()

    router.update(RoutingSnapshot((running("a", new),)))
    assert (await call(router, b"to the new one")).payload == b"to the new one"
    assert old.lost.empty()
    request.reply(b"answered all the same")

    assert (await task).payload == b"answered all the same"
    await old.lost.get()


async def test_a_lease_taken_before_the_worker_left_the_directory_is_good_for_a_call(
    route: Any, start_worker: Any
) -> None:
    old: FrameWorker = await start_worker(echo)
    new: FrameWorker = await start_worker(echo)
    router = route(running("a", old))
    await call(router)

    with router.lease(Target(instance_name="a")) as lease:
        router.update(RoutingSnapshot((running("a", new),)))
        assert (await lease.call(Method.EMBED, b"begun before")).payload == b"begun before"
        assert old.lost.empty()

    await old.lost.get()


async def test_a_payload_over_the_limit_is_not_sent(route: Any, start_worker: Any) -> None:
    worker = await start_worker(echo)

    with pytest.raises(TooLarge, match=r"^Request message larger than max \(1000001 vs\. 1000000 bytes\)$"):
        await call(route(running("a", worker)), b"x" * 1_000_001)


async def test_a_reply_over_the_limit_fails_its_own_call_only(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(lambda request: request.reply(b"x" * 1_000_001))
    router = route(running("a", worker))

    with pytest.raises(TooLarge, match=r"^Reply message larger than max \(1000001 vs\. 1000000 bytes\)$"):
        await call(router)

    worker.script = echo
    assert (await call(router, b"fine")).payload == b"fine"


async def test_calls_beyond_the_bytes_in_flight_are_overloaded_and_those_that_may_wait_wait(
    route: Any, start_worker: Any
) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))
    first = start(router, b"x" * 90_000)
    held = await worker.requests.get()

    with pytest.raises(Overloaded, match=r"^Instance 'a' is overloaded: 1 calls in flight$"):
        await call(router, b"x" * 20_000)
    with pytest.raises(DeadlineExceeded):
        await call(router, b"x" * 20_000, flags=Flag.WAIT, timeout_s=0.01)
    waiting = start(router, b"y" * 20_000, flags=Flag.WAIT)
    held.reply(b"1")
    (await worker.requests.get()).reply(b"2")

    assert ((await first).payload, (await waiting).payload) == (b"1", b"2")


async def test_calls_that_wait_are_bounded_in_bytes_by_replica_and_in_time(
    route: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, idle = await start_worker(hold), await start_worker()
    router = route(running("a", busy), running("b", idle))
    first = start(router, b"x" * 90_000)
    held: Request = await busy.requests.get()
    waiting = [start(router, b"y" * 90_000, flags=Flag.WAIT) for _ in range(3)]
    await asyncio.sleep(0)

    with pytest.raises(Overloaded, match=r"^Instance 'a' is overloaded: too many bytes wait for it$"):
        await call(router, b"z" * 90_000, flags=Flag.WAIT)
    with router.lease(Target(instance_name="b")) as lease:
        await lease.call(Method.EMBED, b"x" * 90_000, flags=Flag.WAIT)

    given_up = waiting.pop()
    given_up.cancel()
    await asyncio.wait({given_up})
    monkeypatch.setattr(links, "_WAIT_LIMIT_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        await call(router, b"z" * 90_000, flags=Flag.WAIT)
    held.reply()
    for _ in waiting:
        (await busy.requests.get()).reply()
    await asyncio.gather(first, *waiting)


async def test_waiting_calls_fail_when_the_link_is_lost(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))
    calls = [start(router, b"x" * 90_000, flags=Flag.WAIT) for _ in range(3)]
    await worker.requests.get()

    worker.drop()

    for each in calls:
        with pytest.raises(Unavailable):
            await each


async def test_outstanding_bytes_steer_calls_to_the_other_replica(route: Any, start_worker: Any) -> None:
    seen: asyncio.Queue[Request] = asyncio.Queue()
    router = route(running("a", await start_worker(seen.put_nowait), await start_worker(seen.put_nowait)))

    calls = [start(router, b"x" * size) for size in (50_000, 10_000, 10_000, 10_000)]
    sizes: dict[str, list[int]] = {}
    for request in [await seen.get() for _ in calls]:
        sizes.setdefault(request.link.worker.incarnation, []).append(len(request.payload))
        request.reply()
    await asyncio.gather(*calls)

    assert sorted(sizes.values()) == [[10_000] * 3, [50_000]]


async def test_closing_the_router_fails_what_is_in_flight(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(hold)
    router = route(running("a", worker))
    task = start(router)
    await worker.requests.get()

    await router.close()

    with pytest.raises(Unavailable):
        await task


# Replicas that refuse, fail or hang


async def test_a_call_that_a_worker_refuses_before_its_start_is_tried_on_another(route: Any, start_worker: Any) -> None:
    sick = await start_worker(lambda request: request.fail(Unavailable("unhealthy")))
    well = await start_worker(echo)
    router = route(running("a", sick, well))

    assert [(await call(router, b"text")).payload for _ in range(3)] == [b"text"] * 3
    assert sick.requests.qsize() >= 1


class Counted:
    """Refuses every call for want of time, and counts them."""

    def __init__(self, retry_after_s: float) -> None:
        self.calls = 0
        self._error = Overloaded(retry_after_s=retry_after_s)

    def __call__(self, request: Request) -> None:
        self.calls += 1
        request.fail(self._error)


async def refused(router: Router, payload: bytes, method: Method = Method.EMBED, **options: Any) -> Overloaded:
    with router.lease(A) as lease, pytest.raises(Overloaded) as refusal:
        await lease.call(method, payload, **options)
    return refusal.value


async def test_calls_that_ask_for_no_less_are_refused_without_asking_the_worker(route: Any, start_worker: Any) -> None:
    busy = Counted(retry_after_s=600)
    router = route(running("a", await start_worker(busy)))

    assert (await refused(router, b"x" * 100)).retry_after_s == 600
    again = await refused(router, b"x" * 99)
    assert busy.calls == 1
    assert again.retry_after_s is not None
    assert 590 < again.retry_after_s < 600

    await refused(router, b"x" * 50)  # a smaller one may fit in
    assert busy.calls == 2
    await refused(router, b"x" * 100, Method.EMBED_ALL)
    assert busy.calls == 3
    await refused(router, b"x" * 100, timeout_s=20)
    assert busy.calls == 4
    await refused(router, b"x" * 100, timeout_s=20)
    await refused(router, b"x" * 100, timeout_s=10)
    assert busy.calls == 4
    await refused(router, b"x" * 100, timeout_s=40)  # it has the time to wait
    assert busy.calls == 5


async def test_a_refusal_holds_for_its_tenant_alone_and_for_no_http_request(route: Any, start_worker: Any) -> None:
    busy = Counted(retry_after_s=600)
    router = route(running("a", await start_worker(busy)))

    async def of_tenant(tenant: int, method: Method) -> None:
        context = RequestContext.from_headers({})
        context.belongs_to(tenant)
        with use_context(context):
            await refused(router, b"x", method)

    for tenant in (1, 2, 1, 2):  # whose work ahead differs
        await of_tenant(tenant, Method.EMBED)
    assert busy.calls == 2
    for _ in range(2):  # a body of the same size may be a picture, or texts
        await of_tenant(1, Method.HTTP)
    assert busy.calls == 4


async def test_the_worker_is_asked_again_after_a_tenth_of_the_time_it_named(route: Any, start_worker: Any) -> None:
    busy = Counted(retry_after_s=6)
    router = route(running("a", await start_worker(busy)))
    began = time.monotonic()
    while busy.calls < 2:
        await refused(router, b"x")

    assert 0.5 < time.monotonic() - began < 5.5


async def test_a_refusal_for_a_short_time_is_not_kept(route: Any, start_worker: Any) -> None:
    busy = Counted(retry_after_s=0.5)
    router = route(running("a", await start_worker(busy)))
    for _ in range(3):
        await refused(router, b"x")

    assert busy.calls == 3


async def test_a_call_to_a_worker_out_of_reach_is_tried_on_another(route: Any, start_worker: Any) -> None:
    gone, well = await start_worker(echo), await start_worker(echo)
    gone.drop()
    router = route(running("a", gone, well))

    assert (await call(router, b"text")).payload == b"text"
    with router.lease(A) as lease:
        started = await lease.start(Method.EMBED, b"text")
        assert (await started.answer).payload == b"text"


async def test_what_goes_before_a_payload_does_not_copy_it(route: Any, start_worker: Any) -> None:
    """The mux joined the options of a stream and each later message: 36 ms of its loop for 40 MiB."""
    router, payload = route(running("a", await start_worker(echo))), b"x" * 50_000

    with router.lease(A) as lease:
        started = await lease.start(Method.EMBED, payload, before=b"options")

        assert started.link._outgoing[-1] is payload
        assert (await started.answer).payload == b"options" + payload


async def test_a_call_that_may_have_ended_its_worker_is_not_tried_again(route: Any, start_worker: Any) -> None:
    fatal: FrameWorker = await start_worker(lambda request: fatal.drop())
    other: FrameWorker = await start_worker(echo)
    router = route(running("a", fatal, other))

    with pytest.raises(Unavailable, match="lost its worker"):
        await call(router)
    assert other.requests.empty()


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_replica_that_fails_several_calls_in_a_row_is_avoided_until_it_passes_its_self_test(
    route: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One that hangs has nothing under way after its calls timed out, and looks the least busy."""
    monkeypatch.setattr(links, "_MIN_FAILURE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(links, "_CHECK_FIRST_PAUSE_S", 0.001)
    healed = asyncio.Event()
    embeds: list[str] = []

    def failing(request: Request) -> None:
        if request.method is Method.PROBE:
            request.reply() if healed.is_set() else request.fail(Unavailable("the self-test failed"))
            return
        embeds.append("sick")
        if healed.is_set():
            request.reply(request.payload)
        elif how == "fails":
            request.fail(InferenceFailed("Backend error: the device is gone"))

    def working(request: Request) -> None:
        embeds.append("well")
        request.reply(request.payload)

    sick, well = await start_worker(failing), await start_worker(working)
    router = route(running("a", sick, well))
    for _ in range(40):
        with contextlib.suppress(InferenceFailed, DeadlineExceeded):
            await call(router, timeout_s=0.05)

    assert embeds.count("sick") == 3
    assert embeds.count("well") >= 30
    healed.set()
    await eventually(lambda: not replica(router).suspended)
    embeds.clear()
    await call(router)
    assert embeds == ["sick"]  # which has had fewer calls


async def test_a_replica_that_nobody_can_replace_gets_its_calls_though_it_fails(route: Any, start_worker: Any) -> None:
    worker: FrameWorker = await start_worker(
        lambda request: request.fail(Unavailable("no")) if request.method is Method.PROBE else echo(request)
    )
    router = route(running("a", worker))
    replica(router).suspended = True

    assert (await call(router, b"text")).payload == b"text"


async def test_failures_of_single_texts_do_not_add_up(route: Any, start_worker: Any) -> None:
    def script(request: Request) -> None:
        request.fail(InferenceFailed("Backend error")) if request.payload == b"bad" else request.reply()

    router = route(running("a", await start_worker(script)))
    for payload in (b"bad", b"bad", b"good", b"bad", b"bad"):
        with contextlib.suppress(InferenceFailed):
            await call(router, payload)

    assert not replica(router).suspended


@pytest.mark.parametrize("timeout_s", [86_400 * 49, 86_400 * 60, 3_600 * 99_999_999])
async def test_a_deadline_beyond_the_frames_largest_is_that(route: Any, start_worker: Any, timeout_s: float) -> None:
    worker = await start_worker(echo)
    router = route(running("a", worker))

    await call(router, timeout_s=timeout_s)

    seen = await worker.requests.get()
    assert seen.header.deadline_ms == pytest.approx(min(timeout_s * 1000, 2**32 - 1), abs=1000)
    assert replica(router).outstanding_calls == 0


async def test_a_request_that_cannot_be_sent_leaves_nothing_on_its_link(
    route: Any, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = route(running("a", await start_worker(echo)))
    await call(router)

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no frame")

    with monkeypatch.context() as patch:
        patch.setattr(links.WorkerLink, "send", broken)
        with pytest.raises(ValueError, match="no frame"):
            await call(router, timeout_s=60)

    [link] = [each for each in replica(router)._links if each is not None]
    assert (link.calls_in_flight, link.budget.taken_bytes, replica(router).outstanding_bytes) == (0, 0, 0)
    await call(router)
