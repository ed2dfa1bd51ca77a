"""§1.5–1.16: what each route takes and what it answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.conformance.case import COST_HEADERS, AskHttp, Http, Reply
from tests.conformance.checks import (
    TOLERANCE,
    all_of,
    as_told,
    costs,
    holds,
    near,
    numbers,
    other_than,
    shaped,
    starts,
)
from tests.conformance.http_form import empty, invalid
from tests.conformance.words import (
    FULL,
    LABELS,
    LONG,
    LONG_TOKENS,
    ONE,
    PASSAGES,
    QUERY,
    TEXT,
    TOKEN_WIDTH,
    WIDTH,
    too_long,
)

BROKEN = starts("Failed to parse the request body as JSON: ")
SHAPE = starts("Failed to deserialize the JSON body into the target type: ")
SENTENCE = "the quick fox"


def unions() -> Iterator[Http]:
    """§1.5"""
    clause = "1.5 Input"
    for inputs, rows in (
        ("fog", 1),
        (["fog", "dog"], 2),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
        (["fog", [5, 6]], 2),
        ([[5, 6], "fog"], 2),
    ):
        yield Http(clause, "embedding", "/embed", {"inputs": inputs}, answer=shaped(rows, WIDTH))
        yield Http(
            clause,
            "embedding",
            "/v1/embeddings",
            {"input": inputs},
            answer=holds(lambda t, n=rows: len(t["data"]) == n),
        )
    yield Http(clause, "embedding", "/embed", {"inputs": [5]}, answer=as_told("/embed", {"inputs": [[5]]}))
    for wrong in ([5, "a"], [["a", "b"]], {"text": "a"}, 5, [None], [[5], ["a"]], [[[5]]], ["a", 5]):
        yield Http(clause, "embedding", "/embed", {"inputs": wrong}, 422, SHAPE)
        yield Http(clause, "embedding", "/v1/embeddings", {"input": wrong}, 422, SHAPE)
        yield Http(clause, "sparse", "/embed_sparse", {"inputs": wrong}, 422, SHAPE)
    clause = "1.5 PredictInput"
    flat = holds(lambda told: len(told) == 3 and all("label" in one for one in told))
    for inputs in ("fog", ["fog"], ["fog", "rain"]):
        yield Http(clause, "classifier", "/predict", {"inputs": inputs}, answer=flat)
    yield Http(
        clause,
        "classifier",
        "/predict",
        {"inputs": [["fog"], ["fog", "rain"]]},
        answer=lambda reply, ask: near(
            reply.json,
            [ask("/predict", {"inputs": "fog"}).json, ask("/predict", {"inputs": ["fog", "rain"]}).json],
        ),
    )
    one = as_told("/predict", {"inputs": "fog"}, lambda told: [told])
    yield Http(clause, "classifier", "/predict", {"inputs": [["fog"]]}, answer=one)
    for wrong in (["a", "b", "c"], [], [[]], [["a", "b", "c"]], [["a"], "b"], ["a", ["b"]], [[1]], 5):
        yield Http(clause, "classifier", "/predict", {"inputs": wrong}, 422, SHAPE)
    clause = "1.5 TokenizeInput"
    for inputs, rows in (("fog", 1), (["fog"], 1), (["fog", "dog"], 2)):
        answer = holds(lambda told, n=rows: len(told) == n)
        yield Http(clause, "embedding", "/tokenize", {"inputs": inputs}, answer=answer)
    for wrong in ([5], [["a"]], {"a": 1}, ["a", 5]):
        yield Http(clause, "embedding", "/tokenize", {"inputs": wrong}, 422, SHAPE)
    clause = "1.5 InputIds"
    yield Http(clause, "embedding", "/decode", {"ids": [2, 3]}, answer=[""])
    yield Http(clause, "embedding", "/decode", {"ids": [[2, 3], [2, 1, 3]]}, answer=["", ""])
    for wrong in ("a", ["a"], [5, [5]], [[5], 5], [[[5]]]):
        yield Http(clause, "embedding", "/decode", {"ids": wrong}, 422, SHAPE)
    clause = "1.5 truncation_direction"
    for path, instance, key in (("/embed", "embedding", "inputs"), ("/predict", "classifier", "inputs")):
        for wrong in ("LEFT", "RIGHT", "", "middle", 0):
            refused = (422, SHAPE) if isinstance(wrong, str) else (400, BROKEN)
            yield Http(clause, instance, path, {key: "a", "truncation_direction": wrong}, *refused)
        for right in ("Left", "left", "Right", "right"):
            yield Http(clause, instance, path, {key: "a", "truncation_direction": right})


def headers() -> Iterator[Http]:
    """§1.6: `test_http` sees to it that every answer has the eight, and that no other has one."""
    clause = "1.6 eight headers"
    for instance, path, body in (
        ("embedding", "/embed", {"inputs": "fog"}),
        ("embedding", "/embed_all", {"inputs": "fog"}),
        ("sparse", "/embed_sparse", {"inputs": "fog"}),
        ("classifier", "/predict", {"inputs": "fog"}),
        ("reranker", "/rerank", {"query": "a", "texts": ["b"]}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("embedding", "/v1/embeddings", {"input": "fog"}),
        ("embedding", "/embeddings", {"input": "fog"}),
        ("embedding", "/invocations", {"inputs": "fog"}),
    ):
        yield Http(clause, instance, path, body, told={"x-compute-type": "gpu+optimized"})
    absent: dict[str, str | None] = dict.fromkeys(COST_HEADERS)
    clause = "1.6 none elsewhere"
    yield Http(clause, "embedding", "/tokenize", {"inputs": "fog"}, told=absent)
    yield Http(clause, "embedding", "/decode", {"ids": [5]}, told=absent)
    yield Http(clause, "embedding", "/vertex", {"instances": [{"inputs": "fog"}]}, told=absent)
    yield Http(clause, "embedding", "/info", verb="GET", told=absent)
    yield Http(clause, "embedding", "/embed", {"inputs": ""}, 400, told=absent)
    yield Http(clause, "embedding", "/embed", {}, 422, told=absent)
    clause = "1.6 characters"
    for instance, path, body, characters in (
        ("embedding", "/embed", {"inputs": "Zürich 东京"}, 9),
        ("embedding", "/embed", {"inputs": ["fog", [101, 5, 6]]}, 6),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "ab", "sentences": ["c"]}}, 3),
        ("embedding", "/v1/embeddings", {"input": ["fog", "dog"]}, 6),
        ("reranker", "/rerank", {"query": "ab", "texts": ["c", "def"]}, 8),
        ("classifier", "/predict", {"inputs": ["ab", "c"]}, 3),
    ):
        yield Http(clause, instance, path, body, answer=costs(characters=characters))
    clause = "1.6 tokens"
    for instance, path, body, tokens in (
        ("embedding", "/embed", {"inputs": ONE}, 3),
        ("embedding", "/embed", {"inputs": [ONE, ONE]}, 6),
        ("embedding", "/embed", {"inputs": LONG}, 96),
        ("embedding", "/embed", {"inputs": [2, 7, 3]}, 3),
        ("classifier", "/predict", {"inputs": [ONE, ONE]}, 5),
        ("reranker", "/rerank", {"query": ONE, "texts": [ONE, ONE]}, 10),
    ):
        yield Http(clause, instance, path, body, answer=costs(tokens=tokens))
    prompted = {"inputs": "fog", "prompt_name": "query"}
    yield Http(clause, "embedding", "/embed", prompted, answer=_as_many_tokens("query: fog"))


def _as_many_tokens(text: str) -> Any:
    def check(reply: Reply, ask: AskHttp) -> None:
        [tokens] = ask("/tokenize", {"inputs": text}).json
        assert int(reply.headers["x-compute-tokens"]) == len(tokens)

    return check


def embeddings() -> Iterator[Http]:
    """§1.7"""
    tail = "lamps and fog by the harbour " * 40
    both = LONG + tail
    yield Http("1.7 truncate", "embedding", "/embed", {"inputs": LONG}, answer=as_told("/embed", {"inputs": FULL}))
    yield Http(
        "1.7 truncate", "embedding", "/embed", {"inputs": LONG, "truncate": None}, told={"x-compute-tokens": "96"}
    )
    yield Http("1.7 truncate", "strict", "/embed", {"inputs": LONG, "truncate": True}, told={"x-compute-tokens": "96"})
    yield invalid("1.7 truncate", "strict", "/embed", {"inputs": LONG, "truncate": None}, too_long(LONG_TOKENS))
    clause = "1.7 truncation_direction"
    for name in ("left", "Left"):
        body: Any = {"inputs": both, "truncation_direction": name}
        yield Http(
            clause,
            "embedding",
            "/embed",
            body,
            answer=as_told("/embed", {"inputs": tail, "truncation_direction": "left"}),
        )
    yield Http(clause, "embedding", "/embed", {"inputs": both}, answer=as_told("/embed", {"inputs": FULL}))
    clause = "1.7 prompt_name"
    body = {"inputs": "fog", "prompt_name": "query"}
    yield Http(clause, "embedding", "/embed", body, answer=as_told("/embed", {"inputs": "query: fog"}))
    body = {"inputs": ["fog", "dog"], "prompt_name": "query"}
    told = as_told("/embed", {"inputs": ["query: fog", "query: dog"]})
    yield Http(clause, "embedding", "/embed", body, answer=told)
    clause = "1.7 default prompt"
    told = as_told("/embed", {"inputs": "fog", "prompt_name": "query"})
    yield Http(clause, "prompted", "/embed", {"inputs": "fog"}, answer=told)
    clause = "1.7 normalize"
    yield Http(clause, "embedding", "/embed", {"inputs": TEXT}, answer=shaped(1, WIDTH, unit=True))
    yield Http(clause, "embedding", "/embed", {"inputs": TEXT, "normalize": True}, answer=shaped(1, WIDTH, unit=True))
    raw = {"inputs": TEXT, "normalize": False}
    yield Http(clause, "embedding", "/embed", raw, answer=shaped(1, WIDTH, unit=False))
    yield Http(clause, "embedding", "/embed", {"inputs": TEXT}, answer=as_told("/embed", raw, _unit))
    clause = "1.7 dimensions"
    cut = as_told("/embed", raw, lambda told: _unit(np.array(told)[:, :8]))
    yield Http(clause, "embedding", "/embed", {"inputs": TEXT, "dimensions": 8}, answer=cut)
    plain = as_told("/embed", raw, lambda told: np.array(told)[:, :8].tolist())
    yield Http(clause, "embedding", "/embed", raw | {"dimensions": 8}, answer=plain)
    for inputs in ("fog", ["fog"], [5], [[5]]):
        yield Http("1.7 list of lists", "embedding", "/embed", {"inputs": inputs}, answer=shaped(1, WIDTH))


def _unit(rows: Any) -> Any:
    return (np.array(rows) / np.linalg.norm(rows, axis=-1, keepdims=True)).tolist()


def other_vectors() -> Iterator[Http]:
    """§1.8 and §1.9"""
    clause = "1.8 embed_all"

    def means(reply: Reply, ask: AskHttp) -> None:
        rows = reply.json
        assert sum(map(len, rows)) == int(reply.headers["x-compute-tokens"])
        pooled = ask("/embed", {"inputs": ["fog", SENTENCE], "normalize": False}).json
        near([np.mean(one, axis=0).tolist() for one in rows], pooled)

    yield Http(clause, "embedding", "/embed_all", {"inputs": ["fog", SENTENCE]}, answer=means)
    yield Http(clause, "embedding", "/embed_all", {"inputs": ONE}, answer=shaped(1, 3, WIDTH, unit=False))

    def first_token(reply: Reply, ask: AskHttp) -> None:
        near(reply.json[0][0], ask("/embed", {"inputs": "fog", "normalize": False}).json[0])

    yield Http(clause, "cls", "/embed_all", {"inputs": "fog"}, answer=first_token)
    prompted: Any = {"inputs": "fog", "prompt_name": "query"}
    yield Http(clause, "embedding", "/embed_all", prompted, answer=as_told("/embed_all", {"inputs": "query: fog"}))
    yield Http(clause, "multi-vector", "/embed_all", {"inputs": SENTENCE}, answer=holds(_late_interaction))
    clause = "1.9 embed_sparse"
    for instance in ("sparse", "m3"):
        yield Http(clause, instance, "/embed_sparse", {"inputs": ["fog", SENTENCE]}, answer=holds(_ascending))
    yield Http(clause, "sparse", "/embed_sparse", {"inputs": "fog"}, answer=holds(lambda told: len(told) == 1))

    def without_zeros(reply: Reply, ask: AskHttp) -> None:
        [dense] = np.array(ask("/embed", {"inputs": TEXT, "normalize": False}).json)
        found = np.flatnonzero(dense)
        near(reply.json, [[{"index": int(i), "value": float(dense[i])} for i in found]])

    yield Http(clause, "sparse", "/embed_sparse", {"inputs": TEXT}, answer=without_zeros)


def _late_interaction(told: Any) -> bool:
    """Its authors' vectors, not the hidden states: narrower, and of length 1."""
    [vectors] = np.array(told)
    return vectors.shape[1] == TOKEN_WIDTH and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=TOLERANCE)


