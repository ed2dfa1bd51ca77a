"""Copies a batch's results from the device to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from teimgr.engine import gpu
from teimgr.engine.batching import pinned_ring
from teimgr.engine.batching.pinned_ring import Event, Loan
from teimgr.engine.finisher import HostRows
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import VectorRows


class _Parts(NamedTuple):
    """The tensors of `Rows`, on the host."""

    values: Tensor
    offsets: Tensor | None
    indices: Tensor | None


class HostCopies:
    """Copies of `rows` to the host, started by the constructor without waiting. The finisher's thread calls `wait` and
    `free`.
    """

    def __init__(self, rows: Mapping[Output, Rows]) -> None:
        self._whole = {output: of.whole for output, of in rows.items()}
        self._loans: list[Loan] = []
        self._copied: Event | None = None
        self._ready = {
            output: HostRows(of.vectors.values, unit=of.vectors.unit, are_finite=of.vectors.are_finite)
            for output, of in rows.items()
            if isinstance(of, VectorRows)
        }
        self._here: dict[Output, _Parts] = {}
        if len(self._ready) == len(rows):
            return
        try:
            self._here = {
                output: _Parts(self._started(of.values), *map(self._started_if_any, (of.offsets, of.indices)))
                for output, of in rows.items()
            }
            if any(gpu.is_gpu(of.values.device) for of in rows.values()):
                self._copied = pinned_ring.new_event()
                self._copied.record()
        except BaseException:
            for loan in self._loans:
                # On a failed device this fails too: the loan stays taken, since the device may still write to it.
                with contextlib.suppress(Exception):
                    loan.free_after_copy()
            raise

    def wait(self) -> dict[Output, HostRows]:
        """The results, valid until `free`.

        Raises:
            RuntimeError: torch's own: the device has failed.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not self._here:
            return self._ready
        return self._ready | {output: _host_rows(self._complete(output, parts)) for output, parts in self._here.items()}

    def free(self) -> None:
        """Give the memory of the results back; not after `wait` has failed, when the device may still write to it."""
        for loan in self._loans:
            loan.free()
        self._loans.clear()

    def _complete(self, output: Output, parts: _Parts) -> _Parts:
        """`parts`, or all rows where their number was more than there was room for."""
        whole = self._whole[output]
        if whole is None or parts.offsets is None or int(parts.offsets[-1]) <= len(parts.values):
            return parts
        with torch.inference_mode():  # only here: entering it takes some microseconds
            of = whole()
            return _Parts(of.values.cpu(), _cpu(of.offsets), _cpu(of.indices))

    def _started_if_any(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._started(tensor)

    def _started(self, tensor: Tensor) -> Tensor:
        if not gpu.is_gpu(tensor.device):
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        loan = pinned_ring.RESULTS.take(tensor.nbytes)
        self._loans.append(loan)
        return loan.memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _host_rows(parts: _Parts) -> HostRows:
    offsets, indices = (None if other is None else other.numpy() for other in parts[1:])
    return HostRows(parts.values.float().numpy(), offsets, indices)
