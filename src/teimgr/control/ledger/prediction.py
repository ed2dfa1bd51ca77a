"""Prediction of a worker's memory from the heads of its model's files, before the model is loaded for the first time.

The constants are measured on workers of the fork server. A prediction is an upper bound that is meant to be at most a
quarter too high; the first measurement replaces it.
"""

from __future__ import annotations

from teimgr.control.ledger.ledger import Footprint
from teimgr.models.weight_sizes import WeightSizes

ASSUMED = Footprint(host_bytes=2 << 30, source="assumed")
"""Of a model whose files are not on this host yet."""
ASSUMED_ON_CARD = Footprint(host_bytes=2 << 30, device_bytes=2 << 30, source="assumed")
_MIB = 1 << 20
_PROCESS_BYTES = 38 * _MIB  # what a forked worker writes of the pages that it has from the fork server
_STATIC_PROCESS_BYTES = 24 * _MIB  # one that never runs a transformer
_CARD_PROCESS_BYTES = 1200 * _MIB  # with a CUDA context
CONTEXT_BYTES = 640 * _MIB
"""Of a process on a card, beside what its allocator holds."""
_BYTES_OF_TOKENIZER = 19  # in memory, for each byte of its file
_MARGIN = 1.08
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_CPU_BATCH_TOKENS = 2048
_CPU_TEMPORARY_BYTES = 25_000_000  # what a batch on a CPU is cut to
_STATIC_BATCH_BYTES = 8 * _MIB


def predicted(sizes: WeightSizes, dtype: str, max_batch_tokens: int, *, on_card: bool) -> Footprint:
    """The footprint of a worker with these weights. "auto" counts as float32, as that is taken where nothing else fits.

    On a CPU the layers are copied into the order in which they are computed; tables of float32 stay in the file,
    and the page cache is not charged to anyone. On a card everything is copied to it.
    """
    item = _ITEM_BYTES.get(dtype, 4)
    tokenizer = _BYTES_OF_TOKENIZER * sizes.tokenizer_bytes
    if sizes.is_static:
        host = _STATIC_PROCESS_BYTES + tokenizer + 4 * sizes.parameters + _STATIC_BATCH_BYTES
        return _with_margin(host, 4 * sizes.parameters)
    batch = _batch_bytes(sizes, max_batch_tokens, on_card=on_card)
    widened = 0 if sizes.is_wide else 4 * sizes.parameters  # for the comparison with float32, while it loads
    if on_card:
        device = CONTEXT_BYTES + min(item, 4) * sizes.parameters + batch
        found = _with_margin(_CARD_PROCESS_BYTES + tokenizer, widened)
        return Footprint(
            host_bytes=found.host_bytes, loading_bytes=found.loading_bytes, device_bytes=int(device * _MARGIN)
        )
    layers = sizes.parameters - sizes.tables
    tables = 0 if sizes.is_wide else 4 * sizes.tables
    copied = item * layers + tables
    return _with_margin(_PROCESS_BYTES + tokenizer + copied + batch, max(widened, 4 * layers) // 4)


def batch_bytes(sizes: WeightSizes, max_batch_tokens: int) -> int:
    """What the largest batch takes on a CPU beside the model, which a worker gives back while it is idle."""
    return _STATIC_BATCH_BYTES if sizes.is_static else _batch_bytes(sizes, max_batch_tokens, on_card=False)


def _batch_bytes(sizes: WeightSizes, max_batch_tokens: int, *, on_card: bool) -> int:
    row = 4 * (2 * sizes.hidden + sizes.widest)
    if on_card:
        return 3 * row * max_batch_tokens
    return min(min(max_batch_tokens, _CPU_BATCH_TOKENS) * row, _CPU_TEMPORARY_BYTES)


def _with_margin(host: int, extra_while_loading: int) -> Footprint:
    host = int(host * _MARGIN)
    return Footprint(host_bytes=host, loading_bytes=host + extra_while_loading)
