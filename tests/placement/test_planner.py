"""How many tokens a batch gets where nobody says."""

from __future__ import annotations

import pytest

from teimgr.errors import InvalidGpuId
from teimgr.placement.gpus import Gpu, Inventory
from teimgr.placement.planner import CPU_TOKENS, with_batch_tokens
from teimgr.spec import InstanceSpec

GIB = 2**30
TWO = Inventory((Gpu(0, "GPU-0", 20 * GIB), Gpu(1, "GPU-1", 10 * GIB + GIB // 2)))
AUTO = {"name": "a", "model_id": "m", "max_batch_tokens": 0}


@pytest.mark.clause("N-auto-tokens")
@pytest.mark.parametrize(
    ("keys", "inventory", "tokens"),
    [
        ({"max_batch_tokens": 7}, TWO, 7),
        ({}, TWO, 40960),
        ({"gpu_id": 1}, TWO, 21504),
        ({"replicas": "per-gpu"}, TWO, 21504),
        ({"replicas": 2}, TWO, 21504),
        ({}, Inventory((Gpu(0, "GPU-0", GIB // 2),)), 2048),
        ({}, Inventory((Gpu(0, "GPU-0", 0),)), CPU_TOKENS),
        ({}, Inventory(), CPU_TOKENS),
    ],
)
def test_tokens_go_by_what_is_free(keys: dict[str, object], inventory: Inventory, tokens: int) -> None:
    spec = InstanceSpec(**{**AUTO, **keys})  # type: ignore[arg-type]
    assert with_batch_tokens(spec, inventory, 2048).max_batch_tokens == tokens


def test_a_card_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidGpuId):
        with_batch_tokens(InstanceSpec(**AUTO, gpu_id=5), TWO, 2048)  # type: ignore[arg-type]
