"""One call for all texts of a row on a GPU, with a stand-in for torch's operator, against attention written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.card import StandInCard

from teimgr.engine.attention import Packing, packed_attention
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.gpu_kernels.varlen_kernel import Borders, VarlenKernel, varlen_kernel

LENGTHS = (1, 2, 7, 7, 7, 12)
# As torch 2.11 has it, and as later versions do.
OLD = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, "
    "Tensor? alibi_slopes=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
NEW = OLD.replace("alibi_slopes=None", "alibi_slopes=None, Tensor? block_table=None, int? num_splits=None")


def batch_of(keys: dict[int, int] | None = None) -> PackedBatch:
    seen = keys or {}
    return pack([Encoded(np.zeros(n, dtype=np.int32), keys=seen.get(i)) for i, n in enumerate(LENGTHS)])


def rows_of(batch: PackedBatch, key_heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, batch.tokens, 8, dtype=torch.float16) for heads in (4, key_heads, key_heads)]


def attended(batch: PackedBatch, rows: list[torch.Tensor], by_kernel: bool, causal: bool, window: int | None) -> Any:
    packing = Packing.of(batch, torch.from_numpy(batch.cu_seqlens) if by_kernel else None)
    module = SimpleNamespace(is_causal=causal)
    result, _ = packed_attention(module, *rows, None, scaling=0.3, sliding_window=window, packing=packing)  # type: ignore[arg-type]
    return result.float()


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_it_attends_as_run_by_run(card: StandInCard, key_heads: int, causal: bool, window: int | None) -> None:
    batch = batch_of()
    rows = rows_of(batch, key_heads)
    by_run = attended(batch, rows, False, causal, window)
    assert card.flash_calls == 0

    torch.testing.assert_close(attended(batch, rows, True, causal, window), by_run, atol=2e-3, rtol=0)
    assert card.flash_calls == 1


@pytest.mark.parametrize(("causal", "window", "calls"), [(False, None, 1), (True, None, 0), (False, 3, 0)])
def test_keys_that_are_left_out_are_seen_by_none(
    card: StandInCard, causal: bool, window: int | None, calls: int
) -> None:
    """The kernel aligns queries and keys at their ends, so a window or causality goes run by run."""
    batch = batch_of({2: 3, 5: 1})
    rows = rows_of(batch)
    by_run = attended(batch, rows, False, causal, window)

    torch.testing.assert_close(attended(batch, rows, True, causal, window), by_run, atol=2e-3, rtol=0)
    assert card.flash_calls == calls


@pytest.mark.parametrize(("schema", "splits"), [(OLD, {}), (NEW, {"num_splits": 1})])
def test_an_argument_that_torch_lacks_is_not_given(schema: str, splits: dict[str, int]) -> None:
    given: list[dict[str, Any]] = []
    rows, borders = torch.zeros(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)

    def operator(*arguments: Any, **options: Any) -> tuple[torch.Tensor]:
        given.append(options)
        return (arguments[0],)

    operator._schema = torch._C.parse_schema(schema)  # type: ignore[attr-defined]
    VarlenKernel(operator)(rows, rows, rows, Borders(borders, borders, 3, 3), causal=True, reach=5)

    assert given == [{"scale": None, "window_size_left": 5, "window_size_right": 0, **splits}]


def test_an_operator_without_windows_is_refused() -> None:
    old = OLD.replace("SymInt? window_size_left=None, SymInt? window_size_right=None, ", "")
    with pytest.raises(ValueError, match="window_size_left, window_size_right"):
        VarlenKernel(SimpleNamespace(_schema=torch._C.parse_schema(old)))


def test_this_torch_has_an_operator_that_is_taken() -> None:
    assert varlen_kernel() is not None


@pytest.mark.parametrize("size", [12, 264])
def test_a_head_size_without_a_kernel_is_refused(size: int, card: StandInCard) -> None:
    kernel, rows, borders = varlen_kernel(), torch.zeros(3, 2, size).half(), torch.tensor([0, 3], dtype=torch.int32)
    assert kernel is not None
    with pytest.raises(RuntimeError, match=f"size {size}"):
        kernel(rows, rows, rows, Borders(borders, borders, 3, 3))
