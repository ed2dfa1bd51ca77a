"""The C kernel against scaled dot-product attention in float64, for every instruction set of this CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.native import needs_native_library
from torch import Tensor
from torch.nn import functional

from teimgr.engine.attention_kernel import DTYPES, AttentionKernel, attention_kernel
from teimgr.engine.native_library import native_library

KERNEL = attention_kernel()
LEVELS = KERNEL.levels() if KERNEL else ()
pytestmark = needs_native_library

# Around the kernel's borders: registers of 4, 8 and 16 numbers, blocks of 1,024 keys, chunks of 512 queries.
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 130, 511, 513, 1023, 1024, 1025, 2100)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.05}  # of values around 1, with scores up to some 20


@pytest.fixture
def kernel() -> AttentionKernel:
    assert KERNEL is not None
    return KERNEL


@dataclass(frozen=True)
class Texts:
    """Random queries, keys and values of some texts; `stride` other numbers lie between those of two tokens."""

    lengths: tuple[int, ...]
    dtype: torch.dtype
    heads: int = 2
    key_heads: int = 2
    size: int = 32
    seed: int = 0

    @property
    def begins(self) -> NDArray[np.int32]:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        widths = (self.heads * self.size, self.key_heads * self.size, self.key_heads * self.size)
        together = torch.randn(sum(self.lengths), sum(widths), generator=generator).to(self.dtype)
        views = [part.unflatten(1, (-1, self.size)) for part in together.split(widths, dim=1)]
        return views[0] * 2, views[1], views[2]

    def expected(
        self, keys: NDArray[np.int32] | None, causal: bool, reach: int | None, slopes: tuple[float, ...] | None
    ) -> Tensor:
        return _expected(self, None if keys is None else tuple(keys.tolist()), causal, reach, slopes)

    def attend(
        self, keys: tuple[int, ...] | None, causal: bool, reach: int | None, slopes: tuple[float, ...] | None = None
    ) -> Tensor:
        parts = []
        for i, (start, stop) in enumerate(zip(self.begins[:-1], self.begins[1:], strict=True)):
            at = torch.arange(int(stop - start))
            distance = at[:, None] - at[None, :]
            seen = (at < (len(at) if keys is None else keys[i])).expand(len(at), -1)
            seen = seen if reach is None else seen & (distance.abs() <= reach)
            seen = seen & (distance >= 0) if causal else seen
            q, k, v = (rows[start:stop].double().transpose(0, 1) for rows in self.rows)
            k, v = (x.repeat_interleave(self.heads // self.key_heads, dim=0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * self.size**-0.5
            if slopes is not None:
                scores = scores - torch.tensor(slopes).double()[:, None, None] * distance.abs()
            scores = scores.masked_fill(~seen, -torch.inf)
            parts.append((scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1))  # NaN: a query that sees no key
        return torch.cat(parts)


@lru_cache(2)  # the instruction sets are compared with it one after the other
def _expected(
    texts: Texts,
    keys: tuple[int, ...] | None,
    causal: bool,
    reach: int | None,
    slopes: tuple[float, ...] | None,
) -> Tensor:
    return texts.attend(keys, causal, reach, slopes)


def largest_difference(
    kernel: AttentionKernel,
    texts: Texts,
    level: str,
    keys: NDArray[np.int32] | None = None,
    causal: bool = False,
    reach: int | None = None,
    slopes: tuple[float, ...] | None = None,
) -> float:
    longest, given = max(texts.lengths), None if slopes is None else torch.tensor(slopes)
    found = kernel(*texts.rows, texts.begins, longest, keys, causal=causal, reach=reach, slopes=given, level=level)
    assert found.dtype is texts.dtype
    return float((found.double() - texts.expected(keys, causal, reach, slopes)).abs().max())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 24, 32, 33, 40, 64, 80, 96, 128, 256])
def test_every_size_of_head(kernel: AttentionKernel, size: int, dtype: torch.dtype, level: str) -> None:
    texts = Texts((3, 16, 17, 65, 130), dtype, heads=4, key_heads=2, size=size)

    assert largest_difference(kernel, texts, level) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reach", [None, 0, 5, 300, 1100])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_and_causality_across_blocks(
    kernel: AttentionKernel, causal: bool, reach: int | None, dtype: torch.dtype, level: str
) -> None:
    texts = Texts((1, 64, 600, 1300), dtype)

    assert largest_difference(kernel, texts, level, causal=causal, reach=reach) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("keys", "causal", "reach"), [(None, False, None), ((1, 30, 500, 1200), True, 700)])
def test_slopes_of_alibi_across_blocks(
    kernel: AttentionKernel,
    keys: tuple[int, ...] | None,
    causal: bool,
    reach: int | None,
    dtype: torch.dtype,
    level: str,
) -> None:
    texts = Texts((1, 64, 600, 1300), dtype, heads=4)
    given, slopes = None if keys is None else np.array(keys, np.int32), (0.5, 0.004, 0.0, 0.06)

    assert largest_difference(kernel, texts, level, given, causal, reach, slopes) < TOLERANCE[dtype]


def test_slopes_of_another_number_of_heads_are_refused(kernel: AttentionKernel) -> None:
    texts = Texts((4,), torch.float32)

    with pytest.raises(ValueError, match="slopes"):
        kernel(*texts.rows, texts.begins, 4, slopes=torch.ones(3))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(kernel: AttentionKernel, seed: int, level: str) -> None:
    draw = np.random.default_rng(seed)
    lengths = tuple(sorted(draw.choice(LENGTHS, size=3).tolist()))
    key_heads, group = int(draw.integers(1, 4)), int(draw.choice([1, 2, 4]))
    dtype, size = DTYPES[seed % 2], int(draw.choice([8, 32, 64, 72]))
    texts = Texts(lengths, dtype, heads=key_heads * group, key_heads=key_heads, size=size, seed=seed)
    keys = np.array([draw.integers(1, n + 1) for n in lengths], dtype=np.int32)
    reach = None if draw.random() < 0.5 else int(draw.choice([0, 1, 64, 700]))

    assert largest_difference(kernel, texts, level, keys, bool(seed % 3), reach) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_text_has_the_same_result_alone_and_in_a_batch_bit_for_bit(
    kernel: AttentionKernel, dtype: torch.dtype
) -> None:
    """On several threads, whatever they take."""
    texts = Texts((5, 12, 40, 300, 1500), dtype, heads=12, key_heads=12)
    together = kernel(*texts.rows, texts.begins, 1500)
    for start, stop in zip(texts.begins[:-1], texts.begins[1:], strict=True):
        rows = [rows[start:stop] for rows in texts.rows]
        length = int(stop - start)
        alone = kernel(*rows, np.array([0, length], dtype=np.int32), length)
        assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_a_text_without_keys_has_a_result_of_zeros(
    kernel: AttentionKernel,
    causal: bool,
    reach: int | None,
    dtype: torch.dtype,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options))
    texts = Texts((700, 5), dtype)
    found = kernel(*texts.rows, texts.begins, 700, np.array([0, 5], np.int32), causal=causal, reach=reach, level=level)

    assert not found[:700].any()
    assert found[700:].isfinite().all()


def test_idle_tokens_are_zero(kernel: AttentionKernel) -> None:
    texts = Texts((9,), torch.float32)
    found = kernel(*texts.rows, np.array([0, 5], dtype=np.int32), 5)

    assert found[:5].abs().min() > 0
    assert not found[5:].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_is_none_stays_in_its_text(kernel: AttentionKernel, dtype: torch.dtype, level: str) -> None:
    texts = Texts(
        (
            6,
            20,
            20,
        ),
        dtype,
    )
    for rows, token in zip(texts.rows, (7, 8, 9), strict=True):
        rows[token] = torch.nan
    found = kernel(*texts.rows, texts.begins, 20, level=level)

    assert found[:6].isfinite().all()
    assert found[26:].isfinite().all()
    assert found[6:26].isnan().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["query", "key"])
def test_a_score_that_is_none_is_not_hidden(
    kernel: AttentionKernel, which: int, dtype: torch.dtype, level: str
) -> None:
    """As a weight of 0 it would be, where every value is a number."""
    texts = Texts((20, 6), dtype)
    texts.rows[which][9, 0, 3] = torch.nan
    found = kernel(*texts.rows, texts.begins, 20, level=level)

    assert found[9, 0].isnan().all()
    assert bool(found[:20, 0].isnan().all()) == (which == 1)  # every query's score with that key is none
    assert found[:, 1].isfinite().all()
    assert found[20:].isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_scores_far_apart_neither_overflow_nor_vanish(kernel: AttentionKernel, level: str) -> None:
    texts = Texts((50,), torch.float32)
    query, key, value = texts.rows
    found = kernel(query * 1e4, key * 1e4, value, texts.begins, 50, level=level)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double())
    best = value.transpose(0, 1).gather(1, scores.argmax(-1)[..., None].expand(-1, -1, texts.size)).transpose(0, 1)

    torch.testing.assert_close(found, best, atol=1e-4, rtol=1e-4)  # all the weight is on one key


def test_numbers_of_heads_that_do_not_divide_are_refused(kernel: AttentionKernel) -> None:
    texts = Texts((4,), torch.float32, heads=3, key_heads=2)

    with pytest.raises(ValueError, match="do not belong together"):
        kernel(*texts.rows, texts.begins, 4)


@pytest.mark.parametrize("dtypes", ["ddd", "eee", "fbf", "bbf"])
def test_rows_of_other_or_several_types_are_refused(dtypes: str, kernel: AttentionKernel) -> None:
    """Numbers of half the bytes were read beyond the end of their memory."""
    texts = Texts((4,), torch.float32)
    of = {"d": torch.float64, "e": torch.float16, "f": torch.float32, "b": torch.bfloat16}
    rows = [part.to(of[name]) for part, name in zip(texts.rows, dtypes, strict=True)]

    with pytest.raises(ValueError, match="queries, keys and values of"):
        kernel(*rows, texts.begins, 4)


@pytest.mark.parametrize("begins", [(0, 5), (2, 1), (-1, 4)])
def test_borders_outside_of_the_rows_are_refused(begins: tuple[int, int], kernel: AttentionKernel) -> None:
    texts = Texts((4,), torch.float32)

    with pytest.raises(RuntimeError, match="outside of what it is of"):
        kernel(*texts.rows, np.array(begins, np.int32), 4)


@pytest.mark.parametrize(("value", "missing"), [("0", True), ("1", False)])
def test_the_environment_turns_it_off(value: str, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", value)

    assert (native_library.__wrapped__() is None) is missing


def test_the_environment_bounds_the_instructions(kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", LEVELS[1])
    found = native_library.__wrapped__()

    assert found is not None
    assert found.level == 1


def test_it_agrees_with_torchs_own(kernel: AttentionKernel) -> None:
    texts = Texts((100,), torch.float32)
    q, k, v = (rows.transpose(0, 1) for rows in texts.rows)
    theirs = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    torch.testing.assert_close(kernel(*texts.rows, texts.begins, 100), theirs, atol=1e-5, rtol=1e-5)
