"""Inference over gRPC, typed: texts in, float32 arrays out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar, Unpack

import numpy as np
from google.protobuf.message import Message

from teimgr.client.batches import Compression, Texts, joined, pack_texts, slices, unpack_vectors
from teimgr.client.calls import Calls
from teimgr.client.checks import (
    check_count,
    check_flag,
    check_keywords,
    check_limit,
    check_sequence,
    check_source,
    check_text,
    check_texts,
)
from teimgr.client.failures import first_of
from teimgr.client.messages import (
    HOW,
    HOW_ARROW,
    WHERE,
    How,
    HowArrow,
    Where,
    arrow_request,
    embed_request,
    target,
    vector,
)
from teimgr.client.sources import items
from teimgr.client.values import Embedded, Info, Rank, Token, Vectors
from teimgr.errors import Internal
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

M = TypeVar("M", bound=Message)

_STREAM_WINDOW = 512
_BATCH_WINDOW = 4


class Inference:
    """The calls of the multiplexer. Every method raises the `TeimgrError` that the server meant.

    `instance=` or `model=` says who answers. Calls end after the client's `timeout_s`; streams when a reply is
    owed for that long.
    """

    _calls: Calls
    _timeout_s: float

    async def embed(self, texts: str | Sequence[str], *, in_flight: int = 64, **how: Unpack[How]) -> Vectors:
        """One vector per text, float32 [n, dim]; one text gives one row, no text none ([0, 0]).

        Each text is a call of its own, `in_flight` at a time; for thousands of texts `embed_arrow` is faster.
        The first failure ends the rest.
        """
        check_keywords(how, HOW)
        check_limit("in_flight", in_flight)
        wanted = [texts] if isinstance(texts, str) else texts
        check_sequence("texts", wanted)
        rows: list[Vectors] = [np.empty(0, np.float32)] * len(wanted)
        waiting = iter(enumerate(wanted))

        async def work() -> None:
            for row, text in waiting:
                check_text(f"texts[{row}]", text)
                reply = await self._calls.unary("Embed", embed_request(text, how), self._timeout_s)
                rows[row] = vector(reply)

        await _together(work, min(in_flight, len(wanted)))
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)

    async def embed_stream(
        self, texts: Iterable[str] | AsyncIterable[str], *, window: int = _STREAM_WINDOW, **how: Unpack[How]
    ) -> AsyncIterator[Vectors]:
        """One row (float32 [dim]) per text, in order, while `texts` is still being read.

        Memory is constant: at most `window` texts are sent and not answered. A plain iterable is read on a thread.
        """
        check_keywords(how, HOW)
        check_limit("window", window)
        check_source("texts", texts)

        async def requests() -> AsyncIterator[bytes]:
            row = 0
            async for text in items(texts):
                check_text(f"texts[{row}]", text)
                row += 1
                yield embed_request(text, how)

        async for reply in self._calls.stream("EmbedStream", requests(), window=window, idle_s=self._timeout_s):
            yield vector(reply)

    async def embed_arrow(
        self,
        texts: Texts,
        *,
        batch_rows: int = 2048,
        in_flight: int = 2,
        compression: Compression | None = None,
        **how: Unpack[HowArrow],
    ) -> Embedded:
        """Many texts as Arrow batches: one vector or one reason per text, in order.

        `batch_rows` texts travel per call, `in_flight` calls at a time; `compression` is that of the request.
        A text that fails alone is told in `Embedded.errors`; a failing call raises.
        """
        check_keywords(how, HOW_ARROW)
        check_limit("in_flight", in_flight)
        pieces = list(slices(texts, batch_rows))
        parts: list[Embedded | None] = [None] * len(pieces)
        waiting = iter(enumerate(pieces))

        async def work() -> None:
            for at, piece in waiting:
                request = arrow_request(pack_texts(piece, compression, first_row=at * batch_rows), how)
                parts[at] = _matching(await self._calls.unary("EmbedArrow", request, self._timeout_s), len(piece))

        await _together(work, min(in_flight, len(pieces)))
        return joined([part for part in parts if part is not None])

    async def embed_arrow_stream(
        self,
        batches: Iterable[Texts] | AsyncIterable[Texts],
        *,
        compression: Compression | None = None,
        window: int = _BATCH_WINDOW,
        **how: Unpack[HowArrow],
    ) -> AsyncIterator[Embedded]:
        """One answer per batch, in order, with at most `window` batches sent and not answered."""
        check_keywords(how, HOW_ARROW)
        check_limit("window", window)
        check_source("batches", batches)

        async def requests() -> AsyncIterator[bytes]:
            number = 0
            async for batch in items(batches):
                yield arrow_request(pack_texts(batch, compression, name=f"batches[{number}]"), how)
                number += 1

        async for reply in self._calls.stream("EmbedArrowStream", requests(), window=window, idle_s=self._timeout_s):
            yield unpack_vectors(_ipc(reply))

    async def info(self, **where: Unpack[Where]) -> Info:
        """What the served model is and takes."""
        check_keywords(where, WHERE)
        request = mux_pb2.InfoRequest(target=target(where))
        return Info.from_message(await self._ask("Info", request, tei_pb2.InfoResponse))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, prompt_name: str | None = None, **where: Unpack[Where]
    ) -> Sequence[Token]:
        """The tokens of a text, prompt included, untruncated."""
        check_keywords(where, WHERE)
        check_text("text", text)
        check_flag("add_special_tokens", add_special_tokens)
        if prompt_name is not None:
            check_text("prompt_name", prompt_name)
        inner = tei_pb2.EncodeRequest(inputs=text, add_special_tokens=add_special_tokens, prompt_name=prompt_name)
        request = mux_pb2.EncodeRequest(target=target(where), request=inner)
        reply = await self._ask("Tokenize", request, tei_pb2.EncodeResponse)
        return [Token.from_message(token) for token in reply.tokens]

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, **where: Unpack[Where]) -> str:
        """The text of token ids."""
        check_keywords(where, WHERE)
        check_flag("skip_special_tokens", skip_special_tokens)
        check_sequence("ids", ids)
        for position, token in enumerate(ids):
            check_count(f"ids[{position}]", token)
        inner = tei_pb2.DecodeRequest(ids=ids, skip_special_tokens=skip_special_tokens)
        request = mux_pb2.DecodeRequest(target=target(where), request=inner)
        return (await self._ask("Decode", request, tei_pb2.DecodeResponse)).text

    async def rerank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        truncate: bool = True,
        raw_scores: bool = False,
        return_text: bool = False,
        **where: Unpack[Where],
    ) -> Sequence[Rank]:
        """Every text's rank for the query, best first; only a reranker serves it."""
        check_keywords(where, WHERE)
        check_text("query", query)
        check_texts("texts", texts)
        for name, flag in (("truncate", truncate), ("raw_scores", raw_scores), ("return_text", return_text)):
            check_flag(name, flag)
        inner = tei_pb2.RerankRequest(
            query=query, texts=texts, truncate=truncate, raw_scores=raw_scores, return_text=return_text
        )
        request = mux_pb2.RerankRequest(target=target(where), request=inner)
        reply = await self._ask("Rerank", request, tei_pb2.RerankResponse)
        return [Rank(rank.index, rank.score, rank.text if rank.HasField("text") else None) for rank in reply.ranks]

    async def _ask(self, method: str, request: Message, reply: type[M]) -> M:
        return reply.FromString(await self._calls.unary(method, request.SerializeToString(), self._timeout_s))


def _ipc(reply: bytes) -> bytes:
    return mux_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc


def _matching(reply: bytes, rows: int) -> Embedded:
    embedded = unpack_vectors(_ipc(reply))
    if len(embedded.vectors) != rows:
        raise Internal(f"the server answered {len(embedded.vectors)} rows for {rows} texts")
    return embedded


async def _together(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """`count` tasks of `work`; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        first_of(failures)
