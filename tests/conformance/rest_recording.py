"""Answers of the real tei-manager 0.12 to its management API, in order, and how teimgr's differ (`recorded/README.md`).

What differs by decision is in `DECIDED`. The calls go to the REST application over an in-memory fleet.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

from tests.conformance.recording import DECIDED_LEVEL, FOLDER, HEADERS, SAME, STATUS, VALUES, WORDS

RESULT = FOLDER / "result-rest.json"
# Every answer of a browser's may be read from anywhere; `vary` names no more than what the answer depends on.
_COMPARED = ("allow", "access-control-allow-origin", "access-control-expose-headers")
_OF_THE_RUN = ("TIME", "N")
_SHAPE = ("error", "code", "timestamp")
AS_JSON = "the same, the error as JSON"
_ASSIGNED = ("prometheus_port",)  # counted up by both, and the real one has had more instances


class Call(NamedTuple):
    """A call and the real answer to it; `value` is its JSON, None where it had none."""

    number: int
    why: str
    method: str
    path: str
    body: str
    status: int
    headers: Mapping[str, str]
    value: Any
    text: str

    @property
    def given(self) -> Any:
        """The JSON of the body; None for none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def calls() -> list[Call]:
    with gzip.open(FOLDER / "tei-manager-0.12-rest.json.gz") as file:
        return [_call(number, each) for number, each in enumerate(json.load(file))]


def _call(number: int, given: Mapping[str, Any]) -> Call:
    known = (given[name] for name in ("why", "method", "path", "body", "status", "headers"))
    return Call(number, *known, given.get("json"), given.get("text", ""))


async def answer(http: aiohttp.ClientSession, origin: str, call: Call) -> Answer:
    # The recording has no headers of requests; only those with a JSON type were answered for what they hold.
    typed = {"Content-Type": "application/json"} if call.body and call.status != 415 else {}
    skipped = () if typed else ("Content-Type",)
    typed["Origin"] = origin
    async with http.request(
        call.method, call.path, data=call.body.encode() or None, headers=typed, skip_auto_headers=skipped
    ) as reply:
        headers = {name.lower(): value for name, value in reply.headers.items()}
        return Answer(reply.status, headers, await reply.read())


def level(call: Call, found: Answer) -> str:
    """How the answer differs from the real one, by what a client would notice first."""
    if found.status >= 500:
        return STATUS
    if any(applies(call) for applies in DECIDED.values()):
        return DECIDED_LEVEL
    if found.status != call.status:
        return STATUS
    if call.value is not None and not _is_within(call.value, json.loads(found.body or b"null")):
        return WORDS if call.status >= 400 else VALUES
    if any(not _has(found, name, call.headers[name]) for name in _COMPARED if name in call.headers):
        return HEADERS
    if call.status < 400 or call.value is not None or call.method == "HEAD":
        return SAME
    return AS_JSON if tuple(json.loads(found.body)) == _SHAPE else VALUES


def _has(found: Answer, name: str, real: str) -> bool:
    """Whether a header has everything in the real one; `allow` has methods of routes that are teimgr's alone too."""
    return set(real.split(",")) <= {word.strip() for word in found.headers.get(name, "").split(",")}


def _is_within(real: Any, found: Any) -> bool:
    """Whether everything in the real answer is in ours, which may have more fields."""
    if isinstance(real, dict):
        return isinstance(found, dict) and all(
            name in found and (name in _ASSIGNED or _is_within(each, found[name])) for name, each in real.items()
        )
    if isinstance(real, list):
        return isinstance(found, list) and len(real) == len(found) and all(map(_is_within, real, found))
    return real in _OF_THE_RUN or (type(real) is type(found) and real == found)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_ONE = ("max_batch_tokens", "max_concurrent_requests", "startup_timeout_secs")
_POOLING = (None, "cls", "mean", "max", "last-token", "splade")


def _fields(call: Call) -> Mapping[str, Any]:
    """The fields of a body that the real one took."""
    return call.given if isinstance(call.given, dict) and call.status == 201 else {}


def _is_cut(call: Call) -> bool:
    """Whether the recording has the beginning of a long body alone."""
    return call.given is None and len(call.body) > 1


DECIDED: Mapping[str, Callable[[Call], bool]] = {
    "Long bodies, of which the recording has the beginning, are not sent": _is_cut,
    "Instances have names of letters, digits, `.`, `_` and `-`: 422": lambda call: (
        call.path == "/instances"
        and isinstance(call.given, dict)
        and "name" in call.given
        and isinstance(call.given["name"], str)
        and not _NAME.fullmatch(call.given["name"])
    ),
    "An unknown field is refused by name": lambda call: "nope" in _fields(call),
    "A model is a hub id or a directory that is there": lambda call: (
        _fields(call).get("model_id") == "" or (call.path == "/models" and _fields(call).get("model_id") in _NO_MODELS)
    ),
    "What no worker can start with, such as a limit of 0 or an unknown `pooling`, is refused at once": lambda call: (
        any(_fields(call).get(name) == 0 for name in _MIN_ONE) or _fields(call).get("pooling") not in _POOLING
    ),
    "A name that exists is 409 `INSTANCE_EXISTS`, a port that is taken 422 `PORT_CONFLICT`": lambda call: (
        call.why == "conflict" and call.status == 400
    ),
    "Start of a running instance and stop of a stopped one are 409": lambda call: (
        call.why == "lifecycle" and call.number in (314, 318)
    ),
    "`DELETE /instances/{name}` answers with the last view": lambda call: (
        call.method == "DELETE" and call.status == 204
    ),
    "`PATCH /instances/{name}` and `DELETE /models/{id}` are routes, and ids of models may have slashes": lambda call: (
        (call.method, call.path) in _ROUTES
    ),
    "`/models` has the models of all instances": lambda call: call.number in (322, 331),
    "`/instances` has those that were accepted, in the order of their creation": lambda call: (
        call.path == "/instances" and call.method == "GET" and bool(call.value)
    ),
}
_NO_MODELS = ("../x", "a b", "org/name/extra")
_ROUTES = (
    ("PATCH", "/instances/x"),
    ("DELETE", "/models/x/load"),
    ("HEAD", "/models/x/load"),
    ("GET", "/models/a/b"),
)
