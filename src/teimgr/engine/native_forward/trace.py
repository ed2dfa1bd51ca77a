"""Records the ATen operators of a model's own forward during one run on a short text.

Also the symbolic values during lowering: places in rows, sums of look-ups, functions of them. Besides these
(`SYMBOLIC`), a value may be a constant (a tensor or a number) or a list of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from teimgr.engine.attention import causality_of, is_plain
from teimgr.engine.native_forward.program import CannotLowerError

TRACED = "teimgr_traced"
TRACED_TOKENS = 23  # of the traced text: no dimension of a model is a multiple of it


# Placeholder for attention in a trace: [1, heads, T, d] → [1, T, heads, d].
torch.library.define(
    "teimgr::attend", "(Tensor q, Tensor k, Tensor v, float? scale, bool causal, int? window, Tensor? slopes) -> Tensor"
)


@torch.library.impl("teimgr::attend", "CompositeExplicitAutograd")
def _attend(query: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(query.transpose(1, 2).contiguous())


def _traced_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not is_plain(attention_mask, kwargs):
        raise CannotLowerError(f"the attention of {type(module).__name__}")
    causal = causality_of(module, is_causal)
    return torch.ops.teimgr.attend(query, key, value, scaling, causal, sliding_window, alibi_slopes), None


AttentionInterface.register(TRACED, _traced_attention)


class OperatorCall(NamedTuple):
    """A call of an ATen operator; `result` is a tensor, or several in a list."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(slots=True)
