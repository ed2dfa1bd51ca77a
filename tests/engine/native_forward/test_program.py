"""Weights lie as the C library reads them, all of a program in one piece of memory."""

from __future__ import annotations

import pytest
import torch

from teimgr.engine.native_forward.program import WeightPacker, narrowest

PANEL = 16


def test_parts_are_packed_as_one_layer_with_zeros_behind_the_last_column() -> None:
    parts = (torch.randn(16, 6), torch.randn(5, 6))
    packed = WeightPacker([(21, 6, torch.float32)], PANEL).pack(parts, torch.float32)

    assert packed.shape == (2, 6, PANEL)
    rows = packed.permute(0, 2, 1).reshape(2 * PANEL, 6)
    assert torch.equal(rows[:21], torch.cat(parts))
    assert not rows[21:].any()


def test_bfloat16_has_the_weights_of_two_inputs_side_by_side() -> None:
    weights = torch.randn(20, 6)
    packed = WeightPacker([(20, 6, torch.bfloat16)], PANEL, pairs=True).pack([weights], torch.bfloat16)

    assert packed.shape == (2, 3, PANEL)
    pairs = packed.view(torch.bfloat16).view(2, 3, PANEL, 2)
    rows = pairs.permute(0, 2, 1, 3).reshape(2 * PANEL, 6)
    assert torch.equal(rows[:20], weights.to(torch.bfloat16))
    assert not rows[20:].any()


@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32] * 3, [torch.bfloat16] * 3, [torch.float16, torch.float32, torch.bfloat16]],
    ids=["float32", "pairs", "halved"],
)
def test_the_layers_of_a_program_share_one_memory_without_touching_each_other(dtypes: list[torch.dtype]) -> None:
    shapes, pairs = [(16, 6), (32, 4), (17, 2)], set(dtypes) == {torch.bfloat16}
    layers = [torch.randn(shape) for shape in shapes]
    described = [(*shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    packer = WeightPacker(described, PANEL, pairs=pairs)
    packed = [packer.pack([layer], dtype) for layer, dtype in zip(layers, dtypes, strict=True)]

    assert len({each.untyped_storage().data_ptr() for each in packed}) == 1
    assert all(each.data_ptr() % 64 == 0 for each in packed)
    alone = [
        WeightPacker([one], PANEL, pairs=pairs).pack([layer], one[2])
        for one, layer in zip(described, layers, strict=True)
    ]
    assert all(torch.equal(one, other) for one, other in zip(packed, alone, strict=True))


@pytest.mark.parametrize("inner", [4, 8, 12, 384])
def test_what_is_summed_in_16_bits_cannot_saturate(inner: int) -> None:
    """Two neighbouring bytes of each of two fours: with 255 as the other factor a sum is below 2^15."""
    weights = torch.cat([torch.randn(19, inner), torch.ones(1, inner), -torch.ones(1, inner)])
    packed, scales, sums = WeightPacker([], PANEL, byte_sum_bits=16).pack_bytes(weights)

    rows = packed.permute(0, 2, 1, 3).reshape(2 * PANEL, inner).int()
    assert torch.equal(sums, rows.sum(dim=1, dtype=torch.int32))
    assert (rows[:21] * scales[:21, None] - weights).abs().max() <= scales.max() * 0.501
    summed = torch.nn.functional.pad(rows, (0, -inner % 8)).view(2 * PANEL, -1, 2, 2, 2)
    positive, negative = (each.clamp_min(0).sum(dim=(2, 4)) for each in (summed, -summed))
    assert max(int(positive.max()), int(negative.max())) in range(120, 129)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_halved_where_not_one_is_another_number_then(dtype: torch.dtype) -> None:
    exact = [torch.randn(100, 90).to(dtype).float() for _ in range(2)]
    assert narrowest(exact) is dtype
    for part, value in ((0, 1 + 2**-12), (1, 1e5 + 1)):
        other = [each.clone() for each in exact]
        other[part][-1, -1] = value  # behind the first 4,096
        assert narrowest(other) is torch.float32
