"""What happens to pooled vectors: Dense modules on the device, then the cut and the normalisation of a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from teimgr.errors import ModelLoadFailed
from teimgr.layout import Dense, Projection


class DenseHead(nn.Module):
    """One Dense module: activation(linear(x)), plus the residual where the model has one. Float32 throughout."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        self.activation = _activation(dense.activation)
        self.residual: nn.Module | None = None
        if dense.residual and dense.in_features != dense.out_features:
            self.residual = nn.Linear(dense.in_features, dense.out_features, bias=False)
        elif dense.residual:
            self.residual = nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        """[N, in_features] → [N, out_features]."""
        out: Tensor = self.activation(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


def load_heads(modules: Sequence[Projection], device: torch.device) -> nn.Sequential:
    """The Dense modules of a model, in order, with their weights.

    Raises:
        ModelLoadFailed: weights are missing or have another shape, or an activation is not one of torch's.
    """
    heads = nn.Sequential(*(DenseHead(dense) for dense in modules))
    for dense, head in zip(modules, heads, strict=True):
        try:
            head.load_state_dict(_weights(dense.path))
        except RuntimeError as error:
            raise ModelLoadFailed(f"the weights of the Dense module {dense.path.name} do not fit: {error}") from error
    return heads.float().eval().requires_grad_(False).to(device)


def finish(vectors: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Cut [N, D] to `dimensions`, then scale every row to length 1 (norm in float64); a zero row stays zero."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if not normalize:
        return cut
    norms = np.sqrt(np.einsum("nd,nd->n", cut, cut, dtype=np.float64))
    norms[norms == 0.0] = 1.0
    return np.asarray(cut / norms[:, None], dtype=np.float32)


def _weights(folder: Path) -> dict[str, Tensor]:
    if (file := folder / "model.safetensors").is_file():
        return load_file(file)
    if (file := folder / "pytorch_model.bin").is_file():
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    raise ModelLoadFailed(f"the Dense module {folder.name} has no weights")


def _activation(name: str) -> nn.Module:
    """An activation by the dotted name sentence-transformers saves; only modules of torch itself are made."""
    kind = getattr(nn, name.rsplit(".", 1)[-1], None)
    if not name.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelLoadFailed(f"the activation {name} of a Dense module is not served")
    return kind()
