"""Two hosts that share no network and no sockets: the second one runs in namespaces of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.end_to_end.rolling_load import SteadyLoad
from tests.support.cluster import NodeProcess, create_near_and_far, needs_ray
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray
from tests.support.hub_server import files_of, lay_out
from tests.support.models import build
from tests.support.network_namespace import NetworkNamespace, reason_for_none
from tests.support.polling import until

from teimgr.client import Client
from teimgr.control.launch.process_handle import look_up
from teimgr.errors import ModelLoadFailed, TeimgrError
from teimgr.models import hub

LIMIT_S = 90.0
COPIED = "somebody/minilm"
TEXTS = ["first", "a second text", "third"]
# Each run directory is seen by its own host alone, so a unix socket of the other one cannot be reached.
HIDE = "mount -t tmpfs -o mode=0700 none"
SEPARATE = f'{HIDE} "$1" && {HIDE} "$2" && shift 2 && exec "$@"'
pytestmark = [
    needs_ray,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none() or "allowed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("bert", tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def space() -> Iterator[NetworkNamespace]:
    with NetworkNamespace() as space:
        yield space
        pids = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True, check=True).stdout
        for pid in map(int, pids.split()):  # all in it are of this test
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def daemon(space: NetworkNamespace) -> Iterator[DaemonProcess]:
    cluster = cluster_table(space.outside, "one")
    running = WarmDaemonProcess(cluster=cluster, orphan_grace_secs=60, instance_host=space.outside)
    running.is_new = True  # its command starts the next one
    # As on a host whose hub's cache has the real MiniLM, by a name that no installed package has weights for.
    packaged = hub.find_packaged(MINILM)
    assert packaged is not None
    lay_out(running.folder / "hub", COPIED, files_of(packaged.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(running.folder / "hub"))
        try:
            with running:
                yield running
        finally:
            kill_ray(running.folder / "run")


@pytest.fixture(scope="module")
def node(daemon: DaemonProcess, space: NetworkNamespace) -> Iterator[NodeProcess]:
    joined = NodeProcess(daemon, "two", space.inside)
    joined.program = "teimgr"
    joined.environ = {"HF_HUB_CACHE": str(joined.state_dir / "hub")}
    run_dirs = [daemon.folder / "run", joined.state_dir / "run"]
    run_dirs[1].mkdir(parents=True)
    joined.within = [*space.within, "sh", "-c", SEPARATE, "sh", *map(str, run_dirs)]
    try:
        process = joined.start().process
        assert process is not None
        with daemon.client() as client:
            until(lambda: process.poll() is not None or "two" in hosts(client), "the second host", LIMIT_S)
        assert process.poll() is None, joined.log()
        yield joined
    finally:
        joined.close()


def hosts(client: Client) -> dict[str, str | None]:
    """Each host's problem."""
    return {each["name"]: each["problem"] for each in client.hosts()["hosts"]}


def worker(client: Client, name: str) -> tuple[str, int]:
    """Host and pid of the only worker."""
    (found,) = client.get(name).details["workers"]
    return found["node"], found["pid"]


def placed(client: Client, name: str) -> list[str]:
    """The hosts of the instance's live workers."""
    return sorted(each["node"] for each in client.get(name).details["workers"] if each["pid"])


