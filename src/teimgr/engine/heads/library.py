"""`LibraryHead`: the head of a model of the transformers library, run separately on hidden states.

No head is reimplemented: the model's own forward runs, with a stub in place of its backbone that returns the given
states. A trial at load compares the result with that of the whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as States

from teimgr.engine import gpu
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack

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
