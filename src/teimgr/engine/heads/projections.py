"""The modules after a pooling or, in late interaction, after every token: Dense, LayerNorm, Normalize, own code."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.directory import fault_of, weight_files
from teimgr.models.layout import Dense, LayerNorm, Normalize, OwnModule, Projection

_NAMED_WEIGHTS = 3  # in an error message


def torch_activation(name: str) -> nn.Module:
    """Return the activation module of a dotted name ("torch.nn.modules.activation.Tanh").

    Raises:
        ModelLoadFailed: it is not an activation of torch, or needs arguments.
    """
    kind = getattr(nn, name.rsplit(".", 1)[-1], None)
    if not name.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelLoadFailed(f"the activation {name} is not served")
    try:  # of rows, the implicit dimension of these three is 1, with a warning
        return kind(dim=1) if issubclass(kind, (nn.Softmax, nn.LogSoftmax, nn.Softmin)) else kind()
    except TypeError as error:
        raise ModelLoadFailed(f"the activation {name} is not served: {error}") from error


class DenseLayer(nn.Module):
    """A Dense module: activation(linear(x)), plus the residual if the model has one."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        self.activation_function = torch_activation(dense.activation)  # named as in files: PReLU has a weight
        self.residual: nn.Module | None = None
        if dense.residual and dense.in_features != dense.out_features:
            self.residual = nn.Linear(dense.in_features, dense.out_features, bias=False)
        elif dense.residual:
            self.residual = nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        out: Tensor = self.activation_function(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


class LayerNormLayer(nn.Module):
    """One LayerNorm module."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(norm.dimension)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.norm(vectors)  # type: ignore[no-any-return]


class NormalizeLayer(nn.Module):
    """One Normalize module: every vector to length 1; zero vectors stay zero."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1)


class OwnModuleLayer(nn.Module):
    """A module of the model's own code, which takes and returns the features of sentence-transformers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, vectors: Tensor) -> Tensor:
        found: Tensor = self.module({"sentence_embedding": vectors})["sentence_embedding"]
        return found


def load_projections(projections: Sequence[Projection], device: torch.device) -> nn.Sequential:
    """Load the modules in order, in float32, with their weights.

    Raises:
        ModelLoadFailed: weights are missing or have another shape, or an activation is not one of torch's.
    """
    layers = nn.Sequential(*map(_load, projections))
    return layers.float().eval().requires_grad_(False).to(device)


def width_behind(projections: Sequence[Projection], width: int) -> int:
    """Return the size of a vector of `width` after the modules.

    Raises:
        ModelLoadFailed: a module expects vectors of another size than it gets.
    """
    if any(isinstance(projection, OwnModule) for projection in projections):
        layers = load_projections(projections, torch.device("cpu"))
        try:
            with torch.inference_mode():
                return int(layers(torch.ones(1, width)).shape[-1])
        except Exception as error:  # of any type, from the model's own code
            raise ModelLoadFailed(f"the modules after the pooling fail: {type(error).__name__}: {error}") from error
    for projection in projections:
        if isinstance(projection, Normalize | OwnModule):
            continue
        takes = projection.in_features if isinstance(projection, Dense) else projection.dimension
        if takes != width:
            raise ModelLoadFailed(f"the module {projection.path.name} takes vectors of {takes}, and is given {width}")
        if isinstance(projection, Dense):
            width = _activated_width(projection)
    return width


def _activated_width(dense: Dense) -> int:
    """Return the size of a vector behind a Dense module, of which a GLU leaves half."""
    try:
        with torch.inference_mode():
            found: Tensor = torch_activation(dense.activation)(torch.zeros(2, dense.out_features))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelLoadFailed(
            f"the module {dense.path.name} has the activation {dense.activation}, which does not take vectors of "
            f"{dense.out_features}: {error}"
        ) from error
    if found.dim() != 2:
        raise ModelLoadFailed(
            f"the module {dense.path.name} has the activation {dense.activation}, which is not served"
        )
    return int(found.shape[1])


def _load(projection: Projection) -> nn.Module:
    """Load the module with its weights; the file may also hold those of a transformer, as in Stanford's ColBERT."""
    if isinstance(projection, OwnModule):
        return _own_module(projection)
    if not isinstance(projection, Dense | LayerNorm):
        return NormalizeLayer()
    with torch.device("meta"):  # config.json may name any size: memory is allocated by the sizes in the files
        layer = DenseLayer(projection) if isinstance(projection, Dense) else LayerNormLayer(projection)
    folder = projection.path
    names = tuple(f"{name}." for name, _ in layer.named_children())
    given = {_named(projection, key): value for key, value in read_weights(folder).items()}
    if not _is_module(folder):  # the file also has the transformer's weights
        given = {key: value for key, value in given.items() if key.startswith(names)}
    if unused := sorted(given.keys() - layer.state_dict().keys()):
        raise ModelLoadFailed(
            f"the weights of the module {folder.name} do not fit: the files have {', '.join(unused[:_NAMED_WEIGHTS])}, "
            "which its config.json does not declare"
        )
    for key, expected in layer.state_dict().items():
        found = given.get(key)
        shown = key.replace("linear.", f"{projection.name}.", 1) if isinstance(projection, Dense) else key
        if found is None:
            raise ModelLoadFailed(f"the weights of the module {folder.name} do not fit: they have no {shown}")
        if found.shape != expected.shape:
            raise ModelLoadFailed(
                f"the weights of the module {folder.name} do not fit: {shown} is {tuple(found.shape)} in the files, "
                f"and its config.json makes it {tuple(expected.shape)}"
            )
    layer.load_state_dict({key: value.float() for key, value in given.items()}, assign=True)
    if isinstance(projection, Dense) and projection.divisor != 1.0:
        for parameter in layer.parameters():
            parameter.data = parameter.data.float() / projection.divisor
    return layer


def _is_module(folder: Path) -> bool:
    """True if the directory belongs to a Dense or a LayerNorm module."""
    config = read_object(folder / "config.json") or {}
    return "model_type" not in config and bool({"in_features", "dimension"} & config.keys())


# Further arguments of a module's `load` in sentence-transformers.
_LOADING: dict[str, Any] = {"local_files_only": True, "trust_remote_code": True}


def _own_module(module: OwnModule) -> OwnModuleLayer:
    """Load the module as sentence-transformers does: from its directory if `load` has one parameter, else from the
    model's directory and the folder in it.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        kind: Any = get_class_from_dynamic_module(
            module.code, str(module.root), local_files_only=True, code_revision=module.revision
        )
        parameters = inspect.signature(kind.load).parameters
        if len(parameters) == 1:
            return OwnModuleLayer(kind.load(str(module.path)))
        given = {"subfolder": module.path.relative_to(module.root).as_posix(), **_LOADING}
        if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            given = {key: value for key, value in given.items() if key in parameters}
        return OwnModuleLayer(kind.load(str(module.root), **given))
    except Exception as error:  # of any type, from the model's own code
        raise ModelLoadFailed(f"{module.code} of modules.json fails: {type(error).__name__}: {error}") from error


def _named(projection: Projection, key: str) -> str:
    """Return the name of a weight in our layer."""
    own = f"{projection.name}." if isinstance(projection, Dense) else ""
    return f"linear.{key.removeprefix(own)}" if own and key.startswith(own) else key


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a directory's weights (`model_directory.weight_files`), on the CPU.

    Raises:
        ModelLoadFailed: the weights are missing, or a file cannot be read.
    """
    files = weight_files(folder)
    if not files:
        raise ModelLoadFailed(f"the module {folder.name} has no weights")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= read_tensors(file)
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a weights file, on the CPU; raises as `read_weights`."""
    if fault := fault_of(file):
        raise ModelLoadFailed(f"{file.parent.name}/{file.name} {fault}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise ModelLoadFailed(f"the weights {file.parent.name}/{file.name} cannot be read: {error}") from error
