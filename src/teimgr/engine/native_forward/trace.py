"""A record of the ATen operators of a model's own forward, made while it runs once on one short text."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from teimgr.engine.attention import causality_of, is_plain
from teimgr.engine.native_forward.program import CannotLowerError

TRACED = "teimgr_traced"
TRACED_TOKENS = 23  # of the traced text: no dimension of a model is a multiple of it


# Stands for attention in a trace: [1, heads, T, d] → [1, T, heads, d].
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
    """The operators of one forward, in order; a tensor is identified by its object, which the record keeps alive.

    The values of results are not those of the model: matrices are not multiplied, and attention is left out.
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

    Without autograd, an operator such as `linear` arrives whole, not as the operators that it is composed of.

    Raises:
        CannotLowerError: Python reads a number that depends on the arguments, so another text may run other code.
    """

    def __init__(self, record: ForwardRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._dependent = {id(record.ids), id(record.positions), id(record.types)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.linear.default:  # what it costs to run the model once
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
    except Exception as error:  # of any kind: the model's code
        raise CannotLowerError(f"it cannot be traced: {str(error).partition(chr(10))[0]}") from error
    finally:
        with suppress(ValueError):
            module.set_attn_implementation(own)
    return record
