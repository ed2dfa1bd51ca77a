"""Rotary positions whose frequencies depend on the length of the text (dynamic NTK), right for every text of a batch.

The library's own module takes the length of the longest text of a batch for all, and keeps the frequencies of the
longest text that it has seen. Here each text has those for its length, padding-free rows included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from teimgr.errors import ModelLoadFailed

_OWN = "teimgr.engine.own_models"
_BEYOND = 64  # tokens of a text that is longer than those in training
_ALIKE = 1e-3  # angles of thousands, in float32


class DynamicRotary(nn.Module):
    """cos and sin, [1, T, d], of rotary positions with dynamic NTK scaling, as transformers' rope type "dynamic".

    A text of L tokens, more than `trained`, has the base θ · (f·L/trained − (f − 1))^(d/(d − 2)); others have θ.
    """

    def __init__(self, theta: float, factor: float, trained: int, size: int) -> None:
        super().__init__()
        self.trained = trained
        self._theta, self._factor, self._size = theta, factor, size

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`position_ids` int64 [rows, T] restart at 0 with every text; several rows are alike."""
        positions = position_ids[0]
        text = (positions == 0).cumsum(0) - 1  # the same number for the tokens of a text
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
    # Our own models' modules leave longer texts to this one.
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
    except (RuntimeError, ValueError, IndexError, TypeError):  # of positions in several dimensions
        return False
    found = own(x, positions)
    return len(expected) == 2 and all(
        one.shape == other.shape and torch.allclose(one, other, atol=_ALIKE)
        for one, other in zip(found, expected, strict=True)
    )
