"""A mux on every host: on two loopback addresses of one machine, with a real daemon, Ray, workers and clients."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.support.cluster import NODE_ADDRESS, NodeProcess, create_near_and_far, needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray
from tests.support.models import build
from tests.support.polling import until

from teimgr.control.launch.process_handle import look_up
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2_grpc

LIMIT_S = 60.0
pytestmark = [needs_ray, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    cluster = cluster_table(HEAD_ADDRESS, "one") | {"mux_per_host": True}
    running = WarmDaemonProcess(cluster=cluster, orphan_grace_secs=60, grpc_host=HEAD_ADDRESS)
    try:
        with running:
            yield running
    finally:
        kill_ray(running.folder / "run")


@pytest.fixture(scope="module")
def node(daemon: DaemonProcess) -> Iterator[NodeProcess]:
    joined = NodeProcess(daemon, "two", NODE_ADDRESS).start()
    until(lambda: mux_state(daemon, "two") == "serving", f"the mux of the second host: {joined.log()}", LIMIT_S)
    yield joined
    joined.close()


def mux_state(daemon: DaemonProcess, host: str) -> str | None:
    with daemon.client() as client:
        found: dict[str, Any] = {each["name"]: each["mux"] for each in client.hosts()["hosts"]}
    return found.get(host)


def metrics(daemon: DaemonProcess) -> str:
    with urllib.request.urlopen(f"{daemon.api}/metrics", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def embedded(daemon: DaemonProcess, address: str, instance: str) -> list[float]:
    """A vector from the mux at an address, which may be starting."""
    request = mux_pb2.EmbedRequest(
        target=mux_pb2.Target(instance_name=instance), request=tei_pb2.EmbedRequest(inputs="the same text")
    )
    with grpc.insecure_channel(f"{address}:{daemon.settings['grpc_port']}") as channel:
        stub = multiplexer_pb2_grpc.TeiMultiplexerStub(channel)  # type: ignore[no-untyped-call]
        return list(stub.Embed(request, wait_for_ready=True, timeout=LIMIT_S).embeddings)


def mux_pid(node: NodeProcess) -> int:
    """Of the live mux on the second host."""
    (path,) = (node.state_dir / "run").glob("mux-0-*.run")
    return int(re.findall(r'"pid": (\d+)', path.read_text())[0])


def test_each_host_answers_on_its_own_mux_by_workers_of_both(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        create_near_and_far(client, model, LIMIT_S)

    vectors = [embedded(daemon, address, name) for address in (HEAD_ADDRESS, NODE_ADDRESS) for name in ("near", "far")]

    assert len(vectors[0]) == 32
    assert vectors.count(vectors[0]) == 4
    assert mux_state(daemon, "one") == "serving"
    until(lambda: 'teimgr_mux_resident_bytes{mux="two/mux-0"}' in metrics(daemon), "its metrics", LIMIT_S)


def test_a_mux_that_is_killed_is_started_again_on_its_host(daemon: DaemonProcess, node: NodeProcess) -> None:
    pid = mux_pid(node)

    os.kill(pid, signal.SIGKILL)

    until(lambda: not look_up(pid), "its end")
    assert embedded(daemon, NODE_ADDRESS, "near")
    until(lambda: mux_state(daemon, "two") == "serving", "its successor", LIMIT_S)
    assert mux_pid(node) != pid
    (report,) = (daemon.folder / "logs" / "crashes").glob("_mux-two-0-*.json")
    assert '"signal": "SIGKILL"' in report.read_text()


def test_it_serves_without_its_agent_and_the_next_daemon_adopts_it(daemon: DaemonProcess, node: NodeProcess) -> None:
    pid = mux_pid(node)
    node.kill()
    daemon.kill()
    assert embedded(daemon, NODE_ADDRESS, "far")

    node.start()
    daemon.start()

    until(lambda: mux_state(daemon, "two") == "serving", "its adoption", LIMIT_S)
    assert mux_pid(node) == pid
    assert embedded(daemon, NODE_ADDRESS, "far")


def test_a_host_that_leaves_has_its_mux_drained(daemon: DaemonProcess, node: NodeProcess) -> None:
    pid = mux_pid(node)
    with daemon.client() as client:
        client.delete("far")
    assert node.process is not None

    node.process.send_signal(signal.SIGTERM)

    assert node.process.wait(LIMIT_S) == 0
    assert not look_up(pid)
    until(lambda: mux_state(daemon, "two") is None, "the host's absence", LIMIT_S)
    until(lambda: "two/mux-0" not in metrics(daemon), "the end of its metrics", LIMIT_S)
    assert '"mux stopped"' in next((node.state_dir / "logs").glob("_mux-0.log")).read_text()
