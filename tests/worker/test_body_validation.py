"""Large bodies are validated in slices with the errors of one call, and every list fails at its first fault."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError
from tests.support import models
from tests.support.worker_process import WorkerProcess
from tests.worker.tei_client import TeiClient

from teimgr.engine.job import Input
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.http.turns import WorkTurns
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import HttpRequest, Method
from teimgr.worker import body_validation, http_inference
from teimgr.worker.dialects import cohere, openai, rerank, sie, tei, vllm
from teimgr.worker.dispatcher import Dispatcher

SLICE = 64
MANY = 3 * SLICE + 7
KINDS: tuple[tuple[type[http_inference.Body], dict[str, Any]], ...] = (
    (openai.OpenAIEmbeddingsRequest, {"input": [7] * MANY}),
    (openai.OpenAIEmbeddingsRequest, {"input": ["a"] * MANY, "dimensions": "3"}),
    (openai.OpenAIEmbeddingsRequest, {"input": [[1, 2]] * MANY}),
    (openai.OpenAIEmbeddingsRequest, {"input": [[1] * MANY, [2] * MANY]}),
    (tei.TeiEmbedRequest, {"inputs": ["a"] * MANY}),
    (tei.TeiPredictRequest, {"inputs": [["a", "b"]] * MANY}),
    (vllm.VllmScoreRequest, {"queries": "a", "documents": ["a"] * MANY}),
    (sie.SieEncodeRequest, {"items": [{"text": "a"}] * MANY}),
    (cohere.CohereEmbedRequest, {"texts": ["a"] * MANY}),
    (rerank.RerankRequest, {"query": "a", "documents": ["a", {"text": "b"}] * MANY}),
)
WRONG: tuple[Any, ...] = (None, -1, 1.5, "text", {"no": 1}, [None], [["a"]], ["a", "b", "c"], True)


def first_error(validate: Any, value: Any) -> Any:
    try:
        return validate(value).model_dump()
    except (ValidationError, http_inference.BadRequest) as error:
        if isinstance(error, http_inference.BadRequest):
            return error.message
        one = error.errors(include_url=False, include_context=False)[0]
        return one["loc"], one["type"], one["msg"], http_inference._refusal(error).message


@pytest.mark.parametrize(("kind", "body"), KINDS)
def test_slices_give_the_value_or_the_error_of_one_call(
    kind: type[http_inference.Body], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_validation, "_SLICE", SLICE)
    [(field, values)] = [(name, value) for name, value in body.items() if isinstance(value, list)]
    bodies = [body] + [
        body | {field: [*values[:at], wrong, *values[at + 1 :]]}
        for wrong in WRONG
        for at in (0, min(len(values), SLICE + 5) - 1, len(values) - 1)
    ]
    assert isinstance(body_validation.validated(kind, body), kind)
    for one in bodies:
        in_slices = first_error(lambda value: body_validation.validated(kind, value), one)
        assert in_slices == first_error(kind.model_validate, one)


@pytest.mark.parametrize("kind", [sie.SieEncodeRequest, sie.SieScoreRequest, rerank.RerankRequest])
def test_a_list_of_many_faults_is_refused_at_the_first(kind: type[http_inference.Body]) -> None:
    field = "documents" if kind is rerank.RerankRequest else "items"
    body = {"query": {"text": "a"}, field: [0] * http_inference.MAX_INPUTS}
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert sum(error["loc"][0] == field for error in raised.value.errors()) <= 4  # one for each form of an element


def test_a_large_list_lets_other_threads_run(longest_pause: Any) -> None:
    body = orjson.dumps({"input": [7000] * 4_000_000})
    value = orjson.loads(body)
    whole = longest_pause(lambda: tei.TeiEmbedRequest.model_validate({"inputs": value["input"]}))
    in_slices = longest_pause(lambda: body_validation.validated(tei.TeiEmbedRequest, {"inputs": value["input"]}))
    assert in_slices < whole / 3


@pytest.fixture
def longest_pause() -> Any:
    def measured(work: Any) -> float:
        best = float("inf")
        for _ in range(3):
            done, pauses = Event(), [0.0]

            def wake(done: Event = done, pauses: list[float] = pauses) -> None:
                before = time.perf_counter()
                while not done.wait(0.001):
                    pauses[0] = max(pauses[0], (now := time.perf_counter()) - before)
                    before = now

            thread = Thread(target=wake)
            thread.start()
            kept = work()
            done.set()
            thread.join()
            del kept
            best = min(best, pauses[0])
        return best

    return measured


class OffLoop:
    """In place of a dispatcher, for the bodies that it has read on a thread; `works` counts them."""

    works = 0
    turns = WorkTurns()

    async def off_loop(self, work: Any, *arguments: Any) -> Any:
        self.works += 1
        return await asyncio.to_thread(work, *arguments)

    def free_off_loop(self, value: object) -> None: ...

    def check_space(self, expected: str | None) -> None: ...


@pytest.mark.parametrize("route", ["/v1/embeddings", "/score"])
async def test_a_large_body_that_is_no_json_is_not_copied_in_one_call(route: str) -> None:
    """15 ms with the GIL for 32 MB: the search for a text that is not Unicode did so, and that for messages, too."""
    body = bytearray(b'{"input": 1e' + b"9" * 8 * 2**20 + b"}")
    inference = http_inference.HttpInference(OffLoop())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        with pytest.raises(http_inference.BadRequest, match="a number is too long"):
            await vllm.ROUTES["POST", route](inference, HttpRequest("vllm", "POST", route, "", {}, body))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize(("inputs", "works"), [(2000, 0), (9000, 1)])
async def test_a_small_body_of_very_many_objects_is_read_on_a_thread(inputs: int, works: int) -> None:
    """9,000 objects in 110 KB held the event loop for 20 ms."""
    body = orjson.dumps({"input": [{"text": "a"}] * inputs})
    dispatcher = OffLoop()
    inference = http_inference.HttpInference(dispatcher)  # type: ignore[arg-type]
    request = HttpRequest("openai", "POST", "/v1/embeddings", "", {}, body)
    found = await inference.read(request, openai.OpenAIEmbeddingsRequest)
    assert found.input == ["a"] * inputs
    assert dispatcher.works == works


async def test_a_body_that_is_read_again_waits_for_no_longer_one() -> None:
    """Four of 3 MiB took both codec threads, and a short one waited 0.8 s for each."""
    long = b'{"inputs":[' + b'"a",' * 30_000 + b"1]}"
    short = b'{"inputs":"a","x":"' + b"a" * http_inference._REPARSED_BYTES + b'","truncate":true,"truncate":true}'
    dispatcher = Dispatcher(WorkerSpec(name="a", model_id="b"))
    inference = http_inference.HttpInference(dispatcher)

    async def refused(body: bytes) -> str:
        request = HttpRequest("tei", "POST", "/embed", "", {"content-type": "application/json"}, body)
        with pytest.raises(http_inference.BadRequest) as raised:
            await inference.read(request, tei.TeiEmbedRequest, tei.TEI_BODY)
        return raised.value.message

    try:
        others = [asyncio.create_task(refused(long)) for _ in range(4)]
        await asyncio.sleep(0)
        assert "duplicate field `truncate`" in await refused(short)
        assert not any(one.done() for one in others)
        assert all(["data did not match any variant" in await one for one in others])
    finally:
        dispatcher.close()


# An encoding of bytes alone, as a plug-in of tiktoken has it.
PLUG_IN = """
def letters():
    ranks = {bytes([each]): each for each in range(256)} | {b"fo": 256, b"fog": 257}
    return {"name": "letters", "pat_str": r"\\S+|\\s+", "mergeable_ranks": ranks, "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"letters": letters}
"""


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    registry = pytest.importorskip("tiktoken.registry")
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "of_tests.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", None)
    registry._available_plugin_modules.cache_clear()
    body_validation._encoding.cache_clear()
    yield "letters"
    registry._available_plugin_modules.cache_clear()
    body_validation._encoding.cache_clear()


def spec(mode: str, encoding: str = "letters") -> WorkerSpec:
    return WorkerSpec(name="mini", model_id="m", token_inputs=mode, token_encoding=encoding)


def ids(*numbers: int) -> Input:
    return np.array(numbers, np.uint32).view(np.int32)


def test_ids_are_read_as_their_text(letters: str) -> None:
    body_validation.check_token_inputs(spec(body_validation.TIKTOKEN))
    cut = "\u6771".encode()[:2]  # a chunk ends within a character
    given: list[Input] = ["a text", ids(257, 32, *b"rain"), ids(*b"a", *cut), None, ids()]

    found = body_validation.read_token_ids(given, spec(body_validation.TIKTOKEN))

    assert found[:4] == ["a text", "fog rain", "a\ufffd", None]
    assert isinstance(found[4], np.ndarray)  # of no ids: refused as empty


def test_an_id_that_the_encoding_lacks_is_refused_with_its_input(letters: str) -> None:
    with pytest.raises(InvalidInput, match="has a token id that letters does not have") as caught:
        body_validation.read_token_ids(["a", ids(257), ids(5, 2**32 - 1)], spec(body_validation.TIKTOKEN))
    assert caught.value.input_index == 2


def test_refused_ids_are_named_and_texts_are_left_alone() -> None:
    refusing = spec(body_validation.REFUSE)
    assert body_validation.read_token_ids(["a", "b"], refusing) == ["a", "b"]
    with pytest.raises(InvalidInput, match="token ids are refused here") as caught:
        body_validation.read_token_ids(["a", ids(5)], refusing)
    assert caught.value.input_index == 1


def test_an_encoding_that_cannot_be_loaded_fails_the_start() -> None:
    pytest.importorskip("tiktoken")
    body_validation.check_token_inputs(spec(body_validation.ACCEPT, "nothing"))
    with pytest.raises(InvalidConfig, match="token_encoding: tiktoken cannot load 'nothing'"):
        body_validation.check_token_inputs(spec(body_validation.TIKTOKEN, "nothing"))


async def test_an_instance_refuses_ids_on_every_route_of_inputs(tmp_path: Path) -> None:
    """LangChain and LibreChat send the ids of OpenAI's tokenizer, which would be those of other words here."""
    with WorkerProcess(models.build("bert", tmp_path), token_inputs=body_validation.REFUSE) as worker:
        link = await worker.link()
        await link.state(link.post(Method.WATCH), "ready")
        link.close()
        await link.closed()
        client = TeiClient(worker)
        for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/embed_all", "inputs")):
            for given in ([5, 6], [[5, 6], [7]], ["fog", [7]]):
                told = await client.post(path, {field: given})
                assert told.status == 422
                assert "token ids are refused here" in told.text
            assert (await client.post(path, {field: ["fog", "rain"]})).status == 200
        assert (await client.post("/decode", {"ids": [5, 6]})).status == 200
        await client.session.close()
