"""NomicBERT with experts, biases and plain layers as the hub has it, without trust: exact at every length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import Served
from tests.engine.exact_models import assert_close, assert_exact
from tests.support import plain_forwards
from tests.support.models import edit
from tests.support.models.own_code import NOMIC_MOE, build_nomic

from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout

PLAIN = {"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "by-run"])
@pytest.mark.parametrize(
    ("changes", "forward"),
    [
        (NOMIC_MOE, "library"),
        ({**NOMIC_MOE, "moe_top_k": 1, "type_vocab_size": 0, "rotary_scaling_factor": 2}, "library"),
        ({**NOMIC_MOE, "activation_function": "swiglu", "moe_every_n_layers": 3}, "library"),
        (PLAIN, "native"),
        ({"qkv_proj_bias": True, "rotary_scaling_factor": 4}, "native"),
    ],
    ids=["v2-moe", "one-expert", "gated", "plain", "biases"],
)
def test_embeddings_are_exact(
    changes: dict[str, Any],
    forward: str,
    native: bool,
    tmp_path: Path,
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setenv("TEIMGR_NATIVE", "0")
    weights, config = build_nomic(tmp_path, **changes)
    served = serve(tmp_path)

    assert served.engine.info.warnings == ()
    assert served.engine.info.max_input_length == 192
    assert served.engine.info.forward == (forward if native else "library")
    assert_exact(served, lambda ids: plain_forwards.nomic(weights, config, ids), "mean")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": "8"}, "num_experts = '8'"),
        ({"moe_top_k": 9}, "moe_top_k = 9 of num_experts = 8"),
        ({"moe_top_k": 0}, "moe_top_k = 0"),
        ({"expert_choice_router": True}, "expert_choice_router"),
        ({"ffn_div": 2}, "ffn_div"),
        ({"n_head": 3}, "a width of 32, which its 3 heads"),
    ],
)
def test_another_setting_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    build_nomic(tmp_path, **NOMIC_MOE)
    edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


def test_bfloat16_on_request_is_close(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """A token whose experts are equally likely may take another one."""
    weights, config = build_nomic(tmp_path, **NOMIC_MOE)
    served = serve(tmp_path, dtype="bfloat16")

    assert served.engine.info.dtype == "bfloat16"
    assert_close(served, lambda ids: plain_forwards.nomic(weights, config, ids), "mean", least=0.99)
