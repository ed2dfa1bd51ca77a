"""Lowering: turns a record of ATen operators into the steps of a native forward, without model code of ours.

`lower` interprets the record of `trace_forward`. A value per token is represented symbolically: a tensor of
its shape has, for every element, the token and the column in a step's result (`StepRows.places`). So torch itself
computes views, transpositions, slices and splits, and a step only checks that the elements are in the order in which it
reads them. Functions of positions become tables; constants are computed at once.

The fidelity gate verifies that the steps compute the same as the model, like every other batching.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from teimgr.engine.native_forward.program import CannotLowerError, Columns, ForwardProgram, Step, Table, fused
from teimgr.engine.native_forward.trace import (
    SYMBOLIC,
    TOKEN,
    TRACED_TOKENS,
    ForwardRecord,
    Function,
    Index,
    Lookups,
    MeanSquare,
    Normalised,
    OfPositions,
    OperatorCall,
    StepRows,
    Turned,
    arranged,
    at_positions,
    combine_pointwise,
    flat,
    number_of,
    one_row,
    recognise_activation,
    rows_by_position,
    sum_lookups,
    trace_forward,
    viewed,
)
from teimgr.engine.native_library import MAX_HEAD_SIZE, MAX_HEADS

log = logging.getLogger(__name__)

_COLUMNS = 16  # the columns of every value are a multiple of the float32 numbers in the widest register
_MAX_REACH = 2**31 - 1  # tokens: a wider window includes any text
_PAIR = 2  # a linear layer reads a multiple of this: panels of bfloat16 interleave the weights of two columns
_aten = torch.ops.aten

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
    except (TypeError, IndexError, AttributeError, KeyError, RuntimeError) as error:
        # Unsupported arguments, or a defect of a handler: the model's own code is used in both cases.
        log.warning("lowering a forward failed", exc_info=True)
        raise CannotLowerError(f"an operator that is used in another way: {error}") from error
    return fused(found)


@dataclass(slots=True)
class _Lowering:
    record: ForwardRecord
    steps: list[Step] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)  # by identity of a recorded tensor
    computed: dict[int, tuple[Any, StepRows]] = field(default_factory=dict)  # by identity of a value
    whole: dict[int, Tensor] = field(default_factory=dict)  # places of whole results by number of columns

    def run(self) -> ForwardProgram:
        record = self.record
        self.values[id(record.ids)] = Index("ids")
        self.values[id(record.positions)] = OfPositions(lambda positions: positions)
        self.values[id(record.types)] = Index("types")
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
        """What the result of a call is.

        Look-ups come first: one by positions is a table of the embed step, not something computed from positions. These
        come before rows, as their operators (cosines, divisions) have no steps.
        """
        args: Any = self._value(call.args)
        kwargs = {name: self._value(value) for name, value in call.kwargs.items()}
        if call.target in _SAME:
            return args[0]
        if call.target in _VIEWS and isinstance(args[0], Index) and torch.equal(call.result, call.args[0]):
            return args[0]
        if call.target is _aten.embedding.default:
            return self._look_up(*args[:2])
        inputs = [one for one in flat([args, list(kwargs.values())]) if isinstance(one, SYMBOLIC)]
        if all(isinstance(one, OfPositions) for one in inputs):
            computed = OfPositions(lambda positions: call.target(*at_positions(args, positions), **kwargs))
            if not isinstance(call.result, (list, tuple)):
                return computed
            return [OfPositions(partial(_part_of, computed, at)) for at in range(len(call.result))]
        return self._call_on_rows(call.target, args, kwargs)

    def _call_on_rows(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A view of rows, or what a handler makes of them. Values that only sums and products continue are computed
        before any other call, and functions before a view, which is one of places.
        """
        if target not in (_aten.add.Tensor, _aten.mul.Tensor):
            args = tuple(self._rows(one) if isinstance(one, (Lookups, Normalised)) else one for one in args)
        if target in _VIEWS and isinstance(args[0], (StepRows, Function)):
            rows = self._rows(args[0])
            return viewed(rows, target(rows.places, *args[1:], **kwargs))
        if (handler := _HANDLERS.get(target)) is None:
            raise CannotLowerError(str(target))
        return handler(self, *args, **kwargs)

    def _add(self, kind: str, width: int, **fields: Any) -> StepRows:
        """Append a step; its result, [1, T, groups · width]."""
        groups = fields.get("groups", 1)
        if width % _COLUMNS and kind != "rotate":
            raise CannotLowerError(f"{width} columns")
        key = len(self.steps)
        self.steps.append(Step(kind, key, width, **fields))
        return StepRows(key, self._whole(width * groups)[None])

    def _whole(self, width: int) -> Tensor:
        """The places of `width` columns from the first on, [T, width]: made once, as layers are alike."""
        if (places := self.whole.get(width)) is None:
            places = torch.arange(TRACED_TOKENS)[:, None] * TOKEN + torch.arange(width)[None, :]
            self.whole[width] = places
        return places

    def _rows(self, value: Any) -> StepRows:
        """A value as the result of a step, which is added where it has not been computed yet."""
        if isinstance(value, StepRows):
            return value
        if id(value) not in self.computed:
            self.computed[id(value)] = value, self._compute(value)
        return self.computed[id(value)][1]

    def _compute(self, value: Any) -> StepRows:
        if isinstance(value, Lookups) and value.tables:
            width = value.tables[0][0].shape[1]
            return self._add("embed", width, tables=value.tables, bias=value.constant, scale=value.scale)
        if isinstance(value, Normalised):
            return self._norm(value, None)
        if isinstance(value, Function):
            columns = self._columns(value.rows)
            made = self._add("activate", columns.width, x=columns, activation=recognise_activation(value.run))
            return arranged(made, value.rows)
        raise CannotLowerError(f"a {type(value).__name__.strip('_').lower()} where rows are needed")

    def _columns(self, rows: StepRows) -> Columns:
        """The columns of values [1, T, …] or [1, heads, T, d], which must be consecutive in every token."""
        places = rows.places
        if places.dim() == 4 and places.shape[2] == TRACED_TOKENS:
            places = places.transpose(1, 2)
        if places.shape[:2] != (1, TRACED_TOKENS) or rows.negated is not None:
            raise CannotLowerError(f"values of shape {tuple(places.shape)}")
        places = places.reshape(TRACED_TOKENS, -1)
        first, width = int(places[0, 0]), places.shape[1]
        if not torch.equal(places - first if first else places, self._whole(width)):
            raise CannotLowerError("columns that are not consecutive")
        return Columns(rows.key, first, width)

    def _look_up(self, table: Any, index: Any) -> Any:
        """The rows of `table` [n, width] at `index` [1, T]; a constant [1, T, width] where that is one number."""
        name = index.name if isinstance(index, Index) else ""
        if isinstance(index, OfPositions):
            positions = torch.arange(TRACED_TOKENS)[None]
            index = index.run(positions)
            name = "positions" if torch.equal(index, positions) else ""
        if name and isinstance(table, Tensor):
            return Lookups(((table, name),))
        if isinstance(index, Tensor) and bool((index == index.flatten()[0]).all()):
            return table[int(index.flatten()[0])].expand(1, TRACED_TOKENS, -1)
        raise CannotLowerError("an embedding by something computed")

    def _linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> StepRows:
        columns = self._columns(self._rows(x))
        if weight.shape[1] != columns.width or weight.shape[1] % _PAIR:
            raise CannotLowerError(f"a linear layer of {tuple(weight.shape)} for {columns.width} columns")
        return self._add("linear", weight.shape[0], x=columns, weights=weight, bias=bias)

    def _layer_norm(
        self, x: Any, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> StepRows:
        columns = self._columns(self._rows(x))
        if shape != [columns.width]:
            raise CannotLowerError(f"a layer norm of {shape} for {columns.width} columns")
        return self._add("norm", columns.width, x=columns, weights=weight, bias=bias, epsilon=eps)

    def _norm(self, value: Normalised, weight: Tensor | None) -> StepRows:
        columns, width = self._columns(value.rows), value.rows.places.shape[-1]
        if weight is not None and weight.shape != (width,):
            raise CannotLowerError(f"weights {tuple(weight.shape)} of a norm of {width} columns")
        groups = columns.width // width
        fields = {"x": columns, "groups": groups, "weights": weight, "norm": "rms", "epsilon": value.epsilon}
        return arranged(self._add("norm", width, **fields), value.rows)

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        scale: float | None,
        causal: bool,
        window: int | None,
        slopes: Any = None,
    ) -> StepRows:
        """[1, T, heads, d] of queries [1, heads, T, d] and of keys and values [1, key heads, T, d]. A window has the
        token itself in it, so it reaches `window - 1` tokens far. `slopes` are ALiBi's, [heads].
        """
        heads, size = query.places.shape[1], query.places.shape[3]
        q, k, v = (self._columns(self._rows(one)) for one in (query, key, value))
        key_heads = key.places.shape[1]
        if key.places.shape[3] != size or value.places.shape[3] != size or value.places.shape[1] != key_heads:
            raise CannotLowerError("queries, keys and values of different shapes")
        if not 0 < size <= MAX_HEAD_SIZE or not 0 < heads <= MAX_HEADS:
            raise CannotLowerError(f"{heads} heads of {size} columns, beyond {MAX_HEADS} of {MAX_HEAD_SIZE}")
        if not key_heads or heads % key_heads:
            raise CannotLowerError(f"{heads} heads of queries for {key_heads} of keys")
        if window is not None and window < 1:
            raise CannotLowerError(f"a window of {window} tokens")
        if slopes is not None and (not isinstance(slopes, Tensor) or slopes.shape != (heads,)):
            raise CannotLowerError("slopes of attention that are computed, or of another number of heads")
        reach = None if window is None or window > _MAX_REACH else window - 1
        fields = {"heads": (heads, key_heads, size), "scale": scale, "causal": causal, "reach": reach, "bias": slopes}
        rows = self._add("attend", heads * size, x=q, with_=k, third=v, **fields)
        return replace(rows, places=rows.places.view(1, TRACED_TOKENS, heads, size))

    def _sum(self, a: Any, b: Any, alpha: float = 1) -> Any:
        if alpha != 1:
            raise CannotLowerError("a weighted sum")
        if isinstance(a, MeanSquare) and isinstance(b, (int, float)) and a.is_mean and not a.inverse:
            return replace(a, epsilon=a.epsilon + b)
        if isinstance(a, Turned) and isinstance(b, Turned):
            return self._rotate(a, b)
        if (pointwise := combine_pointwise(_aten.add.Tensor, a, b)) is not None:
            return pointwise
        if (lookups := sum_lookups(a, b)) is not None:
            return lookups
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            rows, row = (b, a) if isinstance(a, Tensor) else (a, b)
            columns = self._columns(self._rows(rows))
            return self._add("add", columns.width, x=columns, bias=one_row(row, columns.width))
        x, y = (self._columns(self._rows(one)) for one in (a, b))
        if x.width != y.width:
            raise CannotLowerError("a sum of different widths")
        return self._add("add", x.width, x=x, with_=y)

    def _product(self, a: Any, b: Any) -> Any:
        if (pointwise := combine_pointwise(_aten.mul.Tensor, a, b)) is not None:
            return pointwise
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Lookups) and (scale := number_of(other)) is not None:
                return replace(one, scale=one.scale * scale)
            if isinstance(other, MeanSquare) and other.inverse:
                one = self._rows(one)
                if one.key != other.rows.key or not torch.equal(one.places, other.rows.places):
                    raise CannotLowerError("a norm of something else")
                return Normalised(one, other.epsilon)
            if isinstance(one, Normalised) and isinstance(other, Tensor):
                return self._norm(one, other)
            if isinstance(one, StepRows) and isinstance(other, OfPositions):
                return Turned(one, other)
            if isinstance(one, StepRows) and isinstance(other, Tensor):
                return self._scaled(one, other)
        if isinstance(a, (StepRows, Function)) and isinstance(b, (StepRows, Function)):
            x, y = (self._columns(self._rows(one)) for one in (a, b))
            if x.width != y.width:
                raise CannotLowerError("a product of different widths")
            return self._add("gate", x.width, x=x, with_=y)
        raise CannotLowerError(f"a product of {type(a).__name__} and {type(b).__name__}")

    def _scaled(self, rows: StepRows, factors: Tensor) -> StepRows:
        """Columns times a row of factors, as of a layer scale: another linear layer in the place of the one before."""
        columns, before = self._columns(rows), self.steps[rows.key]
        row = one_row(factors, columns.width).float()
        if before.kind != "linear" or columns.width != before.width or columns.column:
            raise CannotLowerError("columns of anything but a linear layer times factors")
        assert before.weights is not None
        bias = None if before.bias is None else before.bias.float() * row
        return self._add("linear", before.width, x=before.x, weights=before.weights.float() * row[:, None], bias=bias)

    def _rotate(self, a: Turned, b: Turned) -> StepRows:
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
        tables = tuple((Table(rows_by_position(one.factor, size)), "positions") for one in (straight, turned))
        rows = self._add("rotate", size, x=columns, groups=columns.width // size, tables=tables)
        return arranged(rows, straight.rows)


def _part_of(several: OfPositions, at: int, positions: Tensor) -> Any:
    return several.run(positions)[at]


def _apply_pointwise(function: Any) -> Callable[..., Any]:
    """The handler of a function of each number, for rows and for functions of rows."""

    def handler(_: _Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, StepRows):
            return Function(x, lambda values: function(values, *args, **kwargs))
        if isinstance(x, Function):
            return Function(x.rows, lambda values: function(x.run(values), *args, **kwargs))
        raise CannotLowerError(f"{function} of a {type(x).__name__}")

    return handler


def _power(lowering: _Lowering, x: Any, exponent: float) -> Any:
    """A square is taken for the beginning of an RMS norm."""
    if exponent == 2 and isinstance(x, StepRows):
        return MeanSquare(x)
    return _apply_pointwise(_aten.pow.Tensor_Scalar)(lowering, x, exponent)


def _mean(_: _Lowering, x: Any, dims: list[int], keepdim: bool = False, **__: Any) -> MeanSquare:
    if not isinstance(x, MeanSquare) or dims != [-1] or not keepdim or x.is_mean:
        raise CannotLowerError("a mean")
    return replace(x, is_mean=True)


def _inverse_root(_: _Lowering, x: Any) -> MeanSquare:
    if not isinstance(x, MeanSquare) or not x.is_mean or x.inverse:
        raise CannotLowerError("an inverse root")
    return replace(x, inverse=True)


def _negated(_: _Lowering, x: Any) -> StepRows:
    if not isinstance(x, StepRows) or x.negated is not None:
        raise CannotLowerError("a negation")
    return replace(x, negated=torch.ones_like(x.places, dtype=torch.bool))


def _joined(_: _Lowering, parts: list[Any], dim: int = 0) -> StepRows:
    if not all(isinstance(one, StepRows) and one.key == parts[0].key for one in parts):
        raise CannotLowerError("a concatenation")
    places = torch.cat([one.places for one in parts], dim)
    if all(one.negated is None for one in parts):
        return StepRows(parts[0].key, places)
    signs = [torch.zeros_like(one.places, dtype=torch.bool) if one.negated is None else one.negated for one in parts]
    return StepRows(parts[0].key, places, torch.cat(signs, dim))


_ATEN_ACTIVATIONS = (_aten.gelu, _aten.relu, _aten.sigmoid, _aten.silu, _aten.tanh)
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
    **{each.default: _apply_pointwise(each.default) for each in _ATEN_ACTIVATIONS},
}


def rehearse() -> None:
    """Do in the fork server what the first load of a process does once for all later ones, on a model of no size.

    The first load in a process compiles the patterns of transformers, finds the overloads of torch's operators, and
    fills tables of both: a fifth of a small model's load. A worker loads once, so it would pay that each time. No
    tensor is large enough for a second thread.

    Raises:
        Exception: of any kind, from transformers' or torch's own code.
    """
    from transformers import BertConfig, BertModel
    from transformers.initialization import no_init_weights

    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    kind: Any = BertModel
    with no_init_weights():
        module = kind._from_config(config, dtype=torch.float32, attn_implementation="sdpa", add_pooling_layer=False)
    module.eval().requires_grad_(False)
    lower(trace_forward(module, {}))
