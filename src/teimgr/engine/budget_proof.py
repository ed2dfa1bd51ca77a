"""The proof at load that the largest batches fit a GPU's memory, before any text depends on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from teimgr.engine import gpu
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.batching.queue import MIN_TOKENS
from teimgr.engine.job import Output
from teimgr.engine.model import Model
from teimgr.engine.runner import MAX_RESULT_BYTES
from teimgr.errors import OutOfDeviceMemory

log = logging.getLogger(__name__)

_SHORT_TEXT = 16  # tokens
_BY_USE = (Output.DENSE, Output.SCORES, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKENS)


def proven_tokens(model: Model, known: Sequence[Encoded], most: int, longest: int) -> int:
    """The tokens of a batch, halved from `most` on until one of the longest texts and one of short ones fit.

    Torch's allocator keeps what they took, so later batches of that size find it. The ids are those of `known`.

    Raises:
        OutOfDeviceMemory: not even `MIN_TOKENS` fit.
        RuntimeError: torch's own, for another failure.
    """
    ids = np.concatenate([text.ids for text in known])
    device, output = model.backbone.device, next(output for output in _BY_USE if output in model.outputs)
    tokens = most
    while True:
        why = _failure(model, device, output, [_batch(ids, tokens, length) for length in (longest, _SHORT_TEXT)])
        if why is None:
            if tokens < most:
                log.warning("batches of %d tokens do not fit the device's memory: %d from now on", most, tokens)
            return tokens
        gpu.free_cached_memory(device)
        if tokens <= MIN_TOKENS:
            raise OutOfDeviceMemory(f"a batch of {tokens} tokens does not fit the device: {why}")
        tokens = max(MIN_TOKENS, tokens // 2)


def _failure(model: Model, device: torch.device, output: Output, batches: Sequence[PackedBatch]) -> str | None:
    """The message of running out of memory; as text, since an exception keeps the tensors of its frames."""
    try:
        for batch in batches:
            rows = batch.tokens if output in (Output.MULTI_VECTOR, Output.TOKENS) else batch.texts
            is_whole = 4 * rows * model.widths[output] <= MAX_RESULT_BYTES  # else the runner splits it
            if is_whole:
                model.run(batch, [output])
            else:
                model.run_backbone(batch)
        if gpu.is_gpu(device):
            gpu.wait_for(device)
    except (RuntimeError, MemoryError) as error:
        if not gpu.is_out_of_memory(error):
            raise
        return str(error)
    return None


def _batch(ids: np.ndarray[tuple[int], np.dtype[np.int32]], tokens: int, length: int) -> PackedBatch:
    """Texts of `length` tokens, at least one; each begins elsewhere in `ids`, whose order does not matter."""
    length = min(length, tokens)
    return pack([Encoded(np.roll(ids, -text).take(range(length), mode="wrap")) for text in range(tokens // length)])
