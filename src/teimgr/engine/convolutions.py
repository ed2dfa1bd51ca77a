"""LFM2's short convolutions, centred: in models whose tokens see all others, each sees those on both sides."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class CentredShortConv(nn.Module):
    """C · conv(B · x) as in LFM2's own layer, with the middle of the kernel over the token; a text is between zeros.

    One text, or several of equal length without padding: [texts, T, H].
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.in_proj, self.conv, self.out_proj = causal.in_proj, causal.conv, causal.out_proj

    def forward(self, hidden_states: Tensor, **_options: Any) -> Tensor:
        b, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        kernel = self.conv.weight
        mixed = functional.conv1d(b * x, kernel, self.conv.bias, padding=kernel.shape[-1] // 2, groups=kernel.shape[0])
        out: Tensor = self.out_proj((c * mixed).transpose(-1, -2).contiguous())
        return out


def centre_convolutions(module: nn.Module) -> None:
    """Put `CentredShortConv` in the place of every short convolution of an LFM2."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Lfm2ShortConv":
                setattr(parent, name, CentredShortConv(child))
