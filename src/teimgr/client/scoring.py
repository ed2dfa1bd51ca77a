"""Calls of classifiers and rerankers: texts and pairs in, scores out."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Unpack

from teimgr.client.asking import Asking
from teimgr.client.checks import (
    check_flag,
    check_keywords,
    check_sequence,
    check_source,
    check_text,
    check_texts,
)
from teimgr.client.messages import HOW_SCORES, HowScores, direction, target
from teimgr.client.sources import items
from teimgr.client.values import Prediction, Rank
from teimgr.errors import ValidationError
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2


class Scoring(Asking):
    """What classifiers and rerankers serve."""

    async def predict(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **how: Unpack[HowScores]
    ) -> Sequence[Sequence[Prediction]]:
        """For every text all labels of the model, best first; one text gives one list."""
        check_keywords(how, HOW_SCORES)

        async def ask(text: str) -> Sequence[Prediction]:
            inner = tei_pb2.PredictRequest(
                inputs=text,
                truncate=how.get("truncate", True),
                raw_scores=how.get("raw_scores", False),
                truncation_direction=direction(how),
            )
            request = mux_pb2.PredictRequest(target=target(how), request=inner)
            return _predictions(await self._ask("Predict", request, tei_pb2.PredictResponse))

        return await self._each_text(texts, in_flight, ask)

    async def predict_pair(
        self, pairs: Sequence[tuple[str, str]], *, in_flight: int = 64, **how: Unpack[HowScores]
    ) -> Sequence[Sequence[Prediction]]:
        """As `predict`, for two texts that the model reads together."""
        check_keywords(how, HOW_SCORES)
        check_sequence("pairs", pairs)

        async def ask(position: int, pair: tuple[str, str]) -> Sequence[Prediction]:
            check_texts(f"pairs[{position}]", pair)
            if len(pair) != 2:
                raise ValidationError(f"pairs[{position}] must be two texts, not {len(pair)}")
            inner = tei_pb2.PredictPairRequest(
                inputs=pair,
                truncate=how.get("truncate", True),
                raw_scores=how.get("raw_scores", False),
                truncation_direction=direction(how),
            )
            request = mux_pb2.PredictPairRequest(target=target(how), request=inner)
            return _predictions(await self._ask("PredictPair", request, tei_pb2.PredictResponse))

        return await self._each(pairs, in_flight, ask)

    async def rerank(
        self, query: str, texts: Sequence[str], *, return_text: bool = False, **how: Unpack[HowScores]
    ) -> Sequence[Rank]:
        """Every text's rank for the query, best first; only a reranker serves it."""
        check_keywords(how, HOW_SCORES)
        check_text("query", query)
        check_texts("texts", texts)
        check_flag("return_text", return_text)
        inner = tei_pb2.RerankRequest(
            query=query,
            texts=texts,
            truncate=how.get("truncate", True),
            raw_scores=how.get("raw_scores", False),
            return_text=return_text,
            truncation_direction=direction(how),
        )
        request = mux_pb2.RerankRequest(target=target(how), request=inner)
        return _ranks(await self._ask("Rerank", request, tei_pb2.RerankResponse))

    async def rerank_stream(
        self,
        query: str,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        return_text: bool = False,
        **how: Unpack[HowScores],
    ) -> Sequence[Rank]:
        """As `rerank`, with texts that are sent while they are read: more than one message may hold."""
        check_keywords(how, HOW_SCORES)
        check_text("query", query)
        check_source("texts", texts)
        check_flag("return_text", return_text)

        async def requests() -> AsyncIterator[bytes]:
            position = 0
            async for text in items(texts):
                check_text(f"texts[{position}]", text)
                position += 1
                inner = tei_pb2.RerankStreamRequest(
                    query=query,
                    text=text,
                    truncate=how.get("truncate", True),
                    raw_scores=how.get("raw_scores", False),
                    return_text=return_text,
                    truncation_direction=direction(how),
                )
                yield mux_pb2.RerankStreamRequest(target=target(how), request=inner).SerializeToString()

        reply = await self._calls.collect("RerankStream", requests(), idle_s=self._timeout_s)
        return _ranks(tei_pb2.RerankResponse.FromString(reply))


def _predictions(reply: tei_pb2.PredictResponse) -> Sequence[Prediction]:
    return [Prediction(prediction.label, prediction.score) for prediction in reply.predictions]


def _ranks(reply: tei_pb2.RerankResponse) -> Sequence[Rank]:
    return [Rank.from_message(rank) for rank in reply.ranks]
