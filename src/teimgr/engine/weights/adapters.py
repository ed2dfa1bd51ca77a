"""LoRA adapters: merges PEFT's into the weights of their base model, at load, in float32.

Adapters by task (jina-embeddings-v3 and v5) are not merged: each text uses the weights of its request's task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.heads.projections import read_tensors
from teimgr.engine.weights.own import own_names
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Adapter, Layout

# `base_model.model.` + the layer + one of these, with the adapter's name if PEFT wrote it.
_PART = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)(?:\.(?!weight$|bias$)\w+)?(?:\.(?P<kind>weight|bias))?$"
)
_SAVED_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<name>.+?)(?:\.modules_to_save(?:\.\w+)?)?\.(?P<kind>weight|bias)$"
)


@dataclass(slots=True)
class _Layer:
    """The parts of one layer's adapter, by "lora_A.weight" and so on."""

    parts: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def merge_adapter(module: nn.Module, adapter: Adapter, prefix: str) -> None:
    """Merge an adapter into the weights of `module`; `prefix` is the name of its base model if it has a head.

    W + s·B·A for LoRA's A [r, in] and B [out, r], where s = alpha / r, or alpha / √r by rank-stabilised LoRA; with a
    magnitude m [out] (DoRA) its rows are then scaled to the length m. Weights that the adapter saved whole replace the
    model's.

    Raises:
        ModelLoadFailed: the adapter changes a layer that the model does not have, or one that has another shape.
    """
    layers: dict[str, _Layer] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in read_tensors(adapter.weights).items():
        if (found := _PART.match(name)) is not None:
            kind = found["kind"] or "weight"
            layers.setdefault(found["layer"], _Layer()).parts[f"{found['part']}.{kind}"] = tensor.float()
        elif (found := _SAVED_WHOLE.match(name)) is not None:
            # The trained bias of a layer with an adapter is that of its `base_layer`.
            whole[f"{found['name'].removesuffix('.base_layer')}.{found['kind']}"] = tensor.float()
        else:
            raise ModelLoadFailed(f"{adapter.weights.name} has {name}, which is not a weight of a LoRA adapter")
    if not layers:
        raise ModelLoadFailed(f"{adapter.weights.name} has no LoRA weights")
    for name, tensor in whole.items():
        if (parameter := _parameter(module, name, prefix)) is not None:
            _replace(parameter, tensor, name)
    for name, layer in layers.items():
        _merge(module, name, layer.parts, adapter, prefix)


def matrices_of(adapter: Adapter) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each layer of an adapter of linear layers, its A [r, in], and its B [out, r] times the scale, in float32.

    Raises:
        ModelLoadFailed: the file has other weights, or matrices that do not fit together.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(adapter.weights).items():
        found = _PART.match(name)
        if found is None or found["part"] not in ("lora_A", "lora_B") or found["kind"] != "weight":
            raise ModelLoadFailed(f"{adapter.weights.name} has the weight {name}, which is not served by task")
        halves.setdefault(found["layer"], {})[found["part"]] = tensor.float()
    if not halves or adapter.transposed:
        raise ModelLoadFailed(f"{adapter.weights} has no LoRA weights of linear layers")
    for layer, given in halves.items():
        a, b = _pair(adapter, layer, given.get("lora_A"), given.get("lora_B"))
        yield layer, a, _scale(adapter, layer, len(a)) * b