def port_url(client: Client, daemon: DaemonProcess, name: str) -> str:
    """Where the instance answers on its port on the head."""
    return f"http://{daemon.settings['instance_host']}:{client.get(name).details['port']}/embed"


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_a_worker_of_the_other_host_answers_on_every_surface(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        assert hosts(client) == {"one": None, "two": None}
        create_near_and_far(client, model, LIMIT_S)
        assert worker(client, "far")[0] == "two"
        assert not list((node.state_dir / "run").iterdir())  # its sockets cannot be seen from here

        for texts in (TEXTS[:1], TEXTS):
            over_grpc = [client.embed(texts, instance=name) for name in ("near", "far")]
            over_arrow = [client.embed_arrow(texts, instance=name).vectors for name in ("near", "far")]
            assert over_grpc[0].tolist() == over_grpc[1].tolist()
            assert over_arrow[0].tolist() == over_arrow[1].tolist()
            answer = post(f"{daemon.api}/v1/embeddings", {"model": "far", "input": texts})
            over_rest = np.array([each["embedding"] for each in answer["data"]], np.float32)
            np.testing.assert_allclose(over_rest, over_grpc[1], atol=1e-6)

            over_port = [post(port_url(client, daemon, name), {"inputs": texts}) for name in ("near", "far")]
            assert over_port[0] == over_port[1]
            np.testing.assert_allclose(
                np.array(over_port[1], np.float32), over_grpc[1].reshape(len(texts), -1), atol=1e-6
            )

        with urllib.request.urlopen(f"{daemon.api}/instances/far/health?probe=true", timeout=LIMIT_S) as answer:
            (proof,) = json.load(answer)["proofs"]
        assert (proof["ok"], proof["problem"]) == (True, None)
        assert 'teimgr_worker_answers{answer="given"} 2' in client.metrics()


def test_a_host_without_the_hub_gets_a_model_from_the_head(daemon: DaemonProcess, node: NodeProcess) -> None:
    folder, cache = hub.folder_name(COPIED), node.state_dir / "hub"
    assert not (cache / folder).exists()
    with daemon.client() as client:
        client.create("packaged", MINILM, node="one", dtype="float32")
        client.create("copied", COPIED, node="two", dtype="float32")
        for name in ("packaged", "copied"):
            client.wait_until_running(name, deadline_s=LIMIT_S)
        assert worker(client, "copied")[0] == "two"

        vectors = [client.embed(TEXTS, instance=name) for name in ("packaged", "copied")]
        assert vectors[0].shape == (len(TEXTS), 384)
        assert vectors[0].tolist() == vectors[1].tolist()
        assert files_of(cache / folder / "snapshots") == files_of(daemon.folder / "hub" / folder / "snapshots")

        client.create("absent", "somebody/else", node="two")
        with pytest.raises(ModelLoadFailed, match="no other host of the fleet has model 'somebody/else'"):
            client.wait_until_running("absent", deadline_s=LIMIT_S)
        for name in ("packaged", "copied", "absent"):
            client.delete(name)


def test_a_killed_worker_of_the_other_host_is_replaced(daemon: DaemonProcess, node: NodeProcess, model: str) -> None:
    with daemon.client() as client:
        _, pid = worker(client, "far")
        os.kill(pid, signal.SIGKILL)
        until(lambda: worker(client, "far")[1] not in (None, pid), "the next worker", LIMIT_S)
        client.wait_until_running("far", deadline_s=LIMIT_S)
        client.embed("answered", instance="far")
        assert worker(client, "far")[0] == "two"
        until(lambda: answers(port_url(client, daemon, "far")), "the port on the head", LIMIT_S)


def answers(url: str) -> bool:
    """Whether the port answers; it is closed while there is no worker."""
    try:
        return bool(post(url, {"inputs": "answered"}))
    except ConnectionError:  # while it answered
        return False
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ConnectionError), error
        return False


