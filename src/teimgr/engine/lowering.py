"""Lowering: a record of ATen operators becomes the steps of a native forward, without model code of ours.

`lower` interprets the record of `forward_trace`. A value of every token is represented by what stands in it: a tensor
of its shape that holds, for every element, the token and the column of the step's result that it is (`_Rows.places`).
So views, transpositions, slices and splits are computed by torch itself, and a step only has to check that the elements
lie as it reads them. What depends on positions alone becomes a table; what depends on nothing is computed at once.

Whether the steps compute what the model does is decided by the fidelity gate, like every other way of running it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from teimgr.engine.forward_program import CannotLowerError, Columns, ForwardProgram, Step, Table, fused
from teimgr.engine.forward_trace import TRACED_TOKENS, ForwardRecord, OperatorCall

_TOKEN = 1 << 32  # the places of two tokens are so far apart
_COLUMNS = 16  # columns of every value are a multiple of this, the float32 numbers of the widest register
_aten = torch.ops.aten


# What a value may be in the interpretation of a record, besides a constant: a tensor, a number, or a list.


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Elements of the result of step `key`: those at `places` (token × _TOKEN + column), negated where set."""

    key: int
    places: Tensor
    negated: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Index:
    """One number per token of the batch: its id, position or type."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _OfPositions:
    """Computed from the positions alone, [1, T] int64."""

    run: Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Lookups:
    """A sum of rows of tables, and of a row that is the same for every token, times `scale`."""

    tables: tuple[tuple[Tensor, str], ...] = ()
    constant: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A function of each number of `rows`; which one is found when the result is needed."""

    rows: _Rows
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _MeanSquare:
    """The mean of the squares of the last dimension of `rows` plus `epsilon`; its inverse root where `inverse`."""

    rows: _Rows
    epsilon: float = 0.0
    is_mean: bool = False
    inverse: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Normalised:
    """`rows` divided by the root of their mean square, not yet multiplied by weights."""

    rows: _Rows
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class _Turned:
    """Rows times what depends on their position: half of a rotation."""

    rows: _Rows
    factor: _OfPositions


_VIEWS = frozenset(
    {
        _aten.view.default, _aten.reshape.default, _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default,
        _aten.squeeze.dim, _aten.slice.Tensor, _aten.select.int, _aten.expand.default, _aten.flatten.using_ints,
        _aten.unflatten.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default,
        _aten.unbind.int, _aten.t.default, _aten.contiguous.default, _aten.clone.default,
    }
)  # fmt: skip
_SAME = frozenset(
    {
        _aten.dropout.default, _aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other,
        _aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.type_as.default,
    }
)  # fmt: skip


def lower(record: ForwardRecord) -> ForwardProgram:
    """The steps of a record of `trace_forward`.

    Raises:
        CannotLowerError: it has an operator, or an arrangement of columns, that no step implements.
    """
    try:
        found = _Lowering(record).run()
    except (TypeError, IndexError, AttributeError, KeyError, RuntimeError) as error:  # arguments that no handler takes
        raise CannotLowerError(f"an operator that is used in another way: {error}") from error
    return fused(found)