def _ascending(told: Any) -> bool:
    places = [[entry["index"] for entry in entries] for entries in told]
    values = [entry["value"] for entries in told for entry in entries]
    keys = all(list(entry) == ["index", "value"] for entries in told for entry in entries)
    return keys and len(told) == 2 and all(p == sorted(set(p)) for p in places) and all(v > 0 for v in values)


def scores() -> Iterator[Http]:
    """§1.10 and §1.11"""
    clause = "1.10 predict"
    best_first = holds(
        lambda told: (
            {one["label"] for one in told} == set(LABELS)
            and all(list(one) == ["score", "label"] for one in told)
            and numbers(told) == sorted(numbers(told), reverse=True)
        )
    )
    yield Http(clause, "classifier", "/predict", {"inputs": TEXT}, answer=best_first)
    yield Http(clause, "classifier", "/predict", {"inputs": [TEXT, "fog"]}, answer=best_first)
    yield Http(clause, "classifier", "/predict", {"inputs": LONG}, told={"x-compute-tokens": "96"})
    # 100 is so far up the sigmoid that both are 1.0 to the last bit.
    tied = holds(
        lambda told: [one["label"] for one in told] == ["joy", "anger", "surprise"] and numbers(told)[:2] == [1.0, 1.0]
    )
    yield Http("1.10 order and ties", "multi-label", "/predict", {"inputs": "fog"}, answer=tied)
    raw = {"inputs": TEXT, "raw_scores": True}
    clause = "1.10 raw_scores"
    yield Http(clause, "classifier", "/predict", {"inputs": TEXT}, answer=as_told("/predict", raw, _softmax))
    yield Http(clause, "classifier", "/predict", raw, answer=other_than("/predict", {"inputs": TEXT}))
    clause = "1.10 of a reranker"
    one = holds(lambda told: len(told) == 1 and told[0]["label"] == "LABEL_0")
    yield Http(clause, "reranker", "/predict", {"inputs": [QUERY, PASSAGES[0]]}, answer=one)

    asked: Any = {"query": QUERY, "texts": PASSAGES}
    clause = "1.11 rerank"

    def as_pairs(raw_scores: bool) -> Any:
        def check(reply: Reply, ask: AskHttp) -> None:
            pairs = [[QUERY, text] for text in PASSAGES]
            single = ask("/predict", {"inputs": pairs, "raw_scores": raw_scores}).json
            assert sorted(rank["index"] for rank in reply.json) == [0, 1, 2]
            for rank in reply.json:
                assert abs(rank["score"] - single[rank["index"]][0]["score"]) < TOLERANCE

        return check

    keys = holds(lambda told: all(list(rank) == ["index", "score"] for rank in told))
    yield Http(clause, "reranker", "/rerank", asked, answer=all_of(as_pairs(False), keys))
    yield Http(clause, "reranker", "/rerank", {"query": LONG, "texts": [LONG]}, told={"x-compute-tokens": "96"})
    clause = "1.11 order and ties"
    sorted_ = holds(lambda told: (s := [r["score"] for r in told]) == sorted(s, reverse=True) and len(s) == 3)
    yield Http(clause, "reranker", "/rerank", asked, answer=sorted_)
    ties = [{"index": i, "score": 1.0} for i in (2, 1, 0)]
    yield Http(clause, "certain-reranker", "/rerank", asked, answer=ties)
    texts = holds(
        lambda told: all(list(r) == ["index", "text", "score"] and r["text"] == PASSAGES[r["index"]] for r in told)
    )
    yield Http("1.11 return_text", "reranker", "/rerank", asked | {"return_text": True}, answer=texts)
    yield Http("1.11 return_text", "reranker", "/rerank", asked | {"return_text": False}, answer=keys)
    yield Http("1.11 raw_scores", "reranker", "/rerank", asked | {"raw_scores": True}, answer=as_pairs(True))
    sigmoid = as_told("/rerank", asked | {"raw_scores": True}, _sigmoids)
    yield Http("1.11 raw_scores", "reranker", "/rerank", asked, answer=sigmoid)
    clause = "1.11 one side empty"
    for body in ({"query": "", "texts": ["a"]}, {"query": "a", "texts": ["", "b"]}):
        answer = holds(lambda told, texts=body["texts"]: len(told) == len(texts))
        yield Http(clause, "reranker", "/rerank", body, answer=answer)


