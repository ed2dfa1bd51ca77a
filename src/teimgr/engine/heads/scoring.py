"""Scoring heads: classifiers and cross-encoders, causal rerankers, and the activations of their logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from teimgr.engine.batching.batch import PackedBatch, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.heads.library import HeadTrial, LibraryHead
from teimgr.engine.heads.pooling import pool
from teimgr.engine.heads.projections import torch_activation
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import CausalRerank

log = logging.getLogger(__name__)

LogitsOf = Callable[[Tensor, PackedBatch], Tensor]
TokenOf = Callable[[PackedBatch], NDArray[np.int64] | None]


def _rows(hidden: Tensor, batch: PackedBatch, token_of: TokenOf) -> Tensor:
    """Return the states of one token per text, [N, H]; `hidden` may be these already."""
    places = None if batch.kept is not None and len(hidden) == batch.texts else token_of(batch)
    return hidden if places is None else hidden[to_device(places, hidden.device)]


class CausalHead:
    """The log-odds of two tokens after a text, or one token's logit; `decode` maps [n, H] to logits [n, 2]."""

    def __init__(self, decode: Callable[[Tensor], Tensor]) -> None:
        self.width = 1
        self._decode = decode

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return SCORES before any activation, [N, 1]."""
        logits = self._decode(_rows(hidden, batch, self.token_of)).float()
        return Rows(logits[:, :1] if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:])

    def token_of(self, batch: PackedBatch) -> NDArray[np.int64]:
        return batch.ends - 1


class FirstToken(nn.Module):
    """An encoder-decoder that scores its inputs by the log-odds of two tokens as the first generated one.

    Its `logits` are [texts, 1].
    """

    def __init__(self, module: Any, score: CausalRerank) -> None:
        """Raise ModelLoadFailed if the model lacks these tokens or a start token."""
        super().__init__()
        self.module = module
        self.config = module.config
        self._tokens = (score.true_token_id, score.false_token_id)
        start = getattr(module.config, "decoder_start_token_id", None)
        if start is None or max(one for one in (*self._tokens, start) if one is not None) >= module.config.vocab_size:
            raise ModelLoadFailed(f"the model has no output for the tokens {self._tokens} after its first, {start}")
        self._start = int(start)

    def get_input_embeddings(self) -> nn.Module:
        return self.module.get_input_embeddings()  # type: ignore[no-any-return]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        start = input_ids.new_full((len(input_ids), 1), self._start)
        written = self.module(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=start, use_cache=False
        ).logits[:, 0]
        yes, no = self._tokens
        return SimpleNamespace(logits=(written[:, yes] - (0.0 if no is None else written[:, no]))[:, None])


class TokenLogitsHead:
    """Classifies tokens: `decode` maps hidden states [T, H] to logits [T, labels], including special tokens."""

    def __init__(self, decode: Callable[[Tensor], Tensor], labels: int) -> None:
        self.width = labels
        self._decode = decode

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return TOKENS before any activation, [T, labels]."""
        return Rows(self._decode(hidden).float(), to_device(batch.cu_seqlens.astype(np.int64), hidden.device))


@torch.no_grad()  # inference mode would forbid changing their dtype later
def keep_two_tokens(module: Any, score: CausalRerank) -> None:
    """Reduce a language model's output layer to the rows of `score`'s tokens, so that no other logit is computed.

    Raises:
        ModelLoadFailed: the tokens are not in the vocabulary, or the model needs the other rows.
    """
    tokens = [score.true_token_id, *([] if score.false_token_id is None else [score.false_token_id])]
    whole = module.get_output_embeddings()
    if whole is None or max(tokens) >= len(whole.weight):
        raise ModelLoadFailed(f"the model has no output for the tokens {tokens}")
    ids = torch.arange(min(4, len(whole.weight)), device=module.device)[None]
    reference = module(input_ids=ids).logits[0, :, tokens]
    few = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None).requires_grad_(False)
    few.weight = nn.Parameter(whole.weight[tokens].clone(), requires_grad=False)
    if whole.bias is not None:
        few.bias = nn.Parameter(whole.bias[tokens].clone(), requires_grad=False)
    module.set_output_embeddings(few)
    logits = module(input_ids=ids).logits[0]
    if logits.shape != reference.shape or not torch.allclose(logits, reference, rtol=1e-4, atol=1e-4):
        raise ModelLoadFailed("the logits of two tokens cannot be computed without those of all others")


