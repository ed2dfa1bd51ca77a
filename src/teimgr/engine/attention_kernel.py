"""Attention of packed rows on CPUs by the C library of `native/`, on torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teimgr.engine.native_library import LEVELS, MAX_HEAD_SIZE, NO_MEMORY, NativeLibrary, native_library

DTYPES = (torch.float32, torch.bfloat16)
_ERRORS = {1: NO_MEMORY, 4: "a size, stride or border that is outside of what it is of"}
# One thread computes fewer products (queries × keys × width): waking a second one would cost more than it saves.
_SERIAL_PRODUCTS = 2_000_000


class _Strides(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int64), ("head", ctypes.c_int64))


class _Call(ctypes.Structure):
    """`struct attention` of library.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("query_stride", _Strides),
        ("key_stride", _Strides),
        ("value_stride", _Strides),
        ("begins", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("texts", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("query_size", ctypes.c_int64),
        ("key_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("slopes_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("reach", ctypes.c_int64),
        ("causal", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("level", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("parallel", ctypes.c_void_p),
    )


def _check(query: Tensor, key: Tensor, value: Tensor, keys: int | None, texts: int, slopes: Tensor | None) -> None:
    """Raise a ValueError if the shapes do not belong together, or the library has no code for them."""
    tokens, heads, size = query.shape
    key_heads = key.shape[1]
    fit = key.shape == value.shape == (tokens, key_heads, size) and query.dtype in DTYPES
    if not fit or {key.dtype, value.dtype} != {query.dtype} or not key_heads or heads % key_heads:
        shapes = ", ".join(f"{tuple(rows.shape)} in {rows.dtype}" for rows in (query, key, value))
        raise ValueError(f"attention kernel: queries, keys and values of {shapes} do not belong together")
    if not 0 < size <= MAX_HEAD_SIZE:
        raise ValueError(f"attention kernel: heads of {size} columns, and at most {MAX_HEAD_SIZE} are computed")
    if keys is not None and keys != texts:
        raise ValueError(f"attention kernel: numbers of keys for {keys} of {texts} texts")
    if slopes is not None and (slopes.shape != (heads,) or slopes.dtype is not torch.float32):
        raise ValueError(f"attention kernel: slopes {tuple(slopes.shape)} in {slopes.dtype} for {heads} heads")


class AttentionKernel:
    """The loaded library; `level` names the instructions that it uses."""

    def __init__(self, library: NativeLibrary) -> None:
        self._run = library.attention
        self._best = library.level
        self._parallel = library.parallel

    @property
    def level(self) -> str:
        return LEVELS[self._best]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        begins: NDArray[np.int32],
        longest: int,
        keys: NDArray[np.int32] | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        reach: int | None = None,
        slopes: Tensor | None = None,
        level: str | None = None,
    ) -> Tensor:
        """softmax(scale · q kᵀ) v within each text, [T, heads, d] from queries [T, heads, d] and keys and values
        [T, key heads, d], in their dtype, one of `DTYPES`.

        Text i has the tokens `begins[i]` to `begins[i + 1]`, at most `longest`, of which the first `keys[i]` are keys.
        `reach` is a window of that many tokens to each side. The scores of head h lose `slopes[h]` · |i − j| (ALiBi),
        float32 [heads]. The result is 0 behind the last text, and for a token whose window has no key. `level` selects
        other instructions than the best of this CPU.

        Raises:
            RuntimeError: the library cannot allocate its buffers.
            ValueError: the shapes do not belong together, or the library has no code for heads of such a shape.
        """
        _check(query, key, value, None if keys is None else len(keys), len(begins) - 1, slopes)
        tokens, heads, size = query.shape
        slopes = None if slopes is None else slopes.contiguous()
        query, key, value = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (query, key, value))
        out = torch.empty(tokens, heads, size, dtype=query.dtype)
        last = int(begins[-1])
        if last < tokens:
            out[last:] = 0
        few = last * longest * heads * size < _SERIAL_PRODUCTS
        call = _Call(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            out=out.data_ptr(),
            out_stride=heads * size,
            query_stride=query.stride()[:2],
            key_stride=key.stride()[:2],
            value_stride=value.stride()[:2],
            begins=begins.ctypes.data,
            keys=None if keys is None else keys.ctypes.data,
            slopes=None if slopes is None else slopes.data_ptr(),
            slopes_size=0 if slopes is None else heads,
            texts=len(begins) - 1,
            longest=longest,
            tokens=tokens,
            query_size=_numbers_from(query),
            key_size=_numbers_from(key),
            value_size=_numbers_from(value),
            out_size=out.numel(),
            heads=heads,
            key_heads=key.shape[1],
            head_size=size,
            reach=-1 if reach is None else reach,
            causal=causal,
            bfloat16=query.dtype is torch.bfloat16,
            level=self._best if level is None else LEVELS.index(level),
            scale=size**-0.5 if scale is None else scale,
            parallel=None if few else self._parallel,
        )
        if status := self._run(ctypes.byref(call)):
            raise RuntimeError(f"attention kernel: {_ERRORS[status]}")
        return out

    def levels(self) -> tuple[str, ...]:
        """Return the instruction sets that this CPU can run, the best last."""
        return LEVELS[: self._best + 1]


def _numbers_from(rows: Tensor) -> int:
    """Return how many numbers follow in its memory, from its first one on."""
    return int(rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset())


@functools.cache
def attention_kernel() -> AttentionKernel | None:
    """The kernel, or None without the library."""
    library = native_library()
    return AttentionKernel(library) if library is not None and library.knows(attention=_Call) else None