def _softmax(told: Any) -> Any:
    powers = np.exp([one["score"] for one in told])
    return [{"score": p / powers.sum(), "label": one["label"]} for p, one in zip(powers, told, strict=True)]


def _sigmoids(told: Any) -> Any:
    return [rank | {"score": 1 / (1 + np.exp(-rank["score"]))} for rank in told]


def similarities() -> Iterator[Http]:
    """§1.12"""
    sentences = ["dog", TEXT, "the quick brown fox"]
    inputs = {"source_sentence": TEXT, "sentences": sentences}

    def cosines(reply: Reply, ask: AskHttp) -> None:
        vectors = np.array(ask("/embed", {"inputs": [TEXT, *sentences]}).json)
        near(reply.json, (vectors[1:] @ vectors[0]).tolist())
        assert abs(reply.json[1] - 1) < TOLERANCE

    clause = "1.12 similarity"
    yield Http(clause, "embedding", "/similarity", {"inputs": inputs}, answer=cosines)
    thirty_one = {"inputs": {"source_sentence": "a", "sentences": ["b"] * 31}}
    yield Http(clause, "embedding", "/similarity", thirty_one, answer=holds(lambda told: len(told) == 31))
    for wrong in ({"source_sentence": "a"}, {"sentences": ["a"]}, {"source_sentence": ["a"], "sentences": ["b"]}, "a"):
        yield Http(clause, "embedding", "/similarity", {"inputs": wrong}, 422, SHAPE)
    clause = "1.12 parameters"
    prompted: Any = {"inputs": inputs, "parameters": {"prompt_name": "query"}}
    by_hand = {"source_sentence": f"query: {TEXT}", "sentences": [f"query: {one}" for one in sentences]}
    yield Http(clause, "embedding", "/similarity", prompted, answer=as_told("/similarity", {"inputs": by_hand}))
    for parameters in (None, {}, {"truncate": None}, {"truncation_direction": "Left"}):
        body = {"inputs": inputs, "parameters": parameters}
        yield Http(clause, "embedding", "/similarity", body, answer=as_told("/similarity", {"inputs": inputs}))
    body = {"inputs": inputs, "parameters": {"truncation_direction": "LEFT"}}
    yield Http(clause, "embedding", "/similarity", body, 422, SHAPE)


