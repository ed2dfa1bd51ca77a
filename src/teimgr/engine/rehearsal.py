"""What the first load of a process does once for all later ones, done ahead in the fork server on a model of no size.

The first load in a process compiles the patterns of transformers, finds the overloads of torch's operators, and fills
tables of both: a fifth of a small model's load. A worker loads once, so it would pay that each time; forked from a
process that has been through it, it does not.
"""

from __future__ import annotations

from typing import Any

import torch

from teimgr.engine.native_forward.lowering import lower
from teimgr.engine.native_forward.trace import trace_forward


def rehearse() -> None:
    """Make a BERT of one narrow layer, trace its forward and lower it. No tensor is large enough for a second thread.

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
