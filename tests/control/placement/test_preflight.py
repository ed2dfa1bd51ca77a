"""The cards that a build of torch has code for; warning or refusal for others."""

from __future__ import annotations

import pytest

from teimgr.control.launch.nursery import TorchBuild
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.control.placement.gpus import Gpu, GpuInventory, Inventory
from teimgr.control.placement.preflight import Preflight, problems, runs_on
from teimgr.errors import InvalidConfig

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
    assert old.startswith("gpu_preflight: GPU 0 (Card, sm_61) is not supported by torch 2.13.0+cu130, which has sm_75")
    assert old.endswith("install torch for CUDA 12.6, the last builds that have it")
    (new,) = problems([card(12, 0)], TorchBuild("2.6.0+cu124", "12.4", ("sm_80", "sm_90")))
    assert new.endswith("install torch for a CUDA later than 12.4")
    (cpu,) = problems([card(9, 0)], TorchBuild("2.13.0+cpu"))
    assert "is for the CPU alone: install a build of torch for CUDA" in cpu


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
    with pytest.raises(InvalidConfig, match="build of torch is unknown"):
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
