"""A fleet of two hosts on one machine: a daemon and a joined host on two loopback addresses, with real workers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.support.cluster import NODE_ADDRESS, NodeProcess, create_near_and_far, needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray
from tests.support.models import build
from tests.support.polling import until

from teimgr.client import Client
from teimgr.errors import NoHost, ValidationError

LIMIT_S = 60.0
pytestmark = [needs_ray, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    cluster = cluster_table(HEAD_ADDRESS, "one", labels={"zone": "a"})
    running = WarmDaemonProcess(cluster=cluster, orphan_grace_secs=60)
    try:
        with running:
            yield running
    finally:
        kill_ray(running.folder / "run")


@pytest.fixture(scope="module")
def node(daemon: DaemonProcess) -> Iterator[NodeProcess]:
    joined = NodeProcess(daemon, "two", NODE_ADDRESS).start("--label", "zone=b")
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


def requests_of(daemon: DaemonProcess) -> dict[str, str]:
    """The host of each instance whose worker counts requests, by the page of metrics."""
    with urllib.request.urlopen(f"{daemon.api}/metrics") as reply:
        text = reply.read().decode()
    found = re.findall(r"^te_request_count\{(.*?)\}", text, re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="(.*?)"', each)) for each in found]
    return {each["instance"]: each["node"] for each in labels}


def doctor(*arguments: str) -> dict[str, list[str]]:
    """The findings of `teimgr doctor` by check, up to their first colon; whether it fails depends on the machine."""
    command = [sys.executable, "-m", "teimgr", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    found: dict[str, list[str]] = {}
    for each in json.loads(done.stdout):
        found.setdefault(each["check"], []).append(each["text"].partition(":")[0])
    return found


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
        page = requests_of(daemon)
        assert page["named"] == "two"
        assert page["labelled"] == "one"
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


def test_logs_of_workers_on_all_hosts_are_read_and_followed(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    def run_on(host: str) -> None:
        client.create("logged", model, node=host, dtype="float32")
        client.wait_until_running("logged", deadline_s=LIMIT_S)

    def ready_on() -> list[str]:
        lines = [json.loads(each) for each in client.logs("logged", level="info").lines if each.startswith("{")]
        assert [each["ts"] for each in lines] == sorted(each["ts"] for each in lines)
        return [each["node"] for each in lines if each["message"] == "worker ready"]

    with daemon.client() as client:
        for host in ("two", "one"):  # one after the other: hosts on one machine share the instance's port
            run_on(host)
            client.delete("logged")
        assert ready_on() == ["two", "one"]
        whole = client.logs("logged")
        assert client.logs("logged", start=-3).lines == whole.lines[-3:]
        assert teimgr(daemon, "logs", "logged", "--url", daemon.api).count("worker ready") == 2

        follower: Any = client.follow_logs("logged", start=0)
        with closing(follower):
            assert [next(follower) for _ in whole.lines] == list(whole.lines)
            for host in ("two", "one"):
                run_on(host)
                found = next(line for line in follower if '"worker ready"' in line)
                assert json.loads(found)["node"] == host
                client.delete("logged")


def test_a_worker_of_another_host_that_is_over_its_memory_is_replaced(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        client.create("large", model, node="two", dtype="float32", max_rss_mib=16)
        client.wait_until_running("large", deadline_s=LIMIT_S)

        def told() -> list[str]:
            return [each.event for each in client.events(["large"], last=50, follow=False)]

        until(lambda: "over_memory" in told(), "the event")
        client.delete("large")


def test_a_trial_of_a_model_runs_on_the_daemons_host_and_no_other_can_be_asked_for(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        client.add_model(model)

        found = client.try_model(model, dtype="float32")

        assert (found["status"], found["verification"]["dimension"]) == ("verified", 32)
        assert {name: each["workers"] for name, each in hosts(client).items()} == {"one": 0, "two": 0}
        with pytest.raises(ValidationError, match="node"):
            client.try_model(model, node="two")  # type: ignore[call-arg]


def test_the_doctor_reports_on_all_hosts_and_on_a_joined_one(daemon: DaemonProcess, node: NodeProcess) -> None:
    with daemon.client() as client:
        for each in hosts(client).values():
            assert each["disk_free_bytes"] > 0
            assert abs(each["clock_ahead_s"]) < 5
    assert doctor("-c", str(daemon.folder / "teimgr.toml"))["hosts"] == ["one (127.0.0.2)", "two (127.0.0.3)"]
    assert doctor("--node", str(node.state_dir))["node"] == ["two has joined, with 0 workers"]


def test_the_next_daemon_takes_over_workers_of_all_hosts(daemon: DaemonProcess, node: NodeProcess, model: str) -> None:
    with daemon.client() as client:
        create_near_and_far(client, model, LIMIT_S)
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


def test_the_status_lists_the_hosts_and_one_leaves_on_request(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    """Where workers move when a host leaves is in `test_cluster_remote.py`: here both hosts have the same ports."""
    with daemon.client() as client:
        client.create("stays", model, node="one", dtype="float32")
        client.wait_until_running("stays", deadline_s=LIMIT_S)
        table = teimgr(daemon, "cluster", "status", "--url", daemon.api)
        assert "one" in table
        assert "two" in table
        found = json.loads(teimgr(daemon, "cluster", "status", "--json", "--url", daemon.api))
        assert {each["name"]: (each["problem"], each["workers"]) for each in found["hosts"]} == {
            "one": (None, 1),
            "two": (None, 0),
        }
        assert teimgr(daemon, "cluster", "token", "--url", daemon.api).startswith("teimgr1.")

        teimgr(daemon, "node", "leave", "--state-dir", str(node.state_dir))

        assert node.process is not None
        assert node.process.wait(LIMIT_S) == 0
        until(lambda: "two" not in hosts(client), "the host's absence", LIMIT_S)
        teimgr(daemon, "cluster", "remove", "two", "--url", daemon.api)
        client.embed("answered", instance="stays")
