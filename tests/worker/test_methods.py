"""Every method over frames, on a worker of every kind: what is answered, and in which words the rest is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from tests.support.models import (
    LABELS,
    TOKEN_WIDTH,
    WIDTH,
    build,
    build_classifier,
    build_cross_encoder,
    build_m3,
    build_multi_vector,
    build_splade,
)
from tests.support.models.dual_encoders import build_gme, file_of, noise
from tests.support.polling import eventually
from tests.support.worker_process import Answer, Connect, WorkerLink, WorkerProcess, arrow
from tests.worker.test_dispatcher import FakeEngine, dispatching

from teimgr.engine.engine import Engine
from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair
from teimgr.engine.text.tokenizer import TokenSpan
from teimgr.errors import Code, TeimgrError
from teimgr.observability.memory import young_collections_alone
from teimgr.spec import MAX_TEXT_BYTES, Kind, WorkerSpec
from teimgr.wire.frames import Flag, HttpRequest, Method, Timings, request_head
from teimgr.wire.json_scan import Steps
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2, frames_pb2
from teimgr.worker import calls, methods
from teimgr.worker.arrow_calls import with_placeholder_results
from teimgr.worker.calls import CallReply, MethodCall
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.methods import embed_all_response, embed_response, embed_sparse_response

INSIDE = 5  # calls: one running and four behind it, of `max_concurrent_requests=1`
LONG = "fog " * 200
DOCUMENT_LENGTH = 40  # of late interaction, which has a limit for each role

BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "embedding": lambda folder: build("bert", folder),
    "m3": build_m3,
    "sparse": lambda folder: build_splade("bert", folder),
    "multi-vector": lambda folder: build_multi_vector("bert", folder, document_length=DOCUMENT_LENGTH),
    "reranker": lambda folder: build_cross_encoder("bert", folder),
    "classifier": lambda folder: build_classifier("bert", folder),
}

Links = Mapping[str, WorkerLink]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    limits: dict[str, Any] = {"max_concurrent_requests": 1, "max_waiting": 4, "max_client_batch_size": 4}
    limits |= {"max_message_bytes": 8192}
    with ExitStack() as stack:
        folders = {kind: make(tmp_path_factory.mktemp("m")) for kind, make in BUILDERS.items()}
        yield {kind: stack.enter_context(WorkerProcess(folder, **limits)) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def roomy_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    """Workers that take messages of the default size."""
    with ExitStack() as stack:
        folders = {
            kind: BUILDERS[kind](tmp_path_factory.mktemp("m")) for kind in ("embedding", "reranker", "classifier")
        }
        yield {kind: stack.enter_context(WorkerProcess(folder)) for kind, folder in folders.items()}


@pytest.fixture
async def links(workers: dict[str, WorkerProcess], connect: Connect) -> Links:
    """A link to each of the workers, all of them ready."""
    found = {kind: await connect(worker) for kind, worker in workers.items()}
    for link in found.values():
        await link.state(link.post(Method.WATCH), "ready")
    return found


def embed(text: str = "fog", **options: Any) -> bytes:
    return tei_pb2.EmbedRequest(inputs=text, **options).SerializeToString()


def sparse(text: str = "fog", **options: Any) -> bytes:
    return tei_pb2.EmbedSparseRequest(inputs=text, **options).SerializeToString()


def every(text: str = "fog", **options: Any) -> bytes:
    return tei_pb2.EmbedAllRequest(inputs=text, **options).SerializeToString()


def predict(text: str = "fog", **options: Any) -> bytes:
    return tei_pb2.PredictRequest(inputs=text, **options).SerializeToString()


def pair(*texts: str, **options: Any) -> bytes:
    return tei_pb2.PredictPairRequest(inputs=texts or ("fog", "dog"), **options).SerializeToString()


def rerank(*texts: str, query: str = "the lazy dog", **options: Any) -> bytes:
    request = tei_pb2.RerankRequest(query=query, texts=texts or ("fog", "dog"), **options)
    return request.SerializeToString()


def message(query: str, text: str, **options: Any) -> tei_pb2.RerankStreamRequest:
    return tei_pb2.RerankStreamRequest(query=query, text=text, **options)


def stream(*messages: tei_pb2.RerankStreamRequest) -> bytes:
    return frames_pb2.RerankPairs(requests=messages or [message("dog", "fog")]).SerializeToString()


def parsed(kind: Callable[[], Any], answer: Answer) -> Any:
    """The reply as a message, once its metadata is equal to the frame's timings."""
    reply = kind()
    reply.ParseFromString(answer.reply)
    assert _figures(reply.metadata) == tuple(answer.timings)
    return reply


def _figures(metadata: Message) -> tuple[int, ...]:
    return tuple(getattr(metadata, field.name) for field in metadata.DESCRIPTOR.fields)


def vector(answer: Answer) -> NDArray[np.float32]:
    return np.array(parsed(tei_pb2.EmbedResponse, answer).embeddings, np.float32)


def matrix(answer: Answer) -> NDArray[np.float32]:
    rows = parsed(tei_pb2.EmbedAllResponse, answer).token_embeddings
    return np.array([row.embeddings for row in rows], np.float32)


def labelled(answer: Answer) -> dict[str, float]:
    return {item.label: item.score for item in parsed(tei_pb2.PredictResponse, answer).predictions}


def ranked(answer: Answer) -> dict[int, float]:
    return {rank.index: rank.score for rank in parsed(tei_pb2.RerankResponse, answer).ranks}


# Which kinds serve which methods.

NO_EMBEDDING = "Backend error: Model is not an embedding model"
NO_VECTOR = (
    "Backend error: Model is not an embedding model with one vector per text: `embed_all` gives its vectors per token"
)
NO_SPLADE = "Backend error: Model is not an embedding model with SPLADE pooling"
NO_CLASSIFIER = "Backend error: Model is not a classifier model"
NO_NORMALIZE = "Backend error: `normalize` is not available for SPLADE models"
NO_EMBED_ALL = "Backend error: `embed_all` is not available for SPLADE models"
NOT_FOR_RANKS = "model is not a classifier model"
NO_RERANKER = "model is not a re-ranker model"

