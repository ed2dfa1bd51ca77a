"""Replicas on other hosts: a router, real certificates, a real worker process, and a network that fails."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mux.test_leases import Fleet, Mux
from tests.support.cluster import HOST, FleetNodes, TcpProxy, endpoint_of, worker_on
from tests.support.models import build
from tests.support.polling import eventually
from tests.support.worker_process import WorkerProcess, arrow, embed_request, table

from teimgr.errors import DailyTokensExceeded, Internal, Unavailable
from teimgr.observability.request_context import RequestContext, use_context
from teimgr.spec import RouteEntry, RoutingSnapshot, State, WorkerEndpoint
from teimgr.wire import remote_frames
from teimgr.wire.fleet_tls import FleetIdentity, write_removed
from teimgr.wire.frames import Flag, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.protobuf import Target
from teimgr.wire.routing import remote_links
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.router import Router
from teimgr.wire.tenants.remote import Meters
from teimgr.wire.tenants.table import FILE, Limits, TenantKey, TenantTable
from teimgr.worker.tenant_meter import EntryMeters

A = Target(instance_name="a")
LIMITS = LinkLimits(connect_timeout_s=20.0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> FleetNodes:
    return FleetNodes(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def worker(nodes: FleetNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker on the node gpu-1; the tests are on the node head."""
    with worker_on(nodes, "gpu-1", build("bert", tmp_path_factory.mktemp("m"))) as one:
        yield one


@pytest.fixture
async def endpoint(worker: WorkerProcess) -> WorkerEndpoint:
    link, _ = await worker.watcher("ready")
    link.close()
    return await endpoint_of(worker)


Route = Callable[..., Router]


@pytest.fixture
async def route(nodes: FleetNodes) -> AsyncIterator[Route]:
    """A router of the node head over an instance with these endpoints."""
    async with AsyncExitStack() as stack:

        def make(
            *endpoints: WorkerEndpoint,
            identity: FleetIdentity | None = None,
            limits: LinkLimits = LIMITS,
            meters: Meters | None = None,
        ) -> Router:
            router = Router(limits, identity or nodes.identity("head"), meters=meters)
            stack.push_async_callback(router.close)
            router.update(RoutingSnapshot((RouteEntry("a", "m", State.RUNNING, None, 32, endpoints),)))
            return router

        yield make


@pytest.fixture
async def proxy(endpoint: WorkerEndpoint) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(endpoint.address) as one:
        yield one


async def call(router: Router, payload: bytes | None = None, method: Method = Method.EMBED, **options: Any) -> bytes:
    with router.lease(A) as lease:
        return (await lease.call(method, embed_request("fog") if payload is None else payload, **options)).payload


def vector(payload: bytes) -> list[float]:
    return list(tei_pb2.EmbedResponse.FromString(payload).embeddings)


def replica(router: Router) -> Any:
    return next(iter(router._by_name.values())).replicas[0]


async def test_a_remote_worker_answers_as_by_its_socket(route: Route, endpoint: WorkerEndpoint) -> None:
    there = route(endpoint)
    here = route(replace(endpoint, node="head"))  # the same process, taken for one of this host

    assert vector(await call(there)) == pytest.approx(vector(await call(here)), abs=1e-6)
    assert (replica(there).is_remote, replica(here).is_remote) == (True, False)


async def test_arrow_batches_and_large_messages_pass_whole(route: Route, endpoint: WorkerEndpoint) -> None:
    texts: list[str | None] = ["fog " * (1 + number % 7) for number in range(3000)]

    found = table(await call(route(endpoint), arrow(texts), Method.EMBED_ARROW, flags=Flag.BULK | Flag.WAIT))

    assert found.num_rows == 3000
    assert np.isfinite(np.array(found["embeddings"].to_pylist())).all()


async def test_calls_are_charged_and_counted_exactly_by_who_admits_them(
    route: Route, endpoint: WorkerEndpoint, tmp_path: Path
) -> None:
    table = TenantTable(tmp_path / FILE)
    tenants = table.configure([TenantKey("free"), TenantKey("daily", Limits(daily=200, concurrent=10**6))])
    routers = [route(endpoint, meters=EntryMeters(tmp_path / FILE)) for _ in range(2)]  # as of two muxes

    async def tokens_of(key: str, number: int) -> int | None:
        context = RequestContext(f"{key}-{number}")
        context.belongs_to(tenants[key])
        with use_context(context):
            try:
                with routers[number % 2].lease(A) as lease:
                    payload = embed_request("fog " * (1 + number % 3))
                    timings = (await lease.call(Method.EMBED, payload, flags=Flag.WAIT)).timings
            except DailyTokensExceeded:
                return None
        assert timings is not None
        return timings.tokens

    for key, number in tenants.items():
        spent = await asyncio.gather(*(tokens_of(key, each) for each in range(128)))
        answered = [tokens for tokens in spent if tokens is not None]
        rows = [row.counts[number] for _, row, _ in table.rows()]
        assert len(rows) == 2
        tokens, texts, calls, refused, _ = map(sum, zip(*rows, strict=True))
        assert (tokens, texts, calls, refused) == (sum(answered), len(answered), len(answered), 128 - len(answered))
        assert table.in_flight(number) == 0
        if key == "daily":
            assert table.spent(number).of_day == tokens
            assert 200 - max(answered) < tokens <= 200
        else:
            assert not refused
    table.close()


