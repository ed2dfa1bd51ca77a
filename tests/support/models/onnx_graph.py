"""A model's weights as torch's export has them in a graph for ONNX, written without ONNX's package."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


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
