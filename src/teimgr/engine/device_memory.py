"""How much memory a model's tensors take, and the device's allocator holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from itertools import chain

import torch
from torch import Tensor, nn

_OURS = "teimgr.engine"


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that `root` holds, in our own objects, modules and containers; shared ones count once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            waiting.extend(_held(item))
    return sum(storages.values())


def device_bytes(device: torch.device) -> tuple[int, int | None]:
    """What the device's allocator holds for this process now, and the most it ever gave out; 0 and None on the CPU."""
    if device.type != "cuda":
        return 0, None
    return torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)


def _held(item: object) -> Iterable[object]:
    if isinstance(item, nn.Module):
        # A head of ours that is a module may hold tensors that it did not register.
        return chain(item.parameters(), item.buffers(), _attributes(item))
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    return _attributes(item)


def _attributes(item: object) -> Iterable[object]:
    if not type(item).__module__.startswith(_OURS):
        return ()
    if is_dataclass(item):
        return [getattr(item, field.name) for field in fields(item)]
    return vars(item).values() if hasattr(item, "__dict__") else ()
