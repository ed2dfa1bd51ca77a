"""Inference over gRPC, typed: texts in, float32 arrays out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar, Unpack

import numpy as np
from google.protobuf.message import Message

from teimgr.client.arrow import Compression, Texts, joined, pack_texts, slices, unpack_vectors
from teimgr.client.checks import (
    check_count,
    check_flag,
    check_keywords,
    check_limit,
    check_sequence,
    check_source,
    check_text,
)
from teimgr.client.failures import first_of
from teimgr.client.grpc_channel import Calls
from teimgr.client.messages import (
    HOW,
    HOW_ARROW,
    HOW_TEXT,
    WHERE,
    How,
    HowArrow,
    HowText,
    Where,
    arrow_request,
    direction,
    embed_request,
    target,
    vector,
)
from teimgr.client.values import Embedded, Info, SparseVector, Token, Vectors
from teimgr.errors import Internal
from teimgr.pb.tei.v1 import tei_pb2
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

ItemT = TypeVar("ItemT")
MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")


class RpcBase:
    """The base of the classes whose methods are calls. Every method raises the `TeimgrError` that the server meant.

    `instance=` or `model=` says who answers. Calls end after the client's `timeout_s`; streams when a reply is
    owed for that long.
    """

    _calls: Calls
    _timeout_s: float

    async def _ask(self, method: str, request: Message, reply: type[MessageT]) -> MessageT:
        return reply.FromString(await self._calls.unary(method, request.SerializeToString(), self._timeout_s))

    async def _each_text(
        self, texts: str | Sequence[str], in_flight: int, ask: Callable[[str], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """As `_each`, for texts; one text is a sequence of one.

        Raises:
            ValidationError: they are none, or one of them is no text.
        """
        wanted = [texts] if isinstance(texts, str) else texts
        check_sequence("texts", wanted)

        async def ask_one(position: int, text: str) -> ResultT:
            check_text(f"texts[{position}]", text)
            return await ask(text)

        return await self._each(wanted, in_flight, ask_one)

    async def _each(
        self, items: Sequence[ItemT], in_flight: int, ask: Callable[[int, ItemT], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """What `ask` gives for every item and its position, in order, `in_flight` at a time.

        The first failure ends the rest.

        Raises:
            ValidationError: `in_flight` is below 1.
        """
        check_limit("in_flight", in_flight)
        results: dict[int, ResultT] = {}
        waiting = iter(enumerate(items))

        async def work() -> None:
            for position, item in waiting:
                results[position] = await ask(position, item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(in_flight, len(items))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            first_of(failures)
        return [results[position] for position in range(len(items))]


T = TypeVar("T")

# One hop to a thread fetches this many items, or what the source gives in this time.
_ITEMS = 256
_PATIENCE_S = 0.002


async def items(source: Iterable[T] | AsyncIterable[T], at_once: int = _ITEMS) -> AsyncIterator[T]:
    """The items of `source` in order; a plain iterable is advanced on a thread, so it may block.

    At most `at_once` items are read ahead: 1 for those that are large.
    """
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
        return
    iterator = iter(source)
    failure: Exception | None = None
    while failure is None:
        taken, failure = await asyncio.to_thread(_take, iterator, at_once)
        for item in taken:
            yield item
        if not taken:
            break
    if failure is not None:
        raise failure


def _take(iterator: Iterator[T], at_once: int) -> tuple[list[T], Exception | None]:
    """Some items, none at the end, and what the source raised after them."""
    taken: list[T] = []
    late = time.monotonic() + _PATIENCE_S
    try:
        for item in iterator:
            taken.append(item)
            if len(taken) == at_once or time.monotonic() > late:
                break
    except Exception as failure:
        return taken, failure
    return taken, None


_STREAM_WINDOW = 512
_BATCH_WINDOW = 4


class Inference(RpcBase):
    """What embedding models of every kind serve, and what concerns tokens."""

    async def embed(self, texts: str | Sequence[str], *, in_flight: int = 64, **how: Unpack[How]) -> Vectors:
        """One vector per text, float32 [n, dim]; one text gives one row, no text none ([0, 0]).

        Each text is a call of its own, `in_flight` at a time; for thousands of texts `embed_arrow` is faster.
        The first failure ends the rest.
        """
        check_keywords(how, HOW)

        async def ask(text: str) -> Vectors:
            return vector(await self._calls.unary("Embed", embed_request(text, how), self._timeout_s))

        rows = await self._each_text(texts, in_flight, ask)
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)

    async def embed_sparse(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **how: Unpack[HowText]
    ) -> Sequence[SparseVector]:
        """The weights of every text over the model's vocabulary; one text gives one vector."""
        check_keywords(how, HOW_TEXT)

        async def ask(text: str) -> SparseVector:
            inner = tei_pb2.EmbedSparseRequest(
                inputs=text,
                truncate=how.get("truncate", True),
                truncation_direction=direction(how),
                prompt_name=how.get("prompt_name"),
            )
            request = mux_pb2.EmbedSparseRequest(target=target(how), request=inner)
            return SparseVector.from_message(await self._ask("EmbedSparse", request, tei_pb2.EmbedSparseResponse))

        return await self._each_text(texts, in_flight, ask)

    async def embed_all(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **how: Unpack[HowText]
    ) -> Sequence[Vectors]:
        """A vector for every token of every text, float32 [tokens, dim] each; one text gives one matrix.

        A late-interaction model gives the vectors it compares, any other its last hidden states.
        """
        check_keywords(how, HOW_TEXT)

        async def ask(text: str) -> Vectors:
            inner = tei_pb2.EmbedAllRequest(
                inputs=text,
                truncate=how.get("truncate", True),
                truncation_direction=direction(how),
                prompt_name=how.get("prompt_name"),
            )
            request = mux_pb2.EmbedAllRequest(target=target(how), request=inner)
            reply = await self._ask("EmbedAll", request, tei_pb2.EmbedAllResponse)
            rows = [np.array(token.embeddings, np.float32) for token in reply.token_embeddings]
            return np.stack(rows) if rows else np.empty((0, 0), np.float32)

        return await self._each_text(texts, in_flight, ask)

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

        async def ask(at: int, piece: Texts) -> Embedded:
            request = arrow_request(pack_texts(piece, compression, first_row=at * batch_rows), how)
            return _matching(await self._calls.unary("EmbedArrow", request, self._timeout_s), len(piece))

        return joined(await self._each(list(slices(texts, batch_rows)), in_flight, ask))

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
            async for batch in items(batches, at_once=1):
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


def _ipc(reply: bytes) -> bytes:
    return mux_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc


def _matching(reply: bytes, rows: int) -> Embedded:
    embedded = unpack_vectors(_ipc(reply))
    if len(embedded.vectors) != rows:
        raise Internal(f"the server answered {len(embedded.vectors)} rows for {rows} texts")
    return embedded
