"""Weights and tokenizer of a GGUF file (llama.cpp) of a Qwen3 model, whose head `models/gguf_head.py` reads.

Each weight becomes the float32 value that its type in the file stands for, as transformers' reader computes it; the
package gguf reads blocks of types other than Q8_0.
"""

from __future__ import annotations

import importlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import HeadTensor
from teimgr.models.gguf_head import read_gguf

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_BYTES = 34  # of Q8_0: a scale in float16, and 32 bytes
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are whole wherever they stand in a text


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
    pairs = [tuple(merge.split(" ")) for merge in merges]  # the library refuses others than pairs
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    qwens: Any = Qwen2Tokenizer
    steps = qwens().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = steps.normalizer, steps.pre_tokenizer
    tokenizer.decoder = steps.decoder
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(token, normalized=False) for token, own in zip(tokens, kinds, strict=True) if own == kind])
    return tokenizer
