"""Differences of the engine on a GPU: exact arithmetic, scheduling of threads, meaning of failures.

Only `gpu.is_gpu(device)` decides whether a device is a GPU: tests replace it to run the paths of a GPU on a CPU, where
copies between host and device are no-ops and operators have CPU implementations.
"""

from __future__ import annotations

import logging
import os

import torch

from teimgr.errors import DeviceFailed, OutOfDeviceMemory
from teimgr.wire.gil import use_short_turns

log = logging.getLogger(__name__)

_CORES_BESIDE_TOKENIZER = 4  # for the engine's three threads and the event loop
# Further texts of out-of-memory errors: only torch's own allocator raises torch.OutOfMemoryError.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def prepare_process(cores: int) -> None:
    """Settings of a process that computes on a GPU, to be made before its first tensor operation.

    Its float32 products are of float32, and 16-bit sums are rounded once, at their end: the reference that the fidelity
    gate compares with must be the truth. A thread that waits for the interpreter's lock gets it within half a
    millisecond, not five: each launch of a kernel can lose it to the tokenizer's or the finisher's thread.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    use_short_turns()
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cores - _CORES_BESIDE_TOKENIZER)))


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done what was launched on the stream of the engine.

    `torch.cuda.synchronize` waits for the whole device. While another thread captures a graph that is an error, which
    looks like a fault of the device, and it spoils the graph.

    Raises:
        RuntimeError: torch's own: the device has failed.
    """
    torch.cuda.current_stream(device).synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` is out of memory, on the device or the host, in any form that torch raises."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def fault_of(error: BaseException, device: torch.device) -> str | None:
    """Why `device` can no longer be used, after a forward on it raised `error`; None if it still can.

    A fault of a kernel (an assertion, an illegal address) breaks the process's context for good: every later call
    reports it again, so waiting for the device shows whether `error` was one. The error's text does not tell.
    """
    if not is_gpu(device) or not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return None
    try:
        wait_for(device)
    except RuntimeError as lasting:
        if is_out_of_memory(lasting):
            return None
        return f"the device failed: {str(error).partition(chr(10))[0]}"
    return None


def raise_if_the_devices(error: BaseException, device: torch.device) -> None:
    """Raise where `error` is not the model's: another attempt may succeed, on the same device or a healthy one.

    Raises:
        OutOfDeviceMemory, DeviceFailed
    """
    if is_out_of_memory(error):
        raise OutOfDeviceMemory(f"the model does not fit the device: {error}") from error
    if fault := fault_of(error, device):
        raise DeviceFailed(fault) from error


def free_cached_memory(device: torch.device) -> None:
    """Give what torch's allocator keeps for later back to the device; waits for the device."""
    if not is_gpu(device):
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as refusal:  # older versions of torch, after a failed capture
        log.warning("freeing torch's cached memory failed: %s", refusal)
