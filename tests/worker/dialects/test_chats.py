"""Texts and images in one input, in the words of every dialect that has them: one vector, and refusals by name."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from tests.support.models.dual_encoders import file_of, noise
from tests.worker.dialects.dialect_client import Asking

FILE, OTHER = file_of(noise(60, 40)), file_of(noise(100, 90, 1))
URI, OTHER_URI = (f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (FILE, OTHER))
PLAIN = URI.partition(",")[2]
TEXT = "the quick fox"
TOLD = "Retrieve images relevant to the query."
PART = {"type": "image_url", "image_url": {"url": URI}}
SAID = {"type": "text", "text": TEXT}
ASSISTANT = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
IMAGE_TOKENS = 6  # of 60 x 40 pixels: 96 x 64 in squares of 32


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def fused(ask: Asking, **more: Any) -> np.ndarray:
    """The vector of the image and the text, by TEI's route of the instance."""
    content = [{"type": "image", "data": PLAIN}, {"type": "text", "value": TEXT}]
    found = await ask.own_port("chat", "/embed", {"inputs": [{"content": content}], **more})
    return np.array(found[0], np.float32)


OPENAI = [
    ("/v1/embeddings", {"messages": [user(PART, SAID)]}),
    ("/v1/embeddings", {"messages": [user(SAID, PART)]}),  # images go first, as in its authors' code
    ("/v1/embeddings", {"messages": [[user(PART, SAID), ASSISTANT]]}),
    ("/v1/embeddings", {"input": [{"text": TEXT, "image": URI}]}),
    ("/jina/v1/embeddings", {"input": [{"text": TEXT, "image": PLAIN}]}),
]


@pytest.mark.parametrize(("path", "body"), OPENAI, ids=range(len(OPENAI)))
async def test_a_text_with_an_image_has_one_vector_in_every_form(ask: Asking, path: str, body: dict[str, Any]) -> None:
    answer = (await ask.post(path, {"model": "chat", **body})).ok
    (found,) = (np.array(one["embedding"], np.float32) for one in answer["data"])
    assert (found == await fused(ask)).all()
    texts = (await ask.post("/v1/embeddings", {"model": "chat", "input": [TEXT]})).ok
    # The image's tokens, and the two around them.
    assert answer["usage"]["prompt_tokens"] == texts["usage"]["prompt_tokens"] + IMAGE_TOKENS + 2


async def test_coheres_inputs_and_sies_items(ask: Asking) -> None:
    whole = await fused(ask)
    body = {"model": "chat", "inputs": [{"content": [SAID, PART]}], "embedding_types": ["float"]}
    answer = (await ask.post("/v2/embed", body)).ok
    assert (np.array(answer["embeddings"]["float"][0], np.float32) == whole).all()
    assert answer["meta"]["billed_units"]["image_tokens"] == IMAGE_TOKENS
    assert answer["meta"]["billed_units"]["images"] == 1
    assert answer["images"][0]["width"] == 60
    items = [{"text": TEXT, "images": [{"data": PLAIN}]}]
    answer = (await ask.post("/v1/encode/chat", {"items": items})).ok
    values = answer["items"][0]["dense"]["values"]
    assert np.allclose(values, whole, atol=1e-6)
    assert answer["usage"]["images"] == 1


async def test_a_system_message_is_the_instruction_as_a_prompt_is(ask: Asking) -> None:
    messages = [[{"role": "system", "content": TOLD}, user(PART, SAID)], [user(PART, SAID)]]
    answer = (await ask.post("/v1/embeddings", {"model": "chat", "messages": messages})).ok
    told, plain = (np.array(one["embedding"], np.float32) for one in answer["data"])
    assert np.allclose(plain, await fused(ask), atol=1e-6)
    assert np.abs(told - plain).max() > 1e-3


async def test_several_images_and_mixed_items_in_one_call(ask: Asking) -> None:
    parts = [PART, {"type": "image_url", "image_url": {"url": OTHER_URI}}, SAID]
    answer = (await ask.post("/v1/embeddings", {"model": "chat", "messages": [[user(*parts)], [user(PART, SAID)]]})).ok
    both, one = (np.array(each["embedding"], np.float32) for each in answer["data"])
    assert np.allclose(one, await fused(ask), atol=1e-6)
    assert np.abs(both - one).max() > 1e-3


async def test_what_clients_of_vllm_say_of_a_chat_that_ends_as_the_models_changes_nothing(ask: Asking) -> None:
    plain, whole = [user(PART, SAID)], await fused(ask)
    continued = {"messages": [*plain, ASSISTANT], "continue_final_message": True, "add_special_tokens": True}
    for body in (
        {"messages": plain, "add_generation_prompt": True, "chat_template_kwargs": {}, "mm_processor_kwargs": None},
        {"messages": plain, "padding": "do_not_pad", "add_special_tokens": False},
        continued,
        continued | {"add_generation_prompt": False},
    ):
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            answer = (await ask.post(path, {"model": "chat", **body})).ok
            assert (np.array(answer["data"][0][key], np.float32) == whole).all()


