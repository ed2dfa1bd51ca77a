"""How many tokens a batch may have, where the user leaves that to us (`max_batch_tokens` 0, "auto" over REST). Pure."""

from __future__ import annotations

from dataclasses import replace

from teimgr.control.gpus import Gpu, Inventory
from teimgr.control.placement import place
from teimgr.spec import InstanceSpec

CPU_TOKENS = 16384
"""On the CPU, and on a card that does not say what is free. There, larger batches gain nothing."""
_GIB = 2**30


def with_batch_tokens(spec: InstanceSpec, inventory: Inventory, per_gib: int) -> InstanceSpec:
    """`spec` with a number of its own: `per_gib` tokens for each GiB that is free now where it would be placed.

    With several replicas the fullest of the cards decides, and one GiB's worth is the least.

    Raises:
        InvalidGpuId: `gpu_id` is none of the cards.
    """
    if spec.max_batch_tokens:
        return spec
    free_bytes = min((card.memory_free_bytes for card in _cards(spec, inventory)), default=0)
    tokens = max(per_gib, free_bytes * per_gib // _GIB) if free_bytes else CPU_TOKENS
    return replace(spec, max_batch_tokens=tokens)


def _cards(spec: InstanceSpec, inventory: Inventory) -> list[Gpu]:
    if spec.gpu_id is None and spec.replicas != 1:
        return list(inventory.gpus)
    card = place(spec, inventory)
    return [card] if card else []
