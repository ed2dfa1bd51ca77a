"""Outside clients, as they are published, judged against the engine's own numbers over gRPC."""

from __future__ import annotations

import numpy as np
import pytest
from tests.outside_clients.conftest import TEXTS, TOLERANCE, Hear, Page, Truth, same, same_ranks


def test_hugging_face(hear: Hear, truth: Truth) -> None:
    told = hear("hugging_face")

    for name in ("of_the_path", "of_the_base", "in_async", "through_the_daemon", "with_the_key"):
        same(told[name], truth.vectors)
    same(told["not_normalized"], truth.raw)
    same(told["with_options"], truth.embedded(TEXTS[0], prompt_name="query", dimensions=8))
    assert told["similarity"] == pytest.approx((truth.vectors[1:] @ truth.vectors[0]).tolist(), abs=TOLERANCE)
    best = truth.best_class()
    assert told["classes"] == {"label": best.label, "score": pytest.approx(best.score, abs=TOLERANCE)}
    assert told["refused"].startswith("BadRequestError")
    assert "`inputs` cannot be empty" in told["refused"]
    assert "401" in told["with_the_wrong_key"]


def test_langchain(hear: Hear, truth: Truth, page: Page) -> None:
    told = hear("langchain", librechat=page("librechat", "Embedding").fields)

    same(told["documents"], truth.vectors)
    same(told["query"], truth.vectors[0])
    same(told["with_a_prompt"], truth.embedded(prompt_name="query"))
    same(told["in_async"], truth.vectors)
    same(told["openai_documents"], truth.short)
    same(told["librechat_documents"], truth.vectors)
    same(told["librechat_query"], truth.vectors[0])


def test_llama_index(hear: Hear, truth: Truth) -> None:
    told = hear("llama_index_tei")

    same(told["texts"], truth.vectors)
    same(told["query"], truth.embedded(f"query: {TEXTS[0]}")[0])
    same(told["in_async"], truth.vectors)
    same_ranks(told["ranks"], truth.ranks()[:2])


def test_haystack(hear: Hear, truth: Truth) -> None:
    told = hear("haystack_tei")

    # Its embedders request raw vectors by default.
    same(told["text"], truth.raw[0])
    same(told["documents"], truth.vectors)
    same(told["with_the_key"], truth.raw[0])
    same_ranks(told["ranks"], truth.ranks())
    same_ranks(told["raw_ranks"], truth.ranks(raw_scores=True))
    same(told["text_over_grpc"], truth.raw[0])
    same_ranks(told["ranks_over_grpc"], truth.ranks())


def test_openai(hear: Hear, truth: Truth) -> None:
    told = hear("openai_sdk")

    for name in ("by_default", "in_async", "of_the_daemon", "with_the_key"):
        same(told[name], truth.vectors)
    same(told["floats_of_8"], truth.short)
    assert np.shape(told["of_ids"]) == (2, truth.vectors.shape[1])
    same(told["of_ids"][0], told["of_ids"][1])
    same(told["picture"], truth.picture)
    for name, error, text in (
        ("of_nothing", "BadRequestError", "`inputs` cannot be empty"),
        ("of_a_classifier", "APIStatusError", "Model is not an embedding model"),
        ("of_nobody", "NotFoundError", "nobody"),
        ("with_the_wrong_key", "AuthenticationError", "401"),
    ):
        assert told[name].startswith(error), told[name]
        assert text in told[name]


def test_litellm(hear: Hear, truth: Truth) -> None:
    told = hear("litellm_sdk")

    for name in ("as_openai", "as_infinity", "as_hugging_face", "as_vllm"):
        same(told[name], truth.vectors)
    for name in ("ranks", "ranks_as_cohere", "ranks_as_infinity", "ranks_as_jina", "ranks_as_vllm"):
        same_ranks(told[name], truth.ranks())
    for way in ("a_header", "a_field", "the_prefix"):
        same_ranks(told[f"ranks_as_vllm_by_{way}"], truth.ranks())
    assert told["too_long"] == "ContextWindowExceededError"


def test_cohere(hear: Hear, truth: Truth) -> None:
    told = hear("cohere_sdk")

    same(told["embedded_by_1"], truth.vectors)
    same(told["embedded_by_2"], truth.vectors)
    assert told["binary_by_2"] == np.packbits(truth.vectors > 0, axis=1).tolist()
    same_ranks(told["ranks_by_1"], truth.ranks())
    same_ranks(told["two_ranks_by_2"], truth.ranks()[:2])
    assert told["joined_pieces"] == TEXTS
    same(told["picture"], truth.picture)
    assert told["of_nobody"].startswith("NotFoundError")


def test_voyage(hear: Hear, truth: Truth) -> None:
    told = hear("voyage_sdk")

    same(told["texts"], truth.vectors)
    same_ranks(told["ranks"], truth.ranks())
    vectors, pixels, tokens = told["picture"]
    same(vectors, truth.picture)
    assert (pixels, tokens) == (60 * 40, 5)
    assert "nobody" in told["of_nobody"]


def test_infinity(hear: Hear, truth: Truth) -> None:
    told = hear("infinity_sdk")

    same(told["texts"], truth.vectors)
    same(told["picture"], truth.picture)


def test_ollama(hear: Hear, truth: Truth) -> None:
    told = hear("ollama_sdk")

    for name in ("several", "in_async", "langchain_documents", "llama_index_texts", "llama_index_in_async"):
        same(told[name], truth.vectors)
    for name in ("short", "langchain_short"):
        same(told[name], truth.short)
    for name in ("one", "langchain_query"):
        same(told[name], truth.vectors[0])
    same(told["older"], truth.raw)
    same(told["llama_index_query"], truth.embedded(f"query: {TEXTS[0]}")[0])
    tags, running = told["listed"]
    assert {"embedding:latest", "locked:latest"} <= set(tags)
    assert running == ["embedding:latest", "locked:latest", "pictures:latest"]
    assert told["shown"][0] == ["embedding"]
    nobody, too_long, generate, pull = told["refused"]
    assert nobody.startswith("ResponseError: model 'nobody' not found")
    assert nobody.endswith("(status code: 404)")
    assert "the input length exceeds the context length" in too_long
    assert "(status code: 400)" in generate
    assert "(status code: 501)" in pull