_CHAT: dict[str, Any] = {"messages": [user(PART, SAID)]}
_CHANGES: list[tuple[dict[str, Any], str]] = [
    (_CHAT | {"chat_template": "{{ messages }}"}, "chat_template: is not supported"),
    (_CHAT | {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs: is not supported"),
    (_CHAT | {"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs: is not supported"),
    (_CHAT | {"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs: is not supported"),
    (_CHAT | {"instruction": TOLD}, "instruction: is not supported; send it as a system message"),
    (_CHAT | {"padding": "max_length"}, "padding: max_length is not supported"),
    (_CHAT | {"add_generation_prompt": False}, "messages: add_generation_prompt: false is not supported"),
    (_CHAT | {"continue_final_message": True}, "messages: continue_final_message is for an empty message"),
    ({"messages": [[user(PART), ASSISTANT]], "continue_final_message": False}, "messages.0: an empty message of an"),
    ({"messages": [user(PART), ASSISTANT], "add_generation_prompt": True}, "messages: an empty message of an"),
    *(
        ({"messages": [{"role": role, "content": "x"}]}, f"messages.0.role: must be user, and is '{role}'")
        for role in ("assistant", "system", "tool", "banana", None)
    ),
    ({"messages": [[user(SAID)], [{"role": "tool", "content": "x"}]]}, "messages.1.0.role: must be user"),
    (_CHAT | {"input": "a"}, "messages: contradict `input`"),
]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(("body", "said"), _CHANGES, ids=range(len(_CHANGES)))
async def test_what_would_change_a_chat_is_refused_by_name(
    ask: Asking, path: str, body: dict[str, Any], said: str
) -> None:
    told = await ask.post(path, {"model": "chat", **body})
    assert told.status == 400, told
    assert said in told.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": TEXT, "documents": [{"content": [PART]}]}),
        ("/rerank", {"query": {"content": [PART]}, "documents": ["a"]}),
        ("/score", {"text_1": TEXT, "text_2": [{"content": [PART]}]}),
    ],
    ids=["documents", "query", "score"],
)
@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs", "chat_template", "chat_template_kwargs"])
async def test_what_would_change_a_score_of_images_is_refused_by_name(
    ask: Asking, path: str, body: dict[str, Any], name: str
) -> None:
    told = await ask.post(path, {"model": "judge", **body, name: {"max_pixels": 1}})
    assert told.status == 400, told
    assert f"{name}: is not supported" in told.body.decode()
    assert (await ask.post(path, {"model": "judge", **body, name: None})).status == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"messages": [user(PART, {"type": "video_url", "video_url": {"url": URI}})]}, "'video_url'"),
        ("/v1/embeddings", {"messages": [user(*[PART] * 9, SAID)]}, "has 9 images, and 8 are allowed"),
        ("/v1/embeddings", {"messages": [user(SAID), user(SAID)]}, "needs one message"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "system", "content": [PART]}, user(SAID)]},
            "an instruction is a text",
        ),
        ("/v1/embeddings", {"messages": [user(PART)], "mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
        ("/instances/chat/embed", {"inputs": {"content": [{"type": "video", "url": URI}]}}, "'video' is not served"),
        ("/instances/chat/embed", {"inputs": {"type": "content", "content": []}}, "needs texts and images"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"type": "input_audio", "input_audio": {}}]}]},
            "input_audio needs `input_audio`",
        ),
    ],
    ids=range(8),
)
async def test_refusals_name_the_part(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path, {"model": "chat", **body})
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/instances/clip/embed", {"inputs": {"content": [{"type": "image", "data": PLAIN}, TEXT]}}),
        ("/v1/embeddings", {"input": [{"text": TEXT, "image": URI}]}),
        ("/v1/embeddings", {"messages": [user(PART, SAID)]}),
        ("/v2/embed", {"inputs": [{"content": [SAID, PART]}]}),
        ("/v1/encode/clip", {"items": [{"text": TEXT, "images": [{"data": PLAIN}]}]}),
    ],
    ids=["tei", "jina", "vllm", "cohere", "sie"],
)
async def test_a_model_of_one_at_a_time_refuses_both_together(ask: Asking, path: str, body: dict[str, Any]) -> None:
    told = await ask.post(path, {"model": "clip", **body})
    assert told.status in (400, 422)
    assert "one at a time" in told.body.decode()


DOCUMENTS: list[Any] = [
    "a caption",
    {"content": [PART]},
    {"content": [{"type": "image_url", "image_url": {"url": OTHER_URI}}, SAID]},
]


