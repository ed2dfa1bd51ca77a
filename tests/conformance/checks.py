"""Checks of answers that are no constants."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.conformance.case import AskGrpc, AskHttp, Replies, Reply

HttpCheck = Callable[[Reply, AskHttp], None]
GrpcCheck = Callable[[Replies, AskGrpc], None]
TOLERANCE = 1e-5


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value, in order."""
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def words(value: Any) -> Any:
    """A JSON value with its numbers left out."""
    if isinstance(value, dict):
        return {key: words(one) for key, one in value.items()}
    if isinstance(value, list):
        return [words(one) for one in value]
    return None if isinstance(value, int | float) else value


def near(told: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """The same JSON but for the last digits of its numbers."""
    assert words(told) == words(expected)
    assert np.allclose(numbers(told), numbers(expected), rtol=tolerance, atol=tolerance)


def is_near(expected: Any, tolerance: float = TOLERANCE) -> HttpCheck:
    return lambda reply, ask: near(reply.json, expected, tolerance)


def as_told(path: str, body: Any, pick: Callable[[Any], Any] = lambda told: told) -> HttpCheck:
    """What another request is answered with, or a part or a function of it."""
    return lambda reply, ask: near(reply.json, pick(ask(path, body).json))


def other_than(path: str, body: Any) -> HttpCheck:
    """As long as the answer to another request, and not the same."""

    def check(reply: Reply, ask: AskHttp) -> None:
        told, other = numbers(reply.json), numbers(ask(path, body).json)
        assert len(told) == len(other)
        assert not np.allclose(told, other, atol=1e-3)

    return check


def shaped(*shape: int, unit: bool | None = None) -> HttpCheck:
    """Vectors: `[rows, width]` or `[texts, rows, width]`; of length 1, or not."""

    def check(reply: Reply, ask: AskHttp) -> None:
        assert np.shape(reply.json) == shape
        if unit is not None:
            norms = np.linalg.norm(reply.json, axis=-1)
            assert np.allclose(norms, 1, atol=TOLERANCE) is unit

    return check


def holds(true: Callable[[Any], Any]) -> HttpCheck:
    """A fact of the JSON."""

    def check(reply: Reply, ask: AskHttp) -> None:
        assert true(reply.json), reply.text[:2000]

    return check


def starts(text: str) -> HttpCheck:
    """Plain text that begins so."""

    def check(reply: Reply, ask: AskHttp) -> None:
        assert reply.media_type == "text/plain"
        assert reply.text.startswith(text), reply.text

    return check


def contains(*parts: str) -> HttpCheck:
    def check(reply: Reply, ask: AskHttp) -> None:
        assert not [part for part in parts if part not in reply.text]

    return check


def all_of(*checks: HttpCheck) -> HttpCheck:
    def check(reply: Reply, ask: AskHttp) -> None:
        for one in checks:
            one(reply, ask)

    return check


def costs(**figures: int) -> HttpCheck:
    """Headers of the cost by the last word of their names."""

    def check(reply: Reply, ask: AskHttp) -> None:
        assert {name: int(reply.headers[f"x-compute-{name}"]) for name in figures} == figures

    return check


def shortest_floats(reply: Reply, ask: AskHttp) -> None:
    """Every number has the fewest digits that give its 32 bits again."""
    found = re.findall(r"-?\d+\.\d+(?:[eE]-?\d+)?", reply.text)
    assert found
    for number in found:
        short = np.format_float_positional(np.float32(number), unique=True, trim="0")
        scientific = np.format_float_scientific(np.float32(number), unique=True, trim="-")
        assert len(number) <= min(len(short), len(scientific) + 1), number


# gRPC.


def replied(true: Callable[[Any], Any]) -> GrpcCheck:
    """A fact of the one answer."""

    def check(replies: Replies, ask: AskGrpc) -> None:
        assert true(replies.one), replies

    return check


def vectors(replies: Replies) -> Any:
    """The vectors of an Embed or an EmbedStream, [N, D]."""
    return np.array([message.embeddings for message in replies.messages], np.float32)


def same_vectors(method: str, *messages: Any, same: bool = True) -> GrpcCheck:
    """Those of another call, or others."""

    def check(replies: Replies, ask: AskGrpc) -> None:
        told, other = vectors(replies), vectors(ask(method, *messages))
        assert told.shape == other.shape
        assert np.allclose(told, other, atol=TOLERANCE if same else 1e-3) is same

    return check


def told_costs(figures: Mapping[str, int], keys: Sequence[str]) -> GrpcCheck:
    """The initial metadata has the cost under every key, and the message has the same."""

    def check(replies: Replies, ask: AskGrpc) -> None:
        for key in keys:
            assert key in replies.metadata
        for name, figure in figures.items():
            assert int(replies.metadata[f"x-compute-{name}"]) == figure
        said = replies.one.metadata
        assert (said.compute_chars, said.compute_tokens) == (figures["characters"], figures["tokens"])
        assert said.total_time_ns >= said.inference_time_ns > 0

    return check