class SequenceHead:
    """A library head for texts; `logits_of` maps hidden states and batch to float32 [N, labels]. `token_of` returns the
    only token of each text whose states it reads, or None.
    """

    def __init__(self, logits_of: LogitsOf, width: int, token_of: TokenOf | None = None) -> None:
        self.width = width
        self._logits_of = logits_of
        self.token_of: TokenOf = token_of or (lambda batch: None)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        return Rows(self._logits_of(hidden, batch))


def sequence_head(library: LibraryHead) -> SequenceHead | None:
    """Return the library head on the fewest hidden states that give the whole model's logits; None if none do.

    One row per text is enough for nearly all: the first, the last, or the mean of all. Other heads get all tokens, run
    by run.
    """
    trial = HeadTrial.of(library)
    reference = torch.stack(trial.logits)
    for name, (logits_of, token_of) in _candidates(library).items():
        try:
            logits = logits_of(trial.hidden, trial.batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as refusal:
            log.debug("the head does not run on %s: %s", name, refusal)
            continue
        if trial.matches(logits, reference):
            log.debug("the head needs %s", name)
            return SequenceHead(logits_of, reference.shape[1], token_of)
    return None


def _candidates(library: LibraryHead) -> dict[str, tuple[LogitsOf, TokenOf | None]]:
    pad = getattr(library.module.config.get_text_config(), "pad_token_id", -1)

    def on_row(token_of: TokenOf) -> tuple[LogitsOf, TokenOf]:
        return lambda hidden, batch: library.rows(_rows(hidden, batch, token_of)), token_of

    def last_but_padding(batch: PackedBatch) -> NDArray[np.int64]:
        """Return each text's last token that is not `pad`, or its first if all are `pad`, as decoders do."""
        return batch.begins + np.maximum.reduceat(batch.position_ids * (batch.ids != pad), batch.begins)

    def every_token(hidden: Tensor, batch: PackedBatch) -> Tensor:
        ids, parts = to_device(batch.ids, hidden.device), []
        for run in batch.runs:
            tokens, shape = slice(run.start, run.stop), (run.texts, run.length)
            parts.append(library.texts(hidden[tokens].view(*shape, -1), ids[tokens].view(shape)))
        return torch.cat(parts)

    return {
        "the first token": on_row(lambda batch: batch.begins),
        "the last token": on_row(lambda batch: batch.ends - 1),
        "the last token that is not padding": on_row(last_but_padding),
        "the mean of all tokens": (
            lambda hidden, batch: library.rows(pool(hidden, batch, ["mean"]).to(hidden.dtype)),
            None,
        ),
        "every token": (every_token, None),
    }


def activate(logits: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """Convert logits [N, labels] to scores: `sigmoid`, `softmax` over the labels, `identity`, or a torch class by name.

    Raises:
        ModelLoadFailed: `activation` is not one of these.
    """
    name = activation.rsplit(".", 1)[-1].lower()
    if name == "identity":
        return logits
    wide = logits.astype(np.float64)
    if name == "sigmoid":
        shrunk = np.exp(-np.abs(wide))  # at most 1: no overflow
        scores = np.where(wide >= 0, 1.0, shrunk) / (1.0 + shrunk)
    elif name == "softmax":
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    else:
        scores = torch_activation(activation)(torch.from_numpy(wide)).numpy()
    return np.asarray(scores, dtype=np.float32)
