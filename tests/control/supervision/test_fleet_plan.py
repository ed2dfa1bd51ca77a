"""Which workers move: to emptier hosts and cards, off the CPU, never back and forth, never without room for both."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from teimgr.control.ledger.ledger import Footprint, Ledger, Place
from teimgr.control.placement.hosts import Gpu, Host, Inventory
from teimgr.control.supervision.fleet_plan import Placed, Rebalancing, rebalance
from teimgr.spec import InstanceSpec

GIB = 2**30
ONE, TWO = Place("one"), Place("two")
HOSTS = Inventory(hosts=(Host(name="one", cores=4), Host(name="two", cores=4)))
CARDS = Inventory(
    gpus=tuple(Gpu(index, f"GPU-{index}", 16 * GIB, memory_total_bytes=16 * GIB) for index in range(2)),
)


def _takes(spec: InstanceSpec, device_kind: str) -> Footprint:
    return Footprint(host_bytes=GIB, device_bytes=0 if device_kind == "cpu" else 2 * GIB, source="measured")


def _placed(name: str, place: Place, replica: int = 0, fixed: str = "", **keys: object) -> Placed:
    return Placed(InstanceSpec(name=name, model_id="m", **keys), replica, place, fixed)  # type: ignore[arg-type]


def _rebalanced(workers: list[Placed], inventory: Inventory, host_budget: int | None = None) -> Rebalancing:
    ledger = Ledger(host_budget)
    for card in inventory.gpus:
        ledger.report(card.uuid, card.uuid, card.memory_total_bytes, card.memory_free_bytes, is_card=True)
    for each in workers:
        kind = "gpu" if each.place.gpu else "cpu"
        ledger.hold(each.spec.name, each.replica, _takes(each.spec, kind), each.place, is_settled=True)
    return rebalance(workers, inventory, ledger, Counter(each.place.host for each in workers), _takes)


def _moved(found: Rebalancing) -> list[tuple[str, int, Place]]:
    return [(each.worker.spec.name, each.worker.replica, each.to) for each in found.moves]


def test_one_device_has_nothing_to_move() -> None:
    found = _rebalanced([_placed("a", Place()), _placed("b", Place())], Inventory(reason="no card"))
    assert not found.moves
    assert {each.reason for each in found.stays} == {"there is one device: the CPU of one host"}


def test_workers_move_to_a_host_with_fewer_for_each_core_until_both_are_even() -> None:
    found = _rebalanced([_placed(name, ONE) for name in "abcd"], HOSTS)
    assert _moved(found) == [("a", 0, TWO), ("b", 0, TWO)]
    assert found.moves[0].reason == "workers per core: 1 here now, 0.25 there after the move"
    assert len(found.stays) == 2


def test_a_second_replica_leaves_the_host_of_the_first_one_even_for_a_busier_one() -> None:
    workers = [_placed("a", ONE), _placed("a", ONE, 1), _placed("b", TWO), _placed("c", TWO)]
    found = _rebalanced(workers, HOSTS)
    assert [(name, place) for name, _, place in _moved(found)][:1] == [("a", TWO)]
    assert found.moves[0].reason == "other replicas: 1 here, 0 there"


def test_cards_are_filled_evenly_and_a_worker_on_the_cpu_takes_a_card() -> None:
    workers = [_placed(name, Place("", "GPU-0")) for name in "abc"] + [_placed("d", Place())]
    found = _rebalanced(workers, CARDS)
    assert ("d", 0, Place("", "GPU-1")) in _moved(found)
    assert [each.reason for each in found.moves if each.worker.spec.name == "d"] == ["a card is there"]
    assert {place.gpu for _, _, place in _moved(found)} == {"GPU-1"}


def test_what_is_pinned_packed_or_not_running_stays_with_its_reason() -> None:
    workers = [
        _placed("a", ONE, node="one"),
        _placed("b", ONE, placement="pack"),
        _placed("c", ONE, fixed="it is starting"),
        _placed("d", ONE),
    ]
    found = _rebalanced(workers, HOSTS)
    assert _moved(found) == [("d", 0, TWO)]
    assert [each.reason for each in found.stays] == [
        "it is already in the best place",
        "placement = 'pack' keeps the workers of a host together",
        "it is starting",
    ]


def test_a_move_needs_room_for_both_workers() -> None:
    workers = [_placed(name, Place("", "GPU-0")) for name in "ab"]
    found = _rebalanced(workers, CARDS, host_budget=2 * GIB)
    assert not found.moves
    assert any(
        each.reason.startswith("no room for a second copy during the move: needs 1024 MiB") for each in found.stays
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_second_rebalancing_of_a_random_fleet_finds_nothing(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"h{number}" for number in range(chance.randint(2, 5))]
    hosts = Inventory(hosts=tuple(Host(name=name, cores=chance.randint(1, 8)) for name in names))
    workers = [
        _placed(f"m{number}", Place(chance.choice(names)), replica)
        for number in range(chance.randint(1, 12))
        for replica in range(chance.randint(1, 3))
    ]
    for _ in range(len(workers) + 2):
        found = _rebalanced(workers, hosts)
        if not found.moves:
            break
        to = {(each.worker.spec.name, each.worker.replica): each.to for each in found.moves}
        workers = [Placed(w.spec, w.replica, to.get((w.spec.name, w.replica), w.place)) for w in workers]
    assert not _rebalanced(workers, hosts).moves, "it never rests"
