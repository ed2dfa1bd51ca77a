"""The matrix products of a model alone: the rate that the paths of `bench peers` are a fraction of."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import weights
from bench.encoders import Task, Tokens


class Products:
    """The matrix products of a model's linear layers alone, by oneDNN, for as many tokens as the texts have.

    It is what the others are a fraction of: the measured rate of one library at the model's shapes. A path with other
    kernels may multiply faster. Attention's own products are not in it, and not the layers behind a pooling. The
    vectors are zeros.
    """

    _TOKENS = 2048  # of a batch
    _BYTES = 2**25  # of a result in float32: the memory of a larger one is mapped anew by every product

    def __init__(self, task: Task) -> None:
        import torch

        self.dtype = task.dtype
        self._torch, self._tokens = torch, Tokens(Path(task.model))
        dtype = getattr(torch, task.dtype)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        shapes = linear_shapes(Path(task.model))
        make = _Int8Product if task.dtype == "int8" else partial(_packed, dtype=dtype)
        made: dict[tuple[int, int], Any] = {shape: make(*shape) for shape in dict.fromkeys(shapes)}
        self._layers = [(made[shape], shape[0], self._BYTES // (4 * shape[1])) for shape in shapes]
        self._rows = {inputs: _rows(self._TOKENS, inputs, dtype) for inputs, _ in made}

    def encode(self, texts: list[str]) -> Any:
        """Zeros [results, 1]."""
        encoded = self._tokens(texts)
        left = sum(map(len, encoded))
        with self._torch.inference_mode():
            while left > 0:
                for layer, inputs, most_rows in self._layers:
                    for rows in self._rows[inputs][:left].split(most_rows):
                        layer(rows)
                left -= self._TOKENS
        return np.zeros((len(encoded), 1), np.float32)


class _Int8Product:
    """A product of 8-bit rows without a sign and 8-bit weights with one, as VNNI multiplies them; results in bfloat16,
    with one scale for the rows and one for each output. Quantising the rows is not in it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        import torch

        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        self._torch = torch
        self._weight = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales, self._zeros = torch.full((outputs,), 0.01), torch.zeros(outputs, dtype=torch.int64)
        self._bias = torch.zeros(outputs)

    def __call__(self, rows: Any) -> Any:
        weight = self._weight, self._scales, self._zeros
        result = self._bias, 1.0, 0, self._torch.bfloat16, "none", [], ""
        return self._torch.ops.onednn.qlinear_pointwise(rows, 0.01, 0, *weight, *result)


def _packed(inputs: int, outputs: int, dtype: Any) -> Any:
    import torch

    from teimgr.engine.backbone import PackedLinear

    return PackedLinear(torch.nn.Linear(inputs, outputs), dtype)


def _rows(count: int, width: int, dtype: Any) -> Any:
    import torch

    if dtype == torch.int8:
        return torch.randint(0, 256, (count, width), dtype=torch.uint8)
    return torch.randn(count, width).to(dtype)


# Linear layers of a module that read the same rows: one product can have the results of all.
_SAME_ROWS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_BEHIND_POOLING = ("pooler", "classifier")  # layers that run once a text


def linear_shapes(folder: Path) -> list[tuple[int, int]]:
    """Inputs and outputs of the products of a model's linear layers for every token, without its weights."""
    import torch
    import transformers

    with torch.device("meta"):
        kind = getattr(transformers, weights.architecture(folder))
        model = kind(transformers.AutoConfig.from_pretrained(folder))
    shapes: dict[tuple[str, object], tuple[int, int]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.startswith(_BEHIND_POOLING):
            module, _, own = name.rpartition(".")
            product = module, next((names for names in _SAME_ROWS if own in names), own)
            _, outputs = shapes.get(product, (0, 0))
            shapes[product] = layer.in_features, outputs + layer.out_features
    return list(shapes.values())
