"""A fleet of two hosts on one machine: a daemon and a joined host on two loopback addresses, with real workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.cluster import HEAD_ADDRESS, NODE_ADDRESS, kill_ray, needs_ray
from tests.support.cluster_node import NodeProcess
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, free_ports
from tests.support.models import build
from tests.support.polling import until

from teimgr.client import Client
from teimgr.errors import NoHost

LIMIT_S = 60.0
pytestmark = [needs_ray, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    (port,) = free_ports(1)
    cluster = {"address": f"{HEAD_ADDRESS}:{port}", "node": "one", "labels": {"zone": "a"}}
    running = WarmDaemonProcess(cluster=cluster, orphan_grace_secs=60)
    try:
        with running:
            yield running
    finally:
        kill_ray(running.folder / "run")


@pytest.fixture(scope="module")
def node(daemon: DaemonProcess) -> Iterator[NodeProcess]:
    head, token = daemon.settings["cluster"]["address"], daemon.folder / "ray-token"
    joined = NodeProcess(daemon.folder, head, token, "two", NODE_ADDRESS).start("--label", "zone=b")
    with daemon.client() as client:
        until(lambda: "two" in hosts(client), f"the second host: {joined.log()}", LIMIT_S)
        yield joined
    joined.close()


def hosts(client: Client) -> dict[str, Any]:
    return {each["name"]: each for each in client.hosts()["hosts"]}


def workers(client: Client, name: str) -> list[tuple[str | None, int | None]]:
    """Host and pid of each worker."""
    return [(each["node"], each["pid"]) for each in client.get(name).details["workers"]]


def teimgr(daemon: DaemonProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "teimgr", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def test_an_instance_runs_on_the_host_that_it_asks_for_and_answers(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        assert {name: (each["problem"], each["labels"]) for name, each in hosts(client).items()} == {
            "one": (None, {"zone": "a"}),
            "two": (None, {"zone": "b"}),
        }
        client.create("named", model, node="two", dtype="float32")
        client.create("labelled", model, labels={"zone": "a"}, dtype="float32")
        for name in ("named", "labelled"):
            client.wait_until_running(name, deadline_s=LIMIT_S)

        assert [host for host, _ in workers(client, "named")] == ["two"]
        assert [host for host, _ in workers(client, "labelled")] == ["one"]
        both = [client.embed("the same text", instance=name).tolist() for name in ("named", "labelled")]
        assert both[0] == both[1]
        *_, last = client.events(["named"], last=1, follow=False)
        assert (last.event, last.nodes) == ("running", ["two"])
        with pytest.raises(NoHost, match=r"no host for 'nowhere' .*it lacks zone = 'c'"):
            client.create("nowhere", model, labels={"zone": "c"})
        client.delete("named")
        client.delete("labelled")


def test_replicas_are_on_different_hosts_first(daemon: DaemonProcess, node: NodeProcess, model: str) -> None:
    with daemon.client() as client:
        client.create("pair", model, replicas=2, dtype="float32")
        client.wait_until_running("pair", deadline_s=LIMIT_S)
        until(lambda: {host for host, pid in workers(client, "pair") if pid} == {"one", "two"}, "a replica on each")
        client.delete("pair")


def test_the_next_daemon_takes_over_workers_of_all_hosts(daemon: DaemonProcess, node: NodeProcess, model: str) -> None:
    with daemon.client() as client:
        for name, host in (("near", "one"), ("far", "two")):
            client.create(name, model, node=host, dtype="float32")
            client.wait_until_running(name, deadline_s=LIMIT_S)
        before = {name: workers(client, name) for name in ("near", "far")}

    daemon.kill()
    daemon.start()

    with daemon.client() as client:
        for name in before:
            client.wait_until_running(name, deadline_s=LIMIT_S)
        assert {name: workers(client, name) for name in before} == before
        for name in before:
            client.embed("answered", instance=name)
            client.delete(name)


def test_a_killed_node_agent_leaves_its_workers_to_the_next(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        client.create("kept", model, node="two", dtype="float32")
        client.wait_until_running("kept", deadline_s=LIMIT_S)
        before = workers(client, "kept")

        node.kill()
        client.embed("answered without an agent", instance="kept")
        node.start("--label", "zone=b")
        until(lambda: "host joins" in node.log().rpartition("killing the nursery")[2], "the next agent", LIMIT_S)
        client.create("later", model, node="two", dtype="float32")
        client.wait_until_running("later", deadline_s=LIMIT_S)

        assert workers(client, "kept") == before
        client.delete("kept")
        client.delete("later")


def test_the_status_lists_hosts_and_a_host_that_leaves_is_drained_first(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        client.create("moved", model, dtype="float32")
        client.wait_until_running("moved", deadline_s=LIMIT_S)
        client.create("free", model, dtype="float32", replicas=2)
        client.wait_until_running("free", deadline_s=LIMIT_S)
        until(lambda: {host for host, pid in workers(client, "free") if pid} == {"one", "two"}, "a replica on each")
        table = teimgr(daemon, "cluster", "status", "--url", daemon.api)
        assert "one" in table
        assert "two" in table
        found = json.loads(teimgr(daemon, "cluster", "status", "--json", "--url", daemon.api))
        assert {each["name"]: each["problem"] for each in found["hosts"]} == {"one": None, "two": None}
        assert sum(each["workers"] for each in found["hosts"]) == 3

        teimgr(daemon, "node", "leave", "--state-dir", str(node.state_dir))

        assert node.process is not None
        assert node.process.wait(LIMIT_S) == 0
        assert {host for name in ("moved", "free") for host, _ in workers(client, name)} == {"one"}
        until(lambda: "two" not in hosts(client), "the host's absence", LIMIT_S)
        client.embed("answered", instance="free")
