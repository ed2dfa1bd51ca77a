"""Where instances run: cards, threads, cores, tokens of a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import Gpu, GpuInventory, Inventory, only_visible
from teimgr.control.placement.planner import (
    CPU_TOKENS,
    LoadSlots,
    Others,
    Planner,
    fair_share,
    place,
    replica_count,
    usable_cores,
    with_batch_tokens,
    worker_spec,
)
from teimgr.errors import InvalidGpuId
from teimgr.spec import InstanceSpec, WorkerSpec

GIB = 1 << 30


def card(index: int, free_gib: float, uuid: str = "") -> Gpu:
    return Gpu(index, uuid or f"GPU-{index}", int(free_gib * GIB))


TWO = Inventory((card(0, 10), card(1, 20)))
NONE = Inventory(reason="no NVIDIA driver: Library Not Found")


def spec(name: str = "a", *, gpu_id: int | None = None, threads: int | None = None) -> InstanceSpec:
    return InstanceSpec(name=name, model_id="m", gpu_id=gpu_id, threads=threads)


@pytest.mark.clause("D-placement")
def test_without_a_card_an_instance_runs_on_the_cpu() -> None:
    assert place(spec(), NONE) is None


@pytest.mark.clause("D-placement")
def test_the_card_with_most_free_memory_wins() -> None:
    assert place(spec(), TWO) == TWO.gpus[1]


def test_what_is_reserved_of_a_card_counts_as_taken() -> None:
    assert place(spec(), TWO, Others(free={"GPU-1": GIB})) == TWO.gpus[0]


def test_cards_that_tell_no_memory_are_taken_in_turn() -> None:
    silent = Inventory((card(0, 0), card(1, 0)))

    assert place(spec(), silent) == silent.gpus[0]
    assert place(spec(), silent, Others(free={"GPU-0": -1, "GPU-1": 0})) == silent.gpus[1]


@pytest.mark.clause("M5.2-gpu")
def test_an_explicit_card_wins_over_a_better_one() -> None:
    assert place(spec(gpu_id=0), TWO) == TWO.gpus[0]


@pytest.mark.clause("M2.4-gpu")
@pytest.mark.parametrize(
    ("inventory", "message"),
    [
        (TWO, "Invalid GPU ID 7: Available GPUs: [0, 1]"),
        (NONE, "Invalid GPU ID 7: Available GPUs: [] (no NVIDIA driver: Library Not Found)"),
    ],
)
def test_a_card_that_is_not_there_is_refused_with_what_there_is(inventory: Inventory, message: str) -> None:
    with pytest.raises(InvalidGpuId) as caught:
        place(spec(gpu_id=7), inventory)

    assert caught.value.message == message


def test_threads_are_shared_equally_and_never_below_one() -> None:
    assert fair_share(8, 3) == 2
    assert fair_share(2, 3) == 1
    assert fair_share(8, 0) == 8


async def test_an_explicit_number_of_threads_wins() -> None:
    both = [spec("a", threads=7), spec("b")]
    plans = await planner(NONE)

    assert [plans.plan(each, 0, Others({"": 2})).threads for each in both] == [7, 4]


@pytest.mark.parametrize(
    ("visible", "indexes"), [(None, [0, 1]), ("1", [1]), ("GPU-0", [0]), (" 0, 1", [0, 1]), ("", []), ("9", [])]
)
def test_the_daemons_own_visible_devices_limit_the_cards(visible: str | None, indexes: list[int]) -> None:
    shown = only_visible(TWO, visible)

    assert [gpu.index for gpu in shown.gpus] == indexes
    assert bool(shown.reason) == (not indexes)


@pytest.mark.parametrize(
    ("visible", "is_missed"),
    [("MIG-6fd1b2c0-1", True), ("9", True), ("GPU-9", True), ("", False), ("-1", False), ("NoDevFiles", False)],
)
def test_cards_that_are_named_and_not_there_are_a_mistake(visible: str, is_missed: bool) -> None:
    shown = only_visible(TWO, visible)

    assert shown.misses_cards is is_missed
    assert ("partitions of a card (MIG) are not supported" in shown.reason) is visible.startswith("MIG-")


async def test_a_missing_driver_is_no_error_and_says_so() -> None:
    inventory = await GpuInventory({}).read()

    assert inventory.gpus or inventory.reason


async def test_a_failed_reading_is_kept_for_a_while() -> None:
    readings: list[int] = []

    def read() -> Inventory:
        readings.append(1)
        return NONE

    gpus = GpuInventory({}, read)
    assert await gpus.read() == await gpus.read() == NONE
    assert len(readings) == 1


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)

    assert usable_cores(tmp_path / "cpu.max") == (cores or usable_cores(tmp_path / "absent"))


# The planner


async def planner(inventory: Inventory) -> Planner:
    made = Planner(Settings(), GpuInventory({}, lambda: inventory), cores=8)
    await made.refresh()
    return made


async def test_orders_name_the_card_by_uuid_and_spread_what_is_reserved() -> None:
    plans = await planner(Inventory((card(0, 10), card(1, 10))))
    specs = [spec(name) for name in "abc"]
    orders: list[WorkerSpec] = []
    for each in specs:
        free = {"GPU-0": 10 * GIB, "GPU-1": 10 * GIB}
        for order in orders:
            free[str(order.gpu)] -= GIB
        orders.append(plans.plan(each, 0, Others({"": len(specs)}, free)))

    assert [order.gpu for order in orders] == ["GPU-0", "GPU-1", "GPU-0"]
    assert [order.threads for order in orders] == [2, 2, 2]
    assert {order.nice for order in orders} == {0}


async def test_replicas_are_spread_before_memory_is_looked_at() -> None:
    plans = await planner(Inventory((card(0, 10), card(1, 70))))
    wanted = replace(spec(), replicas="per-gpu")
    orders: list[WorkerSpec] = []
    for number in range(plans.replicas(wanted)):
        beside = Counter(order.gpu for order in orders if order.gpu)
        orders.append(plans.plan(wanted, number, Others({"": 2}, {}, beside)))

    assert [(order.gpu, order.replica, order.threads) for order in orders] == [("GPU-1", 0, 4), ("GPU-0", 1, 4)]
    assert all(plans.accepts(wanted, order) for order in orders)
    assert not plans.accepts(wanted, replace(orders[0], replica=2))


def test_one_replica_per_card_is_one_where_there_is_no_card() -> None:
    wanted = replace(spec(), replicas="per-gpu")

    assert (
        replica_count(wanted, NONE),
        replica_count(wanted, TWO),
        replica_count(replace(spec(), replicas=5), TWO),
    ) == (1, 2, 5)


async def test_a_worker_on_the_cpu_is_nicer() -> None:
    order = (await planner(NONE)).plan(spec(), 0, Others({"": 1}))

    assert (order.gpu, order.nice, order.threads) == (None, Settings().cpu_worker_nice, 8)


async def test_a_live_worker_is_accepted_where_it_was_placed_if_it_was_told_the_same() -> None:
    plans = await planner(TWO)
    order = plans.plan(spec(), 0, Others({"": 1}))

    assert plans.accepts(spec(), replace(order, threads=1))
    assert plans.accepts(spec(gpu_id=1), order)
    assert not plans.accepts(spec(gpu_id=0), order)
    assert not plans.accepts(spec(gpu_id=5), order)
    assert not plans.accepts(replace(spec(), pooling="cls"), order)
    plans.inventory = Inventory((card(0, 1),))
    assert not plans.accepts(spec(), order)


async def test_extra_arguments_win_over_fields_and_settings() -> None:
    flags = ("--pooling", "cls", "--max-client-batch-size=9", "--trust-remote-code")
    wanted = replace(spec(), pooling="mean", kind="embedding", extra_args=flags)

    order = (await planner(NONE)).plan(wanted, 0, Others({"": 1}))

    assert (order.pooling, order.max_client_batch_size) == ("cls", 9)
    assert (order.kind, order.trust_remote_code) == ("embedding", True)


SIZED = Inventory((Gpu(0, "GPU-0", 20 * GIB), Gpu(1, "GPU-1", 10 * GIB + GIB // 2)))
AUTO = {"name": "a", "model_id": "m", "max_batch_tokens": 0}


@pytest.mark.clause("N-auto-tokens")
@pytest.mark.parametrize(
    ("keys", "inventory", "tokens"),
    [
        ({"max_batch_tokens": 7}, SIZED, 7),
        ({}, SIZED, 32768),
        ({"gpu_id": 1}, SIZED, 21504),
        ({"replicas": "per-gpu"}, SIZED, 21504),
        ({"replicas": 2}, SIZED, 21504),
        ({}, Inventory((Gpu(0, "GPU-0", GIB // 2),)), 2048),
        ({}, Inventory((Gpu(0, "GPU-0", 0),)), CPU_TOKENS),
        ({}, Inventory(), CPU_TOKENS),
    ],
)
def test_tokens_go_by_what_is_free(keys: dict[str, object], inventory: Inventory, tokens: int) -> None:
    spec = InstanceSpec(**{**AUTO, **keys})  # type: ignore[arg-type]
    assert with_batch_tokens(spec, inventory, 2048).max_batch_tokens == tokens


def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidGpuId):
        with_batch_tokens(InstanceSpec(**AUTO, gpu_id=5), SIZED, 2048)  # type: ignore[arg-type]


async def test_the_number_of_load_slots_follows_cores_and_the_ledger_knows_what_the_card_has() -> None:
    plans = await planner(Inventory((replace(card(0, 5, "GPU-a"), memory_total_bytes=8 * GIB),)))

    assert plans.load_limit("GPU-a") == 4
    assert plans.load_limit(None) == 8
    assert plans.memory.ledger.free("GPU-a") == 5 * GIB
    assert plans.memory.ledger.free("") is not None


def test_pickled_weights_are_off_where_the_settings_forbid_them() -> None:
    spec = InstanceSpec(name="a", model_id="org/m")
    assert worker_spec(spec, Settings(allow_pickled_weights=False)).safetensors_only
    assert not worker_spec(spec, Settings()).safetensors_only


@pytest.mark.parametrize(
    ("flags", "given", "cuts"),
    [((), False, True), (("--auto-truncate",), True, True), (("--auto-truncate", "false"), True, False)],
)
def test_that_texts_may_be_cut_is_known_to_be_said(flags: tuple[str, ...], given: bool, cuts: bool) -> None:
    made = worker_spec(InstanceSpec(name="a", model_id="m", extra_args=flags), Settings())
    assert (made.auto_truncate_given, made.auto_truncate) == (given, cuts)


async def test_workers_load_one_after_the_other_where_the_device_has_no_more_room() -> None:
    limits: dict[str | None, int] = {None: 2, "card": 0}
    slots = LoadSlots(lambda gpu: limits[gpu])
    await slots.take(None)
    await slots.take(None)
    await slots.take("card")
    waiting = [asyncio.create_task(slots.take(None)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    waiting[0].cancel()
    slots.give_back(None)
    await asyncio.wait(waiting[:2])

    assert waiting[0].cancelled()
    assert (waiting[1].done(), waiting[2].done()) == (True, False)
    limits[None] = 1
    slots.give_back(None)
    assert not waiting[2].done(), "one loads, and there is no memory for two"
    slots.give_back(None)
    await waiting[2]
