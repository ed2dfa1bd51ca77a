"""Which hosts of a cluster an instance may use, and which gets its next worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teimgr.control.launch.nursery import TorchBuild
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.placement.hosts import (
    Gpu,
    GpuInventory,
    Host,
    Inventory,
    Preflight,
    allows,
    best_host,
    candidates,
    problems,
    runs_on,
)
from teimgr.control.placement.planner import Others, cpu_host, place, replica_count
from teimgr.errors import InvalidConfig, InvalidGpuId, NoHost, ValidationError
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
    with pytest.raises(ValidationError, match="which is not configured"):
        place(spec(node="one"), Inventory())


CUDA_13 = TorchBuild("2.13.0+cu130", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"))


def card(*capability: int) -> Gpu:
    return Gpu(0, "GPU-0", 1, name="Card", compute_capability=(capability[0], capability[1]) if capability else None)


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((9, 0), CUDA_13.archs, True),
        ((8, 9), CUDA_13.archs, True),
        ((8, 9), ("sm_86",), True),
        ((8, 0), ("sm_86",), False),
        ((6, 1), CUDA_13.archs, False),
        ((7, 0), CUDA_13.archs, False),
        ((10, 3), CUDA_13.archs, True),
        ((12, 1), CUDA_13.archs, True),
        ((13, 0), CUDA_13.archs, True),
        ((13, 0), ("sm_120",), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((9, 0), ("gfx942",), False),
        ((9, 0), (), False),
    ],
)
def test_machine_code_runs_on_its_generation_and_the_rest_is_compiled(
    capability: tuple[int, int], archs: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(capability, archs) is runs


@pytest.mark.clause("N-preflight")
def test_the_sentence_names_the_card_and_the_right_build() -> None:
    assert problems([card(9, 0), card()], CUDA_13) == []
    (old,) = problems([card(6, 1)], CUDA_13)
    assert old.startswith(
        "gpu_preflight: GPU 0 (Card, sm_61) is not supported by torch 2.13.0+cu130, which supports sm_75"
    )
    assert old.endswith("install torch for CUDA 12.6, the last builds with support")
    (new,) = problems([card(12, 0)], TorchBuild("2.6.0+cu124", "12.4", ("sm_80", "sm_90")))
    assert new.endswith("install torch for a CUDA later than 12.4")
    (cpu,) = problems([card(9, 0)], TorchBuild("2.13.0+cpu"))
    assert "is a CPU-only build: install a build of torch for CUDA" in cpu


def with_card(mode: str, build: TorchBuild | LaunchFailed, *cards: Gpu) -> Preflight:
    async def asked() -> TorchBuild:
        if isinstance(build, LaunchFailed):
            raise build
        return build

    return Preflight(mode, GpuInventory({}, lambda: Inventory(cards)), asked)  # type: ignore[arg-type]


@pytest.mark.clause("N-preflight")
async def test_warn_is_an_alarm_and_fail_is_a_refusal() -> None:
    warning = with_card("warn", CUDA_13, card(6, 1))
    await warning.run()
    assert "sm_61" in warning.alarms()[0]
    with pytest.raises(InvalidConfig, match="sm_61"):
        await with_card("fail", CUDA_13, card(6, 1)).run()
    fine = with_card("fail", CUDA_13, card(9, 0))
    await fine.run()
    assert fine.alarms() == []


async def test_a_build_that_nobody_can_ask_is_no_pass() -> None:
    with pytest.raises(InvalidConfig, match="cannot read the build of torch"):
        await with_card("fail", LaunchFailed("no nursery"), card(9, 0)).run()


async def test_without_a_card_nothing_is_asked() -> None:
    await with_card("fail", LaunchFailed("no nursery")).run()


async def test_models_that_run_on_the_cpu_by_mistake_are_an_alarm() -> None:
    async def asked() -> TorchBuild:
        raise AssertionError

    gpus = GpuInventory({"CUDA_VISIBLE_DEVICES": "MIG-1"}, lambda: Inventory((card(9, 0),)))
    preflight = Preflight("warn", gpus, asked)
    await preflight.run()
    (alarm,) = preflight.alarms()
    assert "run on the CPU" in alarm
    assert "MIG" in alarm
    with pytest.raises(InvalidConfig, match="MIG"):
        await Preflight("fail", gpus, asked).run()


def test_this_process_can_say_what_its_torch_was_built_for() -> None:
    import torch

    build = TorchBuild.imported()
    assert build.version == torch.__version__
    assert build.cuda == torch.version.cuda
    assert bool(build.archs) == (torch.version.cuda is not None)
