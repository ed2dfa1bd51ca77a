"""Answers of the real TEI 1.9.3 to thousands of requests, and how teimgr's differ (`recorded/README.md`).

Numbers of a line are those of another engine: equal within a tolerance. What differs by decision is in `DECIDED`.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "recorded"
RESULT = FOLDER / "result.json"
MODELS = ("mini", "splade", "reranker", "classifier", "prompts")
"""`mini` is the real MiniLM, the others are folders of `recorded/models`."""
POOLING = {"splade": "splade"}

# MiniLM's by ONNX Runtime, the others by candle, whose GELU is the tanh approximation.
TOLERANCE = dict.fromkeys(MODELS, 0.05) | {"mini": 0.002}
_SPARSE_SLACK = 0.01
_LIMIT_S = 60
_POSITION = re.compile(r" at line \d+ column \d+$")

SAME, DECIDED_LEVEL = "the same", "by decision"
STATUS, WORDS, POSITION, VALUES, HEADERS = "status or kind of body", "words", "position", "JSON", "headers"


class Line(NamedTuple):
    """A request and the real answer to it."""

    id: str
    model: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    answer: Mapping[str, Any]


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def lines() -> list[Line]:
    with gzip.open(FOLDER / "tei-1.9.3-http.jsonl.gz") as file:
        return [_line(json.loads(text)) for text in file]


def _line(given: Mapping[str, Any]) -> Line:
    coded = given.get("body_base64")
    body = (given.get("body") or "").encode() if coded is None else base64.b64decode(coded)
    return Line(given["id"], given["model"], given["method"], given["path"], given["headers"], body, given["answer"])


class Replay:
    """Sends lines to the ports of the instances, on one connection each."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._connections = {
            model: http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S) for model, port in ports.items()
        }

    def answer(self, line: Line) -> Answer:
        connection = self._connections[line.model]
        headers = dict(line.headers)
        if line.body or line.method == "POST":
            headers.setdefault("content-length", str(len(line.body)))
        connection.putrequest(line.method, line.path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(line.body)
        reply = connection.getresponse()
        body = reply.read()
        return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, body)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def level(line: Line, found: Answer) -> str:
    """How the answer differs from the real one, by what a client would notice first."""
    answer = line.answer
    if any(applies(line) for applies in DECIDED.values()):
        return DECIDED_LEVEL
    if found.status != answer["status"]:
        return STATUS
    if "json" in answer:
        try:
            value = json.loads(found.body)
        except ValueError:
            return STATUS
        if not is_near(answer["json"], value, TOLERANCE[line.model]):
            return VALUES
    elif (text := found.body.decode(errors="replace")) != (real := answer.get("text") or ""):
        return POSITION if real and _POSITION.sub("", real) == _POSITION.sub("", text) else WORDS
    return SAME if _headers_agree(answer["headers"], found.headers) else HEADERS


def _headers_agree(real: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """But for those with times, whose value in the recording is `N`, and TEI's name of its own device."""
    return all(found.get(name) == value for name, value in real.items() if value != "N" and name != "x-compute-type")


def is_near(real: Any, found: Any, tolerance: float) -> bool:
    """Whether JSON is the same, numbers within the tolerance, long values by their abbreviation in the recording."""
    if isinstance(real, dict) and "~n" in real:
        return isinstance(found, list) and len(found) == real["~n"] and is_near(real["~first"], found[:3], tolerance)
    if isinstance(real, dict) and "~list" in real:
        # Which weights of a sparse vector are just above zero depends on the engine.
        slack = real["~list"] * _SPARSE_SLACK if "index" in real["~head"][0] else 0
        is_long = isinstance(found, list) and abs(len(found) - real["~list"]) <= slack
        return is_long and is_near(real["~head"], found[: len(real["~head"])], tolerance)
    if isinstance(real, dict) and "~text" in real:
        return isinstance(found, str) and len(found) == real["~text"] and found.startswith(real["~head"])
    if isinstance(real, float) and isinstance(found, float | int) and not isinstance(found, bool):
        return abs(real - found) <= tolerance
    if isinstance(real, str) and real.startswith("MODEL/"):  # where the model lies
        return isinstance(found, str)
    if isinstance(real, dict) and isinstance(found, dict):
        return list(real) == list(found) and all(is_near(real[name], found[name], tolerance) for name in real)
    if isinstance(real, list) and isinstance(found, list):
        return len(real) == len(found) and all(is_near(*pair, tolerance) for pair in zip(real, found, strict=True))
    return type(real) is type(found) and real == found


def _has_ids(line: Line) -> bool:
    """Whether token ids were given as an input, and taken."""
    return line.answer["status"] == 200 and _IDS.search(line.body) is not None and line.path != "/decode"


_IDS = re.compile(rb'"inputs?"\s*:\s*\[+\s*\d')
_OPENAI_LIMIT = re.compile(r"^batch size \d+ > maximum allowed batch size 32$")


def _is_over_the_limit(line: Line) -> bool:
    message = line.answer["json"].get("message", "") if isinstance(line.answer.get("json"), dict) else ""
    return _OPENAI_LIMIT.match(message) is not None


DECIDED: Mapping[str, Callable[[Line], bool]] = {
    "Token ids are taken as they are; TEI decodes them and tokenizes the text": _has_ids,
    "A token id outside of the vocabulary is refused; TEI's process ends": lambda line: line.answer["status"] == 0,
    "One outside of it is refused by `/embed_all` too; TEI answers with no vector": lambda line: (
        line.path == "/embed_all" and line.answer.get("json") == [[]]
    ),
    "OpenAI's route takes 2,048 inputs, as OpenAI's clients expect; TEI's 32": _is_over_the_limit,
    "`/info` has fields of teimgr's, and its version": lambda line: line.path.startswith("/info"),
}


def counts(levels: Iterable[tuple[Any, str]]) -> dict[str, int]:
    """How many lines there are of each level."""
    return dict(Counter(level for _, level in levels))