async def test_muxes_without_a_table_charge_and_count_by_leases_also_of_workers_of_their_host(
    route: Route, endpoint: WorkerEndpoint, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    muxes = Mux(fleet), Mux(fleet)
    routers = (
        route(endpoint, meters=muxes[0].meters),
        route(replace(endpoint, node="head"), meters=muxes[1].meters),  # the same worker, taken for one of this host
    )
    assert [replica(router).is_remote for router in routers] == [True, False]

    async def spent_by(key: str, number: int) -> int:
        context = RequestContext(f"{key}-{number}")
        context.belongs_to(fleet.numbers[key])
        with use_context(context):
            try:
                with routers[number % 2].lease(A) as lease:
                    timings = (await lease.call(Method.EMBED, embed_request("fog " * 90), flags=Flag.WAIT)).timings
            except DailyTokensExceeded:
                return 0
        assert timings is not None
        return timings.tokens

    cost = await spent_by("free", 0)
    daily = await asyncio.gather(*(spent_by("daily", number) for number in range(10_000 // cost + 40)))
    for mux in muxes:
        mux.meters.report()

    assert {sum(daily[0::2]) > 0, sum(daily[1::2]) > 0} == {True}
    rows = {row.key: (row.tokens, row.calls, row.refused) for row in fleet.registry.usage()}
    answered = sum(1 for tokens in daily if tokens)
    assert rows["daily"] == (sum(daily), answered, len(daily) - answered)
    assert rows["free"] == (cost, 1, 0)
    assert 8_000 < sum(daily) <= 10_000
    fleet.table.close()
    fleet.registry.close()


async def test_a_worker_of_an_earlier_version_gets_no_calls_of_a_key_with_a_quota(
    start_worker: Any, tmp_path: Path
) -> None:
    def answer(request: Any) -> None:
        if request.header.method == Method.HELLO:
            request.fail(Internal("No method has the number 71"))
        else:
            request.reply(b"answer")

    worker = await start_worker(answer)
    fleet = Fleet(tmp_path)
    mux = Mux(fleet)
    router = Router(LIMITS, meters=mux.meters)
    router.update(RoutingSnapshot((RouteEntry("a", "m", State.RUNNING, None, 32, (worker.endpoint,)),)))

    async def call_of(key: str) -> bytes:
        context = RequestContext(key)
        context.belongs_to(fleet.numbers[key])
        with use_context(context):
            return await call(router)

    assert await call_of("free") == b"answer"
    for _ in range(2):
        with pytest.raises(Unavailable, match="earlier version"):
            await call_of("daily")
    assert replica(router).outstanding_calls == replica(router).outstanding_bytes == 0
    await router.close()
    fleet.table.close()
    fleet.registry.close()


async def test_a_table_that_cannot_be_opened_costs_the_link_no_room(start_worker: Any) -> None:
    class Broken:
        has_table = False

        def lease(self, instance: str, model: str) -> None:
            raise OSError("no descriptor is left")

        def give_back(self, instance: str, model: str) -> None: ...

    worker = await start_worker(lambda request: request.reply(b"answer"))
    router = Router(LIMITS, meters=Broken())
    router.update(RoutingSnapshot((RouteEntry("a", "m", State.RUNNING, None, 32, (worker.endpoint,)),)))
    with use_context(RequestContext("one")), pytest.raises(OSError, match="no descriptor"):
        await call(router)

    [link, _] = replica(router)._links
    assert link.budget.try_take(LIMITS.max_inflight_bytes)
    await router.close()


async def test_a_link_closed_during_its_greeting_fails_no_call_of_another(start_worker: Any, tmp_path: Path) -> None:
    requests: list[Any] = []

    def answer(request: Any) -> None:
        if request.header.method == Method.HELLO and not requests:
            request.reply(b"")
        requests.append(request)  # the second greeting has no answer

    worker = await start_worker(answer)
    fleet = Fleet(tmp_path)
    router = Router(LIMITS, meters=Mux(fleet).meters)
    router.update(RoutingSnapshot((RouteEntry("a", "m", State.RUNNING, None, 32, (worker.endpoint,)),)))
    first = asyncio.create_task(call(router))
    await eventually(lambda: len(requests) == 2)

    bulk = asyncio.create_task(call(router, flags=Flag.BULK))
    await eventually(lambda: len(requests) == 3)
    bulk.cancel()
    await asyncio.wait({bulk})
    requests[1].reply(b"answer")

    assert await first == b"answer"
    await router.close()
    fleet.table.close()
    fleet.registry.close()


async def test_a_caller_who_leaves_during_the_proof_of_a_link_ends_no_other_link(
    route: Route, endpoint: WorkerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = route(endpoint)
    await call(router)
    proving: list[Any] = []

    async def prove(link: Any, *_: object) -> None:
        proving.append(link)
        await asyncio.Future()

    monkeypatch.setattr(remote_frames.RemoteFrames, "prove", prove)
    bulk = asyncio.create_task(call(router, flags=Flag.BULK))
    await eventually(lambda: proving)
    bulk.cancel()
    await asyncio.wait({bulk})
    await proving[0].closed

    assert not replica(router).lost
    await call(router)


async def test_a_local_replica_is_preferred_while_it_is_free(route: Route, endpoint: WorkerEndpoint) -> None:
    here = replace(endpoint, node="head", incarnation="inc-1")
    router = route(endpoint, here)

    with router.lease(A) as first:
        assert not first._replica.is_remote
        first._replica.outstanding_bytes += 1000
        with router.lease(A) as second:
            assert second._replica.is_remote
        first._replica.outstanding_bytes -= 1000
    with router.lease(A) as third:
        assert not third._replica.is_remote


async def test_without_an_identity_a_remote_worker_is_unavailable(endpoint: WorkerEndpoint) -> None:
    router = Router(LIMITS)
    router.update(RoutingSnapshot((RouteEntry("a", "m", State.RUNNING, None, 32, (endpoint,)),)))

    with pytest.raises(Unavailable, match="no identity in the fleet"):
        await call(router)
    await router.close()


async def test_a_node_of_another_fleet_is_refused_on_both_ends(
    route: Route, endpoint: WorkerEndpoint, tmp_path: Path, worker: WorkerProcess
) -> None:
    stranger = FleetNodes(tmp_path).identity("head")

    with pytest.raises(Unavailable, match="certificate verify failed"):
        await call(route(endpoint, identity=stranger))
    await eventually(lambda: "a link from another host was refused" in worker.log)


async def test_a_client_that_trusts_the_fleet_but_is_not_of_it_is_refused_by_the_worker(
    route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes, tmp_path: Path
) -> None:
    other = FleetNodes(tmp_path)
    stranger = other.identity("head")
    nodes.renew("head")
    authorities = (nodes.folder("head") / "ca.pem").read_bytes()
    (other.folder("head") / "ca.pem").write_bytes(authorities)  # it believes us

    with pytest.raises(Unavailable, match="Failed to connect"):
        await call(route(endpoint, identity=stranger))


async def test_an_expired_certificate_is_refused(route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    expired = nodes.identity("late", valid_s=-5)
    expired.node = "head"

    with pytest.raises(Unavailable, match="Failed to connect"):
        await call(route(endpoint, identity=expired))


async def test_a_worker_of_another_node_is_refused(
    route: Route, endpoint: WorkerEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    router = route(replace(endpoint, node="gpu-2"))

    with pytest.raises(Unavailable, match="not for node 'gpu-2'"):
        await call(router)
    assert replica(router).lost
    assert "no link to a worker on another host" in caplog.text


async def test_a_link_to_a_node_that_is_removed_ends_and_is_not_made_again(
    route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_frames, "_TICK_S", 0.05)
    router = route(endpoint)
    await call(router)

    write_removed(nodes.folder("head"), {"gpu-1": time.time() + 1})
    try:
        await eventually(lambda: replica(router).lost)

        with pytest.raises(Unavailable, match="node 'gpu-1' was removed from the fleet"):
            await call(route(endpoint))
    finally:
        write_removed(nodes.folder("head"), {})
    assert len(vector(await call(route(endpoint)))) == 32


async def test_a_worker_of_another_incarnation_is_refused_and_given_up(route: Route, endpoint: WorkerEndpoint) -> None:
    router = route(replace(endpoint, incarnation="inc-2"))

    with pytest.raises(Unavailable, match="is incarnation inc-1, not inc-2"):
        await call(router)
    await replica(router)._reconnecting  # one more attempt, and then no more
    with pytest.raises(Unavailable, match="its worker is gone"):
        await call(router)


async def test_a_worker_that_was_cut_off_never_answers_for_its_successor(
    route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes, tmp_path: Path
) -> None:
    """The network heals, and the address of the successor, which has another model, leads to the old worker."""
    old = vector(await call(route(endpoint)))
    with worker_on(nodes, "gpu-1", build("bert", tmp_path / "other", seed=1), "inc-2") as successor:
        link, _ = await successor.watcher("ready")
        link.close()
        there = await endpoint_of(successor)
        async with TcpProxy(there.address) as network:
            router = route(replace(there, address=network.address))
            new = vector(await call(router))
            assert new != pytest.approx(old, abs=1e-3)

            network.target = endpoint.address
            network.cut()
            answers, refusals = list[list[float]](), list[str]()
            async with asyncio.timeout(60):
                while not any("its worker is gone" in reason for reason in refusals):
                    try:
                        answers.append(vector(await call(router)))
                    except Unavailable as error:
                        refusals.append(error.message)

            assert [answer for answer in answers if answer != pytest.approx(new, abs=1e-6)] == []
            # It is alive and can be reached: for the route of its own incarnation it answers, by the same network.
            assert vector(await call(route(replace(endpoint, address=network.address)))) == pytest.approx(old, abs=1e-6)


async def test_a_connection_that_is_cut_in_the_middle_of_a_reply_fails_its_calls_and_is_made_again(
    route: Route, endpoint: WorkerEndpoint, proxy: TcpProxy
) -> None:
    router = route(replace(endpoint, address=proxy.address))
    await call(router, flags=Flag.BULK)
    proxy.cut_after = proxy.answered_bytes + 100_000

    with pytest.raises(Unavailable, match="lost its worker"):
        await call(router, arrow(["fog"] * 3000), Method.EMBED_ARROW, flags=Flag.BULK | Flag.WAIT)
    proxy.cut_after = None

    await eventually(lambda: not replica(router).lost)
    assert len(vector(await call(router))) == 32


async def test_a_silent_network_is_noticed_by_the_probe_of_the_link(
    route: Route, endpoint: WorkerEndpoint, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROBE_AFTER_S": 0.1, "SILENCE_LIMIT_S": 2.0, "_TICK_S": 0.05}.items():
        monkeypatch.setattr(remote_frames, name, value)
    router = route(replace(endpoint, address=proxy.address))
    await call(router)
    answered = proxy.answered_bytes
    await eventually(lambda: proxy.answered_bytes > answered)  # idle, and alive: probes are answered
    assert not replica(router).lost

    proxy.freeze()
    waiting = asyncio.create_task(call(router))
    with pytest.raises(Unavailable, match="lost its worker"):
        await waiting

    assert replica(router).lost
    proxy.heal()
    await eventually(lambda: not replica(router).lost)  # the same incarnation: it takes calls again
    assert len(vector(await call(router))) == 32


async def test_a_peer_that_never_answers_the_handshake_is_given_up_in_time(route: Route) -> None:
    limits = LinkLimits(connect_timeout_s=0.5)
    with socket.create_server((HOST, 0)) as silent:  # the kernel accepts, and nothing reads
        address = f"{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"no answer within 0\.5 s"):
            await call(route(WorkerEndpoint("", "inc-1", "gpu-1", address), limits=limits))


async def test_links_are_replaced_before_they_expire_and_no_call_fails(
    route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_MIN_RENEWAL_S": 0.1, "_LEAVE_POLL_S": 0.05, "_RENEW_AT": 0.1}.items():
        monkeypatch.setattr(remote_links, name, value)
    identity = nodes.identity("short", valid_s=8)
    identity.node = "head"
    router = route(endpoint, identity=identity)
    assert len(vector(await call(router))) == 32
    first = replica(router)._links[0]
    nodes.renew("short")  # a new certificate lies there before the old one expires

    async with asyncio.timeout(60):
        while first.is_open:
            await call(router)

    assert replica(router)._links[0] is not first
    assert router.link_stats()[0]["losses"] == 0
    assert len(vector(await call(router))) == 32


async def test_a_worker_closes_a_link_whose_certificate_has_expired(
    route: Route, endpoint: WorkerEndpoint, nodes: FleetNodes, worker: WorkerProcess
) -> None:
    identity = nodes.identity("leaver", valid_s=5)  # and is not renewed, as of a node that was removed
    identity.node = "head"
    router = route(endpoint, identity=identity)
    await call(router)

    await eventually(lambda: replica(router).lost)

    await eventually(lambda: "its certificate has expired" in worker.log)
    with pytest.raises(Unavailable):
        await call(router)


async def test_a_retired_replica_finishes_its_calls(
    route: Route, endpoint: WorkerEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    router = route(endpoint)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(call(router, arrow(["fog"] * 3000), Method.EMBED_ARROW, flags=Flag.BULK | Flag.WAIT))
        await eventually(lambda: replica(router)._links[1] is not None)
        router.apply("a", None)

        assert table(await task).num_rows == 3000
    await eventually(lambda: all(each.is_closed for each in router._retired))
