"""Weights that have other names in a model's files than in the library, as the library is to be given them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from teimgr.engine.heads.projections import read_weights
from teimgr.engine.weights.gguf import gguf_weights
from teimgr.engine.weights.onnx import onnx_weights
from teimgr.models.directory import onnx_file, weight_files
from teimgr.models.gguf_head import GGUF
from teimgr.models.jina_code import JINA_XLM_ROBERTA
from teimgr.models.layout import Layout
from teimgr.models.own_code import DPR, ONNX

Weights = dict[str, Tensor]


def own_weights(layout: Layout) -> tuple[Weights | None, Weights]:
    """Return all weights of the transformer by the library's names, None if the library reads the files itself; and the
    weights by task, by their names in the files.

    Raises:
        ModelLoadFailed: a file cannot be read.
    """
    if layout.weight_names is None:
        return None, {}
    if layout.weight_names == GGUF:
        return gguf_weights(*weight_files(layout.weights_dir)), {}
    if layout.weight_names == ONNX:
        graph = onnx_file(layout.weights_dir)
        assert graph is not None
        return onnx_weights(graph), {}
    given = read_weights(layout.weights_dir)
    by_task = {name: given.pop(name) for name in list(given) if _BY_TASK in name}
    return _CONVERSIONS[layout.weight_names](given, layout), by_task


def unwrapped(weights: Weights, missing: Sequence[str]) -> Weights | None:
    """Return the weights without a prefix that their names have in the files, such as `auto_model.` if the state of
    sentence-transformers' module was saved by hand; None if no prefix fits all `missing` names."""
    first = min(missing)
    for prefix in sorted(name.removesuffix(first) for name in weights if name.endswith(f".{first}")):
        if all(f"{prefix}{name}" in weights for name in missing):
            return {name.removeprefix(prefix): weight for name, weight in weights.items()}
    return None


# Names in Jina's flash implementation, and in the library's XLM-RoBERTa and JinaEmbeddingsV3.
_XLM_ROBERTA = {
    "emb_ln": "embeddings.LayerNorm",
    "encoder.layers": "encoder.layer",
    "mixer.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "output.LayerNorm",
}
_JINA_V3 = {
    "emb_ln": "embeddings.LayerNorm",
    "encoder.layers": "layers",
    "mixer.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
_QKV = re.compile(r"(.*)\bmixer\.Wqkv\.(weight|bias)$")


_ORIGINAL, _BY_TASK = ".parametrizations.weight.original", ".parametrizations.weight.0."


def own_names(layout: Layout, name: str) -> list[str]:
    """Return the library's names of the parts of a weight of Jina's XLM-RoBERTa, in the weight's order."""
    return list(_jina_xlm_roberta({name: torch.empty(3, 1)}, layout))


def _jina_xlm_roberta(weights: Weights, layout: Layout) -> Weights:
    weights = {name.replace(_ORIGINAL, ".weight"): weight for name, weight in weights.items()}
    is_rotary = layout.config["model_type"] == "jina_embeddings_v3"
    names = _JINA_V3 if is_rotary else _XLM_ROBERTA
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if not is_rotary:
        parts = ("attention.self.query", "attention.self.key", "attention.self.value")
    given = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    found: Weights = {}
    for name, weight in weights.items():
        packed = _QKV.match(name)
        named = given.sub(lambda match: names[match[0]], packed[1] if packed else name)
        if packed is None:
            found[named] = weight
            continue
        for part, own in zip(parts, weight.chunk(3), strict=True):
            found[f"{named}{part}.{packed[2]}"] = own
    return found


_DPR_PREFIX = re.compile(r"(?:question_encoder|ctx_encoder)\.bert_model\.")


def _dpr(weights: Weights, _layout: Layout) -> Weights:
    return {_DPR_PREFIX.sub("", name): weight for name, weight in weights.items()}


_CONVERSIONS: dict[str, Callable[[Weights, Layout], Weights]] = {JINA_XLM_ROBERTA: _jina_xlm_roberta, DPR: _dpr}
