"""Packed attention against attention written out, one text at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tests.support.native import needs_native_library

from teimgr.engine.attention import (
    CannotPackError,
    Packing,
    VisibleKeys,
    own_rotary,
    packed_attention,
    put_own_rotary,
    unproved_window,
)
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.errors import ModelLoadFailed

LENGTHS = (1, 2, 7, 7, 7, 12)
each_way = pytest.mark.parametrize("by_kernel", [False, pytest.param(True, marks=needs_native_library)])


class Attention(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def text_of(length: int, keys: int | None = None) -> Encoded:
    return Encoded(np.zeros(length, dtype=np.int32), keys=keys)


def packing_of(batch: PackedBatch, by_kernel: bool) -> Packing:
    return Packing.of(batch, torch.from_numpy(batch.cu_seqlens) if by_kernel else None)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, keys: int | None = None
) -> torch.Tensor:
    """[heads, L, d] of one text."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * 0.3
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance.abs() < window
    if causal:
        seen &= distance >= 0
    if keys is not None:
        seen[:, keys:] = False
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@each_way
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_texts_attend_to_themselves_only(kv_heads: int, causal: bool, window: int | None, by_kernel: bool) -> None:
    torch.manual_seed(0)
    batch = pack([text_of(n) for n in LENGTHS])
    q, k, v = (torch.randn(1, batch.tokens, heads, 8).transpose(1, 2) for heads in (4, kv_heads, kv_heads))
    packing = packing_of(batch, by_kernel)
    result, weights = packed_attention(
        Attention(causal), q, k, v, None, scaling=0.3, sliding_window=window, packing=packing
    )

    assert weights is None
    assert result.shape == (1, batch.tokens, 4, 8)
    for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        one = written_out(*(x[0, :, start:stop] for x in (q, k, v)), causal, window)
        torch.testing.assert_close(result[0, start:stop].transpose(0, 1), one, atol=1e-6, rtol=1e-5)


@each_way
@pytest.mark.parametrize("window", [None, 6, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_tokens_beyond_the_keys_are_seen_by_none(idle: bool, causal: bool, window: int | None, by_kernel: bool) -> None:
    torch.manual_seed(0)
    keys = (1, None, 7, 5, None, 9)
    batch = pack([text_of(n, seen) for n, seen in zip(LENGTHS, keys, strict=True)])
    row = batch.rounded_up() if idle else batch
    q, k, v = (torch.randn(1, len(row.ids), 4, 8).transpose(1, 2) for _ in range(3))
    packing = packing_of(row, by_kernel)
    result, _ = packed_attention(Attention(causal), q, k, v, None, scaling=0.3, sliding_window=window, packing=packing)

    assert result.isfinite().all()
    for i, (start, stop) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        one = written_out(*(x[0, :, start:stop] for x in (q, k, v)), causal, window, keys[i])
        torch.testing.assert_close(result[0, start:stop].transpose(0, 1), one, atol=1e-6, rtol=1e-5)


def test_what_is_seen_is_found_in_the_row() -> None:
    batch = pack([text_of(3, 2), text_of(1), text_of(4, 1)])
    assert batch.keys is not None
    visible = VisibleKeys.of(batch, batch.keys, torch.device("cpu"))

    assert (visible.positions.tolist(), visible.cu_seqlens.tolist(), visible.longest) == ([0, 1, 2, 4], [0, 1, 3, 4], 2)


def test_the_call_overrules_the_module_on_causality() -> None:
    batch = pack([text_of(5)])
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    packing = Packing.of(batch, None)
    told, _ = packed_attention(Attention(True), q, k, v, None, is_causal=False, packing=packing)
    own, _ = packed_attention(Attention(False), q, k, v, None, packing=packing)

    torch.testing.assert_close(told, own)


@pytest.mark.parametrize(
    "extra",
    [
        {"packing": None},
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"softcap": 50.0},
        {"position_bias": torch.zeros(1, 2, 3, 3)},
    ],
)
def test_what_it_does_not_do_is_refused(extra: dict[str, object]) -> None:
    batch = pack([text_of(3)])
    rows = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    inputs = {"attention_mask": None, "packing": Packing.of(batch, None)} | extra

    with pytest.raises(CannotPackError, match="needs more"):
        packed_attention(Attention(False), *rows, **inputs)


D = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
WIDE = D | {"num_key_value_heads": 4, "sliding_window": 1100, "max_position_embeddings": 1400}


@pytest.mark.parametrize(
    ("config", "longest", "width"),
    [
        (transformers.MistralConfig(**WIDE), 1400, None),
        (transformers.MistralConfig(**WIDE, is_causal=False), 1400, 1100),  # the library's mask has a token more
        (transformers.MistralConfig(**WIDE, is_causal=False), 1100, None),  # no text reaches it
        (transformers.PhimoeConfig(**WIDE, num_local_experts=2), 1400, 1100),  # the window is in the mask alone
        (
            transformers.MistralConfig(**WIDE | {"sliding_window": 1024}, is_causal=False),
            1400,
            None,
        ),  # the gate sees it
        (transformers.Qwen2Config(**WIDE, use_sliding_window=False), 1400, None),
        (transformers.BertConfig(**D), 1400, None),
    ],
    ids=lambda given: getattr(given, "model_type", str(given)),
)
def test_a_window_that_the_gate_does_not_reach_is_left_to_the_library_unless_layers_hand_it_on(
    config: transformers.PreTrainedConfig, longest: int, width: int | None
) -> None:
    assert unproved_window(transformers.AutoModel.from_config(config), longest) == width


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("length", [4, 32, 33, 100])
def test_dynamic_positions_of_a_text_are_the_librarys(length: int) -> None:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=4, max_position_embeddings=32, rope_parameters=DYNAMIC
    )
    module, same = (transformers.AutoModel.from_config(config) for _ in range(2))
    put_own_rotary(module)
    own = own_rotary(module)
    assert own is not None

    x, positions = torch.zeros(1, 1), torch.arange(length)[None]
    for found, expected in zip(own(x, positions), same.rotary_emb(x, positions), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_model_that_lays_them_out_in_another_way_is_refused() -> None:
    """Cohere repeats each frequency for two columns side by side."""
    config = transformers.CohereConfig(
        **SIZES, num_key_value_heads=4, max_position_embeddings=32, rope_parameters=DYNAMIC
    )

    with pytest.raises(ModelLoadFailed, match="dynamic rotary positions as in CohereRotaryEmbedding"):
        put_own_rotary(transformers.AutoModel.from_config(config))
