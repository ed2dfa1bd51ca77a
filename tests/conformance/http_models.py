"""§4.3–4.6, §9 and §11 over HTTP: what the numbers mean, and the defects that are not copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.conformance.case import PORT, AskHttp, Http, Reply
from tests.conformance.checks import as_told, contains, holds, near, numbers
from tests.conformance.http_form import invalid
from tests.conformance.words import FULL, LONG, MAX_CHARACTERS, MAX_TOKENS, ONE, PASSAGES, QUERY, TEXT, too_long

# TEI's own snapshots. They are of its approximate GELU, and sentence-transformers itself is 2e-4 off: TEI's tolerance.
TOLERANCE = 4e-3
SNAPSHOT = (0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755)
DEEP_A, DEEP_B = "What is Deep Learning?", "Deep Learning is..."
MEAN, CLS = (-0.5906, -0.2525, 0.1497), (-0.0236, -0.5269, 0.1789)


def prompts_and_texts() -> Iterator[Http]:
    """§4.3–4.5"""
    clause = "4.3 prompts"
    queried = {"inputs": TEXT, "prompt_name": "query"}
    for path in ("/embed", "/embed_all"):
        told = as_told(path, {"inputs": f"query: {TEXT}"})
        yield Http(clause, "embedding", path, queried, answer=told)
    for instance in ("classifier", "reranker"):
        body: Any = {"inputs": TEXT, "prompt_name": "nobody"}  # an unknown field there
        yield Http(clause, instance, "/predict", body, answer=as_told("/predict", {"inputs": TEXT}))
    clause = "4.4 truncation"
    for inputs in (LONG, f"{ONE} " * 100 + "fog " * 500):
        yield Http(clause, "embedding", "/embed", {"inputs": inputs}, answer=as_told("/embed", {"inputs": FULL}))
    left = as_told("/embed", {"inputs": FULL})
    body = {"inputs": "fog " * 300 + FULL, "truncation_direction": "left"}
    yield Http(clause, "embedding", "/embed", body, answer=left)
    many = f"{ONE} " * (MAX_CHARACTERS // 2) + "fog " * 500  # past the bound at which texts are cut unread
    yield Http(clause, "embedding", "/embed", {"inputs": many}, answer=as_told("/embed", {"inputs": FULL}))
    # Longest first: a short query keeps all its tokens, and the text loses its end.
    short: Any = {"inputs": [ONE, LONG]}
    yield Http(clause, "classifier", "/predict", short, told={"x-compute-tokens": "96"})
    kept = f"{ONE} " * (MAX_TOKENS - 4)  # and beside it three special tokens and the other text
    yield Http(clause, "classifier", "/predict", short, answer=as_told("/predict", {"inputs": [ONE, kept]}))
    clause = "4.4 pairs"

    def both_ways(reply: Reply, ask: AskHttp) -> None:
        swapped = ask("/predict", {"inputs": [PASSAGES[0], QUERY], "raw_scores": True}).json
        joined = ask("/predict", {"inputs": f"{QUERY} {PASSAGES[0]}", "raw_scores": True}).json
        for other in (swapped, joined):
            assert not np.allclose(sorted(numbers(reply.json)), sorted(numbers(other)), atol=1e-3)

    pair = {"inputs": [QUERY, PASSAGES[0]], "raw_scores": True}
    yield Http(clause, "classifier", "/predict", pair, answer=both_ways)
    clause = "4.4 ids as input"

    def by_ids(path: str, text: str) -> Any:
        def check(reply: Reply, ask: AskHttp) -> None:
            [tokens] = ask("/tokenize", {"inputs": text}).json
            ids = [one["id"] for one in tokens]
            near(ask(path, {"inputs": ids}).json, reply.json)
            near(ask(path, {"inputs": [ids, text]}).json, reply.json * 2)

        return check

    for instance, path in (
        ("embedding", "/embed"),
        ("cls", "/embed"),
        ("decoder", "/embed"),
        ("sparse", "/embed_sparse"),
        ("m3", "/embed"),
    ):
        yield Http(clause, instance, path, {"inputs": "the quick fox"}, answer=by_ids(path, "the quick fox"))
    by_text = as_told("/embed", {"inputs": "🙂"})  # as they are: nothing is added before or behind
    yield Http(clause, "embedding", "/embed", {"inputs": [2, 1, 3]}, answer=by_text)
    yield Http(clause, "embedding", "/embed", {"inputs": [1]}, told={"x-compute-tokens": "1"})
    strange = contains("Input validation error: `inputs` has the token id 99999", '"error_type":"Validation"')
    wide = {"inputs": [7] * 97, "truncate": False}
    yield invalid(clause, "embedding", "/embed", wide, too_long(97))
    yield Http(clause, "embedding", "/embed", {"inputs": [99999]}, 422, strange)
    clause = "4.5 max_input_length"
    for instance in ("embedding", "classifier", "reranker", "sparse", "cls"):
        told = holds(lambda told: told["max_input_length"] == 96)
        yield Http(clause, instance, "/info", verb="GET", answer=told)
    real = holds(
        lambda told: told["max_input_length"] == 256
    )  # sentence_bert_config.json, not the 512 of its positions
    yield Http(clause, "minilm", "/info", verb="GET", answer=real)
    body = {"inputs": "test " * 255, "truncate": False}
    yield invalid(clause, "minilm", "/embed", body, too_long(257, 256))
    yield Http(clause, "minilm", "/embed", {"inputs": "test " * 254, "truncate": False})


def scores() -> Iterator[Http]:
    """§4.6, with what a model says of its labels obeyed."""
    clause = "4.6 scores"
    one = holds(lambda told: abs(sum(numbers(told)) - 1) < 1e-5)
    yield Http(clause, "classifier", "/predict", {"inputs": TEXT}, answer=one)

    def sigmoids(reply: Reply, ask: AskHttp) -> None:
        raw = ask("/predict", {"inputs": TEXT, "raw_scores": True}).json
        expected = {each["label"]: 1 / (1 + np.exp(-each["score"])) for each in raw}
        near({each["label"]: each["score"] for each in reply.json}, expected)

    yield Http(clause, "multi-label", "/predict", {"inputs": TEXT}, answer=sigmoids)
    high = holds(lambda told: all(90 < n < 110 for n in numbers(told)[:2]))
    yield Http(clause, "multi-label", "/predict", {"inputs": TEXT, "raw_scores": True}, answer=high)


def real_values() -> Iterator[Http]:
    """§9.2, §9.4 and §9.5 for the weights that a package index has."""
    clause = "9.2 real values"

    def rows(count: int) -> Any:
        def check(reply: Reply, ask: AskHttp) -> None:
            told = np.array(reply.json)
            assert told.shape == (count, 128)
            assert np.allclose(told[:, : len(SNAPSHOT)], [SNAPSHOT] * count, atol=TOLERANCE)
            assert np.allclose(np.linalg.norm(told, axis=1), 1, atol=1e-6)

        return check

    yield Http(clause, "minilm", "/embed", {"inputs": "test", "dimensions": 128}, answer=rows(1))
    yield Http(clause, "minilm", "/embed", {"inputs": ["test"] * 3, "dimensions": 128}, answer=rows(3))
    five: Any = {"inputs": [["test"]] * 5}
    same = as_told("/predict", {"inputs": "test"}, lambda told: [told] * 5)
    yield Http(clause, "classifier", "/predict", five, answer=same)
    body: Any = {"query": "test", "texts": ["test", "other", "test"], "return_text": True}

    def equals(reply: Reply, ask: AskHttp) -> None:
        score = {rank["index"]: rank["score"] for rank in reply.json}
        assert score[0] == score[2]
        places = [rank["index"] for rank in reply.json]
        assert places.index(2) == places.index(0) - 1
        assert [rank["text"] for rank in reply.json] == [body["texts"][i] for i in places]

    yield Http(clause, "reranker", "/rerank", body, answer=equals)
    clause = "9.4 real values before normalisation"

    def first_values(expected: tuple[float, ...]) -> Any:
        def check(reply: Reply, ask: AskHttp) -> None:
            alone = np.array(ask("/embed", {"inputs": DEEP_A, "normalize": False}).json[0])
            told = np.array(reply.json)
            assert np.allclose(alone[:3], expected, atol=TOLERANCE)
            assert np.allclose(told[0], alone, atol=1e-5)
            assert np.allclose(told[2], alone, atol=1e-5)

        return check

    batch = {"inputs": [DEEP_A, DEEP_B, DEEP_A], "normalize": False}
    yield Http(clause, "minilm", "/embed", batch, answer=first_values(MEAN))
    yield Http(clause, "minilm-cls", "/embed", batch, answer=first_values(CLS))
    clause = "9.5 tokens of the real model"
    seven_and_eight = holds(lambda told: [len(one) for one in told] == [7, 8, 7])
    yield Http(clause, "minilm", "/embed_all", {"inputs": [DEEP_A, DEEP_B, DEEP_A]}, answer=seven_and_eight)

    def pooled_is_a_row(reply: Reply, ask: AskHttp) -> None:
        near([one[0] for one in reply.json], ask("/embed", {"inputs": [DEEP_A, DEEP_B], "normalize": False}).json)

    yield Http(clause, "minilm-cls", "/embed_all", {"inputs": [DEEP_A, DEEP_B]}, answer=pooled_is_a_row)


BATCH = ["fog", TEXT, "a b c", LONG, "x y z", QUERY]


def alone(path: str, inputs: Any = BATCH, batch_of_one: Any = lambda one: one) -> Any:
    """A batch is answered as its inputs one by one."""

    def check(reply: Reply, ask: AskHttp) -> None:
        singles = [ask(path, {"inputs": batch_of_one(one)}).json[0] for one in inputs]
        near(reply.json, singles)

    return check


def neighbours() -> Iterator[Http]:
    """§9.7 and §11: no input notices those it shares a batch with."""
    clause = "9.7 batch composition"
    for instance, path in (
        *((instance, "/embed") for instance in ("embedding", "cls", "m3", "static", "minilm")),
        ("multi-vector", "/embed_all"),
    ):
        yield Http(clause, instance, path, {"inputs": BATCH}, answer=alone(path))
    singles = [[one] for one in BATCH]
    yield Http(clause, "classifier", "/predict", {"inputs": singles}, answer=alone("/predict", singles, lambda x: [x]))
    for instance in ("sparse", "m3"):
        clause = "11.3 sparse vectors of neighbours"
        yield Http(clause, instance, "/embed_sparse", {"inputs": BATCH}, answer=alone("/embed_sparse"))
    for instance in ("embedding", "cls", "decoder"):
        clause = "11.4 token rows of neighbours"
        yield Http(clause, instance, "/embed_all", {"inputs": BATCH}, answer=alone("/embed_all"))
    equal = ["a b c", "x y z", "c b a"]
    clause = "11.5 causal models in equal batches"
    yield Http(clause, "decoder", "/embed", {"inputs": equal}, answer=alone("/embed", equal))
    yield Http(clause, "decoder", "/embed", {"inputs": BATCH}, answer=alone("/embed"))


def defects() -> Iterator[Http]:
    """§11, the rest."""
    zeros = [[0.0] * 32]
    yield Http("11.2 zero vector", "static", "/embed", {"inputs": "🙂"}, answer=zeros)
    steep = [{"score": 1.0, "label": "joy"}, {"score": 0.0, "label": "surprise"}, {"score": 0.0, "label": "anger"}]
    yield Http("11.9 softmax of large logits", "steep-classifier", "/predict", {"inputs": "fog"}, answer=steep)
    clause = "11.11 default prompt and pairs"
    three = holds(lambda told: len(told) == 3)
    yield Http(clause, "prompted-reranker", "/rerank", {"query": QUERY, "texts": PASSAGES}, answer=three)
    one = holds(lambda told: len(told) == 1)
    yield Http(clause, "prompted-reranker", "/predict", {"inputs": [QUERY, PASSAGES[0]]}, answer=one)
    names = (
        "te_request_count",
        "te_request_success",
        "te_request_failure",
        "te_request_duration",
        "te_request_tokenization_duration",
        "te_request_queue_duration",
        "te_request_inference_duration",
        "te_request_input_length",
        "te_batch_next_size",
        "te_batch_next_tokens",
        "te_embed_count",
        "te_embed_success",
        "te_queue_size",
    )
    yield Http("9.7 metrics", "embedding", "/metrics", verb="GET", answer=contains(*names), surfaces=(PORT,))


def cases() -> Iterator[Http]:
    for table in (prompts_and_texts, scores, real_values, neighbours, defects):
        yield from table()
