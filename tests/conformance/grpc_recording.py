"""Answers of the real TEI 1.9.3 to calls of `tei.v1`, and how teimgr's differ (`recorded/README.md`).

What differs by decision is in `DECIDED`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.conformance.recording import (
    DECIDED_LEVEL,
    FOLDER,
    HEADERS,
    SAME,
    STATUS,
    TOLERANCE,
    VALUES,
    WORDS,
    is_near,
)
from tests.conformance.surfaces import TEI, collect

RESULT = FOLDER / "result-grpc.json"
_TIMES = ("total_time_ns", "tokenization_time_ns", "queue_time_ns", "inference_time_ns")
_COSTS = "x-"
_NAMES = re.compile(r"Available prompts: \[(.*?)\]")


class Call(NamedTuple):
    """A call and the real answer to it; `replies` are the first of `count`."""

    id: int
    model: str
    method: str
    requests: Sequence[Mapping[str, Any]]
    code: str
    text: str
    replies: Sequence[Any]
    count: int
    metadata: Sequence[str]


class Answer(NamedTuple):
    """What came back; `replies` are as many of the first of `count` as the recording has."""

    code: str
    text: str
    replies: Sequence[Any]
    count: int
    metadata: Sequence[str]


def calls() -> list[Call]:
    with gzip.open(FOLDER / "tei-1.9.3-grpc.jsonl.gz") as file:
        return [_call(json.loads(text)) for text in file]


def _call(given: Mapping[str, Any]) -> Call:
    requests = given["requests"]
    if given["of"] > len(requests):  # the recording has the first of equal ones
        requests = [requests[index % len(requests)] for index in range(given["of"])]
    method = given["method"].rpartition("/")[2]
    answer = (given[name] for name in ("code", "text", "replies", "count", "metadata"))
    return Call(given["id"], given["model"], method, requests, *answer)


class Replay:
    """Sends calls to the gRPC of instance ports, on one channel each."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._channels = {model: grpc.insecure_channel(f"127.0.0.1:{port}") for model, port in ports.items()}

    def answer(self, call: Call) -> Answer:
        method = TEI[call.method]
        kind = GetMessageClass(method.input_type)
        shape = f"{_streams(method.client_streaming)}_{_streams(method.server_streaming)}"
        stub = getattr(self._channels[call.model], shape)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        made = {id(each): ParseDict(dict(each), kind()) for each in call.requests}  # equal ones are one mapping
        found = collect(stub, method, [made[id(each)] for each in call.requests])
        replies = [_value(message) for message in found.messages[: len(call.replies)]]
        names = sorted(name for name in found.metadata if name.startswith(_COSTS))
        return Answer(found.status, found.details, replies, len(found.messages), names)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _streams(does: bool) -> str:
    return "stream" if does else "unary"


def _value(message: Any) -> Any:
    """The fields of a reply that are set, without times."""
    value = MessageToDict(message, preserving_proto_field_name=True)
    if isinstance(value.get("metadata"), dict):
        for name in _TIMES:
            value["metadata"].pop(name, None)
    return value


def level(call: Call, found: Answer) -> str:
    """How the answer differs from the real one, by what a client would notice first."""
    if any(applies(call) for applies in DECIDED.values()):
        return DECIDED_LEVEL
    if found.code != call.code:
        return STATUS
    if _in_order(found.text) != _in_order(call.text):
        return WORDS
    if call.code != "OK":  # a stream that fails loses the replies before it in TEI
        return SAME
    if found.count != call.count or not is_near(list(call.replies), list(found.replies), TOLERANCE[call.model]):
        return VALUES
    return SAME if set(call.metadata) <= set(found.metadata) else HEADERS


def _in_order(text: str) -> str:
    """The text of a failure with the names of prompts sorted: TEI lists them in the order of a hash map."""
    listed = _NAMES.search(text)
    return _NAMES.sub(str(sorted(listed[1].split(", "))), text) if listed else text


DECIDED: Mapping[str, Callable[[Call], bool]] = {
    "`RerankStream` answers; TEI's never does": lambda call: call.code == "DEADLINE_EXCEEDED",
    "`Info` has the version and limits of teimgr": lambda call: call.method == "Info",
}
