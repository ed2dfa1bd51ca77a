"""The head of a transformers model, run by itself on hidden states.

So no architecture's head is written again here: the model's own forward runs, with a stub in the place of its backbone
that returns the states it is given. Whether that is the same is tried at load, against the model as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as States

from teimgr.engine.batch import Encoded, PackedBatch, pack

_TRIAL_LENGTHS = (3, 5, 5)
_TOLERANCE = 1e-4  # of float32 logits against the largest of them; another token's row is far beyond it
_ROW_STEP = 8  # a CPU kernel is made and kept for every number of rows it meets


class LibraryHead:
    """What a transformers `module` does behind its backbone; between calls `module` is whole.

    Raises:
        ValueError: the class does not keep its backbone where `base_model_prefix` says.
    """

    def __init__(self, module: Any) -> None:
        self._prefix = module.base_model_prefix
        if self._prefix not in module._modules:
            raise ValueError(f"{type(module).__name__} has no {self._prefix!r} that could stand aside")
        self.module = module
        self.backbone = module._modules[self._prefix]
        self._stub = _Given(self.backbone)
        config = module.config.get_text_config()
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = -1  # no token's id: decoders refuse several texts while there is none at all

    def texts(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """[texts, length, H] of equal length, with their ids where a head looks at them → float32 [texts, labels]."""
        if ids is None:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with self._standing_aside(hidden):
            return self.module(input_ids=ids).logits.float()  # type: ignore[no-any-return]

    def rows(self, rows: Tensor) -> Tensor:
        """[N, H], one row for each text → float32 [N, labels]."""
        idle = -len(rows) % _ROW_STEP if rows.device.type == "cpu" else 0
        return self.texts(functional.pad(rows, (0, 0, 0, idle)).unsqueeze(1))[: len(rows)]

    def tokens(self, hidden: Tensor) -> Tensor:
        """[T, H] → [T, vocabulary] in the model's type, each token by itself."""
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        with self._standing_aside(hidden.unsqueeze(0)):
            return self.module(input_ids=ids).logits[0]  # type: ignore[no-any-return]

    @contextmanager
    def _standing_aside(self, hidden: Tensor) -> Iterator[None]:
        self._stub.hidden = hidden
        self.module._modules[self._prefix] = self._stub
        try:
            yield
        finally:
            self.module._modules[self._prefix] = self.backbone
            self._stub.hidden = None


class _Given(nn.Module):
    """In the place of a backbone: whatever it is asked, it answers with `hidden`, and its own pooling of it."""

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
    """What makes `pooler_output` of [texts, length, H]. ALBERT keeps its parts apart: the first token is ours to take.

    The module is looked up with every call: its layers may be replaced after this.
    """
    pooler = getattr(backbone, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):
        return lambda hidden: backbone.pooler_activation(backbone.pooler(hidden[:, 0]))
    return lambda hidden: backbone.pooler(hidden)


@dataclass(frozen=True, slots=True)
class HeadTrial:
    """A few short texts: their batch, their hidden states [T, H], and what the whole model says of them, one by one."""

    batch: PackedBatch
    hidden: Tensor
    logits: tuple[Tensor, ...]

    @classmethod
    @torch.inference_mode()
    def of(cls, head: LibraryHead) -> HeadTrial:
        """Random ids through the library's own forward; one text ends in the padding token, which some heads skip."""
        batch = pack([Encoded(ids) for ids in _trial_ids(head.module)])
        device = head.module.device
        hidden, logits = [], []
        for begin, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(batch.ids[begin:stop])[None].to(device)
            hidden.append(head.backbone(input_ids=ids).last_hidden_state[0])
            logits.append(head.module(input_ids=ids).logits[0].float())
        return cls(batch, torch.cat(hidden), tuple(logits))

    def shows_a_head_of_tokens(self, head: LibraryHead) -> bool:
        """Whether the head judges each token by itself, so that a packed row of tokens will do."""
        return self.confirms(head.tokens(self.hidden).float(), torch.cat(self.logits))

    def confirms(self, logits: Tensor, truth: Tensor) -> bool:
        """Whether `logits` are `truth`, within rounding."""
        if logits.shape != truth.shape:
            return False
        return bool((logits - truth).abs().max() <= _TOLERANCE * max(1.0, float(truth.abs().max())))


def _trial_ids(module: Any) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    vocabulary = module.get_input_embeddings().num_embeddings
    pad = getattr(module.config.get_text_config(), "pad_token_id", -1)
    usable = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), [pad])
    random = np.random.default_rng(0)
    texts = [random.choice(usable, length).astype(np.int32) for length in _TRIAL_LENGTHS]
    if 0 <= pad < vocabulary:
        texts[-1][-1] = pad
    return texts
