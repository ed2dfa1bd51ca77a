"""Chooses dtype and batching for a GPU, by the fidelity gate.

The float32 reference is computed on the host, so a model of 16 bits needs no room for 32 bits on the device. Both types
of 16 bits are equally fast on a card, so speed is not measured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from teimgr.engine import gpu
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.fidelity.dtype_speed import Preference, risk_of_fewer_bits
from teimgr.engine.fidelity.fidelity_gate import (
    Choice,
    Closeness,
    ProbeResult,
    close_enough,
    compare,
    finite_reference,
    first_batching,
)
from teimgr.engine.gpu_kernels import norm_kernel
from teimgr.engine.gpu_kernels.gpu_fusion import fuse
from teimgr.engine.gpu_kernels.norm_kernel import Norms
from teimgr.engine.model import DeviatesError, Model, name_of
from teimgr.errors import DeviceFailed, InvalidConfig, ModelLoadFailed

log = logging.getLogger(__name__)

# Architectures whose layers end in a normalisation, which bounds their results: float16 does not overflow.
_POST_NORM = frozenset(
    {"bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "mpnet", "roberta", "xlm-roberta"}
)


def candidate_dtypes(architecture: str, has_bfloat16: bool) -> list[torch.dtype]:
    """The dtypes to try for a `model_type`, best first.

    float16 is as fast as bfloat16 and finer, but ends at 65,504, and known texts need not show that the activations of
    other texts exceed this. So it is second for architectures whose residual stream grows from layer to layer.
    """
    both = [torch.float16, torch.bfloat16] if architecture in _POST_NORM else [torch.bfloat16, torch.float16]
    return [*(both if has_bfloat16 else [torch.float16]), torch.float32]


def choose_on_gpu(model: Model, device: torch.device, wanted: torch.dtype | None, inputs: Sequence[Encoded]) -> Choice:
    """Put a model, loaded on the host, on `device` in the dtype and with the batching that pass the gate.

    `wanted` None is the fastest dtype that is close enough.

    Raises:
        ModelLoadFailed: no way of batching gives the library's own results.
        InvalidConfig: int8 is requested.
        OutOfDeviceMemory, DeviceFailed: the device is at fault.
    """
    if wanted is torch.int8:
        raise InvalidConfig("dtype int8 is not for GPUs")
    reference = finite_reference(model, inputs)
    weights = model.host_weights()
    types, why = ([wanted], None) if wanted is not None else _preferred(model)
    refused: dict[str, float] = {}
    for dtype in types:
        try:
            model.place(weights, dtype, device)
            if dtype is torch.float32:
                reference = _own_float32(model, inputs, reference)
        except DeviatesError as refusal:
            if wanted is not None:
                raise
            refused[name_of(dtype)] = round(refusal.min_cosine, 6)
            log.warning("%s", refusal.message)
            continue
        except RuntimeError as error:
            gpu.raise_if_the_devices(error, device)
            raise
        asked = dtype, inputs, reference, wanted is not None
        fused = None if dtype is torch.float32 else _fused(model, weights.module, *asked)
        found = fused or first_batching(model, *asked)
        if isinstance(found, Choice):
            return replace(found, why=why, refused=refused)
        if found is not None:
            refused[name_of(dtype)] = round(found.min_cosine, 6)
        log.warning("%s deviates too much from float32 for this model", dtype)
    raise ModelLoadFailed(f"the model's results in {types[-1]} differ from its own float32 results on known texts")


def _preferred(model: Model) -> tuple[list[torch.dtype], Preference]:
    """The dtypes that `auto` tries, in order, and why."""
    if (risk := risk_of_fewer_bits(model)) is not None:
        reason = f"{risk} in fewer bits, which the known texts may not show"
        return [torch.float32], Preference(torch.float32, reason, {})
    types = candidate_dtypes(str(getattr(model.backbone.config, "model_type", "")), has_bfloat16())
    reason = "the card supports float16 and not bfloat16"
    if torch.bfloat16 in types:
        finer, wider = "float16 is the finer one and cannot overflow here", "float16 might overflow"
        reason = f"both types of 16 bits are equally fast, and {finer if types[0] is torch.float16 else wider}"
    return types, Preference(types[0], reason, {name_of(each): None for each in types})


def _own_float32(model: Model, inputs: Sequence[Encoded], host: Sequence[ProbeResult]) -> list[ProbeResult]:
    """The device's own float32 results, beside which others are exact to the last digits.

    Raises:
        DeviceFailed: they are not those of the host.
    """
    found = finite_reference(model, inputs)
    if not close_enough(close := compare(found, host), torch.float16, requested=False):
        raise DeviceFailed(f"the device's results in float32 are not the host's: {close}")
    return found


def _fused(
    model: Model,
    module: torch.nn.Module,
    dtype: torch.dtype,
    inputs: Sequence[Encoded],
    reference: Sequence[ProbeResult],
    requested: bool,
) -> Choice | None:
    """The choice for the model with fused layers in `module`; None, and the model as it was, if nothing could be fused.

    Raises:
        DeviceFailed, OutOfDeviceMemory
    """
    kernel = norm_kernel.norm_kernel()
    for norms in ([] if kernel is None else [Norms(kernel, model.backbone.device)]) + [None]:
        fusion = fuse(module, norms)
        if norms is not None and not fusion.norms:
            fusion.undo()  # the same as without the kernel
            continue
        choice: Choice | Closeness | None = None
        try:
            choice = first_batching(model, dtype, inputs, reference, requested) if fusion else None
        except AttributeError as refusal:  # model code that reads a layer's weight
            log.warning("this model cannot use fused layers: %s", refusal)
        if isinstance(choice, Choice):
            fusion.keep()
            return choice
        if fusion.norms:
            log.warning("results deviate too much with fused normalisations")
        fusion.undo()
    return None


def has_bfloat16() -> bool:
    """True if the GPU computes in bfloat16 itself."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