def test_the_port_answers_while_its_worker_moves_to_the_head_and_back(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        url = port_url(client, daemon, "far")
        is_over, failures, calls = threading.Event(), list[str](), 0

        def call() -> None:
            nonlocal calls
            while not is_over.is_set():
                try:
                    post(url, {"inputs": TEXTS})
                    calls += 1
                except OSError as error:
                    failures.append(str(error))

        calling = threading.Thread(target=call)
        calling.start()
        try:
            for host in ("one", "two"):
                client.update("far", node=host)
                until(lambda host=host: placed(client, "far") == [host], f"the move to {host}", LIMIT_S)
                known = calls
                until(lambda known=known: calls > known + 20, "answers after the move", LIMIT_S)
        finally:
            is_over.set()
            calling.join()

        assert failures == []
        print(f"{calls} calls over the port while its worker moved to the head and back")


def test_the_next_daemon_takes_over_the_worker_of_the_other_host(daemon: DaemonProcess, node: NodeProcess) -> None:
    with daemon.client() as client:
        before = worker(client, "far")

    daemon.kill()
    daemon.start()

    with daemon.client() as client:
        client.wait_until_running("far", deadline_s=LIMIT_S)
        assert worker(client, "far") == before
        client.embed("answered", instance="far")
        url = port_url(client, daemon, "far")
        until(lambda: answers(url), "the port on the head", LIMIT_S)
        client.delete("far")
        assert not answers(url)
        client.delete("near")
        until(lambda: not look_up(before[1]), "the worker's end", LIMIT_S)


def test_a_restart_in_place_keeps_workers_and_refuses_no_call(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        create_near_and_far(client, model, LIMIT_S)
        before = {name: worker(client, name) for name in ("near", "far")}
        until(lambda: answers(port_url(client, daemon, "far")), "the port on the head", LIMIT_S)
        host, port = str(daemon.settings["instance_host"]), client.get("far").details["port"]
        first = client.daemon()["pid"]

        kept = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        kept.request("GET", "/health")
        kept.getresponse().read()
        with closing(kept), SteadyLoad(daemon, "far", port, host=host) as calls:
            second = client.restart_daemon()["pid"]
            until(lambda: client.daemon()["pid"] == second, "the next daemon", LIMIT_S)
            kept.request("GET", "/health")
            assert kept.getresponse().status == 200
            calls.progress(50)

        assert second != first
        assert calls.failures == {}
        assert {name: worker(client, name) for name in ("near", "far")} == before
        assert [client.get(name).restarts for name in ("near", "far")] == [0, 0]
        assert hosts(client) == {"one": None, "two": None}
        for name in ("near", "far"):
            client.delete(name)


def test_the_other_host_leaves_after_its_workers_were_moved(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    with daemon.client() as client:
        client.create("free", model, replicas=2, dtype="float32")
        client.wait_until_running("free", deadline_s=LIMIT_S)

        until(lambda: placed(client, "free") == ["one", "two"], "a replica on each", LIMIT_S)

        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)

        assert node.process.wait(LIMIT_S) == 0
        assert placed(client, "free") == ["one", "one"]
        client.embed("answered", instance="free")
        until(lambda: hosts(client) == {"one": None}, "the host's absence", LIMIT_S)
        client.delete("free")


def test_a_removed_host_loses_its_workers_and_is_not_admitted_again(
    daemon: DaemonProcess, node: NodeProcess, model: str
) -> None:
    process = node.start().process  # it has a certificate, and needs no token
    assert process is not None
    with daemon.client() as client:
        until(lambda: hosts(client) == {"one": None, "two": None}, "the host's return", LIMIT_S)
        client.create("moved", model, replicas=2, dtype="float32")
        client.wait_until_running("moved", deadline_s=LIMIT_S)
        until(lambda: placed(client, "moved") == ["one", "two"], "a replica on each", LIMIT_S)

        client.create("pinned", model, node="two", dtype="float32")
        client.wait_until_running("pinned", deadline_s=LIMIT_S)
        client.embed("answered", instance="pinned")
        _, pinned = worker(client, "pinned")

        client.remove_host("two")

        until(lambda: placed(client, "moved") == ["one", "one"], "both on the first host", LIMIT_S)
        assert hosts(client)["two"] == "it was removed from the fleet"
        client.embed("answered", instance="moved")
        until(lambda: not look_up(pinned), "the end of the worker that cannot run elsewhere", LIMIT_S)
        until(lambda: "it was removed from the fleet" in str(client.get("pinned").reason), "the reason", LIMIT_S)
        with pytest.raises(TeimgrError, match=r"no host for 'pinned' .*two: it was removed from the fleet"):
            client.embed("to a host that does not count any more", instance="pinned")
        *_, last = client.events(["pinned"], ["no_host"], last=1, follow=False)
        assert (last.event, last.nodes) == ("no_host", ["two"])
        client.delete("pinned")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0

    refused = node.start().process
    assert refused is not None
    assert refused.wait(LIMIT_S) == 1
    assert "Node 'two' is not in the fleet" in node.log()