KINDS = tuple(BUILDERS)
SCORING: dict[str, str | None] = dict.fromkeys(KINDS, NO_CLASSIFIER) | {"reranker": None, "classifier": None}
RANKING: dict[str, str | None] = dict.fromkeys(KINDS, NOT_FOR_RANKS) | {"reranker": None, "classifier": NO_RERANKER}
UNPOOLED: dict[str, str | None] = dict.fromkeys(KINDS, NO_EMBEDDING) | {
    "embedding": None,
    "m3": None,
    "multi-vector": None,
    "sparse": NO_EMBED_ALL,
}
DENSE: dict[str, str | None] = UNPOOLED | {"multi-vector": NO_VECTOR, "sparse": NO_NORMALIZE}

MATRIX = (
    (Method.EMBED, embed(), DENSE),
    (Method.EMBED, embed(normalize=True), DENSE),
    (Method.EMBED, embed(normalize=False), DENSE | {"sparse": None}),
    (Method.EMBED_SPARSE, sparse(), dict.fromkeys(KINDS, NO_SPLADE) | {"sparse": None, "m3": None}),
    (Method.EMBED_ALL, every(), UNPOOLED),
    (Method.PREDICT, predict(), SCORING),
    (Method.PREDICT_PAIR, pair(), SCORING),
    (Method.RERANK, rerank(), RANKING),
    (Method.RERANK, rerank(*["fog"] * 9), RANKING | {"reranker": "batch size 9 > maximum allowed batch size 4"}),
    (Method.RERANK_STREAM, stream(), RANKING),
    (Method.TOKENIZE, tei_pb2.EncodeRequest(inputs="fog").SerializeToString(), dict.fromkeys(KINDS)),
    (Method.DECODE, tei_pb2.DecodeRequest(ids=[2]).SerializeToString(), dict.fromkeys(KINDS)),
    (Method.INFO, b"", dict.fromkeys(KINDS)),
)


@pytest.mark.parametrize(("method", "payload", "refusals"), MATRIX)
async def test_every_kind_serves_a_method_or_says_why_not(
    links: Links, method: Method, payload: bytes, refusals: dict[str, str | None]
) -> None:
    for kind in KINDS:
        answer = await links[kind].ask(method, payload)

        if (text := refusals[kind]) is None:
            assert answer.reply, kind
        else:
            assert answer.error.message == text, kind
            wrong_kind = not text.startswith("batch size")
            assert answer.error.code is (Code.WRONG_MODEL_KIND if wrong_kind else Code.INVALID_INPUT), kind


async def test_info_has_our_own_fields_behind_those_of_tei(links: Links) -> None:
    reply = (await links["embedding"].ask(Method.INFO)).reply
    ours = arrow_pb2.InfoAddition.FromString(reply)
    assert (list(ours.modalities), ours.fused) == (["text"], False)
    of_tei = tei_pb2.InfoResponse.FromString(reply)
    of_tei.DiscardUnknownFields()
    assert reply == of_tei.SerializeToString() + arrow_pb2.InfoAddition(modalities=["text"]).SerializeToString()


async def test_info_says_which_of_teis_three_types_a_kind_is(links: Links) -> None:
    infos = {kind: tei_pb2.InfoResponse.FromString((await link.ask(Method.INFO)).reply) for kind, link in links.items()}

    types = {kind: tei_pb2.ModelType.Name(info.model_type) for kind, info in infos.items()}
    assert types == dict.fromkeys(KINDS, "MODEL_TYPE_EMBEDDING") | {
        "reranker": "MODEL_TYPE_RERANKER",
        "classifier": "MODEL_TYPE_CLASSIFIER",
    }


# Faults of a request, the same on every method.

REFUSING: tuple[tuple[str, Method, Callable[..., bytes]], ...] = (
    ("embedding", Method.EMBED, embed),
    ("sparse", Method.EMBED_SPARSE, sparse),
    ("multi-vector", Method.EMBED_ALL, every),
    ("classifier", Method.PREDICT, predict),
    ("classifier", Method.PREDICT_PAIR, lambda text="fog", **options: pair(text, "dog", **options)),
    ("reranker", Method.RERANK, lambda text="fog", **options: rerank(text, **options)),
    ("reranker", Method.RERANK_STREAM, lambda text="fog", **options: stream(message("dog", text, **options))),
)


@pytest.mark.parametrize(("kind", "method", "request_of"), REFUSING)
async def test_a_long_text_is_cut_only_where_that_was_asked_for(
    links: Links, kind: str, method: Method, request_of: Callable[..., bytes]
) -> None:
    info = tei_pb2.InfoResponse.FromString((await links[kind].ask(Method.INFO)).reply)
    limit = DOCUMENT_LENGTH if kind == "multi-vector" else info.max_input_length
    refused = await links[kind].ask(method, request_of(LONG))
    cut = await links[kind].ask(method, request_of(LONG, truncate=True, truncation_direction=1))

    assert refused.error.code is Code.INVALID_INPUT
    assert "must have less than" in refused.error.message
    assert cut.timings.tokens == limit


@pytest.mark.parametrize(("kind", "method", "request_of"), REFUSING)
async def test_an_unknown_direction_and_bytes_that_are_no_message_are_refused(
    links: Links, kind: str, method: Method, request_of: Callable[..., bytes]
) -> None:
    direction = await links[kind].ask(method, request_of(truncation_direction=7))
    junk = await links[kind].ask(method, b"\xff\xff")

    assert direction.error.code is junk.error.code is Code.INVALID_INPUT
    assert "truncation_direction" in direction.error.message


