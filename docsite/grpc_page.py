"""The reference of gRPC: services, messages and enums with their comments, from the files in `proto/`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from docsite.markdown import MADE_BY, code, document, table

_PROTO = Path(__file__).resolve().parents[1] / "proto"
_FILES = ("tei_multiplexer/v1/multiplexer.proto", "tei/v1/tei.proto", "teimgr/v1/arrow.proto")
# Numbers of fields in FileDescriptorProto, DescriptorProto, EnumDescriptorProto and ServiceDescriptorProto.
_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _VALUES, _METHODS, _NESTED = 4, 5, 6, 2, 2, 2, 3
_HEAD = f"""# gRPC

{MADE_BY}

Port 9001 serves all of this; an instance's own port serves `tei.v1`. Both have reflection (v1 and v1alpha) and
`grpc.health.v1`, with an entry per instance. [proto/README.md](../../proto/README.md) has examples with stubs and the
element types of vectors; [Errors](errors.md) the statuses.

| metadata | direction | meaning |
|---|---|---|
| `x-teimgr-instance` | request | the instance of a `tei.v1` call on port 9001; needed where several run |
| `authorization`, `x-api-key` | request | the API key |
| `x-teimgr-lane` | request | `interactive` or `bulk`: the lane of the call, which its size decides otherwise |
| `x-teimgr-output-dtype` | request | element type of an Arrow reply, over the field `output_dtype` |
| `x-request-id`, `traceparent`, `tracestate` | request | in the logs, and in the traces |
| `x-teimgr-code` | trailing | error code |
| `grpc-retry-pushback-ms` | trailing | when to try again |
"""

Comments = dict[tuple[int, ...], str]


def to_markdown() -> str:
    """The text of docs/reference/grpc.md."""
    lines = _HEAD.splitlines()
    for file in _descriptors():
        comments = {
            tuple(place.path): " ".join(place.leading_comments.split() + place.trailing_comments.split())
            for place in file.source_code_info.location
        }
        lines += ["", f"## {file.package}", "", f"[{file.name}](../../proto/{file.name})"]
        for index, service in enumerate(file.service):
            lines += _service(service, file.package, comments, (_SERVICES, index))
        for index, message in enumerate(file.message_type):
            lines += _message(message, file.package, comments, (_MESSAGES, index))
        for index, enum in enumerate(file.enum_type):
            lines += _enum(enum, enum.name, comments, (_ENUMS, index))
    return document(lines)


def _descriptors() -> Iterator[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "all"
        arguments = ["protoc", f"-I{_PROTO}", "--include_source_info", f"--descriptor_set_out={output}", *_FILES]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc failed")
        found = FileDescriptorSet.FromString(output.read_bytes())
    by_name = {file.name: file for file in found.file}
    yield from (by_name[name] for name in _FILES)


def _service(service: ServiceDescriptorProto, package: str, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield from ("", f"### {package}.{service.name}", "")
    rows = []
    for index, method in enumerate(service.method):
        takes = _stream(method.client_streaming) + _short(method.input_type, package)
        gives = _stream(method.server_streaming) + _short(method.output_type, package)
        rows.append((code(method.name), takes, gives, comments.get((*path, _METHODS, index), "")))
    yield from table(("method", "takes", "answers", ""), rows)


def _message(message: DescriptorProto, package: str, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield from ("", f"### message {message.name}", "")
    if text := comments.get(path):
        yield from (text, "")
    rows = [
        (code(field.name), str(field.number), _type(field, package), comments.get((*path, _FIELDS, index), ""))
        for index, field in enumerate(message.field)
    ]
    yield from table(("field", "number", "type", ""), rows) if rows else ["No fields."]
    for index, inner in enumerate(message.nested_type):
        yield from _message(inner, package, comments, (*path, _NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{message.name}.{enum.name}", comments, (*path, 4, index))


def _enum(enum: EnumDescriptorProto, name: str, comments: Comments, path: Sequence[int]) -> Iterator[str]:
    yield from ("", f"### enum {name}", "")
    if text := comments.get(tuple(path)):
        yield from (text, "")
    rows = [
        (code(value.name), str(value.number), comments.get((*path, _VALUES, index), ""))
        for index, value in enumerate(enum.value)
    ]
    yield from table(("value", "number", ""), rows)


def _type(field: FieldDescriptorProto, package: str) -> str:
    kind = _short(field.type_name, package) if field.type_name else FieldDescriptorProto.Type.Name(field.type)
    kind = kind.removeprefix("TYPE_").lower() if not field.type_name else kind
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    return f"{kind}, one of" if field.HasField("oneof_index") else kind


def _short(name: str, package: str) -> str:
    return name.removeprefix(".").removeprefix(f"{package}.")


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""
