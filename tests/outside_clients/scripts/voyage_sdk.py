"""voyageai's client on the daemon's port: texts, contents with images, reranking."""

from __future__ import annotations

import base64
import io
from typing import Any

import voyageai
from PIL import Image
from telling import main, refusal


def _client(told: Any) -> voyageai.Client:
    return voyageai.Client(api_key="none", base_url=f"{told.daemon}/voyage/v1")


def texts(told: Any) -> Any:
    return _client(told).embed(told.texts, model="embedding", input_type=None).embeddings


def ranks(told: Any) -> Any:
    found = _client(told).rerank(told.query, told.texts, model="reranker")
    return [[told.texts[one.index], one.relevance_score] for one in found.results]


def picture(told: Any) -> Any:
    """The picture, which the client sends as WebP."""
    image = Image.open(io.BytesIO(base64.b64decode(told.picture.partition(",")[2])))
    answer = _client(told).multimodal_embed([[image]], model="pictures", input_type="document")
    return [answer.embeddings, answer.image_pixels, answer.total_tokens - answer.text_tokens]


def of_nobody(told: Any) -> Any:
    return refusal(lambda: _client(told).embed(["fog"], model="nobody"))


main(texts, ranks, picture, of_nobody)
