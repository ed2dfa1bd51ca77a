"""A stand-in for a card: the CPU takes the paths of a GPU, flash attention is implemented, faults come on call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from teimgr.engine import gpu
from teimgr.engine.batching import pinned_ring
from teimgr.engine.batching.pinned_ring import PinnedRing
from teimgr.engine.gpu_kernels import forward_graphs

WAITING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
_REFUSED = "FlashAttention only support fp16 and bf16 data type"


@dataclass
class StandInCard:
    """The state of the card. `fault` is what every call that waits for it raises from then on, `cache_fault` what
    giving memory back does."""

    fault: Exception | None = None
    cache_fault: Exception | None = None
    flash_calls: int = 0
    copies_end: bool = True  # False: no copy ends until it is True again

    def current_stream(self, device: Any = None) -> Any:
        """As `torch.cuda.current_stream`."""
        return SimpleNamespace(synchronize=self._wait)

    def _wait(self) -> None:
        if self.fault is not None:
            raise self.fault

    def synchronize(self, device: Any = None) -> None:
        """As `torch.cuda.synchronize` while any thread captures a graph, which may always be so."""
        raise RuntimeError(CAPTURING)

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache`."""
        if self.cache_fault is not None:
            raise self.cache_fault

    def event(self) -> StandInEvent:
        """As `torch.cuda.Event`."""
        return StandInEvent(self)

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        num_splits: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, ...]:
        """`aten::_flash_attention_forward` for packed rows as CUDA has it: its refusals, windows aligned at the ends of
        queries and keys, NaN where it writes nothing."""
        self.flash_calls += 1
        assert not any(value is not None for value in unused.values())
        assert (dropout_p, return_debug_mask, num_splits) in ((0.0, False, 1), (0.0, False, None))
        if query.dtype not in (torch.float16, torch.bfloat16) or {key.dtype, value.dtype} != {query.dtype}:
            raise RuntimeError(_REFUSED)
        heads, size = query.shape[1:]
        assert size % 8 == 0
        assert heads % key.shape[1] == 0
        assert all(rows.stride(2) == 1 for rows in (query, key, value))
        assert all(at.dtype is torch.int32 and at.is_contiguous() for at in (cum_seq_q, cum_seq_k))
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        left = -1 if window_size_left is None else window_size_left
        right = 0 if is_causal else -1 if window_size_right is None else window_size_right
        ends_q, ends_k = cum_seq_q.tolist(), cum_seq_k.tolist()
        for i in range(len(ends_q) - 1):
            q = query[ends_q[i] : ends_q[i + 1]].float().transpose(0, 1)
            k, v = (rows[ends_k[i] : ends_k[i + 1]].float().transpose(0, 1) for rows in (key, value))
            assert q.shape[1] <= max_q, "a text is longer than announced"
            assert k.shape[1] <= max_k, "a text is longer than announced"
            if not q.shape[1]:
                continue
            k, v = (rows.repeat_interleave(heads // len(rows), dim=0) for rows in (k, v))
            place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
            distance = torch.arange(k.shape[1])[None, :] - place
            seen = torch.ones_like(distance, dtype=torch.bool)
            if left >= 0:
                seen &= distance >= -left
            if right >= 0:
                seen &= distance <= right
            scores = (q @ k.transpose(1, 2)) * (size**-0.5 if scale is None else scale)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
            out[ends_q[i] : ends_q[i + 1]] = (weights @ v).transpose(0, 1).to(query.dtype)
        nothing = torch.empty(0)
        return out, nothing, nothing, nothing, nothing


@dataclass
class StandInEvent:
    """As an event of CUDA, behind copies that end when the card lets them. What was copied before a fault is whole."""

    card: StandInCard
    is_recorded: bool = False
    fault: Exception | None = None

    def record(self) -> None:
        self.is_recorded, self.fault = True, self.card.fault

    def query(self) -> bool:
        return not self.is_recorded or self.card.copies_end

    def synchronize(self) -> None:
        assert self.query(), "this would wait for ever"
        if self.fault is not None:
            raise self.fault


class RecordedGraph(TorchDispatchMode):
    """As a CUDA graph: the operators that ran, by the tensors they read and wrote; Python is not run again, and what
    waits for the device is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.name in WAITING:
            raise RuntimeError(CAPTURING)
        result = operator(*args, **(kwargs or {}))
        self._calls.append((operator, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Write the results of the same operators on the same tensors to the same places."""
        for operator, args, kwargs, result in self._calls:
            again = operator(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr() and old.numel():  # else a view, or written in place
                    old.copy_(new)


def plain_memory(size: int) -> Tensor:
    """As `pinned_memory`, of nothing at first."""
    with torch.inference_mode(False):
        return torch.full((size,), 0xAA, dtype=torch.uint8)


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


def record(body: Callable[[], None]) -> Callable[[], None]:
    """As `CudaCapture`."""
    with RecordedGraph() as graph:
        body()
    return graph.replay


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCard]:
    """Make the CPU a stand-in for a card until the test ends."""
    made = StandInCard()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", made.flash, "CPU")
    monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
    monkeypatch.setattr(gpu, "prepare_process", lambda cores: None)  # its settings would stay
    monkeypatch.setattr(forward_graphs, "CudaCapture", lambda: record)
    monkeypatch.setattr(pinned_ring, "new_event", made.event)
    for name in ("INPUTS", "RESULTS"):
        monkeypatch.setattr(pinned_ring, name, PinnedRing(16, plain_memory, made.event))
    for name in ("current_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    yield made
    library._destroy()