class ForwardRecord:
    """The operators of one forward, in order. Tensors are identified by object; the record keeps them alive.

    The values of results are not the model's: matrix products and attention are skipped.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor
    calls: list[OperatorCall] = field(default_factory=list)
    hidden: Tensor | None = None

    def needed_calls(self) -> list[OperatorCall]:
        """The calls that the hidden states depend on; not those of a pooler, for one."""
        needed, kept = {id(self.hidden)}, list[OperatorCall]()
        for call in reversed(self.calls):
            if not needed.isdisjoint(map(id, tensors_in(call.result))):
                needed.update(map(id, tensors_in((call.args, tuple(call.kwargs.values())))))
                kept.append(call)
        return kept[::-1]


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends each operator call that depends on the arguments to `record`; the results of others are constants.

    Without autograd, an operator such as `linear` is recorded whole, not as its parts.

    Raises:
        CannotLowerError: Python reads a number that depends on the arguments, so another text may run other code.
    """

    def __init__(self, record: ForwardRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._dependent = {id(record.ids), id(record.positions), id(record.types)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.linear.default:  # skipped: most of the cost of a run
            rows, weights = args[0], args[1]
            result = rows.new_zeros(*rows.shape[:-1], weights.shape[0])
        else:
            result = func(*args, **kwargs)
        if not self._dependent.isdisjoint(map(id, tensors_in((args, tuple(kwargs.values()))))):
            made = list(tensors_in(result))
            if not made:
                raise CannotLowerError(f"it cannot be traced: {func} gives Python a number that depends on the text")
            self._dependent.update(map(id, made))
            self._record.calls.append(OperatorCall(func, tuple(args), kwargs, result))
        return result


def trace_forward(module: Any, options: dict[str, Any]) -> ForwardRecord:
    """Record the operators of `module`'s forward, for one text of `TRACED_TOKENS` tokens; `options` are passed to it.

    Raises:
        CannotLowerError: the model's attention is not that of packed rows, or its code fails.
    """
    indices = torch.arange(TRACED_TOKENS)[None]
    record = ForwardRecord(
        ids=indices % int(module.config.get_text_config().vocab_size),
        positions=indices,
        types=torch.zeros_like(indices),
    )
    takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
    more = {"token_type_ids": record.types} if takes_types else {}
    own = module.config._attn_implementation
    try:
        module.set_attn_implementation(TRACED)
        with torch.inference_mode(), _Recorder(record):
            found = module(input_ids=record.ids, position_ids=record.positions, **more, **options)
            record.hidden = found.last_hidden_state
    except CannotLowerError:
        raise
    except Exception as error:  # of any type, from the model's code
        raise CannotLowerError(f"it cannot be traced: {str(error).partition(chr(10))[0]}") from error
    finally:
        with suppress(ValueError):
            module.set_attn_implementation(own)
    return record


TOKEN = 1 << 32  # distance between the places of two tokens


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Elements of the result of step `key` at `places` (token × TOKEN + column), negated if set."""

    key: int
    places: Tensor
    negated: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """One number per token of the batch: its id, position or type."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class OfPositions:
    """A function of the positions alone, [1, T] int64."""

    run: Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """A sum of rows of tables and of a constant row, times `scale`."""

    tables: tuple[tuple[Tensor, str], ...] = ()
    constant: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of each number of `rows`, recognised when the result is needed."""

    rows: StepRows
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class MeanSquare:
    """Part of an RMS norm: squares of `rows`; with `is_mean` their mean over the last dimension plus `epsilon`; with
    `inverse` the inverse root of that."""

    rows: StepRows
    epsilon: float = 0.0
    is_mean: bool = False
    inverse: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Normalised:
    """`rows` divided by the root of their mean square, not yet multiplied by weights."""

    rows: StepRows
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """StepRows times factors that depend on their position: half of a rotation."""

    rows: StepRows
    factor: OfPositions


SYMBOLIC = (StepRows, Index, OfPositions, Lookups, Function, MeanSquare, Normalised, Turned)
# The functions that steps compute, by name.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def recognise_activation(run: Callable[[Tensor], Tensor]) -> str:
    """Return the name of the known activation that computes `run`. Raises CannotLowerError for other functions."""
    grid = torch.linspace(-8, 8, 1001)
    values = run(grid)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(values, known(grid), atol=1e-5):
            return name
    raise CannotLowerError("an unknown elementwise function")


def number_of(value: Any) -> float | None:
    """Return the number that a constant has in every element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None


def combine_pointwise(function: Any, a: Any, b: Any) -> Function | None:
    """Return the sum or product of functions of the same rows, or of one and a number; None for anything else."""
    numbers = [number_of(one) for one in (a, b)]
    kinds = [isinstance(one, Function) for one in (a, b)]
    rows = [one.rows if isinstance(one, Function) else one for one in (a, b)]
    if not any(isinstance(one, StepRows) for one in rows):
        return None
    same = all(isinstance(one, StepRows) for one in rows) and rows[0].key == rows[1].key
    same = same and any(kinds) and torch.equal(rows[0].places, rows[1].places)
    if not same and all(one is None for one in numbers):
        return None
    base = rows[0] if isinstance(rows[0], StepRows) else rows[1]

    def run(x: Tensor) -> Tensor:
        values = []
        for one, number in zip((a, b), numbers, strict=True):
            values.append(one.run(x) if isinstance(one, Function) else x if number is None else number)
        result: Tensor = function(*values) if isinstance(values[0], Tensor) else function(values[1], values[0])
        return result

    return None if base.negated is not None else Function(base, run)


def flat(args: Any) -> list[Any]:
    """Flatten nested lists and tuples, in order."""
    if isinstance(args, (list, tuple)):
        return [one for part in args for one in flat(part)]
    return [args]


def at_positions(args: Any, positions: Tensor) -> Any:
    """Return `args` with everything that depends on positions computed for these positions."""
    if isinstance(args, (list, tuple)):
        return [at_positions(one, positions) for one in args]
    return args.run(positions) if isinstance(args, OfPositions) else args


def viewed(rows: StepRows, places: Any) -> Any:
    """Return other views of the same rows: one, or several as a list. Raises CannotLowerError for negated rows."""
    if rows.negated is not None:
        raise CannotLowerError("a view of negated values")
    if isinstance(places, (list, tuple)):
        return [StepRows(rows.key, one) for one in places]
    return StepRows(rows.key, places)


def arranged(rows: StepRows, like: StepRows) -> StepRows:
    """Return the result [1, T, columns] of a step in the arrangement of the values that it was made from."""
    shape = like.places.shape
    if len(shape) == 4 and shape[2] == TRACED_TOKENS:
        return replace(rows, places=rows.places.view(1, TRACED_TOKENS, shape[1], shape[3]).transpose(1, 2))
    return replace(rows, places=rows.places.view(shape))


def _as_lookups(value: Any) -> Lookups | None:
    """Return a value as a sum of look-ups, if it is one."""
    if isinstance(value, Lookups):
        return value
    if isinstance(value, Tensor) and value.dim() in (1, 3) and value.is_floating_point():
        return Lookups(constant=one_row(value, value.shape[-1]))
    return None


def sum_lookups(a: Any, b: Any) -> Lookups | None:
    """Return the sum of two sums of look-ups; None if one of them is something else."""
    one, other = _as_lookups(a), _as_lookups(b)
    if one is None or other is None or one.scale != 1.0 or other.scale != 1.0:
        return None
    constants = [each.constant for each in (one, other) if each.constant is not None]
    return Lookups(one.tables + other.tables, sum(constants[1:], constants[0]) if constants else None)


def one_row(value: Tensor, width: int) -> Tensor:
    """Return the row [width] that a constant adds to every token; raises CannotLowerError if tokens differ."""
    rows = value.reshape(-1, value.shape[-1])
    if value.shape[-1] != width or not bool((rows == rows[0]).all()):
        raise CannotLowerError("a constant that differs between tokens")
    return rows[0]


def rows_by_position(factor: OfPositions, width: int) -> Callable[[int], Tensor]:
    """Return a function of n that computes the factors of the first n positions, float32 [n, width].

    Raises:
        CannotLowerError: a position has more than `width` factors, for example some per head.
    """

    def rows(count: int) -> Tensor:
        table: Tensor = factor.run(torch.arange(count)[None])
        return table.reshape(count, width).float().contiguous()

    if factor.run(torch.arange(TRACED_TOKENS)[None]).numel() != TRACED_TOKENS * width:
        raise CannotLowerError("a factor that differs between heads")
    return rows
