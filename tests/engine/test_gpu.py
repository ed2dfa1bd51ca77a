"""What a failure on a GPU means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.card import StandInCard

from teimgr.engine import gpu
from teimgr.errors import DeviceFailed, OutOfDeviceMemory

DEVICE = torch.device("cuda")
SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("the memory format is unsupported"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, is_one: bool) -> None:
    assert gpu.is_out_of_memory(error) is is_one


def test_only_what_lasts_is_a_fault_of_the_device(card: StandInCard) -> None:
    """Also while another thread captures a graph, when to wait for the whole device is an error of its own."""
    refused = RuntimeError("CUDA error: invalid configuration argument")
    assert gpu.fault_of(refused, DEVICE) is None
    gpu.raise_if_the_devices(refused, DEVICE)

    card.fault = torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")
    assert gpu.fault_of(card.fault, DEVICE) == "the device failed: CUDA error: device-side assert triggered"
    assert gpu.fault_of(ValueError("bad"), DEVICE) is None
    assert gpu.fault_of(torch.OutOfMemoryError("CUDA out of memory"), DEVICE) is None
    with pytest.raises(DeviceFailed, match="assert triggered"):
        gpu.raise_if_the_devices(RuntimeError("CUDA error: device-side assert triggered"), DEVICE)
    with pytest.raises(OutOfDeviceMemory, match="CUBLAS"):
        gpu.raise_if_the_devices(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), DEVICE)


def test_memory_that_torch_cannot_give_back_stops_nothing(card: StandInCard, caplog: pytest.LogCaptureFixture) -> None:
    card.cache_fault = RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    gpu.free_cached_memory(DEVICE)

    assert "captures_underway" in caplog.text


def test_a_cpu_has_no_lasting_faults() -> None:
    assert gpu.fault_of(RuntimeError("bad"), torch.device("cpu")) is None


def test_a_process_for_a_gpu_computes_exactly_and_hands_the_lock_on_soon() -> None:
    code = """
import os, sys, torch
from teimgr.engine import gpu
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
gpu.prepare_process(16)
products = torch.backends.cuda.matmul
print(products.allow_tf32, torch.backends.cudnn.allow_tf32, products.allow_fp16_reduced_precision_reduction,
      products.allow_bf16_reduced_precision_reduction, torch.get_float32_matmul_precision(),
      sys.getswitchinterval(), os.environ["RAYON_NUM_THREADS"])
"""
    environ = {key: value for key, value in os.environ.items() if key != "RAYON_NUM_THREADS"}
    said = subprocess.check_output([sys.executable, "-c", code], env=environ | {"PYTHONPATH": str(SOURCES)}, text=True)

    assert said.split() == ["False", "False", "False", "False", "highest", "0.0005", "12"]
