"""Reads the weights of a model that is published only for ONNX, with the library's names, from torch's exported graph.

Initialisers have the names of the model's parameters, except the matrices of linear layers: these are transposed and
nameless, and the name of their MatMul is the layer's path. Quantised or optimised graphs lack both and are refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from teimgr.errors import ModelLoadFailed
from teimgr.models.source import stays_below

_FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # of TensorProto.DataType
_EXTERNAL = 1  # of TensorProto.DataLocation
_LINEAR = ("MatMul", "Gemm")
# Prefixes of operators that only a quantiser or an optimiser writes.
_REWRITTEN = (
    *("Quantize", "Dequantize", "MatMulInteger", "QLinear", "MatMulNBits", "Attention", "SkipLayerNormalization"),
    *("EmbedLayerNormalization", "FusedMatMul", "BiasGelu", "FastGelu", "QAttention", "SimplifiedLayerNormalization"),
    *("SkipSimplifiedLayerNormalization", "RotaryEmbedding", "MultiHeadAttention", "GroupQueryAttention"),
)
Field = tuple[int, Any]


@dataclass(slots=True)
class _Node:
    op: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    transposed: bool = False


def onnx_weights(file: Path) -> dict[str, Tensor]:
    """Return the weights in an exported graph by the names of the model's parameters.

    Raises:
        ModelLoadFailed: the file is not a standard export.
    """
    try:
        with file.open("rb") as opened:  # the map is freed with its last view
            return _weights(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)), file)
    except (ValueError, IndexError, UnicodeDecodeError, OverflowError, RuntimeError) as error:
        raise ModelLoadFailed(f"{file.name} cannot be read: {error}") from error


def _weights(content: memoryview, file: Path) -> dict[str, Tensor]:
    graph = next((value for number, value in _fields(content) if number == 7), None)
    if not isinstance(graph, memoryview):
        raise ModelLoadFailed(f"{file.name} has no graph")
    tensors: dict[str, Tensor] = {}
    nodes: list[_Node] = []
    for number, value in _fields(graph):
        if number == 5:
            name, tensor = _tensor(value, file.parent)
            if tensor is not None:
                tensors[name] = tensor
        elif number == 1:
            nodes.append(_node(value))
    rewritten = sorted({node.op for node in nodes if any(node.op.startswith(op) for op in _REWRITTEN)})
    if rewritten:
        raise ModelLoadFailed(
            f"{file.name} was quantised or optimised ({', '.join(rewritten)}), so its weights are not those of the "
            "model that it was exported from: use that one"
        )
    return _named(tensors, nodes, file)


def _named(tensors: dict[str, Tensor], nodes: list[_Node], file: Path) -> dict[str, Tensor]:
    """The tensors by the names of parameters."""
    found = {name: tensor for name, tensor in tensors.items() if _is_named(name)}
    left = {name for name, tensor in tensors.items() if not _is_named(name) and tensor.dim() > 1}
    for node in nodes:
        if node.op == "Identity" and node.inputs[0] in tensors and _is_named(node.outputs[0]):
            found[node.outputs[0]] = tensors[node.inputs[0]]  # the graph stores equal tensors once
        if node.op not in _LINEAR or len(node.inputs) < 2 or node.inputs[1] not in tensors or "/" not in node.name:
            continue
        matrix, path = tensors[node.inputs[1]], node.name.rpartition("/")[0].strip("/").replace("/", ".")
        left.discard(node.inputs[1])
        found.setdefault(f"{path}.weight", matrix if node.transposed else matrix.T.contiguous())
    if left:
        raise ModelLoadFailed(f"{file.name} has weights without a name that no layer is known for: {min(left)}")
    return found


def _is_named(name: str) -> bool:
    return "." in name and not name.startswith(("onnx::", "/", "_v_"))


def _node(message: memoryview) -> _Node:
    node = _Node()
    for number, value in _fields(message):
        if number == 1:
            node.inputs.append(_text(value))
        elif number == 2:
            node.outputs.append(_text(value))
        elif number == 3:
            node.name = _text(value)
        elif number == 4:
            node.op = _text(value)
        elif number == 5:
            attribute = dict(_fields(value))
            if _text(attribute.get(1, b"")) == "transB":
                node.transposed = bool(attribute.get(3))
    return node


def _tensor(message: memoryview, folder: Path) -> tuple[str, Tensor | None]:
    """Return the name of an initialiser and its values in float32; None for integers, such as shapes."""
    shape: list[int] = []
    kind, name, raw, floats, place = 0, "", memoryview(b""), memoryview(b""), {}
    is_external = False
    for number, value in _fields(message):
        if number == 1:
            shape += _packed(value) if isinstance(value, memoryview) else [value]
        elif number == 2:
            kind = value
        elif number == 4 and isinstance(value, memoryview):
            floats = value
        elif number == 8:
            name = _text(value)
        elif number == 9:
            raw = value
        elif number == 13:
            entry = dict(_fields(value))
            place[_text(entry.get(1, b""))] = _text(entry.get(2, b""))
        elif number == 14:
            is_external = value == _EXTERNAL
    if kind not in _FLOATS:
        return name, None
    if is_external:
        raw = _external(place, folder)
    data = bytearray(raw or floats)
    if not data:
        return name, torch.zeros(shape)
    dtype = _FLOATS[kind] if raw else torch.float32
    return name, torch.frombuffer(data, dtype=dtype).reshape(shape).float()


def _external(place: dict[str, str], folder: Path) -> memoryview:
    """Return the bytes of a tensor in a file next to the graph's."""
    location = place.get("location", "")
    if not stays_below(location):
        raise ModelLoadFailed(f"the graph's weights are in {location!r}, which is not a file of its folder")
    with (folder / location).open("rb") as opened:
        opened.seek(int(place.get("offset", "0")))
        return memoryview(opened.read(int(place["length"]) if "length" in place else -1))


def _fields(message: memoryview) -> Iterator[Field]:
    """Yield the fields of a protobuf message: numbers of varints, and views of values with a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError("the file ends too soon")
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"it is not a protobuf message (wire type {kind})")
        yield key >> 3, value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has too many bytes")


def _packed(value: memoryview) -> list[int]:
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(number)
    return numbers


def _text(value: Any) -> str:
    return bytes(value).decode()
