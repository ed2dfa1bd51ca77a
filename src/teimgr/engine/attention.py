"""Attention over a packed row, registered with transformers under one name for every architecture.

No mask function is registered under that name, so transformers builds no mask and passes `None` on. Masks follow from
`Packing`, which is passed as a keyword argument of the model's forward.

`DynamicRotary` has positions whose frequencies depend on the length of the text (dynamic NTK). The library's own module
takes the length of the longest text of a batch for all, and keeps the frequencies of the longest text that it has seen.
Here each text has those for its length, padding-free rows included.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from teimgr.engine import gpu
from teimgr.engine.attention_kernel import attention_kernel
from teimgr.engine.batching.batch import PackedBatch, Run, to_device
from teimgr.engine.gpu_kernels.varlen_kernel import Borders, varlen_kernel
from teimgr.errors import ModelLoadFailed

PACKED = "teimgr_packed"


class CannotPackError(Exception):
    """The model's attention uses something that packed attention does not implement."""


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys of a row with masked tokens: `positions` int64 [S] in the row, and their borders per text, `cu_seqlens`
    int32 [N + 1], both on the device; `longest` is the maximum per text.
    """

    positions: Tensor
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, batch: PackedBatch, keys: NDArray[np.int32], device: torch.device) -> VisibleKeys:
        """The first `keys` tokens of every text of `batch`."""
        borders = np.zeros(batch.texts + 1, dtype=np.int32)
        np.cumsum(keys, out=borders[1:])
        positions = np.arange(borders[-1], dtype=np.int64) + np.repeat(batch.cu_seqlens[:-1] - borders[:-1], keys)
        return cls(to_device(positions, device), to_device(borders, device), int(keys.max()))


@dataclass(frozen=True, slots=True)
class Packing:
    """The borders of the texts of a packed row, and which of their tokens are keys.

    `cu_seqlens` (int32 [N + 1] on the device) is set if the device has a kernel for texts of unequal length; otherwise
    attention is computed run by run. `keys` has, for every run, the number of leading tokens that are keys, int32
    [texts], or None if all are; `text_keys` has it for every text, int32 [N]. `visible` is for the kernel of a GPU.
    `callers` are the classes of layers that asked `packed_attention`: without one, each text saw the whole row.
    """

    runs: tuple[Run, ...]
    keys: tuple[NDArray[np.int32] | None, ...]
    max_seqlen: int
    cu_seqlens: Tensor | None
    text_keys: NDArray[np.int32] | None = None
    visible: VisibleKeys | None = None
    callers: set[type] = field(default_factory=set)
    _masks: dict[tuple[int | Run, int | None, bool], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PackedBatch, cu_seqlens: Tensor | None) -> Packing:
        keys = tuple(batch.keys_of(run) for run in batch.runs)
        visible = None
        if cu_seqlens is not None and batch.keys is not None and gpu.is_gpu(cu_seqlens.device):
            visible = VisibleKeys.of(batch, batch.keys, cu_seqlens.device)
        return cls(batch.runs, keys, batch.max_seqlen, cu_seqlens, batch.keys, visible)

    def window(self, length: int, reach: int, causal: bool, device: torch.device) -> Tensor | None:
        """The mask of a sliding window of `reach` tokens to each side; None if it covers all `length` tokens."""
        if length <= reach + 1:
            return None
        key = (length, reach, causal)
        if key not in self._masks:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            seen = distance.abs() <= reach
            self._masks[key] = seen & (distance >= 0) if causal else seen
        return self._masks[key]

    def mask(self, index: int, reach: int | None, causal: bool, device: torch.device) -> Tensor | None:
        """The mask of run `index`: [length, length], or [texts, 1, 1 or length, length] where not all keys are visible.

        None if no mask is needed: full attention, or plain causal attention.
        """
        run, keys = self.runs[index], self.keys[index]
        window = None if reach is None else self.window(run.length, reach, causal, device)
        if keys is None:
            return window
        key = (run, reach, causal)
        if key not in self._masks:
            seen = np.arange(run.length)[None, :] < keys[:, None]
            mask = to_device(seen, device)[:, None, None, :]
            if window is None and causal:
                window = torch.ones(run.length, run.length, dtype=torch.bool, device=device).tril()
            self._masks[key] = mask if window is None else mask & window
        return self._masks[key]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within each text of a packed row: [1, heads, T, d] in, [1, T, heads, d] out.

    `alibi_slopes` are those of `alibi_slopes()`, float32 [heads], for models of our own.

    Raises:
        CannotPackError: the call has a mask, a bias or a cap, or the model did not pass `packing` on; or it has slopes,
            which a GPU's kernel does not take.
    """
    if packing is None or not is_plain(attention_mask, kwargs):
        raise CannotPackError(f"{type(module).__name__} needs more than packed attention implements")
    packing.callers.add(type(module))
    causal = causality_of(module, is_causal)
    reach = None if sliding_window is None else sliding_window - 1
    rows = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    attend = _by_run
    if packing.cu_seqlens is not None:
        if alibi_slopes is not None and gpu.is_gpu(query.device):
            raise CannotPackError("torch's flash attention is built without ALiBi")
        # A GPU's kernel aligns queries and keys at their ends: with masked keys, a window or causality would shift.
        shifted = packing.visible is not None and (causal or reach is not None)
        attend = _by_native_kernel if not gpu.is_gpu(query.device) else _by_run if shifted else _by_varlen_kernel
    return attend(*rows, packing, _Scores(scaling, causal, reach, alibi_slopes)).unsqueeze(0), None


