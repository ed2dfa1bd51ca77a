"""The choice of dtype and batching for a GPU, by the fidelity gate.

The float32 reference is computed on the host, where the weights are anyway: a model of 16 bits then needs no room for
one of 32 on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from teimgr.engine import gpu, norm_kernel
from teimgr.engine.batch import Encoded
from teimgr.engine.fidelity_gate import Choice, ProbeResult, finite_reference, first_batching
from teimgr.engine.gpu_fusion import fuse
from teimgr.engine.model import Model
from teimgr.engine.norm_kernel import Norms
from teimgr.errors import InvalidConfig, ModelLoadFailed

log = logging.getLogger(__name__)

# Layers end in a normalisation, which bounds what flows from one to the next: float16 does not overflow in them.
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
    architecture = str(getattr(model.backbone.config, "model_type", ""))
    types = candidate_dtypes(architecture, has_bfloat16()) if wanted is None else [wanted]
    for dtype in types:
        try:
            model.place(weights, dtype, device)
            if dtype is torch.float32:  # exact to the last digits only beside the same device's own float32
                reference = finite_reference(model, inputs)
        except RuntimeError as error:
            gpu.raise_if_the_devices(error, device)
            raise
        is_requested = wanted is not None
        choice = None if dtype is torch.float32 else _fused(model, dtype, inputs, reference, is_requested)
        choice = choice or first_batching(model, dtype, inputs, reference, is_requested)
        if choice is not None:
            return choice
        log.warning("%s deviates too much from float32 for this model", dtype)
    raise ModelLoadFailed(f"the model's results in {types[-1]} differ from its own float32 results on known texts")


def _fused(
    model: Model, dtype: torch.dtype, inputs: Sequence[Encoded], reference: Sequence[ProbeResult], requested: bool
) -> Choice | None:
    """The choice for the model with fused layers; None, and the model as it was, if nothing could be fused.

    Raises:
        DeviceFailed, OutOfDeviceMemory
    """
    kernel, module = norm_kernel.norm_kernel(), model.host_weights().module
    for norms in ([] if kernel is None else [Norms(kernel, model.backbone.device)]) + [None]:
        fusion = fuse(module, norms)
        if norms is not None and not fusion.norms:
            fusion.undo()  # the same as without them
            continue
        try:
            choice = first_batching(model, dtype, inputs, reference, requested) if fusion else None
        except AttributeError as refusal:  # model code that reads a layer's weight
            log.warning("fused layers are not for this model: %s", refusal)
            choice = None
        if choice is not None:
            fusion.keep()
            return choice
        if fusion.norms:
            log.warning("results stray with fused normalisations")
        fusion.undo()
    return None


def has_bfloat16() -> bool:
    """Whether the GPU computes in bfloat16 itself."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