def tokens() -> Iterator[Http]:
    """§1.13"""
    clause = "1.13 tokenize"
    cls = {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    sep = {"id": 3, "text": "[SEP]", "special": True, "start": None, "stop": None}
    # The unknown token is a special one of its vocabulary; what it stands for keeps its place: four bytes.
    smile = {"id": 1, "text": "🙂", "special": False, "start": 0, "stop": 4}
    yield Http(clause, "embedding", "/tokenize", {"inputs": "🙂"}, answer=[[cls, smile, sep]])
    bare: Any = {"inputs": "🙂", "add_special_tokens": False}
    yield Http(clause, "embedding", "/tokenize", bare, answer=[[smile]])
    for body, final in (
        ({"inputs": TEXT}, TEXT),
        ({"inputs": TEXT, "prompt_name": "query"}, f"query: {TEXT}"),
    ):
        yield Http(clause, "embedding", "/tokenize", body, answer=_slices(final))
    yield Http(clause, "prompted", "/tokenize", {"inputs": TEXT}, answer=_slices(f"query: {TEXT}"))
    whole = holds(lambda told: len(told[0]) == LONG_TOKENS)
    yield Http(clause, "embedding", "/tokenize", {"inputs": LONG}, answer=whole)
    for instance in ("classifier", "reranker", "sparse", "m3", "multi-vector", "decoder", "static"):
        yield Http(clause, instance, "/tokenize", {"inputs": "fog"}, answer=holds(lambda told: len(told) == 1))
    clause = "1.13 decode"
    for framed, text in ((False, SENTENCE), (True, f"[CLS] {SENTENCE} [SEP]")):

        def round_trip(reply: Reply, ask: AskHttp, framed: bool = framed, text: str = text) -> None:
            ids = [[token["id"] for token in of_text] for of_text in reply.json]
            body = {"ids": ids, "skip_special_tokens": not framed}
            assert ask("/decode", body).json == [text, text.replace(SENTENCE, "fog")]
            assert ask("/decode", body | {"ids": ids[0]}).json == [text]

        yield Http(clause, "embedding", "/tokenize", {"inputs": [SENTENCE, "fog"]}, answer=round_trip)
    yield Http(clause, "embedding", "/decode", {"ids": [2, 3]}, answer=[""])
    yield Http(clause, "embedding", "/decode", {"ids": [2, 3], "skip_special_tokens": False}, answer=["[CLS] [SEP]"])


def _slices(final: str) -> Any:
    """Offsets are those of bytes of the final text, and the text of a token is what lies between them."""

    def check(reply: Reply, ask: AskHttp) -> None:
        [told] = reply.json
        assert [(one["text"], one["start"], one["stop"], one["special"]) for one in (told[0], told[-1])] == [
            ("[CLS]", None, None, True),
            ("[SEP]", None, None, True),
        ]
        for one in told[1:-1]:
            assert one["text"] == final.encode()[one["start"] : one["stop"]].decode(errors="replace")
            assert not one["special"]
        assert max(one["stop"] for one in told[1:-1]) == len(final.encode())

    return check


def openai() -> Iterator[Http]:
    """§1.14"""
    clause = "1.14 OpenAI embeddings"

    def whole(reply: Reply, ask: AskHttp) -> None:
        told = reply.json
        assert list(told) == ["object", "data", "model", "usage"]
        assert (told["object"], told["model"]) == ("list", "my-embedding")
        assert [list(row) for row in told["data"]] == [["object", "embedding", "index"]] * 2
        assert [(row["object"], row["index"]) for row in told["data"]] == [("embedding", 0), ("embedding", 1)]
        near([row["embedding"] for row in told["data"]], ask("/embed", {"inputs": ["fog", SENTENCE]}).json)
        tokens = int(reply.headers["x-compute-tokens"])
        assert told["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}

    for path in ("/v1/embeddings", "/embeddings"):
        for more in ({}, {"model": "gpt-unknown", "user": "me"}, {"encoding_format": "float"}):
            yield Http(clause, "embedding", path, {"input": ["fog", SENTENCE], **more}, answer=whole)
        for wrong in (None, "BASE64", "Float", "int8", 1):
            body: Any = {"input": "fog", "encoding_format": wrong}
            yield Http(clause, "embedding", path, body, *((422, SHAPE) if isinstance(wrong, str) else (400, BROKEN)))
    yield Http(clause, "embedding", "/v1/embeddings", {"input": "fog", "user": 1}, 422, SHAPE)
    yield Http(clause, "embedding", "/v1/embeddings", {"input": LONG}, told={"x-compute-tokens": "96"})
    yield empty(clause, "embedding", "/v1/embeddings", {"input": ["fog", ""]})
    clause = "1.14 base64"

    def same_floats(reply: Reply, ask: AskHttp) -> None:
        coded = [base64.b64decode(row["embedding"], validate=True) for row in reply.json["data"]]
        plain = ask("/v1/embeddings", {"input": ["fog", SENTENCE]}).json["data"]
        for text, row in zip(coded, plain, strict=True):
            assert np.allclose(np.frombuffer(text, "<f4"), row["embedding"], atol=1e-6)

    body = {"input": ["fog", SENTENCE], "encoding_format": "base64"}
    yield Http(clause, "embedding", "/v1/embeddings", body, answer=same_floats)
    clause = "1.14 dimensions"

    def first_vector(reply: Reply, ask: AskHttp) -> None:
        near(reply.json["data"][0]["embedding"], ask("/embed", {"inputs": "fog", "dimensions": 8}).json[0])

    yield Http(clause, "embedding", "/v1/embeddings", {"input": "fog", "dimensions": 8}, answer=first_vector)

    def prompted(reply: Reply, ask: AskHttp) -> None:
        near(reply.json["data"][0]["embedding"], ask("/embed", {"inputs": "fog", "prompt_name": "query"}).json[0])

    yield Http("1.14 default prompt", "prompted", "/v1/embeddings", {"input": "fog"}, answer=prompted)


INFO_KEYS = [
    *("model_id", "model_sha", "model_dtype", "served_model_name", "model_type", "max_concurrent_requests"),
    *("max_input_length", "max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate"),
    *("tokenization_workers", "version", "sha", "docker_label"),
]


def infos() -> Iterator[Http]:
    """§1.15; what teimgr adds comes after TEI's keys."""
    clause = "1.15 info"
    answer = holds(
        lambda told: (
            list(told)[: len(INFO_KEYS)] == INFO_KEYS
            and told["model_sha"] == "v7"
            and told["model_dtype"] == "float32"
            and told["served_model_name"] == "my-embedding"
            and (told["max_input_length"], told["max_client_batch_size"], told["auto_truncate"]) == (96, 32, True)
            and (told["max_concurrent_requests"], told["max_batch_tokens"]) == (512, 16384)
        )
    )
    yield Http(clause, "embedding", "/info", verb="GET", answer=answer)
    strict = holds(
        lambda told: (
            (told["auto_truncate"], told["max_client_batch_size"], told["max_concurrent_requests"]) == (False, 4, 1)
            and told["model_sha"] is None
            and told["served_model_name"] == told["model_id"]
        )
    )
    yield Http(clause, "strict", "/info", verb="GET", answer=strict)
    labels = {
        "id2label": {"0": "anger", "1": "joy", "2": "surprise"},
        "label2id": {"anger": 0, "joy": 1, "surprise": 2},
    }
    for instance, kind in (
        ("embedding", {"embedding": {"pooling": "mean"}}),
        ("cls", {"embedding": {"pooling": "cls"}}),
        ("m3", {"embedding": {"pooling": "cls"}}),
        ("decoder", {"embedding": {"pooling": "last_token"}}),
        ("sparse", {"embedding": {"pooling": "splade"}}),
        ("minilm-cls", {"embedding": {"pooling": "cls"}}),
        ("classifier", {"classifier": labels}),
        ("reranker", {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
    ):
        answer = holds(lambda told, kind=kind: told["model_type"] == kind)
        yield Http("1.15 model types", instance, "/info", verb="GET", answer=answer)


def vertex() -> Iterator[Http]:
    """§1.16"""
    clause = "1.16 vertex"
    for instance, path, instances in (
        ("embedding", "/embed", [{"inputs": "fog"}, {"inputs": ["fog", "dog"], "dimensions": 4}]),
        ("sparse", "/embed_sparse", [{"inputs": "fog"}]),
        ("classifier", "/predict", [{"inputs": "fog"}, {"inputs": [["fog"]]}]),
        ("reranker", "/predict", [{"inputs": ["fog", "dog"]}]),
        ("reranker", "/rerank", [{"query": QUERY, "texts": PASSAGES}]),
    ):

        def wrapped(reply: Reply, ask: AskHttp, path: str = path, instances: Any = instances) -> None:
            near(reply.json, {"predictions": [ask(path, one).json for one in instances]})

        body: Any = {"instances": instances, "parameters": {}}
        yield Http(clause, instance, "/vertex", body, answer=wrapped)
    yield Http(clause, "embedding", "/vertex", {"instances": []}, answer={"predictions": []})
    body = {"instances": [{"inputs": "fog"}, {"inputs": ""}, {"inputs": "fog", "dimensions": 0}]}
    yield empty(clause, "embedding", "/vertex", body)
    for wrong in ({"inputs": 5}, {}, 5, {"query": "a"}):
        told = holds(lambda told: list(told) == ["error", "error_type"] and told["error_type"] == "Validation")
        yield Http(clause, "embedding", "/vertex", {"instances": [wrong]}, 422, told)
    body = {"instances": [{"query": "a", "texts": ["b"]}]}
    told = {"error": "Backend error: model is not a re-ranker model", "error_type": "Backend"}
    yield Http(clause, "embedding", "/vertex", body, 424, told)


def cases() -> Iterator[Http]:
    for table in (unions, headers, embeddings, other_vectors, scores, similarities, tokens, openai, infos, vertex):
        yield from table()
