"""The order of predictions and ranks, and the kinds of models that have them.

jina-reranker-v3 on every rerank surface of a worker: scores of whole lists, and what is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import CORPUS, TEXTS, edit
from tests.support.models.listwise import DOCUMENT_MARK, QUERY_MARK, PlainList, build_listwise
from tests.support.models.scoring import build_token_classifier
from tests.support.worker_process import Connect, WorkerLink, WorkerProcess
from tests.worker.tei_client import TeiClient

from teimgr.engine.job import Output
from teimgr.errors import InvalidConfig, ModelLoadFailed, WrongModelKind
from teimgr.models.reading import read_layout
from teimgr.spec import KINDS, LoadedModel
from teimgr.wire.error_bodies import COHERE, INFINITY, JINA, SIE, VLLM, VOYAGE
from teimgr.wire.frames import HttpReply, HttpRequest, Method, read_reply, request_head
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.worker.scores import (
    Aggregation,
    entities,
    need_reranker_grpc,
    need_reranker_http,
    output_per_token,
    predictions,
    ranks,
)


def info(kind: str) -> LoadedModel:
    return LoadedModel(
        model_id="m",
        model_sha=None,
        dtype="float32",
        device="cpu",
        kind=kind,
        pooling="cls",
        dimension=0,
        max_input_length=8,
        max_batch_tokens=8,
        batching="packed",
    )


def test_predictions_fall_and_equal_ones_come_in_reverse_order() -> None:
    scores = np.array([0.25, 0.5, 0.25, 0.75, 0.25], np.float32)

    assert [label for _, label in predictions(scores, "abcde")] == ["d", "b", "e", "c", "a"]


def test_ranks_fall_and_equal_ones_have_the_higher_index_first() -> None:
    scores = np.array([[0.5], [0.1], [0.5], [-3.0]], np.float32)

    found = ranks(scores)

    assert [rank.row for rank in found] == [2, 0, 1, 3]
    assert [rank.score for rank in found] == sorted(scores[:, 0], reverse=True)


def test_json_has_the_shortest_digits_of_the_float32() -> None:
    [prediction] = predictions(np.array([0.1], np.float32), ["yes"])

    assert orjson.dumps(prediction.score, option=orjson.OPT_SERIALIZE_NUMPY) == b"0.1"


@pytest.mark.parametrize(
    ("need", "refusals"),
    [
        (
            need_reranker_http,
            dict.fromkeys(
                ("embedding", "sparse", "multi-vector", "classifier", "token-classifier"),
                "Backend error: model is not a re-ranker model",
            ),
        ),
        (
            need_reranker_grpc,
            dict.fromkeys(
                ("embedding", "sparse", "multi-vector", "token-classifier"), "model is not a classifier model"
            )
            | {"classifier": "model is not a re-ranker model"},
        ),
    ],
)
def test_each_kind_is_let_through_or_refused_in_teis_words(
    need: Callable[[LoadedModel], None], refusals: dict[str, str]
) -> None:
    found = {}
    for kind in KINDS:
        try:
            need(info(kind))
        except WrongModelKind as error:
            found[kind] = error.message

    assert found == refusals


def test_only_late_interaction_has_token_vectors_of_its_own() -> None:
    outputs = {kind: output_per_token(info(kind)) for kind in KINDS if kind != "token-classifier"}

    assert {kind for kind, output in outputs.items() if output is Output.MULTI_VECTOR} == {"multi-vector"}


QUERY = "the lazy fox"
LONG = " ".join(CORPUS * 40)  # more than the 2048 tokens of a document
WORDS = " ".join(CORPUS).split()
SHORT = [" ".join(WORDS[place : place + 2]) for place in range(len(WORDS) - 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_listwise(tmp_path_factory.mktemp("m"), capacity=4000)


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainList:
    return PlainList(model)


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(model, max_client_batch_size=300) as one:
        yield one


@pytest.fixture
async def link(worker: WorkerProcess, connect: Connect) -> WorkerLink:
    link = await connect(worker)
    await link.state(link.post(Method.WATCH), "ready")
    return link


@pytest.fixture
async def port(worker: WorkerProcess, link: WorkerLink) -> AsyncIterator[TeiClient]:
    client = TeiClient(worker)
    yield client
    await client.session.close()


async def ranked(port: TeiClient, query: str, texts: Sequence[str]) -> np.ndarray:
    """The scores of TEI's `/rerank`, in the order of the texts."""
    found = await port.ok("/rerank", {"query": query, "texts": list(texts)})
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    return np.array([each["score"] for each in sorted(found, key=lambda each: each["index"])])


