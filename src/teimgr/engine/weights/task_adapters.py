"""LoRA weights by task (jina-embeddings-v3 and v5): one set of weights serves every task, and each text uses the
weights of its request's task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.weights.adapters import matrices_of
from teimgr.engine.weights.own import own_names
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Adapter, Layout

_PART = re.compile(r"(?P<layer>.+)\.parametrizations\.weight\.0\.lora_(?P<half>[AB])$")


class Task:
    """The task of the texts that a model computes now; `number` 0 means no task, others count from 1."""

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
    """A layer with weights by task besides its own: A and B, [tasks, …] each, and the scale s of their product."""

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
        if (found := _PART.match(name)) is not None:
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
