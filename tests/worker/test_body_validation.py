"""Large bodies are validated in slices with the errors of one call, and every list fails at its first fault."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from threading import Event, Thread
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from teimgr.http.turns import WorkTurns
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import HttpRequest
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