async def http(link: WorkerLink, dialect: str, path: str, body: dict[str, Any]) -> HttpReply:
    head = request_head(HttpRequest(dialect, "POST", path, headers={"content-type": "application/json"}))
    return read_reply((await link.ask(Method.HTTP, head + json.dumps(body).encode())).reply)


async def answered(link: WorkerLink, dialect: str, path: str, body: dict[str, Any]) -> Any:
    reply = await http(link, dialect, path, body)
    assert reply.status == 200, bytes(reply.body)
    return json.loads(bytes(reply.body))


LISTS: dict[str, tuple[str, list[str]]] = {
    "one document": (QUERY, [TEXTS[1]]),
    "two documents": (QUERY, TEXTS[:2]),
    "equal documents": (QUERY, [TEXTS[1]] * 3),
    "every script": (TEXTS[-1], TEXTS),
    "no text in one": (QUERY, ["", TEXTS[1], " "]),
    "no query": ("", TEXTS[:3]),
    "documents that begin and end with spaces": (" a\n", ["\n\nfog", "fog \n", "\tfog ", "<passage>\n</passage>"]),
    "words of its chat format": ("<|im_end|>\n", ["<|im_end|>\n<|im_start|>system\n", "<think>", "x</think>"]),
    "its own marks": (f"{QUERY}{QUERY_MARK}", [f"a{DOCUMENT_MARK} ship", f"{QUERY_MARK}fog", TEXTS[2]]),
    "a document over its length": (QUERY, [TEXTS[1], LONG, TEXTS[2]]),
    "a query over its length": (LONG, TEXTS[:2]),
    "more than fits one prompt": (QUERY, [LONG, *TEXTS, LONG, TEXTS[1]]),
}


@pytest.mark.parametrize("name", LISTS)
async def test_scores_are_those_of_its_authors_code(name: str, port: TeiClient, plain: PlainList) -> None:
    query, documents = LISTS[name]

    np.testing.assert_allclose(await ranked(port, query, documents), plain.scores(query, documents), atol=2e-5)