async def scored(ask: Asking, **more: Any) -> list[float]:
    """The scores of `DOCUMENTS` by vLLM's route."""
    body = {"model": "judge", "data_1": TEXT, "data_2": DOCUMENTS, **more}
    answer = (await ask.post("/score", body)).ok
    return [one["score"] for one in answer["data"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/jina/v1/rerank"])
async def test_documents_with_images_are_ranked_by_the_rerankers_scores(ask: Asking, path: str) -> None:
    expected = await scored(ask)
    answer = (await ask.post(path, {"model": "judge", "query": TEXT, "documents": DOCUMENTS})).ok
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[row] for row in range(3)] == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 3
    plain = (await ask.post(path, {"model": "judge", "query": TEXT, "documents": DOCUMENTS[:1]})).ok
    assert plain["results"][0]["relevance_score"] == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/vllm/rerank"])
@pytest.mark.parametrize("row", range(3))
async def test_one_document_of_vllms_is_a_list_of_one(ask: Asking, path: str, row: int) -> None:
    body = {"model": "judge", "query": TEXT, "return_documents": True}
    one = (await ask.post(path, body | {"documents": DOCUMENTS[row]})).ok["results"]
    assert one == (await ask.post(path, body | {"documents": [DOCUMENTS[row]]})).ok["results"]
    if row and path in ("/rerank", "/vllm/rerank"):  # as vLLM's server writes it
        assert one[0]["document"] == {"text": None, "multi_modal": DOCUMENTS[row]["content"]}
    else:
        assert one[0]["document"] in ({"text": DOCUMENTS[0]}, DOCUMENTS[row])


async def test_infinitys_document_is_a_text_or_left_out(ask: Asking) -> None:
    body = {"model": "judge", "query": TEXT, "documents": [{"image": URI}, {"text": "a"}], "return_documents": True}
    results = sorted((await ask.post("/infinity/rerank", body)).ok["results"], key=lambda one: one["index"])
    assert "document" not in results[0]
    assert results[1]["document"] == "a"


async def test_teis_rerank_has_the_same_scores(ask: Asking) -> None:
    contents = [[{"type": "image", "data": PLAIN}], [{"type": "image", "url": OTHER_URI}, TEXT]]
    body = {"query": {"type": "text", "value": TEXT}, "texts": ["a caption", *({"content": one} for one in contents)]}
    found = {one["index"]: one["score"] for one in (await ask.post("/instances/judge/rerank", body)).ok}
    assert [found[row] for row in range(3)] == pytest.approx(await scored(ask), abs=1e-6)
    raw = {one["index"]: one["score"] for one in await ask.own_port("judge", "/rerank", body | {"raw_scores": True})}
    assert [1 / (1 + np.exp(-raw[row])) for row in range(3)] == pytest.approx(
        [found[row] for row in range(3)], abs=1e-6
    )


async def test_a_query_with_an_image_and_an_instruction(ask: Asking) -> None:
    plain = await scored(ask)
    asked = {"model": "judge", "documents": DOCUMENTS}
    for query in ({"content": [PART, SAID]}, {"text": TEXT, "image": URI}):
        answer = (await ask.post("/v1/rerank", {"query": query, **asked})).ok
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert [found[row] for row in range(3)] == pytest.approx(
            await scored(ask, data_1={"content": [PART, SAID]}), abs=1e-6
        )
    told = await scored(ask, instruction=TOLD)
    answer = (await ask.post("/v1/rerank", {"query": TEXT, "instruction": TOLD, **asked})).ok
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[row] for row in range(3)] == pytest.approx(told, abs=1e-6)
    assert np.abs(np.array(told) - plain).max() > 1e-5


async def test_sies_score_takes_images_on_both_sides(ask: Asking) -> None:
    items = [{"text": "a caption"}, {"images": [{"data": PLAIN}]}]
    body = {"query": {"text": TEXT}, "items": items}
    answer = (await ask.post("/v1/score/judge", body)).ok
    by_id = {one["item_id"]: one["score"] for one in answer["scores"]}
    assert [by_id["item-0"], by_id["item-1"]] == pytest.approx((await scored(ask))[:2], abs=1e-6)
    assert answer["usage"]["images"] == 1
    body["query"]["images"] = [{"data": PLAIN}]
    usage = (await ask.post("/v1/score/judge", body)).ok["usage"]
    assert (usage["images"], usage["pairs"]) == (2, 2)


async def test_an_embedding_model_of_both_ranks_by_cosine(ask: Asking) -> None:
    asked = {"model": "chat", "query": TEXT, "documents": [{"content": [PART, SAID]}, "a caption"]}
    answer = (await ask.post("/v1/rerank", asked)).ok
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    query = np.array((await ask.own_port("chat", "/embed", {"inputs": [TEXT]}))[0], np.float32)
    assert found[0] == pytest.approx(float(query @ await fused(ask)), abs=1e-5)


_PAIR: dict[str, Any] = {"data_1": "a", "data_2": [{"content": [PART]}]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"model": "reranker", "query": {"image": URI}, "documents": ["a"]}, "query: only text"),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["a"], "instruction": TOLD}, "instruction"),
        ("/score", {"model": "reranker", **_PAIR}, "only text is supported"),
        ("/score", {"model": "judge", **_PAIR, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens: is not"),
        ("/score", {"model": "judge", "data_1": ["a", "b"], "data_2": [{"content": [PART]}]}, "1:1, 1:N or N:N"),
        ("/score", {"model": "judge", "data_1": "a", "data_2": [{"content": [{"type": "video_url"}]}]}, "'video_url'"),
    ],
    ids=range(6),
)
async def test_refusals_of_a_rerank_name_the_field(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path, body)
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()
