"""PEFT adapters, merged at load: against sentence-transformers on the model with the adapter merged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import Served
from tests.support.hub_server import files_of, lay_out
from tests.support.models import TEXTS, build, write
from tests.support.models.other_forms import LORA, RANK, Variant, build_adapter

from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout

VARIANTS: list[Variant] = ["plain", "rslora", "dora", "patterns", "table", "saved-whole", "lora-bias"]


def truth_of(merged: Path) -> np.ndarray[Any, Any]:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(merged), device="cpu").encode(list(TEXTS), show_progress_bar=False)


def assert_same(served: Served, merged: Path) -> None:
    truth = truth_of(merged)
    together = served.embed(TEXTS)
    alone = np.concatenate([served.embed([text]).vectors for text in TEXTS])

    assert together.errors == {}
    assert (together.vectors * truth).sum(axis=1).min() >= 0.99999
    np.testing.assert_allclose(together.vectors, truth, atol=3e-5)
    np.testing.assert_allclose(alone, truth, atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_saved_by_sentence_transformers_is_merged(
    variant: Variant, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", variant=variant)
    served = serve(tmp_path / "adapter")

    assert served.engine.info.forward == "native"
    assert served.engine.info.warnings == ()
    assert_same(served, tmp_path / "merged")


def test_the_layer_says_how_its_weights_lie_whatever_the_adapter_says(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """PEFT sets `fan_in_fan_out` right for each layer; a square matrix would take the change either way."""
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", fan_in_fan_out=True)
    assert_same(serve(tmp_path / "adapter"), tmp_path / "merged")

    gpt2, adapter, merged = build("gpt2", tmp_path / "gpt2"), tmp_path / "conv", tmp_path / "conv-merged"
    shutil.copytree(gpt2, adapter)
    shutil.copytree(gpt2, merged)
    weights, layer = load_file(gpt2 / "model.safetensors"), "h.0.attn.c_proj"
    a, b = 0.3 * torch.randn(RANK, 32), torch.randn(32, RANK)
    weights[f"{layer}.weight"] += 2 * (b @ a).T  # [in, out]
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    own = f"base_model.model.{layer}.lora"
    save_file({f"{own}_A.weight": a, f"{own}_B.weight": b}, adapter / "adapter_model.safetensors")
    write(adapter / "adapter_config.json", LORA | {"base_model_name_or_path": str(gpt2)})
    assert_same(serve(adapter), merged)


def test_a_bare_adapter_of_a_model_in_the_cache_has_its_tokenizer(
    tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LLM2Vec-*-supervised: two files, and the weights' names are those of the model without its head."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    base = build("qwen2", tmp_path / "base", max_length=96)
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", named="acme/base", revision="main")
    snapshot = lay_out(tmp_path / "cache", "acme/base", files_of(base))
    for path in list((tmp_path / "adapter").iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("adapter_"):
            path.unlink()
    served = serve(tmp_path / "adapter", pooling="last-token")
    layout = read_layout(tmp_path / "adapter", "last-token")

    assert (layout.weights_dir, layout.transformer_dir) == (snapshot, snapshot)
    truth = truth_of(tmp_path / "merged")
    short = [index for index, text in enumerate(TEXTS) if len(text) < 60]  # the length is config.json's here
    np.testing.assert_allclose(served.embed([TEXTS[i] for i in short]).vectors, truth[short], atol=3e-5)


def test_an_adapter_beside_weights_is_merged_into_the_model_that_it_names(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base / name, tmp_path / "adapter")

    assert_same(serve(tmp_path / "adapter"), tmp_path / "merged")


def test_the_pooler_that_all_linear_layers_have_beside_is_left_out(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    file, layer = tmp_path / "adapter" / "adapter_model.safetensors", "base_model.model.pooler.dense"
    unused = {f"{layer}.lora_A.weight": torch.ones(4, 32), f"{layer}.lora_B.weight": torch.ones(32, 4)}
    save_file(load_file(file) | unused | {f"{layer}.base_layer.bias": torch.ones(32)}, file)

    assert_same(serve(tmp_path / "adapter"), tmp_path / "merged")


def test_an_adapter_of_dora_without_its_magnitudes_is_refused(tmp_path: Path, serve: Callable[..., Served]) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", use_dora=True)

    with pytest.raises(ModelLoadFailed, match="has no magnitude, and use_dora is set"):
        serve(tmp_path / "adapter")


def test_an_adapter_of_an_adapter_is_merged_behind_it(tmp_path: Path, serve: Callable[..., Served]) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "first", tmp_path / "merged-first")
    build_adapter(
        tmp_path / "merged-first",
        tmp_path / "second",
        tmp_path / "merged",
        variant="rslora",
        named=str(tmp_path / "first"),
    )

    assert_same(serve(tmp_path / "second"), tmp_path / "merged")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "IA3; only LORA"),
        ({"init_lora_weights": "pissa"}, "'pissa', by which the weights of the base model were changed too"),
        ({"base_model_name_or_path": "acme/absent"}, "an adapter of acme/absent, which is not on this machine"),
        ({"base_model_name_or_path": "/absent/model"}, "an adapter of /absent/model, a directory that is not"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"alpha_pattern": {"(": 8}}, r"alpha_pattern '\(', which is not a pattern"),
        ({"rank_pattern": {"(?i)" + "[!-\uffff]" * 500: 8}}, r"rank_pattern '\(\?i\)\[!"),
        ({"rank_pattern": {"(q+)+": 8}}, r"rank_pattern '\(q\+\)\+'; served are layers' names"),
        ({"alpha_pattern": {".*.*.*.*q": 8}}, r"up to 3 of `\*`"),
        ({"alpha_pattern": {f"layer.{n}": 8 for n in range(257)}}, "an object with at most 256 patterns"),
        ({"lora_alpha": "8"}, "lora_alpha = '8', which should be a number"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", **changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(tmp_path / "adapter")


@pytest.mark.parametrize("changes", [{"r": 16}, {"rank_pattern": {"query": 16}}])
def test_an_adapter_of_another_rank_than_its_configuration_says_is_refused_naming_both(
    changes: dict[str, Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged", **changes)

    named = (
        r"r = 16 for encoder.layer.0.*query, and its matrices in adapter_model.safetensors have the rank 4, A \(4, 32"
    )
    with pytest.raises(ModelLoadFailed, match=named):
        serve(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"lora_A.weight": "lora_E.weight"}, "lora_E.weight, which"),
        (
            {"attention.self.query": "attention.self.absent"},
            "attention.self.absent.weight, which the model does not have",
        ),
        ({"attention.self.query": "intermediate.dense"}, r"changes encoder.layer.0.intermediate.dense by \(32, 32\)"),
        ({"lora_B.weight": "lora_B.default.weight"}, None),  # as PEFT has it in memory
    ],
)
def test_an_adapter_of_another_model_is_refused_by_name(
    names: dict[str, str], reason: str | None, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    base = build("bert", tmp_path / "base")
    build_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, file)

    if reason is None:
        assert_same(serve(tmp_path / "adapter"), tmp_path / "merged")
        return
    with pytest.raises(ModelLoadFailed, match=reason):
        serve(tmp_path / "adapter")
