"""Quotas and use of keys on two hosts, each with its muxes: the other one computes the calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.end_to_end.test_tenants import ADMIN, embed, embed_by_grpc, key_of, usage
from tests.support.cluster import NODE_ADDRESS, NodeProcess, needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, DaemonProcess, WarmDaemonProcess, cluster_table, kill_ray
from tests.support.models import build_static
from tests.support.polling import until

from teimgr.wire.tenants.table import LEASE_S

LIMIT_S = 60.0
DAILY = 601
RATE, BURST = 2000, 4000
KEYS = {
    "free": {},
    "daily": {"tokens_per_day": DAILY, "concurrent_tokens": 100_000},
    "fleet": {"tokens_per_day": DAILY},
    "ample": {"tokens_per_day": 10**6},
    "rate": {"tokens_per_second": RATE, "burst_tokens": BURST},
}
pytestmark = [needs_ray, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With a joined host "two" and the instance "a" on it."""
    keys: list[dict[str, object]] = [{"name": "admin", "key": ADMIN, "rights": ["admin", "read"]}]
    keys += [{"name": name, "key": key_of(name), "rights": ["inference"], **more} for name, more in KEYS.items()]
    auth = {"enabled": True, "providers": ["api_keys"], "api_keys": keys}
    cluster = cluster_table(HEAD_ADDRESS, "one") | {"mux_per_host": True}
    running = WarmDaemonProcess(
        cluster=cluster, orphan_grace_secs=60, grpc_host=HEAD_ADDRESS, mux_processes=2, auth=auth
    )
    try:
        with running, running.client(api_key=ADMIN) as client:
            node = NodeProcess(running, "two", NODE_ADDRESS)
            node.api_key = ADMIN
            try:
                node.start()
                muxes = lambda: {each["name"]: each["mux"] for each in client.hosts()["hosts"]}  # noqa: E731
                until(lambda: muxes().get("two") == "serving", node.log(), LIMIT_S)
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
            return cost if embed_by_grpc(daemon, "daily", text, HEAD_ADDRESS)[0] == "OK" else 0
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


def test_muxes_of_both_hosts_admit_a_day_together_and_count_it(daemon: DaemonProcess) -> None:
    text = "river " * 6
    cost = embed(daemon, "free", text)[2]["usage"]["total_tokens"]
    found: Counter[tuple[str, str]] = Counter()

    def call(number: int) -> None:
        address = (HEAD_ADDRESS, NODE_ADDRESS)[number % 2]
        status, headers = embed_by_grpc(daemon, "fleet", text, address)
        found[address, status] += 1
        if status != "OK":
            assert headers["x-teimgr-code"] == "DAILY_TOKENS_EXCEEDED"
            assert int(headers["grpc-retry-pushback-ms"]) > 0

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(call, range(256)))

    answered = found[HEAD_ADDRESS, "OK"] + found[NODE_ADDRESS, "OK"]
    assert min(found[HEAD_ADDRESS, "OK"], found[NODE_ADDRESS, "OK"]) > 0
    assert 0.8 * DAILY < answered * cost <= DAILY
    until(lambda: usage(daemon)[("fleet",)]["calls"] == answered, "the counts of the other host's mux", LIMIT_S)
    row = usage(daemon)[("fleet",)]
    assert (row["tokens"], row["refused"]) == (answered * cost, 256 - answered)


def test_a_rate_is_that_of_both_hosts_together(daemon: DaemonProcess) -> None:
    text = "river " * 100
    cost = embed(daemon, "free", text)[2]["usage"]["total_tokens"]
    stop_at, begin = time.monotonic() + 6, time.monotonic()

    def client(number: int) -> tuple[int, int]:
        """What it was admitted, and how often refused, while it calls without a pause."""
        admitted = refused = 0
        while time.monotonic() < stop_at:
            status, _ = embed_by_grpc(daemon, "rate", text, (HEAD_ADDRESS, NODE_ADDRESS)[number % 2])
            admitted, refused = (admitted + cost, refused) if status == "OK" else (admitted, refused + 1)
        return admitted, refused

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(client, range(8)))

    took_s = time.monotonic() - begin
    admitted = sum(tokens for tokens, _ in found)
    assert all(sum(tokens for tokens, _ in found[host::2]) for host in (0, 1))
    assert sum(refused for _, refused in found) > 0
    assert admitted <= BURST + RATE * (took_s + LEASE_S)
    assert admitted >= 0.8 * (BURST + RATE * 6)


def test_without_the_daemon_what_is_leased_ends_and_the_next_one_leases_again(daemon: DaemonProcess) -> None:
    outcome = lambda key: embed_by_grpc(daemon, key, "river", NODE_ADDRESS)  # noqa: E731
    assert outcome("ample")[0] == "OK"

    daemon.kill()

    until(lambda: outcome("ample")[0] != "OK", "the end of what is leased", LIMIT_S)
    status, trailers = outcome("ample")
    assert (status, trailers["x-teimgr-code"]) == ("UNAVAILABLE", "BACKEND_UNAVAILABLE")
    assert int(trailers["grpc-retry-pushback-ms"]) > 0
    assert outcome("free")[0] == "OK"
    daemon.start()
    until(lambda: outcome("ample")[0] == "OK", "the next daemon", LIMIT_S)
