"""A record of the ATen operators of a model's own forward, by torch's tracer `make_fx`."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface

from teimgr.engine.attention import causality_of, is_plain
from teimgr.engine.forward_program import CannotLowerError

TRACED = "teimgr_traced"
TRACED_TOKENS = 23  # of the traced text: no dimension of a model is a multiple of it


# Stands for attention in a trace: [1, heads, T, d] → [1, T, heads, d].
torch.library.define(
    "teimgr::attend", "(Tensor q, Tensor k, Tensor v, float? scale, bool causal, int? window) -> Tensor"
)


@torch.library.impl("teimgr::attend", "CompositeExplicitAutograd")
def _attend(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query.transpose(1, 2).contiguous())


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not is_plain(attention_mask, kwargs):
        raise CannotLowerError(f"the attention of {type(module).__name__}")
    causal = causality_of(module, is_causal)
    return torch.ops.teimgr.attend(query, key, value, scaling, causal, sliding_window), None


AttentionInterface.register(TRACED, _traced_attention)


def trace_forward(module: Any, options: dict[str, Any]) -> fx.GraphModule:
    """Record the operators of `module`'s forward, for one text of `TRACED_TOKENS` tokens; `options` are passed to it.

    The arguments of the record are token ids, positions and, where the model takes them, token types.

    Raises:
        CannotLowerError: the model's attention is not that of packed rows, or torch cannot trace its code.
    """
    takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
    indices = torch.arange(TRACED_TOKENS)[None]

    def run(ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        more = {"token_type_ids": types} if takes_types else {}
        hidden: Tensor = module(input_ids=ids, position_ids=positions, **more, **options).last_hidden_state
        return hidden

    own = module.config._attn_implementation
    try:
        module.set_attn_implementation(TRACED)
        with torch.no_grad():
            ids = indices % int(module.config.get_text_config().vocab_size)
            return make_fx(run, pre_dispatch=True)(ids, indices, torch.zeros_like(indices))
    except CannotLowerError:
        raise
    except Exception as error:  # of any kind: the model's code, and torch's tracing of it
        raise CannotLowerError(f"it cannot be traced: {str(error).partition(chr(10))[0]}") from error
    finally:
        with suppress(ValueError):
            module.set_attn_implementation(own)
