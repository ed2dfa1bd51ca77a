"""Rerankers that are language models: how much likelier one token is than another as the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads.base import Rows, moved
from teimgr.errors import ModelLoadFailed
from teimgr.layout import CausalScore


class CausalHead:
    """The log-odds of two tokens behind a text, or one token's logit; `decode` makes [n, 2] logits of [n, H]."""

    def __init__(self, decode: Callable[[Tensor], Tensor]) -> None:
        self.width = 1
        self._decode = decode

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """SCORES before any activation, [N, 1]."""
        logits = self._decode(hidden[moved(batch.cu_seqlens[1:].astype(np.int64) - 1, hidden.device)]).float()
        return Rows(logits[:, :1] if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:])


@torch.no_grad()  # tensors of the inference mode could not change their type later
def keep_two_tokens(module: Any, score: CausalScore) -> None:
    """Leave of a language model's output layer the rows of the tokens that `score` looks at: no other logit is made.

    Raises:
        ModelLoadFailed: the tokens are not in the vocabulary, or the model cannot do without the other rows.
    """
    tokens = [score.true_token_id, *([] if score.false_token_id is None else [score.false_token_id])]
    whole = module.get_output_embeddings()
    if whole is None or max(tokens) >= len(whole.weight):
        raise ModelLoadFailed(f"the model has no output for the tokens {tokens}")
    ids = torch.arange(min(4, len(whole.weight)), device=module.device)[None]
    truth = module(input_ids=ids).logits[0, :, tokens]
    few = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None).requires_grad_(False)
    few.weight = nn.Parameter(whole.weight[tokens].clone(), requires_grad=False)
    if whole.bias is not None:
        few.bias = nn.Parameter(whole.bias[tokens].clone(), requires_grad=False)
    module.set_output_embeddings(few)
    logits = module(input_ids=ids).logits[0]
    if logits.shape != truth.shape or not torch.allclose(logits, truth, rtol=1e-4, atol=1e-4):
        raise ModelLoadFailed("the logits of two tokens cannot be had without those of all others")
