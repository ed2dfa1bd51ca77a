"""What is sent: messages of any type, Arrow tables of any type, and both with their bytes broken."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tests.fuzz.target import FLEET

LIMITS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
TROUBLE = (
    "",
    " ",
    "\0",
    "rain " * 40,
    "rain " * 3000,
    "[MASK] [SEP] [PAD]",
    "🙂" * 50,
    "\u202e\ufeff",
    "e" + "\u0301" * 200,
)
DEPTH = 4


def names() -> st.SearchStrategy[str]:
    """Mostly instances that there are."""
    return st.sampled_from([*FLEET, *FLEET, "nobody", "a" * 300])


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(TROUBLE) | st.text(max_size=60)


def messages(kind: Descriptor, depth: int = DEPTH) -> st.SearchStrategy[Message]:
    """Messages of `kind`: any of the fields, with values of their types."""
    fields = {field.name: _values(field, depth) for field in kind.fields if depth or field.message_type is None}
    build = GetMessageClass(kind)
    if kind.name == "Target":
        return names().map(lambda name: build(instance_name=name)) | _some(fields).map(lambda given: build(**given))
    # The target and the inner request are mostly there: without them nothing is reached.
    wanted = {name: fields.pop(name) for name in ("target", "request", "inputs") if name in fields}
    few = st.fixed_dictionaries(wanted, optional=fields) | _some(wanted | fields)
    return few.map(lambda given: build(**given))


def _some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.message_type is not None:
        one = messages(field.message_type, depth - 1)
    elif field.type in LIMITS:
        one = st.sampled_from((0, 1, 7)) | st.integers(*LIMITS[field.type])
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = st.booleans()
    elif field.type == FieldDescriptor.TYPE_FLOAT:
        one = st.floats(width=32)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = arrow_bodies()
    else:
        one = texts()
    return st.lists(one, max_size=5) if field.is_repeated else one


# Arrow.

TYPES: tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...] = (
    (pa.string(), texts()),
    (pa.large_string(), texts()),
    (pa.string_view(), texts()),
    (pa.dictionary(pa.int8(), pa.string()), texts()),
    (pa.dictionary(pa.int32(), pa.large_string()), texts()),
    (pa.binary(), st.binary(max_size=20)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float16(), st.floats(width=16)),
    (pa.null(), st.none()),
    (pa.list_(pa.string()), st.lists(texts(), max_size=2)),
    (pa.struct([("text", pa.string())]), st.fixed_dictionaries({"text": texts()})),
)


@st.composite
def arrow_bodies(draw: st.DrawFn) -> bytes:
    """An IPC stream of a table of any types, batches and compression, whole or broken; or no Arrow at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    columns = draw(st.lists(st.sampled_from(TYPES[:5]) | st.sampled_from(TYPES), max_size=3))
    labels = draw(st.lists(st.sampled_from(("text", "id", "")), min_size=len(columns), max_size=len(columns)))
    schema = pa.schema([pa.field(label, kind) for label, (kind, _) in zip(labels, columns, strict=True)])
    compression = draw(st.sampled_from((None, "lz4", "zstd")))
    sink = BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for _ in range(draw(st.integers(0, 3))):
            rows = draw(st.integers(0, 4))
            arrays = [
                pa.array(draw(st.lists(values | st.none(), min_size=rows, max_size=rows)), kind)
                for kind, values in columns
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return draw(broken(sink.getvalue()))


# Breaking bytes.


@st.composite
def broken(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` as it is, in half of the cases; else cut, with bits flipped, parts repeated, left out or put in."""
    if draw(st.booleans()):
        return whole
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        until = min(len(raw), at + draw(st.integers(0, 16)))
        match draw(st.sampled_from(("flip", "set", "cut", "drop", "repeat", "insert", "length"))):
            case "flip" if at < len(raw):
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if at < len(raw):
                raw[at] = draw(st.sampled_from((0x00, 0x7F, 0x80, 0xFF)))
            case "cut":
                del raw[at:]
            case "drop":
                del raw[at:until]
            case "repeat":
                raw[at:at] = raw[at:until] * draw(st.integers(1, 8))
            case "insert":
                raw[at:at] = draw(st.binary(max_size=8))
            case "length":  # a field that says it is longer than all there is
                raw[at:at] = b"\x0a" + draw(st.sampled_from((b"\x7f", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01")))
    return bytes(raw)
