"""infinity-client on the daemon's port: texts and a picture."""

from __future__ import annotations

from typing import Any

from infinity_client import Client
from infinity_client.api.default import embeddings
from infinity_client.models import OpenAIEmbeddingInputImage, OpenAIEmbeddingInputText
from telling import main


def _vectors(told: Any, body: Any) -> Any:
    answer: Any = embeddings.sync(client=Client(base_url=told.daemon), body=body)
    return [one.embedding for one in answer.data]


def texts(told: Any) -> Any:
    return _vectors(told, OpenAIEmbeddingInputText(input_=told.texts, model="embedding"))


def picture(told: Any) -> Any:
    return _vectors(told, OpenAIEmbeddingInputImage(input_=[told.picture], model="pictures"))


main(texts, picture)