@dataclass(slots=True)
class _Lowering:
    record: ForwardRecord
    steps: list[Step] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)  # by identity of a tensor of the record
    computed: dict[int, tuple[Any, _Rows]] = field(default_factory=dict)  # by identity of a value

    def run(self) -> ForwardProgram:
        record = self.record
        self.values[id(record.ids)] = _Index("ids")
        self.values[id(record.positions)] = _OfPositions(lambda positions: positions)
        self.values[id(record.types)] = _Index("types")
        for call in record.needed_calls():
            made = self._call(call)
            several = isinstance(call.result, (list, tuple))
            for tensor, value in zip(call.result, made, strict=True) if several else ((call.result, made),):
                self.values[id(tensor)] = value
        result = self._columns(self._rows(self._value(record.hidden)))
        if result.key != len(self.steps) - 1 or result.width != self.steps[-1].width:
            raise CannotLowerError("the result is not that of the last step")
        linears = [step.weights for step in self.steps if step.kind == "linear"]
        addresses = frozenset(weights.data_ptr() for weights in linears if weights is not None)
        return ForwardProgram(tuple(self.steps), result.width, addresses)

    def _value(self, argument: Any) -> Any:
        """An argument of an operator with what stands for its tensors; those that the text does not change stay."""
        if isinstance(argument, (list, tuple)):
            return [self._value(one) for one in argument]
        return self.values.get(id(argument), argument) if isinstance(argument, Tensor) else argument

    def _call(self, call: OperatorCall) -> Any:
        target = call.target
        args: Any = self._value(call.args)
        kwargs = {name: self._value(value) for name, value in call.kwargs.items()}
        inputs = [one for one in _flat([args, list(kwargs.values())]) if isinstance(one, _SYMBOLIC)]
        if target in _SAME:
            return args[0]
        if target is _aten.embedding.default:
            return self._embedding(args[0], args[1])
        if all(isinstance(one, _OfPositions) for one in inputs):
            return _OfPositions(lambda positions: target(*_at(args, positions), **kwargs))
        if target not in (_aten.add.Tensor, _aten.mul.Tensor):
            args = tuple(self._rows(one) if isinstance(one, (_Lookups, _Normalised)) else one for one in args)
        if target in _VIEWS and isinstance(args[0], _Function):
            args = (self._rows(args[0]), *args[1:])
        if target in _VIEWS and isinstance(args[0], _Rows):
            return _viewed(args[0], target(args[0].places, *args[1:], **kwargs))
        handler = _HANDLERS.get(target)
        if handler is None:
            raise CannotLowerError(str(target))
        return handler(self, *args, **kwargs)

    # Values and steps

    def _add(self, kind: str, width: int, **fields: Any) -> _Rows:
        groups = fields.get("groups", 1)
        if width % _COLUMNS and kind != "rotate":
            raise CannotLowerError(f"{width} columns")
        key = len(self.steps)
        self.steps.append(Step(kind, key, width, **fields))
        places = torch.arange(TRACED_TOKENS)[:, None] * _TOKEN + torch.arange(width * groups)[None, :]
        return _Rows(key, places[None])

    def _rows(self, value: Any) -> _Rows:
        """A value as the result of a step, which is added where it has not been computed yet."""
        if isinstance(value, _Rows):
            return value
        if id(value) not in self.computed:
            self.computed[id(value)] = value, self._compute(value)
        return self.computed[id(value)][1]

    def _compute(self, value: Any) -> _Rows:
        if isinstance(value, _Lookups) and value.tables:
            width = value.tables[0][0].shape[1]
            return self._add("embed", width, tables=value.tables, bias=value.constant, scale=value.scale)
        if isinstance(value, _Normalised):
            return self._norm(value, None)
        if isinstance(value, _Function):
            columns = self._columns(value.rows)
            made = self._add("activate", columns.width, x=columns, activation=_activation(value.run))
            return _arranged(made, value.rows)
        raise CannotLowerError(f"a {type(value).__name__.strip('_').lower()} where rows are needed")

    def _columns(self, rows: _Rows) -> Columns:
        """The columns of values [1, T, …] or [1, heads, T, d], which must be consecutive in every token."""
        places = rows.places
        if places.dim() == 4 and places.shape[2] == TRACED_TOKENS:
            places = places.transpose(1, 2)
        if places.shape[:2] != (1, TRACED_TOKENS) or rows.negated is not None:
            raise CannotLowerError(f"values of shape {tuple(places.shape)}")
        places = places.reshape(TRACED_TOKENS, -1)
        first, width = int(places[0, 0]), places.shape[1]
        expected = torch.arange(TRACED_TOKENS)[:, None] * _TOKEN + first + torch.arange(width)[None, :]
        if not torch.equal(places, expected):
            raise CannotLowerError("columns that are not consecutive")
        return Columns(rows.key, first, width)

    def _embedding(self, table: Any, index: Any) -> Any:
        if isinstance(index, Tensor) and index.dtype is torch.int64 and bool((index == index.flatten()[0]).all()):
            return table[int(index.flatten()[0])].expand(1, TRACED_TOKENS, -1)
        name = index.name if isinstance(index, _Index) else "positions" if isinstance(index, _OfPositions) else ""
        if isinstance(index, _OfPositions):
            probe = torch.arange(TRACED_TOKENS)[None]
            if not torch.equal(index.run(probe), probe):
                index_of = index.run(probe)
                if bool((index_of == index_of.flatten()[0]).all()):
                    return table[int(index_of.flatten()[0])].expand(1, TRACED_TOKENS, -1)
                raise CannotLowerError("positions that are changed by the model")
        if not name or not isinstance(table, Tensor):
            raise CannotLowerError("an embedding by something computed")
        return _Lookups(((table, name),))

    def _linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> _Rows:
        columns = self._columns(self._rows(x))
        if weight.shape[1] != columns.width or weight.shape[1] % 2:
            raise CannotLowerError(f"a linear layer of {tuple(weight.shape)} for {columns.width} columns")
        return self._add("linear", weight.shape[0], x=columns, weights=weight, bias=bias)

    def _layer_norm(
        self, x: Any, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> _Rows:
        columns = self._columns(self._rows(x))
        if shape != [columns.width]:
            raise CannotLowerError(f"a layer norm of {shape} for {columns.width} columns")
        return self._add("norm", columns.width, x=columns, weights=weight, bias=bias, epsilon=eps)

    def _norm(self, value: _Normalised, weight: Tensor | None) -> _Rows:
        columns, width = self._columns(value.rows), value.rows.places.shape[-1]
        if weight is not None and weight.shape != (width,):
            raise CannotLowerError(f"weights {tuple(weight.shape)} of a norm of {width} columns")
        groups = columns.width // width
        fields = {"x": columns, "groups": groups, "weights": weight, "norm": "rms", "epsilon": value.epsilon}
        return _arranged(self._add("norm", width, **fields), value.rows)

    def _attention(
        self, query: Any, key: Any, value: Any, scale: float | None, causal: bool, window: int | None
    ) -> _Rows:
        heads, size = query.places.shape[1], query.places.shape[3]
        q, k, v = (self._columns(self._rows(one)) for one in (query, key, value))
        key_heads = key.places.shape[1]
        if value.places.shape[3] != size:
            raise CannotLowerError("values of another size than keys")
        reach = None if window is None else window - 1
        fields = {"heads": (heads, key_heads, size), "scale": scale, "causal": causal, "reach": reach}
        rows = self._add("attend", heads * size, x=q, with_=k, third=v, **fields)
        return replace(rows, places=rows.places.view(1, TRACED_TOKENS, heads, size))

    def _sum(self, a: Any, b: Any, alpha: float = 1) -> Any:
        if alpha != 1:
            raise CannotLowerError("a weighted sum")
        if isinstance(a, _MeanSquare) and isinstance(b, (int, float)) and a.is_mean and not a.inverse:
            return replace(a, epsilon=a.epsilon + b)
        if isinstance(a, _Turned) and isinstance(b, _Turned):
            return self._rotate(a, b)
        if (pointwise := _function(_aten.add.Tensor, a, b)) is not None:
            return pointwise
        if (lookups := _summed(a, b)) is not None:
            return lookups
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            rows, row = (b, a) if isinstance(a, Tensor) else (a, b)
            columns = self._columns(self._rows(rows))
            return self._add("add", columns.width, x=columns, bias=_one_row(row, columns.width))
        x, y = (self._columns(self._rows(one)) for one in (a, b))
        if x.width != y.width:
            raise CannotLowerError("a sum of different widths")
        return self._add("add", x.width, x=x, with_=y)

    def _product(self, a: Any, b: Any) -> Any:
        if (pointwise := _function(_aten.mul.Tensor, a, b)) is not None:
            return pointwise
        for one, other in ((a, b), (b, a)):
            if isinstance(one, _Lookups) and (scale := _number(other)) is not None:
                return replace(one, scale=one.scale * scale)
            if isinstance(other, _MeanSquare) and other.inverse:
                one = self._rows(one)
                if one.key != other.rows.key or not torch.equal(one.places, other.rows.places):
                    raise CannotLowerError("a norm of something else")
                return _Normalised(one, other.epsilon)
            if isinstance(one, _Normalised) and isinstance(other, Tensor):
                return self._norm(one, other)
            if isinstance(one, _Rows) and isinstance(other, _OfPositions):
                return _Turned(one, other)
        if isinstance(a, (_Rows, _Function)) and isinstance(b, (_Rows, _Function)):
            x, y = (self._columns(self._rows(one)) for one in (a, b))
            if x.width != y.width:
                raise CannotLowerError("a product of different widths")
            return self._add("gate", x.width, x=x, with_=y)
        raise CannotLowerError(f"a product of {type(a).__name__} and {type(b).__name__}")

    def _rotate(self, a: _Turned, b: _Turned) -> _Rows:
        """x · cos + (−second half, first half) · sin, of heads [1, heads, T, d]."""
        straight, turned = (a, b) if b.rows.negated is not None else (b, a)
        columns, size = self._columns(straight.rows), straight.rows.places.shape[-1]
        places, half = straight.rows.places, size // 2
        swapped = torch.cat([places[..., half:], places[..., :half]], dim=-1)
        signs = torch.zeros_like(places, dtype=torch.bool)
        signs[..., :half] = True
        same = straight.rows.key == turned.rows.key and straight.rows.negated is None
        if not same or turned.rows.negated is None or not torch.equal(turned.rows.places, swapped):
            raise CannotLowerError("another rotation than of halves")
        if not torch.equal(turned.rows.negated, signs):
            raise CannotLowerError("another rotation than of halves")
        tables = tuple((Table(_rows_by_position(one.factor, size)), "positions") for one in (straight, turned))
        rows = self._add("rotate", size, x=columns, groups=columns.width // size, tables=tables)
        return _arranged(rows, straight.rows)


_SYMBOLIC = (_Rows, _Index, _OfPositions, _Lookups, _Function, _MeanSquare, _Normalised, _Turned)
# The functions that steps compute, by their names there.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


def _activation(run: Callable[[Tensor], Tensor]) -> str:
    """The name of a function, which is tried."""
    grid = torch.linspace(-8, 8, 1001)
    values = run(grid)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(values, known(grid), atol=1e-5):
            return name
    raise CannotLowerError("another function of each number than the known activations")


def _number(value: Any) -> float | None:
    """The number that a constant is for every element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None


def _function(function: Any, a: Any, b: Any) -> _Function | None:
    """The sum or product of functions of the same rows, or of one and a number; None for anything else."""
    numbers = [_number(one) for one in (a, b)]
    kinds = [isinstance(one, _Function) for one in (a, b)]
    rows = [one.rows if isinstance(one, _Function) else one for one in (a, b)]
    if not any(isinstance(one, _Rows) for one in rows):
        return None
    same = all(isinstance(one, _Rows) for one in rows) and rows[0].key == rows[1].key
    same = same and any(kinds) and torch.equal(rows[0].places, rows[1].places)
    if not same and all(one is None for one in numbers):
        return None
    base = rows[0] if isinstance(rows[0], _Rows) else rows[1]

    def run(x: Tensor) -> Tensor:
        values = []
        for one, number in zip((a, b), numbers, strict=True):
            values.append(one.run(x) if isinstance(one, _Function) else x if number is None else number)
        result: Tensor = function(*values) if isinstance(values[0], Tensor) else function(values[1], values[0])
        return result

    return None if base.negated is not None else _Function(base, run)


def _applied(function: Any) -> Callable[..., Any]:
    """A function of ATen, applied to rows or to a function of rows."""

    def handler(_: _Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, _Rows):
            return _Function(x, lambda values: function(values, *args, **kwargs))
        if isinstance(x, _Function):
            return _Function(x.rows, lambda values: function(x.run(values), *args, **kwargs))
        raise CannotLowerError(f"{function} of a {type(x).__name__}")

    return handler


def _power(lowering: _Lowering, x: Any, exponent: float) -> Any:
    """A square is taken for the beginning of an RMS norm."""
    if exponent == 2 and isinstance(x, _Rows):
        return _MeanSquare(x)
    return _applied(_aten.pow.Tensor_Scalar)(lowering, x, exponent)


def _mean(_: _Lowering, x: Any, dims: list[int], keepdim: bool = False, **__: Any) -> _MeanSquare:
    if not isinstance(x, _MeanSquare) or dims != [-1] or not keepdim or x.is_mean:
        raise CannotLowerError("a mean")
    return replace(x, is_mean=True)


def _inverse_root(_: _Lowering, x: Any) -> _MeanSquare:
    if not isinstance(x, _MeanSquare) or not x.is_mean or x.inverse:
        raise CannotLowerError("an inverse root")
    return replace(x, inverse=True)


def _negated(_: _Lowering, x: Any) -> _Rows:
    if not isinstance(x, _Rows) or x.negated is not None:
        raise CannotLowerError("a negation")
    return replace(x, negated=torch.ones_like(x.places, dtype=torch.bool))


def _joined(_: _Lowering, parts: list[Any], dim: int = 0) -> _Rows:
    if not all(isinstance(one, _Rows) and one.key == parts[0].key for one in parts):
        raise CannotLowerError("a concatenation")
    places = torch.cat([one.places for one in parts], dim)
    if all(one.negated is None for one in parts):
        return _Rows(parts[0].key, places)
    signs = [torch.zeros_like(one.places, dtype=torch.bool) if one.negated is None else one.negated for one in parts]
    return _Rows(parts[0].key, places, torch.cat(signs, dim))


_POINTWISE = (
    _aten.gelu.default,
    _aten.relu.default,
    _aten.sigmoid.default,
    _aten.silu.default,
    _aten.tanh.default,
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _Lowering._linear,
    _aten.layer_norm.default: _Lowering._layer_norm,
    torch.ops.teimgr.attend.default: _Lowering._attention,
    _aten.add.Tensor: _Lowering._sum,
    _aten.mul.Tensor: _Lowering._product,
    _aten.pow.Tensor_Scalar: _power,
    _aten.mean.dim: _mean,
    _aten.rsqrt.default: _inverse_root,
    _aten.neg.default: _negated,
    _aten.cat.default: _joined,
    **{target: _applied(target) for target in _POINTWISE},
}


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [one for part in args for one in _flat(part)]
    return [args]


def _at(args: Any, positions: Tensor) -> Any:
    """`args` with everything that depends on positions computed for these."""
    if isinstance(args, (list, tuple)):
        return [_at(one, positions) for one in args]
    return args.run(positions) if isinstance(args, _OfPositions) else args


def _viewed(rows: _Rows, places: Any) -> Any:
    """Other views of the same rows: one, or several as a list."""
    if rows.negated is not None:
        raise CannotLowerError("a view of negated values")
    if isinstance(places, (list, tuple)):
        return [_Rows(rows.key, one) for one in places]
    return _Rows(rows.key, places)


def _arranged(rows: _Rows, like: _Rows) -> _Rows:
    """The result [1, T, columns] of a step in the arrangement of the values that it was made from."""
    shape = like.places.shape
    if len(shape) == 4 and shape[2] == TRACED_TOKENS:
        return replace(rows, places=rows.places.view(1, TRACED_TOKENS, shape[1], shape[3]).transpose(1, 2))
    return replace(rows, places=rows.places.view(shape))


def _lookups(value: Any) -> _Lookups | None:
    """A value as a sum of lookups, if it is one."""
    if isinstance(value, _Lookups):
        return value
    if isinstance(value, Tensor) and value.dim() in (1, 3) and value.is_floating_point():
        return _Lookups(constant=_one_row(value, value.shape[-1]))
    return None


def _summed(a: Any, b: Any) -> _Lookups | None:
    """The sum of two sums of lookups; None where one of them is something else."""
    one, other = _lookups(a), _lookups(b)
    if one is None or other is None or one.scale != 1.0 or other.scale != 1.0:
        return None
    constants = [each.constant for each in (one, other) if each.constant is not None]
    return _Lookups(one.tables + other.tables, sum(constants[1:], constants[0]) if constants else None)


def _one_row(value: Tensor, width: int) -> Tensor:
    """The row [width] that a constant adds to every token."""
    rows = value.reshape(-1, value.shape[-1])
    if value.shape[-1] != width or not bool((rows == rows[0]).all()):
        raise CannotLowerError("a constant that differs between tokens")
    return rows[0]


def _rows_by_position(factor: _OfPositions, width: int) -> Callable[[int], Tensor]:
    def rows(count: int) -> Tensor:
        table: Tensor = factor.run(torch.arange(count)[None])
        return table.reshape(count, width).float().contiguous()

    if factor.run(torch.arange(TRACED_TOKENS)[None]).numel() != TRACED_TOKENS * width:
        raise CannotLowerError("a factor that differs between heads")
    return rows
