"""The forward of a transformer as a list of steps, and the changes before it runs: fusions, merged layers,
quantisation, and weights in the order in which the C library reads them (panels of columns, in huge pages)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

_BYTE_COLUMNS = 16  # numbers quantised per step
# The fields that matrix products read, by the kind of a step.
_OPERAND_FIELDS = {"linear": ("x",), "quantise": ("x",), "attend": ("x", "with_", "third")}


class CannotLowerError(Exception):
    """The model computes something that no step implements."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive columns of the result of step `key`."""

    key: int
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table of rows by position, float32 [positions, width]: `rows(n)` computes positions 0 to n − 1."""

    rows: Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a forward; `kind` and the fields are those of `struct step` in native/forward.h.

    Results have `width` columns in each of `groups` parts. `further` are the weights of linear layers merged with this
    one, whose columns follow. `tables` are [rows, width], with the index that selects a row, or tables of positions.
    The `bias` of an attend step has the slopes of its heads (ALiBi).
    """

    kind: str
    key: int
    width: int
    x: Columns | None = None
    with_: Columns | None = None
    third: Columns | None = None
    groups: int = 1
    weights: Tensor | None = None
    further: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    tables: tuple[tuple[Tensor | Table, str], ...] = ()
    activation: str = "none"
    norm: str = "layer"
    epsilon: float = 0.0
    heads: tuple[int, int, int] = (0, 0, 0)  # query heads, key heads, head size
    causal: bool = False
    reach: int | None = None
    scale: float | None = None

    @property
    def reads(self) -> tuple[Columns, ...]:
        return tuple(self.named_reads.values())

    @property
    def named_reads(self) -> dict[str, Columns]:
        """Return the columns that the step reads, by field name; two fields may have the same columns."""
        fields = {"x": self.x, "with_": self.with_, "third": self.third}
        return {name: one for name, one in fields.items() if one is not None}

    def reads_operands(self, name: str) -> bool:
        """True if it reads that field in the dtype of matrix products; the others are float32."""
        return name in _OPERAND_FIELDS.get(self.kind, ())


@dataclass(frozen=True, slots=True)
class ForwardProgram:
    """Steps in order. The hidden states are the result of the last step, `width` columns. `linears` are the weights of
    the model's linear layers that the steps contain, by address."""

    steps: tuple[Step, ...]
    width: int
    linears: frozenset[int] = frozenset()


def fused(program: ForwardProgram) -> ForwardProgram:
    """Return the same forward in fewer steps.

    Steps whose result no step reads are dropped, sums and activations are computed with the step before or after them,
    and layers that read the same rows become one.
    """
    return _with_merged_linears(_with_fused_activations(_with_fused_sums(_without_unused(program))))


def quantised(program: ForwardProgram) -> ForwardProgram:
    """Return the same forward with linear layers that read bytes; a layer whose number of columns does not allow it
    stays as it is."""
    steps: list[Step] = []
    moved: dict[int, Columns] = {}
    rows: dict[Columns, Columns] = {}
    for step in program.steps:
        step = _renamed(step, moved)
        if step.kind == "linear" and step.x is not None and step.x.width % _BYTE_COLUMNS == 0:
            if step.x not in rows:
                width = step.x.width
                rows[step.x] = Columns(len(steps), 0, width)
                steps.append(Step("quantise", len(steps), width, x=step.x))
            step = replace(step, x=rows[step.x])
        moved[step.key] = Columns(len(steps), 0, 0)
        steps.append(replace(step, key=len(steps)))
    return replace(program, steps=tuple(steps))


def _without_unused(program: ForwardProgram) -> ForwardProgram:
    used, kept = {len(program.steps) - 1}, []
    for step in reversed(program.steps):
        if step.key in used:
            kept.append(step)
            used.update(one.key for one in step.reads)
    return _renumbered(replace(program, steps=tuple(reversed(kept))))


def _consumers(steps: tuple[Step, ...]) -> dict[int, int]:
    counts = dict.fromkeys(range(len(steps)), 0)
    for step in steps:
        for one in step.reads:
            counts[one.key] += 1
    return counts


