"""Weights in other forms: LoRA adapters, ONNX graphs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tests.support.models.files import write
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


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
