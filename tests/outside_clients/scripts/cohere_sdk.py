"""cohere's client, both of its versions, on the daemon's port."""

from __future__ import annotations

from typing import Any

import cohere
from telling import main, refusal


def _first(told: Any) -> cohere.Client:
    return cohere.Client(api_key="none", base_url=told.daemon)


def _second(told: Any) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="none", base_url=told.daemon)


def _ranks(told: Any, answer: Any) -> Any:
    return [[told.texts[rank.index], rank.relevance_score] for rank in answer.results]


def embedded_by_1(told: Any) -> Any:
    return _first(told).embed(texts=told.texts, model="embedding", input_type="search_document").embeddings


def embedded_by_2(told: Any) -> Any:
    kinds: Any = {"input_type": "search_document", "embedding_types": ["float"]}
    return _second(told).embed(texts=told.texts, model="embedding", **kinds).embeddings.float_


def binary_by_2(told: Any) -> Any:
    kinds: Any = {"input_type": "search_document", "embedding_types": ["ubinary"]}
    return _second(told).embed(texts=told.texts, model="embedding", **kinds).embeddings.ubinary


def ranks_by_1(told: Any) -> Any:
    return _ranks(told, _first(told).rerank(query=told.query, documents=told.texts, model="reranker"))


def two_ranks_by_2(told: Any) -> Any:
    return _ranks(told, _second(told).rerank(query=told.query, documents=told.texts, model="reranker", top_n=2))


def joined_pieces(told: Any) -> Any:
    """As Dify's plugin for Cohere cuts and joins its texts."""
    each = [_first(told).tokenize(text=text, model="embedding", offline=False) for text in told.texts]
    return ["".join(one.token_strings) for one in each]


def picture(told: Any) -> Any:
    kinds: Any = {"input_type": "image", "embedding_types": ["float"]}
    return _second(told).embed(images=[told.picture], model="pictures", **kinds).embeddings.float_


def of_nobody(told: Any) -> Any:
    return refusal(lambda: _second(told).rerank(query="fog", documents=["dog"], model="nobody"))


main(embedded_by_1, embedded_by_2, binary_by_2, ranks_by_1, two_ranks_by_2, joined_pieces, picture, of_nobody)
