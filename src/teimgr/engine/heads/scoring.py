"""Scoring heads: classifiers and cross-encoders, causal rerankers, and the activations of their logits.

No architecture's head is reimplemented: in `LibraryHead` the model's own forward runs on hidden states, with a stub in
place of its backbone that returns the given states. A trial at load compares the result with that of the whole model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as States

from teimgr.engine import gpu
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import pool
from teimgr.engine.heads.projections import torch_activation
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import CausalRerank

_TRIAL_LENGTHS = (3, 5, 5)
_TOLERANCE = 1e-4  # between float32 logits, relative to the largest; those of a wrong token differ far more
_ROW_STEP = 8  # oneDNN creates and caches a kernel per number of rows


class LibraryHead:
    """The part of a transformers `module` after its backbone; `module` is unchanged between calls. Calls of several
    threads are serialised, since the module has one stub.

    Raises:
        ValueError: the class does not keep its backbone under `base_model_prefix`.
    """

    def __init__(self, module: Any) -> None:
        self._prefix = module.base_model_prefix
        if self._prefix not in module._modules:
            raise ValueError(f"{type(module).__name__} has no {self._prefix!r} to replace")
        self.module = module
        self.backbone = module._modules[self._prefix]
        self._stub = _StubBackbone(self.backbone)
        self._stubbed = threading.Lock()
        config = module.config.get_text_config()
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = -1  # an unused id: decoders refuse batches without a padding id

    def texts(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Map texts of equal length, [texts, length, H], to float32 [texts, labels]; `ids` are for heads that use
        them."""
        if ids is None:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with self._stubbed_backbone(hidden):
            return self.module(input_ids=ids).logits.float()  # type: ignore[no-any-return]

    def rows(self, rows: Tensor) -> Tensor:
        """Map one row per text, [N, H], to float32 [N, labels]."""
        idle = 0 if gpu.is_gpu(rows.device) else -len(rows) % _ROW_STEP
        return self.texts(functional.pad(rows, (0, 0, 0, idle)).unsqueeze(1))[: len(rows)]

    def tokens(self, hidden: Tensor) -> Tensor:
        """Map each token separately: [T, H] → [T, vocabulary] in the model's dtype."""
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        with self._stubbed_backbone(hidden.unsqueeze(0)):
            return self.module(input_ids=ids).logits[0]  # type: ignore[no-any-return]

    @contextmanager
    def _stubbed_backbone(self, hidden: Tensor) -> Iterator[None]:
        with self._stubbed:
            self._stub.hidden = hidden
            self.module._modules[self._prefix] = self._stub
            try:
                yield
            finally:
                self.module._modules[self._prefix] = self.backbone
                self._stub.hidden = None


class _StubBackbone(nn.Module):
    """Replaces a backbone: returns `hidden` and the backbone's own pooling of it, for any inputs."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.config = backbone.config
        self._pooler = _pooler(backbone)

    def forward(self, *_args: Any, **_inputs: Any) -> States:
        assert self.hidden is not None
        pooled = None if self._pooler is None else self._pooler(self.hidden)
        return States(last_hidden_state=self.hidden, pooler_output=pooled)


def _pooler(backbone: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function for `pooler_output` from [texts, length, H]. ALBERT's pooler is a linear layer on the first
    token.

    The module is looked up at every call, since its layers may be replaced later.
    """
    pooler = getattr(backbone, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):
        return lambda hidden: backbone.pooler_activation(backbone.pooler(hidden[:, 0]))
    return lambda hidden: backbone.pooler(hidden)


@dataclass(frozen=True, slots=True)
class HeadTrial:
    """A few short texts: their batch, hidden states [T, H], and the whole model's logits, text by text."""

    batch: PackedBatch
    hidden: Tensor
    logits: tuple[Tensor, ...]

    @classmethod
    @torch.inference_mode()
    def of(cls, head: LibraryHead) -> HeadTrial:
        """Run random ids through the library's forward; one text ends with the padding token, which some heads skip."""
        batch = pack([Encoded(ids) for ids in _trial_ids(head.module)])
        device = head.module.device
        hidden, logits = [], []
        for begin, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(batch.ids[begin:stop])[None].to(device)
            hidden.append(head.backbone(input_ids=ids).last_hidden_state[0])
            logits.append(head.module(input_ids=ids).logits[0].float())
        return cls(batch, torch.cat(hidden), tuple(logits))

    def is_token_wise(self, head: LibraryHead) -> bool:
        """True if the head maps each token separately, so that it can run on a packed row."""
        return self.matches(head.tokens(self.hidden).float(), torch.cat(self.logits))

    def matches(self, logits: Tensor, reference: Tensor) -> bool:
        if logits.shape != reference.shape:
            return False
        return bool((logits - reference).abs().max() <= _TOLERANCE * max(1.0, float(reference.abs().max())))


def _trial_ids(module: Any) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    vocabulary = module.get_input_embeddings().num_embeddings
    pad = getattr(module.config.get_text_config(), "pad_token_id", -1)
    usable = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), [pad])
    random = np.random.default_rng(0)
    texts = [random.choice(usable, length).astype(np.int32) for length in _TRIAL_LENGTHS]
    if 0 <= pad < vocabulary:
        texts[-1][-1] = pad
    return texts


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
        scores = torch_activation(activation).double()(torch.from_numpy(wide)).numpy(force=True)
    return np.asarray(scores, dtype=np.float32)


def check_activation(activation: str, labels: int) -> None:
    """Raise ModelLoadFailed if `activation` is not torch's, changes the number of scores, or is random."""
    logits = np.linspace(-2, 2, 8 * labels, dtype=np.float32).reshape(8, labels)
    try:
        found = activate(logits, activation)
        alone = np.concatenate([activate(row[None], activation) for row in logits])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelLoadFailed(f"the activation {activation} does not take {labels} scores: {error}") from error
    if found.shape != logits.shape or not np.allclose(found, alone, atol=1e-5, equal_nan=True):
        raise ModelLoadFailed(
            f"the activation {activation} is not served: it gives another number of scores, or others each time"
        )
