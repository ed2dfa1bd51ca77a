"""Weights of linear layers in the order in which the C library reads them: in panels of columns, in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNMENT = 64  # bytes
_FEW = 4096  # numbers


class WeightPacker:
    """Packs the layers of one program, which are (out, in, dtype); where it reads `pairs`, all are of bfloat16.

    `panel` is how many columns the library computes at a time, `byte_sum_bits` is that of the library.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int, torch.dtype]],
        panel: int,
        *,
        pairs: bool = False,
        byte_sum_bits: int = 32,
    ) -> None:
        self._panel = panel
        self._byte_sum_bits = byte_sum_bits
        self._pairs = pairs
        sizes = [-(-columns // panel) * panel * inner * dtype.itemsize for columns, inner, dtype in layers]
        self._memory = _HugePages(sum(map(_aligned, sizes)))

    def pack(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """[out, in], in parts → [panels, in, panel], or in pairs [panels, in / 2, panel], each as one int32; zeros
        behind the last column.
        """
        columns, inner = sum(len(part) for part in parts), parts[0].shape[1]
        panels = -(-columns // self._panel)
        rows = torch.empty(panels * self._panel, inner, dtype=dtype)
        rows[columns:] = 0
        at = 0
        for part in parts:
            rows[at : at + len(part)] = part
            at += len(part)
        units = (rows.view(torch.int32) if self._pairs else rows).view(panels, self._panel, -1)
        packed = self._memory.take(units.numel(), units.dtype).view(panels, -1, self._panel)
        return packed.copy_(units.permute(0, 2, 1))

    def pack_bytes(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[out, in] → int8 [panels, in / 4, panel, 4]; the scale of each column, and the sum of its bytes.

        Sums in 16 bits are of two neighbouring products in each of two fours. They saturate unless the weights of one
        sign in such a sum add up to at most 128.
        """
        weights = weights.float()
        scales = weights.abs().amax(dim=1).clamp_min(1e-12) / 127.0
        if self._byte_sum_bits == 16:
            largest = _largest_sums(weights).clamp_min(1e-12)
            scales = largest / 126.0  # fits always: four that are rounded up add 2
            for most in (127.0, 128.0):
                rounded = (weights / (largest / most)[:, None]).round()
                fits = (_largest_sums(rounded) <= 128.0) & (rounded.abs().amax(dim=1) <= 127.0)
                scales = torch.where(fits, largest / most, scales)
        rows = self.padded((weights / scales[:, None]).round().to(torch.int8))
        packed = rows.view(-1, self._panel, weights.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous()
        return packed, self.padded(scales), rows.sum(dim=1, dtype=torch.int32)

    def padded(self, rows: Tensor) -> Tensor:
        """`rows` and zeros up to a whole panel."""
        missing = -rows.shape[0] % self._panel
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).contiguous()


def narrowest(parts: Sequence[Tensor]) -> torch.dtype:
    """bfloat16 or float16 where each number of all `parts` is the same in it, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(_are_same_in(dtype, part) for part in parts):
            return dtype
    return torch.float32


def _are_same_in(dtype: torch.dtype, numbers: Tensor) -> bool:
    if numbers.dtype is dtype:
        return True
    few = numbers.flatten()[:_FEW]  # decide for most
    return all(torch.equal(some.to(dtype).to(some.dtype), some) for some in (few, numbers))


def _largest_sums(weights: Tensor) -> Tensor:
    """Return the largest sum per row of the weights of one sign whose products are summed in 16 bits."""
    summed = functional.pad(weights, (0, -weights.shape[1] % 8)).view(len(weights), -1, 2, 2, 2)
    return torch.maximum(*(each.clamp_min(0).sum(dim=(2, 4)) for each in (summed, -summed))).flatten(1).amax(dim=1)


class _HugePages:
    """`size` bytes, in huge pages where the system has them.

    Thousands of small pages, each taken from the system at its first use, cost more time than the packing.
    """

    def __init__(self, size: int) -> None:
        self._taken = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if size:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # a system without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(pages, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] numbers."""
        size = count * dtype.itemsize
        found = self._bytes[self._taken : self._taken + size].view(dtype)
        self._taken += _aligned(size)
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
