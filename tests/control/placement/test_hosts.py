"""Which hosts of a cluster an instance may use, and which gets its next worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teimgr.control.placement.decision import Others, cpu_host, place, replica_count
from teimgr.control.placement.gpus import Gpu, Inventory
from teimgr.control.placement.hosts import Host, allows, best_host, candidates
from teimgr.errors import InvalidGpuId, NoHost, ValidationError
from teimgr.spec import InstanceSpec

GIB = 2**30
ONE, TWO = Host(name="one", cores=4, labels={"zone": "a"}), Host(name="two", cores=2, labels={"zone": "b"})
GONE = Host(name="gone", problem="it is leaving")
HOSTS = (ONE, TWO, GONE)
CARDS = Inventory(
    tuple(
        Gpu(index, f"{host}-{index}", free * GIB, node=host)
        for host, index, free in (("one", 0, 80), ("one", 1, 70), ("two", 0, 20))
    ),
    hosts=HOSTS,
)


def spec(**values: object) -> InstanceSpec:
    return InstanceSpec(name="a", model_id="m", **values)  # type: ignore[arg-type]


def test_node_and_labels_choose_the_hosts_and_problems_exclude_them() -> None:
    assert candidates(spec(), HOSTS) == [ONE, TWO]
    assert candidates(spec(node="two"), HOSTS) == [TWO]
    assert candidates(spec(labels={"zone": "a"}), HOSTS) == [ONE]


def test_what_no_host_fits_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(NoHost) as caught:
        candidates(spec(labels={"zone": "c"}), HOSTS)
    assert caught.value.message == (
        "no host for 'a' (one: it lacks zone = 'c'; two: it lacks zone = 'c'; gone: it lacks zone = 'c')"
    )
    with pytest.raises(NoHost, match="gone: it is leaving"):
        candidates(spec(node="gone"), HOSTS)


def test_a_live_worker_stays_where_node_and_labels_allow_it_also_on_an_unknown_host() -> None:
    assert allows(spec(), "unknown", HOSTS)
    assert allows(spec(labels={"zone": "b"}), "two", HOSTS)
    assert not allows(spec(labels={"zone": "b"}), "one", HOSTS)
    assert not allows(spec(node="one"), "two", HOSTS)


def test_spread_takes_the_host_with_fewest_replicas_then_the_idlest() -> None:
    assert best_host(spec(), (ONE, TWO), {}, {"one": 1}) == TWO
    assert best_host(spec(), (ONE, TWO), {"one": 2, "two": 2}, {}) == ONE


def test_pack_takes_the_fullest_host_with_an_idle_core() -> None:
    packed = spec(placement="pack")
    assert best_host(packed, (ONE, TWO), {"one": 1}, {}) == ONE
    assert best_host(packed, (ONE, TWO), {"one": 4, "two": 1}, {"one": 1}) == TWO


def test_replicas_are_apart_by_host_before_memory_is_looked_at() -> None:
    first = place(spec(), CARDS)
    assert first is not None
    assert first.uuid == "one-0"
    second = place(spec(), CARDS, Others(beside={"one-0": 1}, beside_hosts={"one": 1}))
    assert second is not None
    assert second.uuid == "two-0"


def test_packed_replicas_share_a_host_and_not_a_card() -> None:
    packed = spec(placement="pack")
    second = place(packed, CARDS, Others(beside={"one-0": 1}, beside_hosts={"one": 1}, alive={"one": 1}))
    assert second is not None
    assert second.uuid == "one-1"


def test_the_number_of_a_card_is_that_of_its_host() -> None:
    named = place(spec(node="two", gpu_id=0), CARDS)
    assert named is not None
    assert named.uuid == "two-0"
    with pytest.raises(InvalidGpuId, match=r"Available GPUs: \[0\]"):
        place(spec(node="two", gpu_id=1), CARDS)


def test_one_replica_per_card_counts_the_cards_of_the_hosts_that_fit() -> None:
    wanted = spec(replicas="per-gpu")
    assert replica_count(wanted, CARDS) == 3
    assert replica_count(replace(wanted, labels={"zone": "b"}), CARDS) == 1


def test_without_cards_a_worker_goes_to_a_hosts_cpu() -> None:
    assert cpu_host(spec(node="two"), Inventory(hosts=HOSTS), Others()) == "two"
    assert cpu_host(spec(), Inventory(), Others()) == ""


def test_a_fleet_of_one_host_refuses_keys_of_a_cluster() -> None:
    with pytest.raises(ValidationError, match="the daemon has none"):
        place(spec(node="one"), Inventory())