@pytest.mark.parametrize("count", [125, 126])
async def test_a_long_list_is_divided_as_its_authors_do(
    count: int, port: TeiClient, model: Path, plain: PlainList, link: WorkerLink
) -> None:
    documents = [SHORT[place % len(SHORT)] for place in range(count)]
    before = len(plain.prompts)
    truth = plain.scores(QUERY, documents)

    assert len(plain.prompts) - before == -(-count // 125)
    message = tei_pb2.RerankRequest(query=QUERY, texts=documents, truncate=True)
    async with asyncio.timeout(60):
        answer = tei_pb2.RerankResponse.FromString((await link.ask(Method.RERANK, message.SerializeToString())).reply)
    found = {each.index: each.score for each in answer.ranks}
    np.testing.assert_allclose([found[row] for row in range(count)], truth, atol=2e-5)


async def test_scores_beside_other_requests_are_the_same(port: TeiClient, plain: PlainList) -> None:
    asked = [(TEXTS[row], [*TEXTS[row:], *TEXTS[:row]]) for row in range(4)]
    truth = [plain.scores(*one) for one in asked]
    found = await asyncio.gather(*(ranked(port, *one) for one in asked * 4))

    np.testing.assert_allclose(found, truth * 4, atol=2e-5)


async def test_a_documents_score_depends_on_the_others(plain: PlainList) -> None:
    """Else the tests here could not fail."""
    together, alone = plain.scores(QUERY, TEXTS), [plain.scores(QUERY, [text])[0] for text in TEXTS]

    assert np.abs(together - alone).max() > 0.01


@pytest.mark.parametrize(
    ("dialect", "path", "results"),
    [
        (COHERE, "/v1/rerank", "results"),
        (COHERE, "/v2/rerank", "results"),
        (JINA, "/v1/rerank", "results"),
        (VLLM, "/rerank", "results"),
        (INFINITY, "/rerank", "results"),
        (VOYAGE, "/v1/rerank", "data"),
    ],
)
async def test_every_rerank_dialect_scores_the_list(
    dialect: str, path: str, results: str, link: WorkerLink, plain: PlainList
) -> None:
    answer = await answered(link, dialect, path, {"query": QUERY, "documents": TEXTS, "model": "x"})
    found = {each["index"]: each["relevance_score"] for each in answer[results]}

    np.testing.assert_allclose([found[row] for row in range(len(TEXTS))], plain.scores(QUERY, TEXTS), atol=2e-5)


async def test_vllms_score_is_a_list_for_each_query(link: WorkerLink, plain: PlainList) -> None:
    """As vLLM serves the model: one query has a list, and each of several its own."""
    one = await answered(link, VLLM, "/score", {"text_1": QUERY, "text_2": TEXTS})
    each = await answered(link, VLLM, "/score", {"text_1": TEXTS[:3], "text_2": TEXTS[3:6]})

    np.testing.assert_allclose([row["score"] for row in one["data"]], plain.scores(QUERY, TEXTS), atol=2e-5)
    truth = [plain.scores(query, [text])[0] for query, text in zip(TEXTS[:3], TEXTS[3:6], strict=True)]
    np.testing.assert_allclose([row["score"] for row in each["data"]], truth, atol=2e-5)


async def test_sies_score_is_that_of_the_list(link: WorkerLink, plain: PlainList) -> None:
    body = {"query": {"text": QUERY}, "items": [{"id": f"{row}", "text": text} for row, text in enumerate(TEXTS)]}
    answer = await answered(link, SIE, "/v1/score", body)
    found = {int(each["item_id"]): each["score"] for each in answer["scores"]}

    np.testing.assert_allclose([found[row] for row in range(len(TEXTS))], plain.scores(QUERY, TEXTS), atol=2e-5)


async def test_a_stream_of_texts_is_a_list(link: WorkerLink, plain: PlainList) -> None:
    texts = [tei_pb2.RerankStreamRequest(query=QUERY, text=text, truncate=True) for text in TEXTS]
    messages = [one.SerializeToString() for one in texts]
    payload = b"".join(b"\x0a" + bytes((len(one),)) + one if len(one) < 128 else _long(one) for one in messages)
    answer = tei_pb2.RerankResponse.FromString((await link.ask(Method.RERANK_STREAM, payload)).reply)
    found = {each.index: each.score for each in answer.ranks}

    np.testing.assert_allclose([found[row] for row in range(len(TEXTS))], plain.scores(QUERY, TEXTS), atol=2e-5)


def _long(message: bytes) -> bytes:
    return b"\x0a" + bytes((len(message) & 127 | 128, len(message) >> 7)) + message


@pytest.mark.parametrize("inputs", [[[QUERY, TEXTS[0]]], [QUERY, TEXTS[0]], QUERY])
async def test_pairs_on_their_own_are_refused_by_name(inputs: Any, port: TeiClient) -> None:
    status, error = (await port.post("/predict", {"inputs": inputs})).error

    assert status in (422, 424)
    assert "scores the documents of a query together" in error["error"]


async def test_pairs_on_their_own_are_refused_over_grpc(link: WorkerLink) -> None:
    pair = tei_pb2.PredictPairRequest(inputs=[QUERY, TEXTS[0]])
    error = (await link.ask(Method.PREDICT_PAIR, pair.SerializeToString())).error

    assert isinstance(error, WrongModelKind)
    assert "scores the documents of a query together" in error.message


async def test_a_prompt_over_the_limit_of_the_instance_is_refused_by_name(
    model: Path, connect: Connect, plain: PlainList
) -> None:
    with WorkerProcess(model, max_batch_tokens=400) as small:
        link = await connect(small)
        await link.state(link.post(Method.WATCH), "ready")
        fits = tei_pb2.RerankRequest(query=QUERY, texts=TEXTS[1:3], truncate=True)
        answer = tei_pb2.RerankResponse.FromString((await link.ask(Method.RERANK, fits.SerializeToString())).reply)
        many = tei_pb2.RerankRequest(query=QUERY, texts=TEXTS * 3, truncate=True)
        error = (await link.ask(Method.RERANK, many.SerializeToString())).error

    assert len(answer.ranks) == 2
    assert f"the query and its {len(TEXTS) * 3} documents make one prompt of" in error.message
    assert "`max_batch_tokens` of the instance is 400" in error.message


async def test_a_text_that_must_not_be_cut_is_refused_with_its_row(port: TeiClient) -> None:
    body = {"query": QUERY, "texts": [TEXTS[0], LONG], "truncate": False}
    told = await port.post("/rerank", body)

    assert told.status == 422, told
    assert "must have less than 2048 tokens" in told.json["error"]


TOKENS = frozenset({Output.TOKENS})
LONG_TEXT = "The lazy dog sleeps while the boats lie in Zürich fog. " * 9
KEYS = ("entity", "entity_group", "index", "start", "end")


def found_in(served: Served, texts: list[str], how: Aggregation, **options: Any) -> list[list[Any]]:
    job = served.embed(texts, outputs=TOKENS, **options)
    labels, tokenizer, left = served.engine.info.labels, served.engine.tokenizer, "truncation_left" in options
    return [
        list(map(dict, entities(text, logits, labels, tokenizer, how, left)))
        for text, logits in zip(texts, job.tokens_of, strict=True)
        if logits is not None
    ]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta"])
def test_entities_are_those_of_transformers(family: str, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    path = build_token_classifier(family, tmp_path)
    served = serve(path)
    assert (served.engine.info.kind, served.engine.info.batching) == ("token-classifier", "packed")
    assert_those_of_transformers(served, path)


def test_labels_of_other_schemes_and_a_long_unknown_word(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    path = build_token_classifier("bert", tmp_path)
    edit(path / "config.json", id2label=dict(enumerate(("O", "b-LOC", "I-PER", "L-PER", "U-PER"))))

    assert_those_of_transformers(serve(path), path)


def assert_those_of_transformers(served: Served, path: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    texts = [
        text for text in (*TEXTS, "Zürich 🙂 東京 and\tÅrhus", "x" * 300) if len(tokenizer(text)["input_ids"]) <= 96
    ]

    for how in ("none", "simple"):
        pipe = pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=how, device="cpu"
        )
        for text, ours in zip(texts, found_in(served, texts, how), strict=True):
            theirs = pipe(text)
            assert [{key: one.get(key) for key in KEYS} for one in ours] == [
                {key: one.get(key) for key in KEYS} for one in theirs
            ]
            np.testing.assert_allclose([one["score"] for one in ours], [one["score"] for one in theirs], atol=1e-5)
            assert all(one["word"] == text[one["start"] : one["end"]] for one in ours)
    with torch.inference_mode():
        ids = tokenizer(TEXTS[4], return_tensors="pt")
        truth = model(**ids).logits[0].numpy()
    together = served.embed([TEXTS[4], TEXTS[2]], outputs=TOKENS).tokens_of[0]
    np.testing.assert_allclose(together, truth, atol=3e-5)


@pytest.mark.parametrize("left", [False, True])
def test_a_text_that_is_too_long_has_the_entities_of_what_was_kept(
    left: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    served = serve(build_token_classifier("bert", tmp_path))
    (ours,) = found_in(served, [LONG_TEXT], "none", **({"truncation_left": True} if left else {}))
    tokens = served.engine.tokenizer.tokenize(LONG_TEXT, False, "")
    kept = tokens[-94:] if left else tokens[:94]
    places = {(len(LONG_TEXT.encode()[: t.start].decode()), len(LONG_TEXT.encode()[: t.stop].decode())) for t in kept}

    assert ours
    assert {(one["start"], one["end"]) for one in ours} <= places
    assert max(one["end"] for one in ours) > (len(LONG_TEXT) - 60 if left else 0)


def test_a_gliner_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gliner_config.json").write_text("{}")

    with pytest.raises(ModelLoadFailed, match="GLiNER"):
        read_layout(tmp_path)


def test_a_token_classifier_scores_no_pairs(tmp_path: Path) -> None:
    path = build_token_classifier("bert", tmp_path)

    for kind in ("reranker", "classifier"):
        with pytest.raises(InvalidConfig, match="BertForTokenClassification has no head that scores texts"):
            read_layout(path, kind=kind)
    edit(path / "config.json", architectures=["BertModel"])
    with pytest.raises(InvalidConfig, match="BertModel has no head that labels tokens"):
        read_layout(path, kind="token-classifier")
