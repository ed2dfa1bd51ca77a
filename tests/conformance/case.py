"""A case: a request, and exactly what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

COST_HEADERS = (
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-compute-tokens",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
)

# Where HTTP is spoken, and where gRPC.
PORT, DAEMON = "instance port", "daemon"
HTTP_SURFACES = (PORT, DAEMON)
BY_METADATA, MUX = "mux, tei.v1 by metadata", "mux, its own methods"
GRPC_SURFACES = (PORT, BY_METADATA, MUX)


@dataclass(frozen=True)
class Reply:
    """What came back over HTTP; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").split(";")[0]


@dataclass(frozen=True)
class Replies:
    """What came back over gRPC: every message before the end, the status, and the metadata before the first message."""

    messages: Sequence[Any]
    status: str
    details: str
    metadata: Mapping[str, str]

    @property
    def one(self) -> Any:
        """The answer of a call that has one."""
        assert self.status == "OK", self
        [message] = self.messages
        return message


# Another request to the same instance over the same surface: path and body, or method and message.
AskHttp = Callable[[str, Any], Reply]
AskGrpc = Callable[..., Replies]


@dataclass(frozen=True)
class Http:
    """A request over HTTP and its answer.

    Attributes:
        clause: One of `clauses.CLAUSES`.
        instance: A name of `fleet.MODELS`.
        path: With a leading slash.
        body: Bytes as they are, everything else as JSON; None for no body.
        status: The exact status.
        answer: What the body is. A dict or list: this JSON; a str: this plain text; b"": nothing; a function: it looks
            for itself.
        verb: The method.
        headers: Further request headers; they win over the content type of a body.
        told: Response headers that must be there, with their values; None for one that must not.
        surfaces: Those on which this holds.
    """

    clause: str
    instance: str
    path: str
    body: Any = None
    status: int = 200
    answer: Any = None
    verb: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, str | None] = field(default_factory=dict)
    surfaces: Sequence[str] = HTTP_SURFACES

    @property
    def title(self) -> str:
        """For the test's name."""
        sent = self.body if isinstance(self.body, bytes) else json.dumps(self.body, ensure_ascii=False).encode()
        return f"{self.clause}: {self.verb} {self.path} {self.instance} {sent[:60]!r}"


@dataclass(frozen=True)
class Rpc:
    """A call over gRPC and its answer.

    Attributes:
        clause: One of `clauses.CLAUSES`.
        instance: A name of `fleet.MODELS`.
        method: Of `tei.v1`, or of the multiplexer where no service of `tei.v1` has it.
        messages: One for a unary call; a stream sends them all. Over the mux they are wrapped with a target, but where
            they are the mux's own.
        status: The exact status.
        details: The exact text of a failure; `*` stands for any part of it.
        answer: Looks at what came back.
        answers: How many messages come before the end.
        metadata: Of the request.
        surfaces: Those on which this holds.
    """

    clause: str
    instance: str
    method: str
    messages: Sequence[Message]
    status: str = "OK"
    details: str = ""
    answer: Callable[[Replies, AskGrpc], None] | None = None
    answers: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    surfaces: Sequence[str] = GRPC_SURFACES

    @property
    def title(self) -> str:
        """For the test's name."""
        said = " ".join(str(self.messages[0]).split()) if self.messages else ""
        return f"{self.clause}: {self.method} {self.instance} {said[:60]!r}"


@dataclass(frozen=True)
class Sequel:
    """A clause that takes more than one request to show: a test of `test_sequences.py` by name."""

    clause: str
    test: str
    surfaces: Sequence[str]
