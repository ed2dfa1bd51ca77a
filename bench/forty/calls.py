"""One call of a model over each interface that fits its kind; every answer is one array, to be compared with another.

An answer over one interface is right where it equals that of gRPC, taken while no other call was under way.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.fleet import Fleet
from teimgr.errors import TeimgrError

TEXTS = (
    "Rain fell on the harbour all night.",
    "How long does a query wait while a bulk job runs?",
    "An embedding is a point in space.",
    "seven wizards mix a potion of zinc and jade",
)
LIMIT_S = 120.0
_TOLERANCE = 1e-4
_WIDTH = 1 << 16  # of a sparse vector that is written out
# What a caller can act on: full, not loaded in time, too late.
_REFUSALS = frozenset({429, 503, 504})

Call = Callable[[Fleet, str, int], np.ndarray]


class Refused(Exception):
    """The call was refused with a reason of the daemon's own."""


def is_right(answer: np.ndarray, alone: np.ndarray) -> bool:
    """Whether an answer is the one that the model gave alone, but for the last bits of other batches."""
    return answer.shape == alone.shape and bool(np.allclose(answer, alone, atol=_TOLERANCE))


def _posted(path: str, body: Callable[[int], Mapping[str, Any]], read: Callable[[Any], Any]) -> Call:
    def call(fleet: Fleet, model: str, number: int) -> np.ndarray:
        return np.asarray(read(post(fleet, path, {"model": model, **body(number)})), np.float32)

    return call


def post(fleet: Fleet, path: str, body: Mapping[str, Any]) -> Any:
    """Raises Refused; OSError for another status than 200 without the daemon's reason."""
    address = f"http://127.0.0.1:{fleet.api_port}{path}"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        if error.code in _REFUSALS and reason.startswith("{"):
            raise Refused(f"{error.code} {reason}") from None
        raise OSError(f"{path}: {error.code} {reason}") from None


def _over_grpc(call: Callable[[Fleet, str, str], Any]) -> Call:
    def of_text(fleet: Fleet, model: str, number: int) -> np.ndarray:
        try:
            return np.asarray(call(fleet, model, TEXTS[number]), np.float32)
        except TeimgrError as error:
            if type(error) is TeimgrError or not error.message:
                raise
            raise Refused(f"{type(error).__name__}: {error.message}") from None

    return of_text


def _unit(vector: Sequence[float]) -> np.ndarray:
    found = np.asarray(vector, np.float32)
    return found / np.linalg.norm(found)


def _written_out(found: Any) -> np.ndarray:
    row = np.zeros(_WIDTH, np.float32)
    row[found.indices] = found.values
    return row


def _scores(ranks: Any, index: str, score: str) -> list[float]:
    by_index = {rank[index]: rank[score] for rank in ranks}
    return [by_index[number] for number in range(len(TEXTS))]


def _ranked(fleet: Fleet, model: str, query: str) -> list[float]:
    ranks = fleet.client.rerank(query, list(TEXTS), instance=model)
    return [each.score for each in sorted(ranks, key=lambda each: each.index)]


def _labelled(fleet: Fleet, model: str, text: str) -> list[float]:
    [found] = fleet.client.predict(text, instance=model)
    return [each.score for each in sorted(found, key=lambda each: each.label)]


def _ranking(path: str) -> Call:
    return _posted(
        path,
        lambda number: {"query": TEXTS[number], "documents": TEXTS},
        lambda answer: _scores(answer["results"], "index", "relevance_score"),
    )


def _text(key: str, **more: Any) -> Callable[[int], Mapping[str, Any]]:
    return lambda number: {key: TEXTS[number], **more}


_COHERE: dict[str, Any] = {"input_type": "search_document", "embedding_types": ["float"]}

CALLS: dict[str, dict[str, Call]] = {
    "dense": {
        "Embed": _over_grpc(lambda fleet, model, text: _unit(fleet.client.embed(text, instance=model)[0])),
        "EmbedArrow": _over_grpc(
            lambda fleet, model, text: _unit(fleet.client.embed_arrow([text], instance=model).vectors[0])
        ),
        "EmbedStream": _over_grpc(
            lambda fleet, model, text: _unit(next(iter(fleet.client.embed_stream([text], instance=model))))
        ),
        "OpenAI": _posted("/v1/embeddings", _text("input"), lambda answer: _unit(answer["data"][0]["embedding"])),
        "Cohere": _posted(
            "/v2/embed",
            lambda number: {"texts": [TEXTS[number]], **_COHERE},
            lambda answer: _unit(answer["embeddings"]["float"][0]),
        ),
        "Ollama": _posted("/api/embed", _text("input"), lambda answer: _unit(answer["embeddings"][0])),
    },
    "reranker": {
        "Rerank": _over_grpc(_ranked),
        "Cohere rerank": _ranking("/v2/rerank"),
        "vLLM rerank": _ranking("/rerank"),
    },
    "classifier": {
        "Predict": _over_grpc(_labelled),
        "vLLM classify": _posted("/classify", _text("input"), lambda answer: answer["data"][0]["probs"]),
    },
    "sparse": {
        "EmbedSparse": _over_grpc(
            lambda fleet, model, text: _written_out(fleet.client.embed_sparse(text, instance=model)[0])
        ),
    },
}
"""By the kind of a model; the first one of each kind gives the answers that others are compared with."""


def alone(fleet: Fleet, model: str, kind: str) -> list[np.ndarray]:
    """The right answer for each text."""
    first = next(iter(CALLS[kind].values()))
    return [first(fleet, model, number) for number in range(len(TEXTS))]
