"""§2, and what of §1.4 gRPC shares, over `tei.v1`: the same on an instance's port and through the mux."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from teimgr.wire.pb.tei.v1 import tei_pb2 as tei
from tests.conformance.case import COST_HEADERS, PORT, AskGrpc, Replies, Rpc
from tests.conformance.checks import near, replied, same_vectors, vectors
from tests.conformance.words import (
    API_KEY,
    EMPTY,
    FULL,
    LABELS,
    LONG,
    LONG_TOKENS,
    MAX_CHARACTERS,
    NO_EMBED_ALL,
    NO_NORMALIZE,
    NO_VECTOR,
    NOT_CLASSIFIER,
    NOT_EMBEDDING,
    NOT_SPLADE,
    PASSAGES,
    QUERY,
    TEXT,
    WIDTH,
    too_long,
    too_many,
    too_wide,
)

ALONE = (PORT,)
RIGHT, LEFT = tei.TRUNCATION_DIRECTION_RIGHT, tei.TRUNCATION_DIRECTION_LEFT
SENTENCE = "the quick fox"


def embed(text: str = "fog", **options: Any) -> tei.EmbedRequest:
    return tei.EmbedRequest(inputs=text, **options)


def predict(text: str = "fog", **options: Any) -> tei.PredictRequest:
    return tei.PredictRequest(inputs=text, **options)


def pair(*texts: str, **options: Any) -> tei.PredictPairRequest:
    return tei.PredictPairRequest(inputs=texts, **options)


def rerank(*texts: str, query: str = QUERY, **options: Any) -> tei.RerankRequest:
    return tei.RerankRequest(query=query, texts=texts, **options)


def ranked(text: str, query: str = QUERY, **options: Any) -> tei.RerankStreamRequest:
    return tei.RerankStreamRequest(query=query, text=text, **options)


def encode(text: str = "fog", **options: Any) -> tei.EncodeRequest:
    return tei.EncodeRequest(inputs=text, **options)


# A method, the kind that serves it, and a message for it.
METHODS: tuple[tuple[str, str, Message], ...] = (
    ("Info", "embedding", tei.InfoRequest()),
    ("Embed", "embedding", embed()),
    ("EmbedStream", "embedding", embed()),
    ("EmbedSparse", "sparse", tei.EmbedSparseRequest(inputs="fog")),
    ("EmbedSparseStream", "sparse", tei.EmbedSparseRequest(inputs="fog")),
    ("EmbedAll", "embedding", tei.EmbedAllRequest(inputs="fog")),
    ("EmbedAllStream", "embedding", tei.EmbedAllRequest(inputs="fog")),
    ("Predict", "classifier", predict()),
    ("PredictStream", "classifier", predict()),
    ("PredictPair", "classifier", pair("fog", "rain")),
    ("PredictPairStream", "classifier", pair("fog", "rain")),
    ("Rerank", "reranker", rerank(*PASSAGES)),
    ("RerankStream", "reranker", ranked(PASSAGES[0])),
    ("Tokenize", "embedding", encode()),
    ("TokenizeStream", "embedding", encode()),
    ("Decode", "embedding", tei.DecodeRequest(ids=[2, 7, 3])),
    ("DecodeStream", "embedding", tei.DecodeRequest(ids=[2, 7, 3])),
)
COSTLY = ("Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "RerankStream")


def invalid(clause: str, instance: str, method: str, *messages: Message, details: str) -> Rpc:
    return Rpc(clause, instance, method, messages, "INVALID_ARGUMENT", details, answers=0)


def wrong_kind(clause: str, instance: str, method: str, *messages: Message, details: str) -> Rpc:
    return Rpc(clause, instance, method, messages, "FAILED_PRECONDITION", details, answers=0)


def methods() -> Iterator[Rpc]:
    """§2.1 and §2.5: every method answers, and says what it cost where it should."""
    for method, instance, message in METHODS:
        yield Rpc("2.1 every method", instance, method, [message], answers=1)
        if method in COSTLY:
            yield Rpc("2.5 initial metadata", instance, method, [message], answer=_costs)
        else:
            yield Rpc("2.5 initial metadata", instance, method, [message], answer=_no_costs)
        if method not in ("Info", "Tokenize", "TokenizeStream", "Decode", "DecodeStream"):
            yield Rpc("2.5 metadata message", instance, method, [message], answer=_metadata)
        if method.endswith("Stream") and method != "RerankStream":
            yield Rpc("2.5 streams in order", instance, method, [message] * 3, answers=3)
            yield Rpc("2.5 streams in order", instance, method, [], answers=0, surfaces=ALONE)


def _costs(replies: Replies, ask: AskGrpc) -> None:
    assert replies.metadata["x-compute-type"] == "gpu+optimized"
    figures = {key: int(replies.metadata[key]) for key in COST_HEADERS[1:]}
    said = replies.one.metadata
    assert figures["x-compute-characters"] == said.compute_chars
    assert figures["x-compute-tokens"] == said.compute_tokens
    assert figures["x-total-time"] == figures["x-compute-time"] == said.total_time_ns // 1_000_000


def _no_costs(replies: Replies, ask: AskGrpc) -> None:
    assert not set(COST_HEADERS) & set(replies.metadata)


def _metadata(replies: Replies, ask: AskGrpc) -> None:
    for message in replies.messages:
        said = message.metadata
        assert min(said.compute_chars, said.compute_tokens) > 0
        assert said.total_time_ns >= max(said.tokenization_time_ns, said.queue_time_ns, said.inference_time_ns)
        assert min(said.total_time_ns, said.inference_time_ns) > 0


def messages() -> Iterator[Rpc]:
    """§2.2: what is in the answers."""
    clause = "2.2 messages"

    def info(replies: Replies, ask: AskGrpc) -> None:
        told = replies.one
        assert (told.model_sha, told.model_dtype, told.model_type) == ("v7", "float32", tei.MODEL_TYPE_EMBEDDING)
        assert (told.max_input_length, told.max_client_batch_size, told.max_concurrent_requests) == (96, 32, 512)
        assert (told.max_batch_tokens, told.HasField("max_batch_requests")) == (16384, False)
        assert told.version
        assert told.model_id
        assert told.tokenization_workers >= 1
        assert not told.HasField("sha")
        assert not told.HasField("docker_label")

    yield Rpc(clause, "embedding", "Info", [tei.InfoRequest()], answer=info)
    for instance, kind in (
        ("classifier", tei.MODEL_TYPE_CLASSIFIER),
        ("reranker", tei.MODEL_TYPE_RERANKER),
        ("sparse", tei.MODEL_TYPE_EMBEDDING),
    ):
        answer = replied(lambda told, kind=kind: told.model_type == kind)
        yield Rpc(clause, instance, "Info", [tei.InfoRequest()], answer=answer)
    yield Rpc(clause, "embedding", "Embed", [embed()], answer=replied(lambda told: len(told.embeddings) == WIDTH))
    yield Rpc(
        clause, "embedding", "Embed", [embed(dimensions=8)], answer=replied(lambda told: len(told.embeddings) == 8)
    )
    prompted = same_vectors("Embed", embed("query: fog"))
    yield Rpc(clause, "embedding", "Embed", [embed(prompt_name="query")], answer=prompted)

    def sparse(replies: Replies, ask: AskGrpc) -> None:
        entries = replies.one.sparse_embeddings
        dense = ask("Embed", embed(TEXT, normalize=False)).one.embeddings
        assert [entry.index for entry in entries] == np.flatnonzero(dense).tolist()
        near([entry.value for entry in entries], [value for value in dense if value])

    yield Rpc(clause, "sparse", "EmbedSparse", [tei.EmbedSparseRequest(inputs=TEXT)], answer=sparse)

    def per_token(replies: Replies, ask: AskGrpc) -> None:
        rows = np.array([row.embeddings for row in replies.one.token_embeddings])
        assert rows.shape == (replies.one.metadata.compute_tokens, WIDTH)
        near(rows.mean(axis=0).tolist(), list(ask("Embed", embed(TEXT, normalize=False)).one.embeddings))

    yield Rpc(clause, "embedding", "EmbedAll", [tei.EmbedAllRequest(inputs=TEXT)], answer=per_token)

    def best_first(replies: Replies, ask: AskGrpc) -> None:
        scores = [one.score for one in replies.one.predictions]
        assert scores == sorted(scores, reverse=True)
        assert {one.label for one in replies.one.predictions} == set(LABELS)

    for message, method in (
        (predict(TEXT), "Predict"),
        (pair(TEXT, "fog"), "PredictPair"),
        (pair(TEXT), "PredictPair"),
    ):
        yield Rpc(clause, "classifier", method, [message], answer=best_first)
    raw = replied(lambda told: abs(sum(one.score for one in told.predictions) - 1) > 1e-3)
    yield Rpc(clause, "classifier", "Predict", [predict(TEXT, raw_scores=True)], answer=raw)
    tied = replied(lambda told: [one.label for one in told.predictions] == ["joy", "anger", "surprise"])
    yield Rpc(clause, "multi-label", "Predict", [predict()], answer=tied)
    ties = replied(lambda told: [(rank.index, rank.score) for rank in told.ranks] == [(2, 1.0), (1, 1.0), (0, 1.0)])
    yield Rpc(clause, "certain-reranker", "Rerank", [rerank(*PASSAGES)], answer=ties)
    texts = replied(lambda told: all(rank.text == PASSAGES[rank.index] for rank in told.ranks) and len(told.ranks) == 3)
    yield Rpc(clause, "reranker", "Rerank", [rerank(*PASSAGES, return_text=True)], answer=texts)
    none = replied(lambda told: not any(rank.HasField("text") for rank in told.ranks))
    yield Rpc(clause, "reranker", "Rerank", [rerank(*PASSAGES)], answer=none)

    def framed(replies: Replies, ask: AskGrpc) -> None:
        tokens = replies.one.tokens
        assert [(one.text, one.special) for one in (tokens[0], tokens[-1])] == [("[CLS]", True), ("[SEP]", True)]
        assert not tokens[0].HasField("start")
        assert not tokens[0].HasField("stop")
        for one in tokens[1:-1]:
            assert one.text == TEXT.encode()[one.start : one.stop].decode(errors="replace")

    yield Rpc(clause, "embedding", "Tokenize", [encode(TEXT, add_special_tokens=True)], answer=framed)
    prompt = replied(lambda told: told.tokens[-1].stop == len(f"query: {TEXT}".encode()))
    yield Rpc(clause, "embedding", "Tokenize", [encode(TEXT, prompt_name="query")], answer=prompt)


def differences() -> Iterator[Rpc]:
    """§2.3: what is not said means something else than over HTTP."""
    clause = "2.3 truncate absent is false"
    for method, instance, message in _long():
        yield invalid(clause, instance, method, message, details=too_long(LONG_TOKENS))
    cut = replied(lambda told: told.metadata.compute_tokens == 96)
    for method, instance, message in _long(truncate=True):
        yield Rpc(clause, instance, method, [message], answer=cut)
    clause = "2.3 add_special_tokens absent is false"
    bare = replied(lambda told: [(one.id, one.text, one.start, one.stop) for one in told.tokens] == [(1, "🙂", 0, 4)])
    yield Rpc(clause, "embedding", "Tokenize", [encode("🙂")], answer=bare)
    clause = "2.3 skip_special_tokens absent is false"
    whole = replied(lambda told: told.text == "[CLS] [SEP]")
    yield Rpc(clause, "embedding", "Decode", [tei.DecodeRequest(ids=[2, 3])], answer=whole)
    nothing = replied(lambda told: told.text == "")
    yield Rpc(clause, "embedding", "Decode", [tei.DecodeRequest(ids=[2, 3], skip_special_tokens=True)], answer=nothing)
    clause = "2.3 normalize absent is true"
    yield Rpc(clause, "embedding", "Embed", [embed()], answer=_length(one=True))
    yield Rpc(clause, "embedding", "Embed", [embed(normalize=True)], answer=_length(one=True))
    yield Rpc(clause, "embedding", "Embed", [embed(normalize=False)], answer=_length(one=False))


def _long(**options: Any) -> tuple[tuple[str, str, Message], ...]:
    return (
        ("Embed", "embedding", embed(LONG, **options)),
        ("EmbedStream", "embedding", embed(LONG, **options)),
        ("EmbedSparse", "sparse", tei.EmbedSparseRequest(inputs=LONG, **options)),
        ("EmbedAll", "embedding", tei.EmbedAllRequest(inputs=LONG, **options)),
        ("Predict", "classifier", predict(LONG, **options)),
    )


def _length(one: bool) -> Any:
    def check(replies: Replies, ask: AskGrpc) -> None:
        assert np.allclose(np.linalg.norm(vectors(replies)), 1, atol=1e-5) is one

    return check


def faults() -> Iterator[Rpc]:
    """§2.4"""
    clause = "2.4 Empty"
    for method, instance, message in (
        ("Embed", "embedding", embed("")),
        ("EmbedStream", "embedding", embed("")),
        ("EmbedSparse", "sparse", tei.EmbedSparseRequest()),
        ("EmbedAll", "embedding", tei.EmbedAllRequest()),
        ("Predict", "classifier", predict("")),
        ("PredictPair", "classifier", pair("", "")),
        ("Rerank", "reranker", rerank("fog", "", query="")),
        ("Tokenize", "embedding", encode("")),
    ):
        yield invalid(clause, instance, method, message, details=EMPTY)
    nothing = "Input validation error: `input_ids` cannot be empty"
    yield invalid(clause, "embedding", "Decode", tei.DecodeRequest(), details=nothing)
    clause = "2.4 Validation"
    for method in ("Embed", "EmbedStream"):
        details = "Input validation error: `dimensions` should be positive"
        yield invalid(clause, "embedding", method, embed(dimensions=0), details=details)
        details = "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
        yield invalid(clause, "embedding", method, embed(dimensions=WIDTH + 1), details=details)
        yield invalid(clause, "embedding", method, embed(FULL + "a"), details=too_long(97))
        wide = embed("a" * (MAX_CHARACTERS + 1))
        yield invalid(clause, "embedding", method, wide, details=too_wide(MAX_CHARACTERS + 1))
        none = (
            "Input validation error: `default-prompt-name` is set to `query` but no prompts were found in the "
            "Sentence Transformers configuration"
        )
        yield invalid(clause, "cls", method, embed(prompt_name="query"), details=none)
    most = replied(lambda told: told.metadata.compute_tokens == 96)
    yield Rpc(clause, "embedding", "Embed", [embed(FULL)], answer=most)
    yield Rpc(clause, "embedding", "Embed", [embed(dimensions=WIDTH)])
    yield invalid(clause, "reranker", "Rerank", rerank(*["fog"] * 33), details=too_many(33))
    left = same_vectors("Embed", embed(FULL))
    both = embed("fog " * 300 + FULL, truncate=True, truncation_direction=LEFT)
    yield Rpc(clause, "embedding", "Embed", [both], answer=left)
    right = same_vectors("Embed", embed(FULL))
    both = embed(LONG + "fog " * 300, truncate=True, truncation_direction=RIGHT)
    yield Rpc(clause, "embedding", "Embed", [both], answer=right)
    clause = "2.4 rerank with no texts"
    for instance in ("reranker", "embedding", "classifier"):
        yield invalid(clause, instance, "Rerank", rerank(), details="`texts` cannot be empty")
    clause = "2.4 PredictPair with not one or two"
    for count in (0, 3):
        details = f"`inputs` must have a single or two elements. Given: {count}"
        yield invalid(clause, "classifier", "PredictPair", pair(*["fog"] * count), details=details)
        yield invalid(clause, "classifier", "PredictPairStream", pair(*["fog"] * count), details=details)
    clause = "2.4 unknown truncation_direction"
    for method, instance, message in (
        ("Embed", "embedding", embed(truncation_direction=7)),  # type: ignore[arg-type]
        ("Predict", "classifier", predict(truncation_direction=7)),
        ("Rerank", "reranker", rerank("fog", truncation_direction=7)),
    ):
        yield Rpc(clause, instance, method, [message], "INVALID_ARGUMENT", "*truncation_direction*")
    clause = "2.4 RerankStream without messages"
    yield invalid(clause, "reranker", "RerankStream", details="Empty stream")
    clause = "2.4 bad key"
    for method, message in (("Embed", embed()), ("EmbedStream", embed()), ("Info", tei.InfoRequest())):
        for given in ({}, *({"authorization": text} for text in (API_KEY, "Bearer no", f"bearer {API_KEY}"))):
            said: dict[str, Any] = {"metadata": given, "surfaces": ALONE}
            yield Rpc(clause, "locked", method, [message], "UNAUTHENTICATED", "No valid auth token", **said)
        right = {"authorization": f"Bearer {API_KEY}"}
        yield Rpc(clause, "locked", method, [message], metadata=right, surfaces=ALONE)


EMBEDDINGS = ("embedding", "m3", "static", "decoder")
NOT_FOR_RANKS, NO_RERANKER = "model is not a classifier model", "model is not a re-ranker model"
SCORERS = ("classifier", "reranker")


def kinds() -> Iterator[Rpc]:
    """§2.4: methods on kinds that they are not for."""
    clause = "2.4 wrong kind"
    on_scorers = dict.fromkeys(SCORERS, NOT_EMBEDDING)
    table: Sequence[tuple[str, Message, dict[str, str]]] = (
        ("Embed", embed(), on_scorers | {"sparse": NO_NORMALIZE, "multi-vector": NO_VECTOR}),
        ("Embed", embed(normalize=True), {"sparse": NO_NORMALIZE}),
        (
            "EmbedSparse",
            tei.EmbedSparseRequest(inputs="a"),
            dict.fromkeys((*SCORERS, "embedding", "static", "decoder", "multi-vector"), NOT_SPLADE),
        ),
        ("EmbedAll", tei.EmbedAllRequest(inputs="a"), on_scorers | {"sparse": NO_EMBED_ALL}),
        ("Predict", predict(), dict.fromkeys((*EMBEDDINGS, "sparse", "multi-vector"), NOT_CLASSIFIER)),
        ("PredictPair", pair("a", "b"), dict.fromkeys((*EMBEDDINGS, "sparse", "multi-vector"), NOT_CLASSIFIER)),
    )
    for method, message, refusals in table:
        for instance, details in refusals.items():
            yield wrong_kind(clause, instance, method, message, details=details)
            yield wrong_kind(clause, instance, f"{method}Stream", message, details=details)
    yield Rpc(clause, "sparse", "Embed", [embed(normalize=False)])
    clause = "2.4 rerank on other kinds"
    refusals = dict.fromkeys((*EMBEDDINGS, "sparse", "multi-vector"), NOT_FOR_RANKS) | {"classifier": NO_RERANKER}
    for instance, details in refusals.items():
        yield wrong_kind(clause, instance, "Rerank", rerank("a"), details=details)
        yield wrong_kind(clause, instance, "RerankStream", ranked("a"), details=details)


def streams() -> Iterator[Rpc]:
    """§2.5"""
    clause = "2.5 streams in order"

    def in_order(replies: Replies, ask: AskGrpc) -> None:
        assert [message.metadata.compute_chars for message in replies.messages] == list(range(1, 201))

    texts = [embed("a" * n, truncate=True) for n in range(1, 201)]
    yield Rpc(clause, "embedding", "EmbedStream", texts, answer=in_order)
    clause = "2.5 an error ends the stream"
    mixed = [embed("fog"), embed("dog"), embed(""), embed("rain")]
    yield Rpc(clause, "embedding", "EmbedStream", mixed, "INVALID_ARGUMENT", EMPTY, answers=2)
    long = [encode("fog"), encode(""), encode("fog")]
    yield Rpc(clause, "embedding", "TokenizeStream", long, "INVALID_ARGUMENT", EMPTY, answers=1)
    clause = "2.5 RerankStream"

    def as_one_call(replies: Replies, ask: AskGrpc) -> None:
        expected = ask("Rerank", rerank(*PASSAGES, raw_scores=True)).one.ranks
        told = replies.one.ranks
        assert [rank.index for rank in told] == [rank.index for rank in expected]
        near([rank.score for rank in told], [rank.score for rank in expected])
        assert all(rank.text == PASSAGES[rank.index] for rank in told)

    # What the first message says of these two counts, and what the others say does not.
    first = ranked(PASSAGES[0], raw_scores=True, return_text=True)
    yield Rpc(clause, "reranker", "RerankStream", [first, *map(ranked, PASSAGES[1:])], answer=as_one_call)
    plain = replied(lambda told: not any(rank.HasField("text") for rank in told.ranks) and len(told.ranks) == 2)
    later = [ranked("fog"), ranked("dog", raw_scores=True, return_text=True)]
    yield Rpc(clause, "reranker", "RerankStream", later, answer=plain)

    def own_query(replies: Replies, ask: AskGrpc) -> None:
        told = {rank.index: rank.score for rank in replies.one.ranks}
        for index, query in enumerate((QUERY, "fog")):
            [rank] = ask("Rerank", rerank("dog", query=query)).one.ranks
            near(told[index], rank.score)

    yield Rpc(clause, "reranker", "RerankStream", [ranked("dog"), ranked("dog", query="fog")], answer=own_query)


def cases() -> Iterator[Rpc]:
    for table in (methods, messages, differences, faults, kinds, streams):
        yield from table()