def _with_fused_activations(program: ForwardProgram) -> ForwardProgram:
    """Compute activations that only a product reads together with it."""
    steps, consumers = {step.key: step for step in program.steps}, _consumers(program.steps)
    for step in program.steps:
        for x, other in ((step.x, step.with_), (step.with_, step.x)):
            if step.kind != "gate" or x is None or step.activation != "none":
                continue
            activate = steps[x.key]
            if activate.kind == "activate" and consumers[x.key] == 1 and x.width == activate.width:
                fused = replace(step, x=activate.x, with_=other, activation=activate.activation)
                steps[step.key] = fused
                del steps[x.key]
                break
    return _renumbered(replace(program, steps=tuple(steps[key] for key in sorted(steps))))


def _with_fused_sums(program: ForwardProgram) -> ForwardProgram:
    """Compute activations and sums that follow a linear layer together with it."""
    steps, consumers = {step.key: step for step in program.steps}, _consumers(program.steps)
    moved: dict[int, int] = {}  # results that were moved to another step
    for step in program.steps:
        step = _renamed(step, {key: Columns(to, 0, 0) for key, to in moved.items()})
        steps[step.key] = step
        for x, other in ((step.x, step.with_), (step.with_, step.x)):
            if step.kind not in ("activate", "add") or x is None or (step.kind == "add" and other is None):
                continue
            linear = steps[x.key]
            is_whole = linear.kind == "linear" and x.width == linear.width and x.column == 0
            if not is_whole or consumers[linear.key] != 1 or linear.with_ is not None:
                continue
            if step.kind == "activate" and linear.activation == "none":
                steps[linear.key] = replace(linear, activation=step.activation)
            elif step.kind == "add" and other is not None and other.key < linear.key:
                steps[linear.key] = replace(linear, with_=other)
            else:
                continue
            moved[step.key] = linear.key
            consumers[linear.key] = consumers[step.key]
            del steps[step.key]
            break
    kept = tuple(steps[key] for key in sorted(steps))
    return _renumbered(replace(program, steps=kept))


def _with_merged_linears(program: ForwardProgram) -> ForwardProgram:
    """Merge linear layers that read the same rows, as queries, keys and values do."""
    groups: dict[Columns, list[Step]] = {}
    for step in program.steps:
        if step.kind == "linear" and step.activation == "none" and step.with_ is None and step.x is not None:
            groups.setdefault(step.x, []).append(step)
    moved: dict[int, Columns] = {}
    merged: dict[int, Step] = {}
    for same in groups.values():
        if len(same) == 1:
            continue
        column, first = 0, same[0]
        for one in same:
            moved[one.key] = Columns(first.key, column, 0)
            column += one.width
        further = tuple(one.weights for one in same[1:] if one.weights is not None)
        biases = [torch.zeros(one.width) if one.bias is None else one.bias.float() for one in same]
        bias = torch.cat(biases) if any(one.bias is not None for one in same) else None
        merged[first.key] = replace(first, further=further, bias=bias, width=column)
    steps = tuple(
        _renamed(merged.get(step.key, step), moved)
        for step in program.steps
        if step.key not in moved or step.key in merged
    )
    return _renumbered(replace(program, steps=steps))


def _renamed(step: Step, moved: dict[int, Columns]) -> Step:
    """Return the step with its inputs renamed to their new places."""

    def place(one: Columns | None) -> Columns | None:
        if one is None or one.key not in moved:
            return one
        to = moved[one.key]
        return Columns(to.key, to.column + one.column, one.width)

    return replace(step, x=place(step.x), with_=place(step.with_), third=place(step.third))


def _renumbered(program: ForwardProgram) -> ForwardProgram:
    numbers = {step.key: Columns(i, 0, 0) for i, step in enumerate(program.steps)}
    steps = tuple(replace(_renamed(step, numbers), key=i) for i, step in enumerate(program.steps))
    return replace(program, steps=steps)


