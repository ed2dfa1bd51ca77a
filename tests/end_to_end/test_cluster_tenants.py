"""Quotas and use of keys on two hosts: the daemon's host admits the calls, the other one computes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.end_to_end.test_tenants import ADMIN, embed, embed_by_grpc, key_of, usage
from tests.support.cluster import NODE_ADDRESS, NodeProcess, needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray
from tests.support.models import build_static
from tests.support.polling import until

LIMIT_S = 60.0
DAILY = 601
KEYS = {"free": {}, "daily": {"tokens_per_day": DAILY, "concurrent_tokens": 100_000}}
pytestmark = [needs_ray, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With a joined host "two" and the instance "a" on it."""
    keys: list[dict[str, object]] = [{"name": "admin", "key": ADMIN, "rights": ["admin", "read"]}]
    keys += [{"name": name, "key": key_of(name), "rights": ["inference"], **more} for name, more in KEYS.items()]
    auth = {"enabled": True, "providers": ["api_keys"], "api_keys": keys}
    running = WarmDaemonProcess(
        cluster=cluster_table(HEAD_ADDRESS, "one"), orphan_grace_secs=60, mux_processes=2, auth=auth
    )
    try:
        with running, running.client(api_key=ADMIN) as client:
            node = NodeProcess(running, "two", NODE_ADDRESS)
            node.api_key = ADMIN
            try:
                node.start()
                until(lambda: "two" in {each["name"] for each in client.hosts()["hosts"]}, node.log(), LIMIT_S)
                model = build_static(tmp_path_factory.mktemp("models") / "model")
                client.create("a", str(model), node="two")
                client.wait_until_running("a", deadline_s=LIMIT_S)
                yield running
            finally:
                node.close()
    finally:
        kill_ray(running.folder / "run")


def test_calls_that_another_host_computes_are_charged_and_counted_exactly_once(daemon: DaemonProcess) -> None:
    text = "river " * 6
    cost = embed(daemon, "free", text)[2]["usage"]["total_tokens"]

    def call(number: int) -> int:
        if number % 2:
            return cost if embed_by_grpc(daemon, "daily", text)[0] == "OK" else 0
        status, headers, body = embed(daemon, "daily", text)
        assert status == 200 or headers["x-teimgr-code"] == "DAILY_TOKENS_EXCEEDED"
        return body["usage"]["total_tokens"] if status == 200 else 0

    with ThreadPoolExecutor(64) as pool:
        spent = list(pool.map(call, range(256)))

    assert sum(spent) == DAILY // cost * cost
    rows = usage(daemon, "key,instance")
    answered = DAILY // cost
    row = rows["daily", "a"]
    assert (row["tokens"], row["texts"], row["calls"], row["refused"]) == (
        *(answered * cost, answered, answered),
        256 - answered,
    )
    assert rows["free", "a"]["tokens"] == cost
