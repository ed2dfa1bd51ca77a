"""Two hosts in network namespaces, whose link is cut and healed."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import NodeProcess, needs_ray
from tests.support.daemon_process import WarmDaemonProcess, cluster_table, kill_ray
from tests.support.models import build
from tests.support.network_namespace import NetworkNamespace, reason_for_none
from tests.support.polling import until

from teimgr.control.launch.process_handle import look_up

LIMIT_S = 90.0
pytestmark = [
    needs_ray,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none() or "allowed"),
]


def test_the_workers_of_a_host_that_is_cut_off_run_elsewhere_and_the_host_comes_back(tmp_path: Path) -> None:
    model = str(build("bert", tmp_path / "model"))
    with NetworkNamespace() as space:
        daemon = WarmDaemonProcess(cluster=cluster_table(space.outside, "one"), orphan_grace_secs=60)
        node = NodeProcess(daemon, "two", space.inside)
        node.program = "teimgr"  # its fork server, and so its workers, are in the namespace
        node.within = space.within
        try:
            with daemon, daemon.client() as client:
                node.start()

                def takes_workers() -> set[str]:
                    return {each["name"] for each in client.hosts()["hosts"] if not each["problem"]}

                until(lambda: takes_workers() == {"one", "two"}, f"the second host: {node.log()}", LIMIT_S)
                client.create("pair", model, replicas=2, dtype="float32")
                client.wait_until_running("pair", deadline_s=LIMIT_S)

                def placed() -> dict[Any, Any]:
                    workers = client.get("pair").details["workers"]
                    return {(each["replica"], each["node"]): each["pid"] for each in workers if each["pid"]}

                before = until(lambda: len(placed()) == 2 and placed(), "two workers", LIMIT_S)
                assert {host for _, host in before} == {"one", "two"}
                (lost,) = [pid for (_, host), pid in before.items() if host == "two"]

                space.cut()
                began = time.monotonic()
                until(lambda: [host for _, host in placed()] == ["one", "one"], "both on the first host", LIMIT_S)
                print(f"on the other host {time.monotonic() - began:.1f} s after the cut")
                assert [each["name"] for each in client.hosts()["hosts"]] == ["one"]
                client.embed("answered", instance="pair")

                space.heal()
                until(lambda: not look_up(lost), "the end of the worker that was cut off", LIMIT_S)
                print(f"the cut-off worker ended {time.monotonic() - began:.1f} s after the cut")
                until(lambda: takes_workers() == {"one", "two"}, "the host's return", LIMIT_S)
                client.create("later", model, node="two", dtype="float32")
                client.wait_until_running("later", deadline_s=LIMIT_S)
                body = json.dumps({"inputs": "over its port on the head"}).encode()
                url = f"http://127.0.0.1:{client.get('later').details['port']}/embed"
                request = urllib.request.Request(url, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    assert len(json.load(answer)) == 1
                client.delete("later")
        finally:
            node.close()
            kill_ray(daemon.folder / "run")