def _pair(adapter: Adapter, layer: str, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of one layer; raises ModelLoadFailed where one is missing or of another shape, as by
    another r than that of the configuration.
    """
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise ModelLoadFailed(f"the adapter of {layer} has no matrices A and B that fit together")
    if len(a) != (rank := adapter.rank_of(layer)):
        raise ModelLoadFailed(
            f"adapter_config.json has r = {rank:g} for {layer}, and its matrices in {adapter.weights.name} have the "
            f"rank {len(a)}, A {tuple(a.shape)} and B {tuple(b.shape)}: one of the two files is of another adapter"
        )
    return a, b


def _scale(adapter: Adapter, layer: str, rank: int) -> float:
    return adapter.alpha_of(layer) / (rank**0.5 if adapter.by_root else rank)


def _merge(module: nn.Module, layer: str, parts: dict[str, Tensor], adapter: Adapter, prefix: str) -> None:
    if (weight := _parameter(module, f"{layer}.weight", prefix)) is None:
        return
    is_table = "lora_embedding_A.weight" in parts
    a, b = _pair(
        adapter, layer, *(parts.pop(f"lora_{'embedding_' if is_table else ''}{half}.weight", None) for half in "AB")
    )
    scale = _scale(adapter, layer, a.shape[0])
    change = scale * (b @ a)
    # As in PEFT, the layer's type decides, not the adapter's `fan_in_fan_out`: GPT-2's layers are [in, out].
    transposed = any(type(one).__name__ == "Conv1D" and one.weight is weight for one in module.modules())
    if transposed or is_table:
        change = change.T
    if change.shape != weight.shape:
        raise ModelLoadFailed(f"the adapter changes {layer} by {tuple(change.shape)}, and it is {tuple(weight.shape)}")
    magnitude = parts.pop("lora_magnitude_vector.weight", None)
    if magnitude is None and adapter.has_magnitudes:
        raise ModelLoadFailed(f"the adapter of {layer} has no magnitude, and use_dora is set")
    if magnitude is None:
        weight.data = weight + change
    elif transposed or is_table or magnitude.numel() != len(weight):
        raise ModelLoadFailed(f"the adapter of {layer} has a magnitude (DoRA) for a layer of a kind that is not served")
    else:
        changed = weight + change
        weight.data = magnitude.reshape(-1, 1) * changed / changed.norm(dim=1, keepdim=True)
    if (bias := parts.pop("lora_B.bias", None)) is not None:
        if (own := _parameter(module, f"{layer}.bias", prefix)) is None:
            raise ModelLoadFailed(f"the adapter changes the bias of {layer}, which has none")
        own.data = own + scale * bias
    if parts:
        raise ModelLoadFailed(f"the adapter of {layer} has {', '.join(sorted(parts))}, which is not served")


def _replace(parameter: nn.Parameter, tensor: Tensor, name: str) -> None:
    if parameter.shape != tensor.shape:
        raise ModelLoadFailed(f"the adapter has {name} as {tuple(tensor.shape)}, and it is {tuple(parameter.shape)}")
    parameter.data = tensor


# Layers of the trained model that embeddings do not use; `target_modules = "all-linear"` includes them.
_UNUSED = re.compile(r"(?:\w+\.)?(?:pooler|lm_head)\.")


def _parameter(module: nn.Module, name: str, prefix: str) -> nn.Parameter | None:
    """Return a parameter by its name in the trained model, with or without a head; None for a parameter of a head that
    this model lacks.

    Raises:
        ModelLoadFailed: the model does not have such a parameter.
    """
    for own in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        parent, _, leaf = own.rpartition(".")
        try:
            found = getattr(module.get_submodule(parent), leaf, None)
        except AttributeError:
            continue
        if isinstance(found, nn.Parameter):
            return found
    if _UNUSED.match(name):
        return None
    raise ModelLoadFailed(f"the adapter changes {name}, which the model does not have")


_TASK_PART = re.compile(r"(?P<layer>.+)\.parametrizations\.weight\.0\.lora_(?P<half>[AB])$")


class Task:
    """The current task of a model; `number` 0 means no task, others count from 1."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def set(self, number: int) -> Iterator[None]:
        """Compute for this task inside the block; one thread at a time uses a model."""
        self.number = number
        try:
            yield
        finally:
            self.number = 0


class _ByTask(nn.Module):
    """A layer with additional weights by task: A and B, [tasks, …] each, and the scale s of their product."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scale: float, task: Task) -> None:
        super().__init__()
        self.layer = layer
        self.task = task
        self.scale = scale
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def of_task(self) -> tuple[Tensor, Tensor] | None:
        """Return A and B of the current task; None without one."""
        if not (number := self.task.number):
            return None
        return self.get_buffer("a")[number - 1], self.get_buffer("b")[number - 1]


class TaskLinear(_ByTask):
    """x Wᵀ + b + s·(x Aᵀ) Bᵀ with A [tasks, r, in] and B [tasks, out, r] of the current task."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if (own := self.of_task()) is None:
            return out
        a, b = (half.to(x.dtype) for half in own)
        return out + self.scale * functional.linear(functional.linear(x, a), b)


class TaskEmbedding(_ByTask):
    """Rows of a table, and s·A[row] B with A [tasks, rows, r] and B [tasks, r, width] of the current task."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(ids)
        if (own := self.of_task()) is None:
            return out
        a, b = own
        return out + self.scale * (a[ids] @ b).to(out.dtype)


def task_of(module: nn.Module) -> Task | None:
    """Return the current task of a model with weights by task; None for any other."""
    found = (child for child in module.modules() if isinstance(child, _ByTask))
    return next((child.task for child in found), None)


def put_task_adapters(module: nn.Module, layout: Layout, saved: Mapping[str, Tensor]) -> None:
    """Add the model's LoRA weights by task to its layers: `saved`, by their names in the file of all weights, or the
    adapters of PEFT that `layout` has.

    Raises:
        ModelLoadFailed: they are of layers that the model does not have, of other shapes or of another number of tasks.
    """
    if layout.task_adapters:
        task = Task()
        for name, halves_of_tasks in _of_adapters(layout.task_adapters).items():
            _put(module, name, *halves_of_tasks, 1.0, task, is_table=False)
        return
    count = max(layout.tasks.values())
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        if (found := _TASK_PART.match(name)) is not None:
            halves.setdefault(found["layer"], {})[found["half"]] = tensor.float()
    task, layers = Task(), 0
    for name, given in halves.items():
        a, b = given.get("A"), given.get("B")
        if a is None or b is None or not len(a) == len(b) == count:
            raise ModelLoadFailed(f"the LoRA weights of {name} are not those of {count} tasks")
        is_table = "embeddings." in name
        targets = [name] if is_table else own_names(layout, f"{name}.weight")
        parts = [b] if len(targets) == 1 else list(b.chunk(len(targets), dim=1))
        for target, part in zip(targets, parts, strict=True):
            layers += _put(module, target.removesuffix(".weight"), a, part, layout.task_scale, task, is_table=is_table)
    if not layers:
        raise ModelLoadFailed("config.json has lora_adaptations, and the files have no LoRA weights")


def _of_adapters(adapters: Sequence[Adapter]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [tasks, r, in] and B [tasks, out, r] with its scale, by layer; zeros if a task has none, or a smaller
    rank.

    Raises:
        ModelLoadFailed: an adapter has other weights than those, or halves that do not fit together.
    """
    parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for number, adapter in enumerate(adapters):
        for layer, a, b in matrices_of(adapter):
            parts.setdefault(layer, {})[number] = (a, b)
    found = {}
    for layer, given in parts.items():
        rank = max(len(a) for a, _ in given.values())
        first_a, first_b = next(iter(given.values()))
        a = first_a.new_zeros(len(adapters), rank, first_a.shape[1])
        b = first_b.new_zeros(len(adapters), len(first_b), rank)
        for number, (own_a, own_b) in given.items():
            if own_a.shape[1] != a.shape[2] or len(own_b) != b.shape[1]:
                raise ModelLoadFailed(f"the adapters of {layer} have other shapes in one task than in another")
            a[number, : len(own_a)], b[number, :, : len(own_a)] = own_a, own_b
        found[layer] = (a, b)
    return found


def _put(module: nn.Module, name: str, a: Tensor, b: Tensor, scale: float, task: Task, *, is_table: bool) -> int:
    """Replace the layer `name`; return 0 for a layer that is left out of the model, such as its pooler."""
    name = name.removeprefix("roberta.")
    if name.startswith("pooler."):
        return 0
    above, _, leaf = name.rpartition(".")
    try:
        parent = module.get_submodule(above)
        layer = getattr(parent, leaf)
    except AttributeError:
        raise ModelLoadFailed(f"the files have LoRA weights of {name}, which the model does not have") from None
    weight = layer.weight
    change = (len(a[0]), b.shape[2]) if is_table else (b.shape[1], a.shape[2])
    if tuple(weight.shape) != change:
        raise ModelLoadFailed(f"the LoRA weights of {name} change {change}, and it is {tuple(weight.shape)}")
    setattr(parent, leaf, (TaskEmbedding if is_table else TaskLinear)(layer, a, b, scale, task))
    return 1