class _Scores(NamedTuple):
    """How products become scores: `reach` is the window, `slopes` are ALiBi's."""

    scale: float | None
    causal: bool
    reach: int | None
    slopes: Tensor | None


_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "past_key_values", "head_mask")


def is_plain(attention_mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """True if a call of attention has no mask, bias, cap or cache, which neither packed rows nor a trace implement."""
    return attention_mask is None and all(options.get(name) is None for name in _UNSUPPORTED)


def causality_of(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """True if attention is causal: as the call has it, else as the layer has it."""
    return bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)


WINDOW_KEYS = ("sliding_window", "local_attention")
"""Keys of config.json with the width of an attention window."""
WIDEST_PROBED_WINDOW = 1024
"""The widest window, in tokens, that the fidelity gate tests: a longer text would add seconds to every load."""


def unproved_window(module: torch.nn.Module, longest: float) -> int | None:
    """The width of a window, less than the `longest` text, of which packed attention may differ from the library's,
    unseen by the fidelity gate.

    A causal layer that hands its window to attention is right by construction. The library's masks of bidirectional
    attention have a token more on each side than its kernels, and some layers leave the window to the mask alone.
    """
    whole: Any = module.config
    config = whole.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", None) is False or (kinds and not any("sliding" in kind for kind in kinds)):
        return None
    widths = [getattr(config, key, None) for key in WINDOW_KEYS]
    wide = [width for width in widths if isinstance(width, int) and WIDEST_PROBED_WINDOW < width < longest]
    if not wide:
        return None
    layers = [layer for layer in module.modules() if hasattr(layer, "is_causal")]
    causal = getattr(config, "is_causal", True) is not False and all(layer.is_causal for layer in layers)
    return None if layers and causal and all(_hands_on_window({type(layer) for layer in layers})) else max(wide)


def _hands_on_window(layers: set[type]) -> Iterator[bool]:
    for layer in layers:
        try:
            yield "sliding_window=" in inspect.getsource(layer)
        except OSError:
            yield False


def _by_varlen_kernel(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """One call of torch's flash attention for all texts, [T, heads, d]."""
    kernel = varlen_kernel()
    assert kernel is not None
    assert packing.cu_seqlens is not None
    keys_at, longest_keys = packing.cu_seqlens, packing.max_seqlen
    if (visible := packing.visible) is not None:
        key, value = key[visible.positions], value[visible.positions]
        keys_at, longest_keys = visible.cu_seqlens, visible.longest
    borders = Borders(packing.cu_seqlens, keys_at, packing.max_seqlen, longest_keys)
    return kernel(query, key, value, borders, scale=scores.scale, causal=scores.causal, reach=scores.reach)


def _by_native_kernel(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """One call of our C library for all texts, [T, heads, d]."""
    kernel = attention_kernel()
    assert kernel is not None
    assert packing.cu_seqlens is not None
    begins, longest, keys = packing.cu_seqlens.numpy(), packing.max_seqlen, packing.text_keys
    scale, causal, reach, slopes = scores
    return kernel(query, key, value, begins, longest, keys, scale=scale, causal=causal, reach=reach, slopes=slopes)


def _by_run(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: _Scores) -> Tensor:
    """One call per run of equal lengths, on views of [T, heads, d]."""
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for i, run in enumerate(packing.runs):
        q, k, v = (_of_run(rows, run) for rows in (query, key, value))
        mask = packing.mask(i, scores.reach, scores.causal, query.device)
        causal = scores.causal and mask is None
        if scores.slopes is None:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scores.scale, enable_gqa=grouped
            )
        else:
            out = biased_attention(q, k, v, scores.slopes, scale=scores.scale, seen=mask, causal=causal)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_run(rows: Tensor, run: Run) -> Tensor:
    """[T, heads, d] → the run's [texts, heads, length, d], a view."""
    return rows[run.start : run.stop].view(run.texts, run.length, *rows.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)


# ALiBi in both directions, as in encoders: score − slope · |i − j|, with a slope per head (Press et al., "Train Short,
# Test Long", 2022).
_CHUNK_SCORES = 16_000_000
"""Scores computed at a time, whose biases take 64 MB."""


@functools.lru_cache(maxsize=64)
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of each head, float32 [heads]: a geometric sequence for a power of two; else that of the next lower
    power, and then every second one of the next higher.
    """

    def of_power(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (i + 1) for i in range(count)]

    power = 1 << (heads.bit_length() - 1)
    slopes = of_power(power) + of_power(2 * power)[::2][: heads - power]
    with torch.inference_mode(mode=False):
        return torch.tensor(slopes, dtype=torch.float32, device=device)


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    scale: float | None = None,
    seen: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ − slope · |i − j|) v by torch's operators, [texts, heads, T, d], of equal shapes.

    `seen` is boolean, [T, T] or broadcast to [texts, heads, T, T]: the keys that a query attends to. Queries are taken
    in chunks, so that a long text's biases need not be in memory at once.
    """
    texts, heads, length, _ = query.shape
    step = max(1, _CHUNK_SCORES // max(1, (texts if seen is not None else 1) * heads * length))
    places = torch.arange(length, device=query.device)
    parts = []
    for first in range(0, length, step):
        rows = slice(first, min(first + step, length))
        distances = places[rows, None] - places[None, :]
        bias = (slopes[:, None, None] * -distances.abs()).to(query.dtype)
        if causal:
            bias = bias.masked_fill(distances < 0, -math.inf)
        if seen is not None:
            whole = seen if seen.shape[-2] == 1 else seen[..., rows, :]
            bias = bias.masked_fill(~whole, -math.inf)
        mask = bias if bias.dim() == 4 else bias[None]
        parts.append(functional.scaled_dot_product_attention(query[:, :, rows], key, value, mask, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


_OWN = "teimgr.engine.own_models"
_BEYOND = 64  # tokens of a test text beyond the trained length
_ALIKE = 1e-3  # tolerance for angles of thousands in float32


class DynamicRotary(nn.Module):
    """cos and sin, [1, T, d], of rotary positions with dynamic NTK scaling, as transformers' rope type "dynamic".

    A text of L > `trained` tokens has the base θ · (f·L/trained − (f − 1))^(d/(d − 2)); others have θ.
    """

    def __init__(self, theta: float, factor: float, trained: int, size: int) -> None:
        super().__init__()
        self.trained = trained
        self._theta, self._factor, self._size = theta, factor, size

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`position_ids` int64 [rows, T] restart at 0 with every text; several rows are alike."""
        positions = position_ids[0]
        text = (positions == 0).cumsum(0) - 1  # the number of each token's text
        longest = torch.zeros_like(positions).scatter_reduce(0, text, positions, "amax")
        lengths = (longest[text] + 1).clamp(min=self.trained).to(torch.float32)
        grown = self._factor * lengths / self.trained - (self._factor - 1)
        base = self._theta * grown ** (self._size / (self._size - 2))
        exponents = torch.arange(0, self._size, 2, device=x.device, dtype=torch.float32) / self._size
        angles = positions.to(torch.float32)[:, None] * (1.0 / base[:, None] ** exponents)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(0)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def own_rotary(module: nn.Module) -> DynamicRotary | None:
    """The `DynamicRotary` in `module`, if any."""
    return next((child for child in module.modules() if isinstance(child, DynamicRotary)), None)


def put_own_rotary(module: nn.Module) -> None:
    """Put a `DynamicRotary` in the place of the library's module of rope type "dynamic".

    Raises:
        ModelLoadFailed: each type of layer has its own frequencies, or the library's module gives other values.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            kinds = getattr(child, "rope_type", None)
            if isinstance(kinds, dict) and "dynamic" in kinds.values():
                raise ModelLoadFailed("dynamic rotary positions that differ between layers are not served")
            if kinds == "dynamic":
                setattr(parent, name, _as_own(child))


def depends_on_batch(module: nn.Module) -> bool:
    """True if the library takes frequencies by the longest text of a batch (rope type "longrope"), or scales all
    tokens of a row by how many of them are masks (ESM).
    """
    if getattr(getattr(module, "config", None), "token_dropout", False):
        return True
    kinds = [getattr(child, "rope_type", None) for child in module.modules()]
    return any("longrope" in kind.values() if isinstance(kind, dict) else kind == "longrope" for kind in kinds)


def _as_own(library: Any) -> DynamicRotary:
    config = library.config
    rope = config.rope_parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * rope.get("partial_rotary_factor", 1.0))
    trained = int(config.max_position_embeddings)
    own = DynamicRotary(float(rope["rope_theta"]), float(rope["factor"]), trained, size)
    # Modules of our own models compute only trained lengths.
    lengths = (trained,) if type(library).__module__.startswith(f"{_OWN}.") else (trained, trained + _BEYOND)
    if not all(_is_alike(own, library, length) for length in lengths):
        raise ModelLoadFailed(f"dynamic rotary positions as in {type(library).__name__} are not served")
    return own


def _is_alike(own: DynamicRotary, library: Any, length: int) -> bool:
    """True if both give the same to the positions of one text: models differ in how they lay out the columns."""
    x, positions = torch.zeros(1, 1, dtype=torch.float32), torch.arange(length)[None]
    try:
        with torch.no_grad():
            expected = library(x, positions)
    except (RuntimeError, ValueError, IndexError, TypeError):  # its positions have several dimensions
        return False
    found = own(x, positions)
    return len(expected) == 2 and all(
        one.shape == other.shape and torch.allclose(one, other, atol=_ALIKE)
        for one, other in zip(found, expected, strict=True)
    )