_ALIGNMENT = 64  # bytes
_FEW = 4096  # numbers


class WeightPacker:
    """Packs the layers (out, in, dtype) of one program; if it reads `pairs`, all are bfloat16.

    `panel` is the number of columns that the library computes at a time, `byte_sum_bits` is the library's.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int, torch.dtype]],
        panel: int,
        *,
        pairs: bool = False,
        byte_sum_bits: int = 32,
    ) -> None:
        self._panel = panel
        self._byte_sum_bits = byte_sum_bits
        self._pairs = pairs
        sizes = [-(-columns // panel) * panel * inner * dtype.itemsize for columns, inner, dtype in layers]
        self._memory = _HugePages(sum(map(_aligned, sizes)))

    def pack(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """[out, in], in parts → [panels, in, panel], or in pairs [panels, in / 2, panel], each as one int32; zeros
        behind the last column.
        """
        columns, inner = sum(len(part) for part in parts), parts[0].shape[1]
        panels = -(-columns // self._panel)
        rows = torch.empty(panels * self._panel, inner, dtype=dtype)
        rows[columns:] = 0
        at = 0
        for part in parts:
            rows[at : at + len(part)] = part
            at += len(part)
        units = (rows.view(torch.int32) if self._pairs else rows).view(panels, self._panel, -1)
        packed = self._memory.take(units.numel(), units.dtype).view(panels, -1, self._panel)
        return packed.copy_(units.permute(0, 2, 1))

    def pack_bytes(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[out, in] → int8 [panels, in / 4, panel, 4]; the scale of each column, and the sum of its bytes.

        Sums in 16 bits are of two neighbouring products in each of two fours. They saturate unless the weights of one
        sign in such a sum add up to at most 128.
        """
        weights = weights.float()
        scales = weights.abs().amax(dim=1).clamp_min(1e-12) / 127.0
        if self._byte_sum_bits == 16:
            largest = _largest_sums(weights).clamp_min(1e-12)
            scales = largest / 126.0  # always fits: rounding up four numbers adds 2
            for most in (127.0, 128.0):
                rounded = (weights / (largest / most)[:, None]).round()
                fits = (_largest_sums(rounded) <= 128.0) & (rounded.abs().amax(dim=1) <= 127.0)
                scales = torch.where(fits, largest / most, scales)
        rows = self.padded((weights / scales[:, None]).round().to(torch.int8))
        packed = rows.view(-1, self._panel, weights.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous()
        return packed, self.padded(scales), rows.sum(dim=1, dtype=torch.int32)

    def padded(self, rows: Tensor) -> Tensor:
        """`rows` and zeros up to a whole panel."""
        missing = -rows.shape[0] % self._panel
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).contiguous()


def narrowest(parts: Sequence[Tensor]) -> torch.dtype:
    """bfloat16 or float16 where each number of all `parts` is the same in it, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(_are_same_in(dtype, part) for part in parts):
            return dtype
    return torch.float32


def _are_same_in(dtype: torch.dtype, numbers: Tensor) -> bool:
    if numbers.dtype is dtype:
        return True
    few = numbers.flatten()[:_FEW]  # decides most cases
    return all(torch.equal(some.to(dtype).to(some.dtype), some) for some in (few, numbers))


def _largest_sums(weights: Tensor) -> Tensor:
    """Return the largest sum per row of the weights of one sign whose products are summed in 16 bits."""
    summed = functional.pad(weights, (0, -weights.shape[1] % 8)).view(len(weights), -1, 2, 2, 2)
    return torch.maximum(*(each.clamp_min(0).sum(dim=(2, 4)) for each in (summed, -summed))).flatten(1).amax(dim=1)


class _HugePages:
    """`size` bytes, in huge pages if possible: faulting in thousands of small pages takes longer than packing."""

    def __init__(self, size: int) -> None:
        self._taken = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if size:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # a system without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(pages, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] numbers."""
        size = count * dtype.itemsize
        found = self._bytes[self._taken : self._taken + size].view(dtype)
        self._taken += _aligned(size)
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
