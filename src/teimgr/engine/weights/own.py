"""Weights with other names or types in a model's files than in the library, and weights on the host.

Weights of a GGUF file (llama.cpp) of a Qwen3 model, whose head `models/gguf_head.py` reads, are converted to float32
with the same values as by transformers' reader; the package gguf reads blocks of types other than Q8_0. `HostWeights`
keeps the loaded weights on the host, and copies them to a device in one dtype after another.
"""

from __future__ import annotations

import importlib
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor, nn

from teimgr.engine.heads.projections import read_weights
from teimgr.engine.weights.onnx import onnx_weights
from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import HeadTensor
from teimgr.models.directory import onnx_file, weight_files
from teimgr.models.gguf_head import GGUF, read_gguf
from teimgr.models.jina_code import JINA_XLM_ROBERTA
from teimgr.models.layout import Layout
from teimgr.models.own_code import DPR, ONNX

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 34  # of Q8_0: a float16 scale and 32 bytes
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split


def gguf_weights(file: Path) -> dict[str, Tensor]:
    """Return the weights of a GGUF file by the library's names; raises like `read_gguf`."""
    found = {}
    with file.open("rb") as opened:
        for tensor in read_gguf(file).tensors:
            opened.seek(tensor.begin)
            data = bytearray(tensor.end - tensor.begin)
            if opened.readinto(data) < len(data):
                raise ModelLoadFailed(f"{file.name} ends too soon")
            found[tensor.name] = _float32(data, tensor).reshape(tensor.shape)
    return found


def _float32(data: bytearray, tensor: HeadTensor) -> Tensor:
    if tensor.dtype in _FLOATS:
        return torch.frombuffer(data, dtype=_FLOATS[tensor.dtype]).float()
    if tensor.dtype == "Q8_0":
        blocks = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, _BLOCK_BYTES)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return blocks[:, 2:].view(torch.int8).float().mul_(scales)
    gguf: Any = importlib.import_module("gguf")
    rows = np.frombuffer(data, np.uint8).reshape(tensor.elements // tensor.shape[-1], -1)
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype]))


def gguf_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file, with the steps of Qwen's own, but without the token after every text.

    Raises like `read_gguf`, also if tokens, their types and merges do not fit together.
    """
    from transformers import Qwen2Tokenizer

    values = read_gguf(file).values
    tokens, kinds, merges = (values.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(kinds, tuple | array):
        raise ModelLoadFailed(f"{file.name} has no tokens, token_type or merges (tokenizer.ggml)")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(kinds):
        raise ModelLoadFailed(f"{file.name} has a token twice, or {len(kinds):,} types of {len(tokens):,} tokens")
    pairs = [tuple(merge.split(" ")) for merge in merges]  # the library refuses anything but pairs
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    qwens: Any = Qwen2Tokenizer
    steps = qwens().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = steps.normalizer, steps.pre_tokenizer
    tokenizer.decoder = steps.decoder
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token, own in zip(tokens, kinds, strict=True) if own == kind])
    return tokenizer


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


# Names in Jina's flash implementation to those in the library's XLM-RoBERTa and JinaEmbeddingsV3.
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


class HostWeights:
    """The float32 parameters of a module on the host, memory-mapped or widened from 16 bits.

    They are kept until a dtype is chosen, so that another one needs neither the files again nor float32 copies on the
    device. Each parameter is converted here and then copied, which halves the bytes over the bus.
    """

    def __init__(self, module: nn.Module, heads: Sequence[nn.Module] = (), apart: nn.Module | None = None) -> None:
        """`heads` are modules of our own behind `module`, which compute in float32; `apart` is placed for itself."""
        self.module = module
        self.apart = None if apart is None else HostWeights(apart)
        self._heads = heads
        self._parameters = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the module on `device`, parameters in `dtype`; buffers (rotary frequencies) keep their precision.

        Raises:
            RuntimeError: torch's own, if one cannot be allocated.
        """
        placed: dict[int, nn.Parameter] = {}  # by source: a parameter may have two owners
        for owner, name, source in self._parameters:
            owner._parameters[name] = None  # frees the copy of an earlier call first
            if id(source) not in placed:
                copy = source.detach().to(dtype).to(device)
                placed[id(source)] = nn.Parameter(copy, requires_grad=False)
            owner._parameters[name] = placed[id(source)]
        for owner in self.module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device)
        for head in self._heads:
            head.to(device)
