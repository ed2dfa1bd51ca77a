"""Weights in other forms: LoRA adapters, ONNX graphs, GGUF."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tests.support.models.files import read, write
from torch import Tensor

RANK = 4
LORA = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": RANK,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["query", "value"],
    "task_type": "FEATURE_EXTRACTION",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
ADAPTED = ("attention.self.query", "attention.self.value", "q_proj", "v_proj")
Variant = Literal["plain", "rslora", "dora", "patterns", "table", "saved-whole", "lora-bias"]


def build_adapter(
    base: Path, folder: Path, merged: Path, *, variant: Variant = "plain", named: str | None = None, **changes: Any
) -> None:
    """Write an adapter of the model at `base` to `folder`, and the model with it merged to `merged`.

    The modules behind the transformer and the tokenizer are in `folder`, as sentence-transformers saves them; `named`
    is how the adapter names its base, its directory if None.
    """
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    config = LORA | {"base_model_name_or_path": str(base) if named is None else named}
    config |= {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}.get(variant, {})
    config |= {"patterns": {"alpha_pattern": {"layer.1.attention.self.value": 20}, "rank_pattern": {"value": 2}}}.get(
        variant, {}
    )
    saved: dict[str, torch.Tensor] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    for name in sorted(weights):
        layer = name.removesuffix(".weight")
        if not layer.endswith(ADAPTED) or layer == name:
            continue
        own, out, into = f"base_model.model.{layer}", *weights[name].shape
        rank = 2 if variant == "patterns" and layer.endswith("value") else RANK
        alpha = 20 if variant == "patterns" and layer.endswith("layer.1.attention.self.value") else 8
        a, b = drawn(rank, into), drawn(out, rank)
        saved |= {f"{own}.lora_A.weight": a, f"{own}.lora_B.weight": b}
        scale = alpha / (rank**0.5 if variant == "rslora" else rank)
        changed = weights[name] + scale * b @ a
        if variant == "dora":
            length = saved[f"{own}.lora_magnitude_vector"] = 1 + drawn(out).abs()
            changed = length[:, None] * changed / changed.norm(dim=1, keepdim=True)
        if variant == "lora-bias":
            bias = saved[f"{own}.lora_B.bias"] = drawn(out)
            weights[f"{layer}.bias"] = weights[f"{layer}.bias"] + scale * bias
        weights[name] = changed
    if variant == "table":
        table = "embeddings.word_embeddings"
        rows, width = weights[f"{table}.weight"].shape
        a, b = drawn(RANK, rows), drawn(width, RANK)
        saved |= {f"base_model.model.{table}.lora_embedding_A": a, f"base_model.model.{table}.lora_embedding_B": b}
        weights[f"{table}.weight"] = weights[f"{table}.weight"] + 2 * (b @ a).T
    if variant == "saved-whole":
        for name in ("encoder.layer.1.output.dense.weight", "encoder.layer.0.attention.self.query.bias"):
            called = name.replace("query.bias", "query.base_layer.bias")  # as PEFT has it with `bias` = "lora_only"
            saved[f"base_model.model.{called}"] = weights[name] = drawn(*weights[name].shape)
    for place in (folder, merged):
        shutil.copytree(base, place, dirs_exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    write(folder / "adapter_config.json", config | changes)
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


def number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def part(tag: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return _varint(tag << 3 | 2) + _varint(len(data)) + data


def node(op: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> bytes:
    fields = [part(1, one) for one in inputs] + [part(2, one) for one in outputs]
    return part(1, b"".join([*fields, part(3, name), part(4, op)]))


def tensor(name: str, values: Tensor, external: tuple[str, int] | None = None) -> bytes:
    """An initialiser of a graph, its bytes in it or at a place of another file."""
    kind = {torch.float32: 1, torch.int64: 7, torch.float16: 10}[values.dtype]
    raw = values.contiguous().numpy().tobytes()
    fields = [number(1, size) for size in values.shape] + [number(2, kind), part(8, name)]
    if external is None:
        return part(5, b"".join([*fields, part(9, raw)]))
    place = {"location": external[0], "offset": str(external[1]), "length": str(len(raw))}
    entries = [part(13, part(1, key) + part(2, value)) for key, value in place.items()]
    return part(5, b"".join([*fields, *entries, number(14, 1)]))


def move_to_onnx(
    folder: Path, *, name: str = "onnx/model.onnx", external: bool = False, half: bool = False, extra: bytes = b""
) -> Path:
    """Put the weights of the model in `folder` into a graph in place of model.safetensors: matrices of linear layers
    transposed and nameless, equal tensors once. `external`: in a file beside it, `half`: in float16.
    """
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    parts, beside, seen = [tensor("onnx::Shape_7", torch.ones(2, dtype=torch.int64))], b"", dict[bytes, str]()
    for index, (key, given) in enumerate(sorted(weights.items())):
        values = given.half() if half else given
        layer = key.removesuffix(".weight")
        is_linear = values.dim() == 2 and "embed" not in key
        called = f"onnx::MatMul_{index}" if is_linear else key
        if is_linear:
            values = values.T
            path = "/" + layer.replace(".", "/").replace("layer/", "layer.").replace("layers/", "layers.")
            parts.append(node("MatMul", f"{path}/MatMul", ("x", called), ("y",)))
        raw = values.contiguous().numpy().tobytes()
        if not is_linear and raw in seen:
            parts.append(node("Identity", f"Identity_{index}", (seen[raw],), (called,)))
            continue
        seen[raw] = called
        parts.append(tensor(called, values, (f"{file.name}_data", len(beside)) if external else None))
        beside += raw if external else b""
    if external:
        (file.parent / f"{file.name}_data").write_bytes(beside)
    file.write_bytes(number(1, 8) + part(2, "pytorch") + part(7, b"".join([*parts, extra])))
    return folder


_GGML = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16), "Q8_0": (8, torch.int8)}
_GGML |= {"Q4_0": (2, torch.uint8), "MXFP4": (39, torch.uint8)}
_LLAMA_NAMES = {"layers.": "blk.", "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_"}
_LLAMA_NAMES |= {"_proj": "", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_LLAMA_NAMES |= {"embed_tokens": "token_embd"}


def move_to_gguf(folder: Path, form: str = "F16", changes: Mapping[str, Any] | None = None) -> Path:
    """Put the Qwen3 model in `folder` into model.gguf alone, as llama.cpp's converter does, its matrices in `form`;
    `changes` are those of the metadata by key, None for a key that is left out.
    """
    config, tokens = read(folder / "config.json"), read(folder / "tokenizer.json")
    words = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].__getitem__)
    whole = {token["content"] for token in tokens["added_tokens"]}
    model = {
        **{"context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"]},
        **{"block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"]},
        **{"attention.head_count": config["num_attention_heads"], "attention.key_length": config["head_dim"]},
        **{"attention.head_count_kv": config["num_key_value_heads"], "attention.value_length": config["head_dim"]},
        **{"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "pooling_type": 3},
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    tokenizer = {
        **{"model": "gpt2", "pre": "qwen2", "tokens": words, "eos_token_id": words.index("</s>")},
        **{"add_eos_token": True, "add_bos_token": False, "token_type": [3 if one in whole else 1 for one in words]},
        "merges": [" ".join(pair) for pair in tokens["model"]["merges"]],
    }
    values = {"general.architecture": "qwen3", "general.name": "tiny", "general.file_type": 1}
    values |= {f"qwen3.{key}": value for key, value in model.items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()} | dict(changes or {})
    given = {key: value for key, value in values.items() if value is not None}
    weights = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    folder.mkdir()
    rows, data = b"", bytearray()
    for name, weight in weights.items():
        own = "output_norm.weight" if name == "norm.weight" else name
        for theirs, llamas in _LLAMA_NAMES.items():
            own = own.replace(theirs, llamas)
        kind = form if weight.dim() > 1 else "F32"
        rows += _text(own) + struct.pack(f"<I{weight.dim()}Q", weight.dim(), *reversed(weight.shape))
        rows += struct.pack("<IQ", _GGML[kind][0], len(data))
        data += _blocks(weight, kind)
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(given))
    head += b"".join(_text(key) + _metadata(value) for key, value in given.items()) + rows
    (folder / "model.gguf").write_bytes(head + bytes(-len(head) % 32) + data)
    return folder


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _metadata(value: Any) -> bytes:
    """The type and the bytes of a value."""
    if isinstance(value, list):
        rows = [_metadata(one) for one in value]
        return struct.pack("<I", 9) + rows[0][:4] + struct.pack("<Q", len(rows)) + b"".join(row[4:] for row in rows)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind, form = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack(f"<I{form}", kind, value)


def _blocks(weight: Tensor, form: str) -> bytes:
    dtype = _GGML[form][1]
    if dtype is torch.uint8:  # of any numbers, with small scales
        return torch.randint(0, 60, (weight.numel() // 32 * 18,), dtype=dtype).numpy().tobytes()
    if dtype is torch.int8:
        rows = weight.reshape(-1, 32)
        scales = (rows.abs().amax(1, keepdim=True) / 127).half()
        numbers = (rows / scales.float()).round().clamp(-127, 127).to(dtype)
        return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], 1).numpy().tobytes()
    return weight.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
