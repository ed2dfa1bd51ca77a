"""Activations that files name by the dotted path of a class; only torch's own are made."""

from __future__ import annotations

from torch import nn

from teimgr.errors import ModelLoadFailed


def torch_activation(name: str) -> nn.Module:
    """The module that `name` ("torch.nn.modules.activation.Tanh") says, made without arguments.

    Raises:
        ModelLoadFailed: it is no module of torch's, or needs arguments.
    """
    kind = getattr(nn, name.rsplit(".", 1)[-1], None)
    if not name.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelLoadFailed(f"the activation {name} is not served")
    try:
        return kind()
    except TypeError as error:
        raise ModelLoadFailed(f"the activation {name} is not served: {error}") from error
