"""What a real worker's port for other hosts answers to peers that keep the protocol, and to those that do not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.cluster import FleetNodes, endpoint_of, worker_on
from tests.support.polling import eventually
from tests.support.worker_process import WorkerLink, WorkerProcess, embed_request

from teimgr.control.launch.control_link import WorkerStatus
from teimgr.control.launch.remote_control import open_control_link
from teimgr.errors import Code, Unavailable
from teimgr.spec import WorkerEndpoint
from teimgr.wire.fleet_tls import FleetIdentity, write_removed
from teimgr.wire.frames import Method


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> FleetNodes:
    return FleetNodes(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def remote(nodes: FleetNodes, tiny: Path) -> Iterator[WorkerProcess]:
    with worker_on(nodes, "gpu-1", tiny, max_message_bytes=1 << 20) as one:
        yield one


@pytest.fixture
async def endpoint(remote: WorkerProcess) -> WorkerEndpoint:
    local, _ = await remote.watcher("ready")
    local.close()
    return await endpoint_of(remote)


async def connected(endpoint: WorkerEndpoint, identity: FleetIdentity) -> WorkerLink:
    host, _, port = endpoint.address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(WorkerLink, host, int(port), ssl=identity.client_context())
    return link


@pytest.fixture
async def node(endpoint: WorkerEndpoint, nodes: FleetNodes) -> AsyncIterator[WorkerLink]:
    """A connection of the node head that has not sent anything."""
    link = await connected(endpoint, nodes.identity("head"))
    yield link
    await ended(link)


async def ended(link: WorkerLink) -> None:
    link.abort()  # at once: the end of a TLS connection takes an answer
    await link.closed()


def hello(incarnation: object = "inc-1") -> bytes:
    return json.dumps({"incarnation": incarnation}).encode()


async def test_hello_is_answered_by_incarnation_and_validity(node: WorkerLink) -> None:
    answer = (await node.ask(Method.HELLO, hello())).json

    assert answer["incarnation"] == "inc-1"
    assert 71 * 3600 < answer["valid_s"] < 73 * 3600


async def test_a_call_before_hello_ends_the_link(node: WorkerLink, remote: WorkerProcess) -> None:
    node.post(Method.EMBED, embed_request("fog"))

    await node.closed()
    await eventually(lambda: "a frame before HELLO" in remote.log)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (hello("inc-2"), Code.BACKEND_UNAVAILABLE),
        (hello(None), Code.BACKEND_UNAVAILABLE),
        (b"[]", Code.INVALID_INPUT),
        (b"", Code.INVALID_INPUT),
    ],
)
async def test_a_wrong_hello_is_refused_by_name_and_ends_the_link(node: WorkerLink, payload: bytes, code: Code) -> None:
    assert (await node.ask(Method.HELLO, payload)).error.code is code
    await node.closed()


async def test_a_removed_node_loses_its_links_and_gets_no_new_one(
    node: WorkerLink, endpoint: WorkerEndpoint, remote: WorkerProcess, nodes: FleetNodes
) -> None:
    await node.ask(Method.HELLO, hello())
    write_removed(nodes.folder("gpu-1"), {"head": time.time() + 1})
    try:
        await node.closed()
        again = await connected(endpoint, FleetIdentity(nodes.folder("head"), "head"))
        await again.closed()
        await eventually(lambda: remote.log.count("node 'head' was removed from the fleet") == 2)
    finally:
        write_removed(nodes.folder("gpu-1"), {})


@pytest.mark.parametrize("method", [Method.WATCH, Method.DRAIN, Method.THREADS, Method.METRICS, Method.SHARE_PORTS])
async def test_a_node_may_not_control_a_worker(node: WorkerLink, method: Method) -> None:
    await node.ask(Method.HELLO, hello())

    assert (await node.ask(method, b"{}")).error.code is Code.FORBIDDEN
    assert (await node.ask(Method.PROBE)).reply == b""  # the self-test of a replica it may ask for
    assert len((await node.answer(node.embed())).vector) == 32


async def test_descriptors_are_passed_to_no_other_host(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    link = await connected(endpoint, nodes.identity(""))
    await link.ask(Method.HELLO, hello())

    assert (await link.ask(Method.SHARE_PORTS)).error.code is Code.FORBIDDEN
    await ended(link)


async def test_a_frame_over_the_limit_ends_the_link_as_on_the_socket(node: WorkerLink) -> None:
    await node.ask(Method.HELLO, hello())
    node.send_header_of(1 << 30)

    await node.closed()


async def test_a_client_that_sends_nothing_is_dropped_and_others_are_served_meanwhile(
    endpoint: WorkerEndpoint, nodes: FleetNodes, node: WorkerLink, remote: WorkerProcess
) -> None:
    host, _, port = endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:  # no handshake
        assert (await node.ask(Method.HELLO, hello())).json["incarnation"] == "inc-1"
        quiet = await connected(endpoint, nodes.identity("head"))  # a handshake, and no HELLO
        await quiet.closed()
        assert await asyncio.to_thread(silent.recv, 1) == b""
    assert "no HELLO within 5 s" in remote.log


async def test_the_daemon_watches_and_controls_a_worker_of_another_host(
    endpoint: WorkerEndpoint, nodes: FleetNodes
) -> None:
    statuses: asyncio.Queue[WorkerStatus] = asyncio.Queue()
    identity, lost = nodes.identity(""), asyncio.Event()

    link = await open_control_link(endpoint, identity, statuses.put_nowait, lost.set)
    status = await statuses.get()

    assert (status.state, status.incarnation, status.node) == ("ready", "inc-1", "gpu-1")
    assert json.loads(await link.call(Method.STATS, timeout_s=5))["calls"] == 0
    link.abort()
    await lost.wait()


async def test_a_node_cannot_watch_as_the_daemon_does(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    lost = asyncio.Event()

    await open_control_link(endpoint, nodes.identity("head"), lambda status: None, lost.set)

    await asyncio.wait_for(lost.wait(), 10)


async def test_control_of_another_incarnation_is_unavailable(endpoint: WorkerEndpoint, nodes: FleetNodes) -> None:
    wrong = WorkerEndpoint(endpoint.socket, "inc-2", endpoint.node, endpoint.address)

    with pytest.raises(Unavailable, match="is incarnation inc-1, not inc-2"):
        await open_control_link(wrong, nodes.identity(""), lambda status: None, lambda: None)