@pytest.mark.parametrize(
    ("kind", "method", "payload", "code", "text"),
    [
        ("embedding", Method.EMBED_ALL, every(""), Code.EMPTY_INPUT, "`inputs` cannot be empty"),
        ("sparse", Method.EMBED_SPARSE, sparse(""), Code.EMPTY_INPUT, "`inputs` cannot be empty"),
        ("classifier", Method.PREDICT, predict(""), Code.EMPTY_INPUT, "`inputs` cannot be empty"),
        ("classifier", Method.PREDICT_PAIR, pair("", ""), Code.EMPTY_INPUT, "`inputs` cannot be empty"),
        ("reranker", Method.RERANK, rerank("fog", "", query=""), Code.EMPTY_INPUT, "`inputs` cannot be empty"),
        ("embedding", Method.EMBED_ALL, every(prompt_name="nobody"), Code.INVALID_INPUT, "`nobody`"),
        ("sparse", Method.EMBED_SPARSE, sparse(prompt_name="nobody"), Code.INVALID_INPUT, "`nobody`"),
        ("embedding", Method.EMBED_ALL, every("fog " * 90), Code.MESSAGE_TOO_LARGE, "limit of 8192 bytes"),
        (
            "embedding",
            Method.TOKENIZE,
            tei_pb2.EncodeRequest(inputs="fog " * 900).SerializeToString(),
            Code.MESSAGE_TOO_LARGE,
            "limit of 8192 bytes",
        ),
        ("classifier", Method.RERANK, b"", Code.EMPTY_INPUT, "`texts` cannot be empty"),
        ("reranker", Method.RERANK_STREAM, b"", Code.INVALID_INPUT, "Missing rerank request"),
        *(
            (
                "classifier",
                Method.PREDICT_PAIR,
                tei_pb2.PredictPairRequest(inputs=["fog"] * count).SerializeToString(),
                Code.INVALID_INPUT,
                f"`inputs` must have a single or two elements. Given: {count}",
            )
            for count in (0, 3)
        ),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(
    links: Links, kind: str, method: Method, payload: bytes, code: Code, text: str
) -> None:
    answer = await links[kind].ask(method, payload)

    assert answer.error.code is code
    assert text in answer.error.message


async def test_of_several_faults_the_first_is_told_and_nothing_else(links: Links) -> None:
    texts = ("dog", "fog " * 120, "fog " * 110)

    whole = await links["reranker"].ask(Method.RERANK, rerank(*texts))
    streamed = await links["reranker"].ask(
        Method.RERANK_STREAM, stream(*(message("the lazy dog", text, truncate=text == "dog") for text in texts))
    )
    alone = await links["reranker"].ask(Method.RERANK, rerank(texts[1]))

    assert "Given: " in alone.error.message
    assert whole.error.message == streamed.error.message == alone.error.message
    assert whole.error.input_index == streamed.error.input_index == 1
    assert alone.error.input_index is None


# Embeddings.


async def test_tokens_are_as_many_as_were_counted_and_their_mean_is_the_vector(links: Links) -> None:
    text = "The quick brown fox"
    tokens = await links["embedding"].ask(Method.EMBED_ALL, every(text))
    pooled = await links["embedding"].ask(Method.EMBED, embed(text, normalize=False))
    unit = await links["embedding"].ask(Method.EMBED, embed(text))

    assert matrix(tokens).shape == (tokens.timings.tokens, WIDTH)
    assert tokens.timings.chars == len(text)
    assert np.allclose(matrix(tokens).mean(axis=0), vector(pooled), atol=1e-5)
    assert np.linalg.norm(vector(unit)) == pytest.approx(1.0, abs=1e-5)
    assert np.linalg.norm(vector(pooled)) != pytest.approx(1.0, abs=1e-2)


async def test_more_token_vectors_than_there_is_room_for_are_made_one_call_after_the_other(links: Links) -> None:
    """60 tokens of 128 bytes each: a few such calls fill the eight messages of 8 KiB that may be held."""
    link = links["embedding"]
    posted = [link.post(Method.EMBED_ALL, every("fog " * 58), flags=Flag.WAIT | Flag.BULK) for _ in range(40)]
    link.cancel(posted[20])

    answers = await link.answers([call for call in posted if call != posted[20]])
    assert {matrix(answer).shape for answer in answers} == {(60, WIDTH)}
    await link.emptied()


async def test_late_interaction_gives_unit_vectors_of_its_own_width(links: Links) -> None:
    vectors = matrix(await links["multi-vector"].ask(Method.EMBED_ALL, every("The quick brown fox")))

    assert vectors.shape[1] == TOKEN_WIDTH
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("text", ["fog", "The quick brown fox jumps over the lazy dog."])
async def test_sparse_entries_ascend_and_are_those_of_the_full_vector(links: Links, text: str) -> None:
    entries = parsed(tei_pb2.EmbedSparseResponse, await links["sparse"].ask(Method.EMBED_SPARSE, sparse(text)))
    full = vector(await links["sparse"].ask(Method.EMBED, embed(text, normalize=False)))

    indices = [entry.index for entry in entries.sparse_embeddings]
    assert indices == np.flatnonzero(full).tolist()
    assert np.allclose([entry.value for entry in entries.sparse_embeddings], full[indices], atol=1e-5)


async def test_one_model_may_give_vectors_and_sparse_ones(links: Links) -> None:
    entries = parsed(tei_pb2.EmbedSparseResponse, await links["m3"].ask(Method.EMBED_SPARSE, sparse()))

    assert all(entry.value > 0 for entry in entries.sparse_embeddings)
    assert np.linalg.norm(vector(await links["m3"].ask(Method.EMBED, embed()))) == pytest.approx(1.0, abs=1e-5)


# Scores.


async def test_predictions_are_all_labels_best_first(links: Links) -> None:
    answer = await links["classifier"].ask(Method.PREDICT, predict())
    raw = labelled(await links["classifier"].ask(Method.PREDICT, predict(raw_scores=True)))

    scores = labelled(answer)
    assert set(scores) == set(LABELS)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert sum(scores.values()) == pytest.approx(1.0, abs=1e-5)
    exponentials = {label: np.exp(logit) for label, logit in raw.items()}
    assert scores == pytest.approx({k: v / sum(exponentials.values()) for k, v in exponentials.items()}, abs=1e-5)
    assert answer.timings.chars == 3


async def test_a_pair_of_one_is_a_text_and_a_pair_of_two_depends_on_both(links: Links) -> None:
    link = links["classifier"]
    single = labelled(await link.ask(Method.PREDICT, predict("fog")))
    one = labelled(await link.ask(Method.PREDICT_PAIR, pair("fog")))
    two = labelled(await link.ask(Method.PREDICT_PAIR, pair("fog", "dog")))
    turned = labelled(await link.ask(Method.PREDICT_PAIR, pair("dog", "fog")))

    assert one == pytest.approx(single, abs=1e-6)
    assert two != pytest.approx(single, abs=1e-6)
    assert two != pytest.approx(turned, abs=1e-6)


async def test_ranks_are_the_scores_of_the_pairs_best_first(links: Links) -> None:
    link, query = links["reranker"], "the lazy dog"
    texts = ("fog", "The quick brown fox", "fog", "rain")
    answer = await link.ask(Method.RERANK, rerank(*texts, query=query, return_text=True))
    pairs = [await link.ask(Method.PREDICT_PAIR, pair(query, text)) for text in texts]
    raw = ranked(await link.ask(Method.RERANK, rerank(*texts, query=query, raw_scores=True)))

    scores = ranked(answer)
    ranks = parsed(tei_pb2.RerankResponse, answer).ranks
    assert {rank.index: rank.text for rank in ranks} == dict(enumerate(texts))
    assert list(scores) == sorted(scores, key=lambda row: (-scores[row], -row))
    assert scores == pytest.approx({i: labelled(one)["LABEL_0"] for i, one in enumerate(pairs)}, abs=1e-5)
    assert scores == pytest.approx({i: 1 / (1 + np.exp(-logit)) for i, logit in raw.items()}, abs=1e-5)
    assert answer.timings.chars == len(query) * len(texts) + sum(map(len, texts))


class _Recorded(MethodCall):
    """A call that keeps what it was answered."""

    errors: tuple[TeimgrError, ...] = ()

    replies: tuple[CallReply, ...] = ()

    def reply(self, reply: CallReply) -> None:
        self.replies += (reply,)

    def fail(self, error: TeimgrError) -> None:
        self.errors += (error,)


async def test_a_large_message_is_read_on_a_codec_thread_and_its_query_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop, 37 MiB of 60,000 texts took it 80 ms, and a query of 8 MiB was decoded again for each text."""
    engine, threads = FakeEngine(), []
    engine.info = replace(engine.info, kind=Kind.RERANKER)
    dispatcher, parse = dispatching(engine), calls.parsed

    def seen(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(calls, "parsed", seen)
    texts = ["fog " * 40_000, "rain " * 40_000]
    call = _Recorded(Method.RERANK, rerank(*texts, query="dog " * 9, truncate=True), Flag.NONE)
    refused = _Recorded(Method.RERANK, rerank(*["fog " * 4000] * 33), Flag.NONE)
    malformed = _Recorded(Method.EMBED, b"\x0a" * 400_000, Flag.NONE)

    for one in (refused, malformed, call):  # each alone: two are over the bytes that may be held
        methods.handle(dispatcher, one)
        await eventually(lambda one=one: engine.jobs or one.errors)

    (job,) = engine.jobs
    assert [pair.second for pair in job.inputs] == texts
    assert job.inputs[0].first is job.inputs[1].first
    assert {name.split("_")[0] for name in threads} == {"codec"}
    assert not call.errors
    assert "batch size 33 > maximum allowed batch size 32" in refused.errors[0].message
    assert malformed.errors[0].code is Code.INVALID_INPUT
    dispatcher.cancel(call)
    dispatcher.close()


_LARGE = 270_000  # bytes, of a message that is parsed on a codec thread


class _HeldThreads:
    """Both codec threads of `dispatcher`, busy until `release`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._goes_on, both = threading.Event(), threading.Barrier(3)

        def hold() -> None:
            both.wait(60)
            self._goes_on.wait(60)

        self._holds = [asyncio.ensure_future(dispatcher.off_loop(hold)) for _ in range(2)]
        self._held = asyncio.ensure_future(asyncio.to_thread(both.wait, 60))

    async def held(self) -> None:
        await self._held

    async def release(self) -> None:
        self._goes_on.set()
        await asyncio.gather(*self._holds)


def http_frame(text: str, path: str = "/embed", end: str = ',"truncate":true}') -> bytes:
    head = request_head(HttpRequest("tei", "POST", path, headers={"content-type": "application/json"}))
    return head + f'{{"inputs":"{text}"{end}'.encode()


@pytest.mark.parametrize("method", [Method.EMBED, Method.PREDICT, Method.EMBED_ALL, Method.HTTP])
async def test_large_messages_that_wait_for_a_thread_are_within_the_bounds_of_the_worker(method: Method) -> None:
    """While two tables held both threads, 124 messages of 31 MiB were kept, of 8 MiB that may be."""
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=32)
    threads = _HeldThreads(dispatcher)
    await threads.held()
    make = {Method.EMBED: embed, Method.PREDICT: predict, Method.EMBED_ALL: every, Method.HTTP: http_frame}
    payload = make[method]("x" * _LARGE)
    posted = [_Recorded(method, payload, Flag.NONE) for _ in range(8)]

    for call in posted:
        methods.handle(dispatcher, call)

    kept = [call for call in posted if not call.errors]
    assert dispatcher.calls == len(kept) == 1  # as 8 messages of 64 KiB fit, and one of any size
    assert {call.errors[0].code for call in posted[1:]} == {Code.OVERLOADED}
    await threads.release()
    await eventually(lambda: engine.jobs)
    assert dispatcher.taken == len(posted)
    dispatcher.cancel(posted[0])
    dispatcher.close()


_EMOJI = "\U0001f600" * (MAX_TEXT_BYTES // 4)
_PAIR_TEXTS = {"text": [f"{number:>200}" for number in range(90_000)], "text_pair": ["b" * 100] * 90_000}


def _pairs_message(count: int) -> bytes:
    """Of `RerankStream`: each with its own query, and four sets of options."""
    return stream(
        *(message(f"{n:>200}", f"{n:>150}", truncate=n % 2 > 0, truncation_direction=n // 2 % 2) for n in range(count))
    )


def _table(kind: Callable[..., Message], columns: Mapping[str, list[Any]], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch(columns)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return kind(arrow_ipc=sink.getvalue().to_pybytes(), **options).SerializeToString()


_SPARSE_TABLE = multiplexer_pb2.EmbedSparseArrowRequest
LARGEST: Mapping[str, tuple[Method, Callable[[], bytes]]] = {
    "Embed": (Method.EMBED, lambda: embed(_EMOJI)),
    "EmbedSparse": (Method.EMBED_SPARSE, lambda: sparse(_EMOJI)),
    "EmbedAll": (Method.EMBED_ALL, lambda: every(_EMOJI)),
    "Predict": (Method.PREDICT, lambda: predict(_EMOJI)),
    "PredictPair": (Method.PREDICT_PAIR, lambda: pair(_EMOJI, _EMOJI)),
    "Rerank of many texts": (Method.RERANK, lambda: rerank(*["b" * 600] * 60_000, query="a", return_text=True)),
    "Rerank of long texts": (Method.RERANK, lambda: rerank(*[_EMOJI] * 4, query="a")),
    "RerankStream": (Method.RERANK_STREAM, lambda: _pairs_message(60_000)),
    "Info": (Method.INFO, lambda: bytes(2**25)),
    "Tokenize": (Method.TOKENIZE, lambda: tei_pb2.EncodeRequest(inputs=_EMOJI).SerializeToString()),
    "Decode": (Method.DECODE, lambda: tei_pb2.DecodeRequest(ids=[1] * 260_000).SerializeToString()),
    "EmbedArrow": (Method.EMBED_ARROW, lambda: arrow(["\U0001f600" * 150] * 50_000)),
    "EmbedSparseArrow": (Method.EMBED_SPARSE_ARROW, lambda: _table(_SPARSE_TABLE, {"text": ["b" * 300] * 90_000})),
    "EmbedSparseArrow, noop": (
        Method.EMBED_SPARSE_ARROW,
        lambda: _table(_SPARSE_TABLE, {"text": ["b" * 300] * 90_000}, noop=True),
    ),
    "InferArrow, pairs": (
        Method.INFER_ARROW,
        lambda: _table(arrow_pb2.ArrowRequest, _PAIR_TEXTS, input=arrow_pb2.INPUT_PAIR),
    ),
    "HTTP": (Method.HTTP, lambda: http_frame(_EMOJI)),
}


class _Tokenizing(FakeEngine):
    """An engine of reranking that answers `Tokenize` and `Decode` with as much as a reply may have."""

    info = replace(FakeEngine.info, kind=Kind.RERANKER, labels=("a",))

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = self

    def check(self, options: InferOptions) -> None:
        pass

    def tokenized(self, text: str, add_special_tokens: bool, prompt_name: str | None) -> Steps[list[TokenSpan]]:
        yield
        return [TokenSpan(n, f"word{n}", False, n, n + 1) for n in range(300_000)]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "\U0001f600" * (9 * 2**20)


_HELD_S = 0.02


async def _most_held(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Processor time of the longest callback of the loop, from the arrival of a message until its answer: without that
    of other processes, and of the collector, which would look at all that the tests hold."""
    engine, held, run = _Tokenizing(), [0.0], asyncio.Handle._run
    dispatcher = Dispatcher(WorkerSpec(name="i", model_id="m", port=1, max_client_batch_size=2**16))
    dispatcher.attach(cast(Engine, engine))
    method, make = LARGEST[name]
    call = _Recorded(method, make(), Flag.NONE)

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        held.append(time.thread_time() - began)

    def finish() -> None:
        """As an engine does, on its thread."""
        for job in engine.jobs:
            with_placeholder_results(engine.info, job)
            job.tokens_of = [np.zeros((8192, 32), np.float32)]
        dispatcher.deliver(engine.jobs)
        engine.jobs = []

    with monkeypatch.context() as patched, young_collections_alone():
        patched.setattr(asyncio.Handle, "_run", timed)
        began = time.thread_time()
        methods.handle(dispatcher, call)
        held.append(time.thread_time() - began)
        await eventually(lambda: engine.started or call.errors or call.replies, 120)
        if engine.jobs:
            await asyncio.to_thread(finish)
        await dispatcher.drained(120)
        dispatcher.close()

    assert call.errors == ()
    assert call.replies
    return max(held)


@pytest.mark.parametrize("name", LARGEST)
async def test_the_largest_message_of_a_method_holds_the_loop_only_shortly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of three tries: a busy machine makes each step of the processor slower."""
    tries = list[float]()
    while len(tries) < 3 and (not tries or min(tries) >= _HELD_S):
        tries.append(await _most_held(name, monkeypatch))

    assert min(tries) < _HELD_S, tries


def test_ranks_are_serialised_in_parts_that_make_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of protobuf held the GIL for 105 ms for ranks with texts of 40 MB together."""
    monkeypatch.setattr(methods, "_RANKED_BYTES", 1000)
    pairs = [Pair("q", "\U0001f600" * (row % 40)) for row in range(500)]
    job = Job(pairs, InferOptions(frozenset({Output.SCORES})), Lane.BULK)
    scores = np.random.default_rng(1).standard_normal((500, 1)).astype(np.float32)
    job.fill(np.zeros((500, 1), np.float32), scores, [])

    for texts in (None, pairs):
        parts = list(methods._ranked(job, texts))
        message = tei_pb2.RerankResponse()
        for row in np.argsort(-scores[:, 0]).tolist():
            message.ranks.add(index=row, score=scores[row, 0], text=None if texts is None else texts[row].second)

        assert b"".join(parts) == message.SerializeToString()
        assert len(parts) > 5
        assert max(map(len, parts)) < 5000


async def test_a_large_http_frame_waits_for_as_long_as_a_small_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `max_queue_wait_secs` in the lane of its inputs; the gateway's limit is not a deadline of its caller."""
    engine = FakeEngine()
    dispatcher = dispatching(engine, calls=100, message_bytes=1 << 24)
    most_s = dispatcher.spec.max_queue_wait_secs
    waits = dict.fromkeys(Lane, most_s - 0.5)
    monkeypatch.setattr(engine, "expected_s", lambda lane, jobs=(), share=None: waits[lane])
    frame = http_frame('","'.join(["x" * 10_000] * 32)).replace(b'"inputs":', b'"inputs":[').replace(b'","t', b'"],"t')
    assert len(frame) > _LARGE
    posted: list[_Recorded] = []

    async def post(limit_s: float) -> _Recorded:
        posted.append(call := _Recorded(Method.HTTP, frame, Flag.NONE, time.monotonic() + limit_s))
        methods.handle(dispatcher, call)
        await eventually(lambda: len(engine.jobs) == len(posted) or call.errors or call.replies)
        return call

    for _ in range(9):
        assert not (await post(most_s)).errors
    assert {job.lane for job in engine.jobs} == {Lane.BULK}
    waits |= {Lane.INTERACTIVE: 0.0, Lane.BULK: most_s + 0.5}
    assert [error.code for error in (await post(100 * most_s)).errors] == [Code.OVERLOADED]
    for call in posted:
        dispatcher.cancel(call)
    await dispatcher.drained(60)
    assert dispatcher.calls == 0
    dispatcher.close()


async def test_what_a_large_http_frame_holds_is_released_whatever_becomes_of_it() -> None:
    engine = FakeEngine()
    dispatcher = dispatching(engine)
    refused = _Recorded(Method.HTTP, http_frame("x" * _LARGE, end=""), Flag.NONE)
    malformed = _Recorded(Method.HTTP, b"\xff" * _LARGE, Flag.NONE)
    unknown = _Recorded(Method.HTTP, http_frame("x" * _LARGE, "/nowhere"), Flag.NONE)
    gone = _Recorded(Method.HTTP, http_frame("x" * _LARGE), Flag.NONE)

    for call in (refused, malformed, unknown, gone):
        methods.handle(dispatcher, call)
        if call is gone:
            assert dispatcher.is_admitted(gone)
            dispatcher.cancel(gone)
        await dispatcher.drained(60)
        assert dispatcher.calls == 0

    assert [len(call.errors) for call in (refused, malformed, unknown, gone)] == [0, 1, 0, 0]
    assert [len(call.replies) for call in (refused, unknown, gone)] == [1, 1, 0]
    assert engine.jobs == []
    dispatcher.close()


async def test_a_large_message_that_nobody_waits_for_is_neither_parsed_nor_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, read = FakeEngine(), list[int]()
    dispatcher, parse = dispatching(engine), calls.parsed

    def seen(*arguments: Any) -> Any:
        read.append(1)
        return parse(*arguments)

    monkeypatch.setattr(calls, "parsed", seen)
    threads = _HeldThreads(dispatcher)
    await threads.held()
    gone = _Recorded(Method.EMBED, embed("x" * _LARGE), Flag.NONE)
    freed = weakref.ref(gone)
    late = _Recorded(Method.RERANK, rerank("x" * _LARGE), Flag.NONE, deadline=time.monotonic())
    stopped = _Recorded(Method.EMBED, embed("x" * _LARGE), Flag.NONE)

    methods.handle(dispatcher, gone)
    await asyncio.sleep(0)  # it waits for a thread
    dispatcher.cancel(gone)
    errors = gone.errors
    del gone
    await eventually(lambda: freed() is None)  # although no thread is free
    methods.handle(dispatcher, late)
    dispatcher.stop_accepting()
    methods.handle(dispatcher, stopped)
    assert stopped.errors[0].code is Code.BACKEND_UNAVAILABLE
    await threads.release()
    await eventually(lambda: late.errors)

    assert late.errors[0].code is Code.TIMEOUT
    assert not read
    assert not errors
    assert not engine.jobs
    assert dispatcher.calls == 0
    dispatcher.close()


async def test_a_parsed_message_is_not_kept_beside_what_was_read_from_it() -> None:
    call = _Recorded(Method.EMBED, embed("fog"), Flag.NONE)
    call.parse(tei_pb2.EmbedRequest, 9)

    found = call.message(tei_pb2.EmbedRequest)

    assert found.inputs == "fog"
    assert call.message(tei_pb2.EmbedRequest) is not found


async def test_equal_scores_have_the_higher_index_first_and_texts_come_only_when_asked_for(links: Links) -> None:
    answer = await links["reranker"].ask(Method.RERANK, rerank("fog", "fog", "fog", "fog"))

    ranks = parsed(tei_pb2.RerankResponse, answer).ranks
    assert [rank.index for rank in ranks] == sorted(range(4), key=lambda row: (-ranked(answer)[row], -row))
    assert not any(rank.HasField("text") for rank in ranks)


async def test_a_rerank_stream_has_a_query_per_message_and_the_first_says_how_scores_are_given(links: Links) -> None:
    link = links["reranker"]
    asked = [("dog", "fog"), ("a potion of zinc", "rain"), ("the boats", "The quick brown fox")] * 2
    first, *rest = asked

    answer = await link.ask(
        Method.RERANK_STREAM,
        stream(
            message(*first, raw_scores=True, return_text=True),
            *(message(*one, raw_scores=False, return_text=False) for one in rest),
        ),
    )

    alone = [await link.ask(Method.RERANK, rerank(text, query=query, raw_scores=True)) for query, text in asked]
    assert ranked(answer) == pytest.approx({i: ranked(one)[0] for i, one in enumerate(alone)}, abs=1e-4)
    ranks = parsed(tei_pb2.RerankResponse, answer).ranks
    assert {rank.index: rank.text for rank in ranks} == {i: text for i, (_, text) in enumerate(asked)}


FLOOD = 100_000


@pytest.mark.parametrize(
    ("kind", "method", "payload", "reason"),
    [
        ("embedding", Method.EMBED, b"\x78\0" * FLOOD, "more than 4096 fields"),
        ("reranker", Method.RERANK, b"\x12\0" * FLOOD, "more than 65536 fields"),
        ("classifier", Method.PREDICT_PAIR, b"\x0a\0" * FLOOD, "more than 4096 fields"),
        ("reranker", Method.RERANK_STREAM, b"\x0a\0" * (FLOOD + 1), "more than 100000 fields"),
        ("reranker", Method.RERANK_STREAM, b"\x0a\xc0\x9a\x0c" + b"\x78\0" * FLOOD, "more than 4096 fields"),
        ("embedding", Method.DECODE, b"\x0a\x80\x80\x80\x01" + b"\x02" * 2**21, "`ids` have 2097157 bytes"),
    ],
    ids=["embed", "rerank", "pair", "messages", "one message", "ids"],
)
async def test_what_would_hold_the_interpreter_is_refused_by_name(
    kind: str, method: Method, payload: bytes, reason: str, roomy_workers: dict[str, WorkerProcess], connect: Connect
) -> None:
    link = await connect(roomy_workers[kind])
    await link.state(link.post(Method.WATCH), "ready")
    error = (await link.ask(method, payload)).error

    assert error.code is Code.INVALID_INPUT
    assert reason in error.message


async def test_a_rerank_stream_cuts_each_message_as_that_one_says(links: Links) -> None:
    link, text = links["reranker"], "a b c " * 40 + "x y z"
    ways: list[dict[str, Any]] = [{"truncation_direction": 0}, {"truncation_direction": 1}, {"truncation_direction": 0}]

    answer = await link.ask(Method.RERANK_STREAM, stream(*(message("dog", text, truncate=True, **way) for way in ways)))

    alone = [await link.ask(Method.RERANK, rerank(text, query="dog", truncate=True, **way)) for way in ways]
    assert ranked(answer) == pytest.approx({i: ranked(one)[0] for i, one in enumerate(alone)}, abs=1e-4)
    assert answer.timings.tokens == sum(one.timings.tokens for one in alone)
    assert answer.timings.chars == sum(one.timings.chars for one in alone)
    assert answer.timings.inference_ns > 0


# Tokens.


async def test_absent_flags_of_the_tokenizer_are_false(links: Links) -> None:
    link = links["embedding"]
    bare = await link.ask(Method.TOKENIZE, tei_pb2.EncodeRequest(inputs="fog").SerializeToString())
    framed = await link.ask(
        Method.TOKENIZE, tei_pb2.EncodeRequest(inputs="fog", add_special_tokens=True).SerializeToString()
    )
    tokens, all_tokens = (tei_pb2.EncodeResponse.FromString(one.reply).tokens for one in (bare, framed))
    ids = [token.id for token in all_tokens]
    kept = await link.ask(Method.DECODE, tei_pb2.DecodeRequest(ids=ids).SerializeToString())

    assert not any(token.special for token in tokens)
    assert len(all_tokens) == len(tokens) + 2
    assert tei_pb2.DecodeResponse.FromString(kept.reply).text.startswith("[CLS]")
    assert not bare.header.flags & Flag.TIMINGS
    assert not kept.header.flags & Flag.TIMINGS


# Room.


@pytest.mark.parametrize(
    ("kind", "method", "payload", "waits"),
    [
        ("reranker", Method.RERANK, rerank(), True),
        ("reranker", Method.RERANK_STREAM, stream(), True),
        ("reranker", Method.PREDICT_PAIR, pair(), False),
        ("classifier", Method.PREDICT, predict(), False),
        ("sparse", Method.EMBED_SPARSE, sparse(), False),
        ("embedding", Method.EMBED_ALL, every(), False),
        ("embedding", Method.TOKENIZE, tei_pb2.EncodeRequest(inputs="fog").SerializeToString(), True),
    ],
)
async def test_a_full_worker_lets_reranks_wait_and_refuses_other_unary_calls(
    links: Links, kind: str, method: Method, payload: bytes, waits: bool
) -> None:
    link = links[kind]
    answers = await link.answers([link.post(method, payload) for _ in range(3 * INSIDE)])

    assert all(answer.reply for answer in answers[:INSIDE])
    refused = {answer.error.code for answer in answers if answer.header.type != answers[0].header.type}
    assert refused == (set() if waits else {Code.OVERLOADED})
    await link.emptied()


async def test_a_cancelled_rerank_stream_frees_its_room_and_is_not_answered(links: Links) -> None:
    link = links["reranker"]
    messages = (message("dog", "fog " * 40, truncate=True, truncation_direction=way % 2) for way in range(60))
    cancelled = link.post(Method.RERANK_STREAM, stream(*messages))
    link.cancel(cancelled)

    assert (await link.ask(Method.RERANK, rerank())).reply
    await link.emptied()
    assert cancelled not in link.arrived


async def test_a_deadline_of_a_rerank_that_passed_is_said(links: Links) -> None:
    link = links["reranker"]
    heavy = [link.post(Method.RERANK, rerank(*["fog " * 80] * 4, truncate=True)) for _ in range(40)]
    late = link.post(Method.RERANK_STREAM, stream(), deadline_ms=1)

    assert (await link.answer(late)).error.code is Code.TIMEOUT
    await link.answers(heavy)


# Metrics.


async def test_metrics_count_calls_items_and_batches_of_every_kind(
    workers: dict[str, WorkerProcess], links: Links
) -> None:
    before = {kind: await _samples(workers[kind]) for kind in ("reranker", "sparse")}
    await links["reranker"].ask(Method.RERANK, rerank("fog", "dog", "rain"), flags=Flag.WAIT)  # as both ports send it
    await links["reranker"].ask(Method.PREDICT_PAIR, pair())
    await links["reranker"].ask(Method.RERANK_STREAM, stream(message("dog", "fog"), message("dog", "rain")))
    await links["reranker"].ask(Method.RERANK, rerank(*["fog"] * 9))
    await links["reranker"].ask(Method.EMBED, embed())
    await links["sparse"].ask(Method.EMBED_SPARSE, sparse())
    await links["sparse"].ask(Method.EMBED_SPARSE, sparse(), flags=Flag.WAIT)  # a message of a stream
    ipc = multiplexer_pb2.EmbedArrowRequest.FromString(arrow(["fog", "dog"])).arrow_ipc
    request = multiplexer_pb2.EmbedSparseArrowRequest(arrow_ipc=ipc)
    await links["sparse"].ask(Method.EMBED_SPARSE_ARROW, request.SerializeToString(), flags=Flag.WAIT | Flag.BULK)
    after = {kind: await _samples(workers[kind]) for kind in before}
    grown = {
        kind: {key: value - before[kind].get(key, 0) for key, value in samples.items()}
        for kind, samples in after.items()
    }

    scores, entries = grown["reranker"], grown["sparse"]
    assert scores["te_request_count", "single"] == 2  # the pair, and the vector that it cannot give
    assert scores["te_request_count", "batch"] == 2  # one of them too large
    assert scores["te_request_success", "single"] == scores["te_request_success", "batch"] == 1
    assert scores["te_request_failure", "batch_size"] == scores["te_request_failure", "model_type"] == 1
    assert scores["te_predict_count", ""] == scores["te_predict_success", ""] == 6
    assert scores["te_predict_duration_count", ""] == 6
    assert scores["te_request_duration_count", ""] == 3
    assert scores["te_request_input_length_count", ""] == 6
    assert scores["te_batch_next_size_sum", ""] == 6
    assert 3 <= scores["te_batch_next_size_count", ""] == scores["te_batch_next_tokens_count", ""] <= 6
    assert ("te_embed_count", "") not in scores
    assert entries["te_request_count", "single"] == entries["te_request_success", "single"] == 1
    assert entries["te_request_count", "batch"] == entries["te_request_success", "batch"] == 1
    assert entries["te_embed_count", ""] == entries["te_embed_inference_duration_count", ""] == 4
    assert after["sparse"]["te_queue_size", ""] == 0


async def _samples(worker: WorkerProcess) -> dict[tuple[str, str], float]:
    """Every sample but the buckets, by its name and its one label."""

    def read() -> str:
        with urllib.request.urlopen(f"{worker.url}/metrics", timeout=10) as response:
            return str(response.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    samples = (sample for family in families for sample in family.samples if "le" not in sample.labels)
    # The parser gives counters the `_total` that TEI leaves out.
    return {(sample.name.removesuffix("_total"), "".join(sample.labels.values())): sample.value for sample in samples}


# Array replies, packed by hand, are the bytes that protobuf writes.

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
floats = st.floats(width=32)
some_timings = st.builds(Timings, uint32, uint32, uint64, uint64, uint64, uint64)


def metadata_of(timings: Timings) -> tei_pb2.Metadata:
    return tei_pb2.Metadata(
        compute_chars=timings.chars,
        compute_tokens=timings.tokens,
        total_time_ns=timings.total_ns,
        tokenization_time_ns=timings.tokenization_ns,
        queue_time_ns=timings.queue_ns,
        inference_time_ns=timings.inference_ns,
    )


async def test_queries_beside_bulk_on_one_thread_are_answered_with_their_own_times(
    tmp_path: Path, connect: Connect
) -> None:
    """One thread computes both lanes of this model: queries between the steps of a batch of pictures."""
    pictures = [base64.b64encode(file_of(noise(96, 96, seed))).decode() for seed in range(8)]
    body = json.dumps({"inputs": [{"content": [{"type": "image", "data": data}]} for data in pictures]}).encode()

    def post() -> int:
        headers = {"content-type": "application/json", "x-teimgr-lane": "bulk"}
        with urllib.request.urlopen(urllib.request.Request(f"{worker.url}/embed", body, headers)) as answer:
            return len(json.load(answer))

    with WorkerProcess(build_gme(tmp_path)) as worker:
        link = await connect(worker)
        await link.state(link.post(Method.WATCH), "ready")
        bulk = asyncio.gather(*[asyncio.to_thread(post) for _ in range(2)])
        while not bulk.done():
            began_ns = time.monotonic_ns()
            times = (await link.ask(Method.EMBED, embed())).timings
            assert times.queue_ns + times.inference_ns <= time.monotonic_ns() - began_ns
        assert await bulk == [8, 8]


@given(st.lists(floats, max_size=40), some_timings)
def test_embed_response_is_byte_identical_to_protobuf(values: list[float], timings: Timings) -> None:
    message = tei_pb2.EmbedResponse(embeddings=values, metadata=metadata_of(timings))

    assert embed_response(np.array(values, np.float32), timings) == message.SerializeToString()


@given(st.lists(st.tuples(uint32 | st.integers(0, 40_000), floats), max_size=40), some_timings)
def test_embed_sparse_response_is_byte_identical_to_protobuf(
    entries: list[tuple[int, float]], timings: Timings
) -> None:
    message = tei_pb2.EmbedSparseResponse(metadata=metadata_of(timings))
    for index, value in entries:
        message.sparse_embeddings.add(index=index, value=value)
    indices = np.array([index for index, _ in entries], np.uint32)
    values = np.array([value for _, value in entries], np.float32)

    assert embed_sparse_response(indices, values, timings) == message.SerializeToString()


@given(arrays(np.float32, st.tuples(st.integers(0, 9), st.integers(0, 40)), elements=st.floats(width=32)), some_timings)
def test_embed_all_response_is_byte_identical_to_protobuf(vectors: NDArray[np.float32], timings: Timings) -> None:
    message = tei_pb2.EmbedAllResponse(metadata=metadata_of(timings))
    for vector in vectors:
        message.token_embeddings.add(embeddings=vector.tolist())

    assert embed_all_response(vectors, timings) == message.SerializeToString()


def test_values_that_are_a_slice_of_others_are_packed_too() -> None:
    timings = Timings(0, 0, 0, 0, 0, 0)
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)

    assert embed_all_response(wide[:, 1:3], timings) == embed_all_response(wide[:, 1:3].copy(), timings)
    assert embed_sparse_response(np.array([1, 2, 3], np.uint32), wide[:, 2], timings) == embed_sparse_response(
        np.array([1, 2, 3], np.uint32), wide[:, 2].copy(), timings
    )
