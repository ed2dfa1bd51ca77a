"""Residual add and layer normalisation as one kernel of Triton, for rows in 16 bits: one pass over memory, not two.

Sums and statistics are float32, and the result is rounded once. RMSNorm is the same kernel without the mean.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from teimgr.engine import gpu

try:
    import triton
    import triton.language as tl
except ImportError:  # an installation for CPUs
    triton = tl = None

log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
_WIDEST = 8192  # numbers per row, which is one block
_TRIED_ROWS = 3
_FARTHEST = 0.02  # largest difference from torch's float32 result, whose numbers are about 1


class NormShape(NamedTuple):
    """The parameters for which a kernel is compiled."""

    width: int
    dtype: torch.dtype
    is_rms: bool
    adds: bool
    has_bias: bool


NormRows = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float, bool], Tensor]
"""(x, residual, weight, bias, eps, whether RMSNorm) → normalised rows of x + residual, of the shape and type of x.

An RMSNorm has no bias.
"""

if triton is not None:
    # Other arguments have no annotations, because Triton reads them.
    @triton.jit  # type: ignore[untyped-decorator]
    def _norm_row(  # type: ignore[no-untyped-def]
        x, residual, weight, bias, out, width, eps,
        is_rms: tl.constexpr, adds: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """One row: out = (v - mean) / sqrt(variance + eps) · weight + bias, with v = x + residual."""
        start = tl.program_id(0).to(tl.int64) * width
        at = tl.arange(0, block)
        inside = at < width
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if adds:
            values += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
        if not is_rms:
            values = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
        values = values / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
        values *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            values += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + start + at, values.to(out.dtype.element_ty), mask=inside)


def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool
) -> Tensor:
    """Like `NormRows`, by Triton.

    Raises:
        RuntimeError: rows are too wide.
        Exception: Triton's own, of any kind, where the kernel cannot be compiled.
    """
    width = x.shape[-1]
    if width > _WIDEST:
        raise RuntimeError(f"rows of {width} numbers are too wide")
    x = x.contiguous()
    out = torch.empty_like(x)
    if rows := x.numel() // width:
        block = triton.next_power_of_2(width)
        other = x if residual is None else residual.contiguous()
        _norm_row[(rows,)](
            x, other, weight, weight if bias is None else bias, out, width, eps,
            is_rms=is_rms, adds=residual is not None, has_bias=bias is not None, block=block,
            num_warps=4 if block <= 1024 else 8,
        )  # fmt: skip
    return out


def eager_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool
) -> Tensor:
    """Like `NormRows`, by torch's operators in float32: what the kernel is compared with."""
    values = x.float() if residual is None else x.float() + residual.float()
    parts = weight.float(), None if bias is None else bias.float()
    if not is_rms:
        return functional.layer_norm(values, (x.shape[-1],), *parts, eps).to(x.dtype)
    return functional.rms_norm(values, (x.shape[-1],), parts[0], eps).to(x.dtype)


class Norms:
    """A kernel, and the shapes for which it works on a device: each is compared with torch before use."""

    def __init__(self, kernel: NormRows, device: torch.device) -> None:
        self.kernel = kernel
        self._device = device
        self._works: dict[NormShape, bool] = {}

    def has(self, shape: NormShape) -> bool:
        """True if the kernel gives torch's results for rows of this shape; compiles it at the first time.

        Raises:
            DeviceFailed, OutOfDeviceMemory
        """
        if shape not in self._works:
            self._works[shape] = shape.dtype in DTYPES and self._tried(shape)
        return self._works[shape]

    def _tried(self, shape: NormShape) -> bool:
        options: dict[str, Any] = {"device": self._device, "dtype": shape.dtype}
        columns = torch.arange(_TRIED_ROWS * shape.width, device=self._device).view(_TRIED_ROWS, shape.width)
        x, residual = torch.sin(columns).to(**options), torch.cos(3.0 * columns).to(**options)
        weight, bias = torch.cos(columns[0]).to(**options), torch.sin(columns[1]).to(**options)
        given = (x, residual if shape.adds else None, weight, bias if shape.has_bias else None, 1e-6, shape.is_rms)
        try:
            farthest = float(
                (self.kernel(*given).float() - eager_norm(*given).float()).abs().max().nan_to_num(torch.inf)
            )
        except Exception as refusal:  # of any type: a missing compiler, a version with other arguments
            if isinstance(refusal, RuntimeError):
                gpu.raise_if_the_devices(refusal, self._device)
            log.warning("no kernel for %s: %s", shape, refusal)
            return False
        if farthest > _FARTHEST:
            log.warning("the kernel for %s is not used: it differs from torch by %.2g", shape, farthest)
        return farthest <= _FARTHEST


@functools.cache
def norm_kernel() -> NormRows | None:
    """The kernel, or None if Triton is not installed."""
    return None if triton is None else norm_rows
