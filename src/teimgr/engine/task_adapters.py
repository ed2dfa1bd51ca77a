"""LoRA weights by task (jina-embeddings-v3): one set of weights serves every task, each text by that of its request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.heads.projections import read_weights
from teimgr.engine.own_weights import own_names
from teimgr.errors import ModelLoadFailed
from teimgr.model_files.layout import Layout

_PART = re.compile(r"(?P<layer>.+)\.parametrizations\.weight\.0\.lora_(?P<half>[AB])$")


class Task:
    """The task of the texts that a model computes now; `number` 0 is none, others count from 1."""

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
    """A layer with weights by task beside its own: A and B, [tasks, …] each, and the scale s of their product."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scale: float, task: Task) -> None:
        super().__init__()
        self.layer = layer
        self.task = task
        self.scale = scale
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)

    def of_task(self) -> tuple[Tensor, Tensor] | None:
        """A and B of the current task; None without one."""
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
    """The current task of a model with weights by task; None for any other."""
    found = (child for child in module.modules() if isinstance(child, _ByTask))
    return next((child.task for child in found), None)


def put_task_adapters(module: nn.Module, layout: Layout) -> None:
    """Put the LoRA weights by task that the model's files have beside its layers into these.

    Raises:
        ModelLoadFailed: they are those of layers that the model does not have, of other shapes or of another number of
            tasks.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_weights(layout.weights_dir).items():
        if (found := _PART.match(name)) is not None:
            halves.setdefault(found["layer"], {})[found["half"]] = tensor.float()
    task, layers = Task(), 0
    for name, given in halves.items():
        a, b = given.get("A"), given.get("B")
        if a is None or b is None or not len(a) == len(b) == len(layout.tasks):
            raise ModelLoadFailed(f"the LoRA weights of {name} are not those of {len(layout.tasks)} tasks")
        is_table = "embeddings." in name
        targets = [name] if is_table else own_names(layout, f"{name}.weight")
        parts = [b] if len(targets) == 1 else list(b.chunk(len(targets), dim=1))
        for target, part in zip(targets, parts, strict=True):
            layers += _put(module, target.removesuffix(".weight"), a, part, layout.task_scale, task, is_table=is_table)
    if not layers:
        raise ModelLoadFailed("config.json has lora_adaptations, and the files have no LoRA weights")


def _put(module: nn.Module, name: str, a: Tensor, b: Tensor, scale: float, task: Task, *, is_table: bool) -> int:
    """Replace the layer `name`; 0 for one that is left out of the model, such as its pooler."""
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
