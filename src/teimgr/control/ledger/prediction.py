"""Prediction of a worker's memory from the heads of its model's files, before the model is loaded for the first time.

The constants are measured on workers of the fork server, of all kinds by `bench ledger`. A prediction is an upper
bound that is meant to be at most a quarter too high; the first measurement replaces it.
"""

from __future__ import annotations

from typing import NamedTuple

from teimgr.control.ledger.ledger import Footprint
from teimgr.models.weight_sizes import WeightSizes
from teimgr.spec import CPU_BATCH_TOKENS, CPU_TEMPORARY_BYTES, GRAPH_TOKENS, Kind

ASSUMED = Footprint(host_bytes=2 << 30, source="assumed")
"""Of a model whose files are not on this host yet."""
ASSUMED_ON_CARD = Footprint(host_bytes=2 << 30, device_bytes=2 << 30, source="assumed")
_MIB = 1 << 20
_PROCESS_BYTES = 34 * _MIB  # what a forked worker writes of the pages that it has from the fork server
# Of a model whose tokenizer is not WordPiece, with its caches and longer texts.
_OTHER_TOKENIZER_BYTES = 5 * _MIB
_NARROW_BYTES = 1 * _MIB  # of types other than float32
_WORDPIECE = frozenset({"albert", "bert", "distilbert", "electra", "mpnet", "nomic_bert"})
# What comes on top of an embedding's head, in its largest batch.
_KIND_BYTES = {
    Kind.SPARSE: 3 * _MIB,
    Kind.MULTI_VECTOR: 2 * _MIB,
    Kind.RERANKER: 3 * _MIB,
    Kind.CLASSIFIER: 3 * _MIB,
    Kind.TOKEN_CLASSIFIER: 3 * _MIB,
}
_STATIC_PROCESS_BYTES = 18 * _MIB  # one that never runs a transformer
_CARD_PROCESS_BYTES = 1200 * _MIB  # with a CUDA context
CONTEXT_BYTES = 640 * _MIB
"""Of a process on a card, beside what its allocator holds."""


FIRST_CALLS_BYTES = 9 * _MIB // 2
"""What a loaded worker takes once calls of all its interfaces have come: 2.3 to 4.3 MiB in `bench forty`'s models."""


class _Architecture(NamedTuple):
    """MiB that an architecture takes beside its weights: in float32, in other types, and more while it loads."""

    wide: int = 0
    narrow: int = 0
    loading: int = 0


# Torch's libraries allocate working memory for models that its operators compute, more in 16 bits than in float32;
# DeBERTa's code is compiled at load.
_ARCHITECTURES = {
    "mpnet": _Architecture(19, 21, 7),
    "t5": _Architecture(14, 14, 7),
    "deberta": _Architecture(26, 26, 44),
    "deberta-v2": _Architecture(26, 26, 44),
    "gemma3_text": _Architecture(11, 20, 2),
    "qwen3": _Architecture(5, 14, 0),
}
_BYTES_OF_TOKENIZER = 19  # in memory, for each byte of its file
_MARGIN = 1.08
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_STATIC_BATCH_BYTES = 8 * _MIB


def predicted(sizes: WeightSizes, dtype: str, max_batch_tokens: int, *, on_card: bool) -> Footprint:
    """The footprint of a worker with these weights. "auto" counts as float32, as that is taken where nothing else fits.

    On a CPU the layers are copied into the order in which they are computed; tables of float32 stay in the file,
    and the page cache is not charged to anyone. On a card everything is copied to it.
    """
    item = 4 if sizes.is_static else _ITEM_BYTES.get(dtype, 4)  # a table keeps the type of its file
    tokenizer = _BYTES_OF_TOKENIZER * sizes.tokenizer_bytes
    if sizes.is_static and not on_card:
        host = _STATIC_PROCESS_BYTES + tokenizer + 4 * sizes.parameters + _STATIC_BATCH_BYTES
        return _with_margin(host, 4 * sizes.parameters)
    batch = _batch_bytes(sizes, max_batch_tokens, on_card=on_card)
    widened = 0 if sizes.is_wide else 4 * sizes.parameters  # for the comparison with float32, while it loads
    if on_card:
        # As if in use from the start; a table has none.
        graphs = 0 if sizes.is_static else GRAPH_TOKENS * sizes.hidden * _ITEM_BYTES["float16"]
        device = CONTEXT_BYTES + item * sizes.parameters + batch + graphs
        found = _with_margin(_CARD_PROCESS_BYTES + tokenizer, widened)
        return Footprint(
            host_bytes=found.host_bytes, loading_bytes=found.loading_bytes, device_bytes=int(device * _MARGIN)
        )
    own = _ARCHITECTURES.get(sizes.architecture, _Architecture())
    process = _PROCESS_BYTES + _KIND_BYTES.get(sizes.kind, 0)
    wide, narrow = own.wide * _MIB, own.narrow * _MIB + _NARROW_BYTES
    process += max(wide, narrow) if dtype == "auto" else wide if item == 4 else narrow
    if sizes.architecture not in _WORDPIECE:
        process += _OTHER_TOKENIZER_BYTES
    layers = sizes.parameters - sizes.tables
    tables = 0 if sizes.is_wide else 4 * sizes.tables
    copied = item * layers + tables
    # int8 is made from float32, all layers of which may be there at once.
    extra = max(widened, 4 * layers) // (1 if item == 1 else 4) + own.loading * _MIB
    return _with_margin(process + tokenizer + copied + batch, extra)


def batch_bytes(sizes: WeightSizes, max_batch_tokens: int) -> int:
    """What the largest batch takes on a CPU beside the model, which a worker gives back while it is idle."""
    return _STATIC_BATCH_BYTES if sizes.is_static else _batch_bytes(sizes, max_batch_tokens, on_card=False)


def _batch_bytes(sizes: WeightSizes, max_batch_tokens: int, *, on_card: bool) -> int:
    row = 4 * (2 * sizes.hidden + sizes.widest)
    if on_card:
        return 3 * row * max_batch_tokens
    return min(min(max_batch_tokens, CPU_BATCH_TOKENS) * row, CPU_TEMPORARY_BYTES)


def _with_margin(host: int, extra_while_loading: int) -> Footprint:
    host = int(host * _MARGIN)
    return Footprint(host_bytes=host, loading_bytes=host + extra_while_loading)
