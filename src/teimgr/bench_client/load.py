"""Load generation of bench-client: texts, unary and Arrow load, and the outcome."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lz4.frame

from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.payloads import (
    ArrowOptions,
    arrow_request,
    embed_request,
    pack_texts,
    slices,
    unpack_vectors,
    vector,
)
from teimgr.errors import Internal, InvalidConfig, TeimgrError
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

_SENTENCES = (
    "An embedding turns a sentence into a point, and close points mean much the same thing.",
    "Semantic search finds the passage you had in mind even when it shares no word with your question.",
    "The quick brown fox jumps over the lazy dog while a pangram counts every letter.",
    "Attention lets each token look at every other token before it decides what it stands for.",
    "A neural network learns by nudging millions of weights towards smaller mistakes.",
    "Nearest neighbours in a vector index are found in milliseconds when the graph is well connected.",
    "Cosine similarity compares directions and forgets how long the vectors are.",
    "Retrieval gives a language model fresh facts instead of asking it to remember them all.",
    "Mean pooling averages the token vectors of a text into the one vector that is stored.",
    "Good tokenizers cut rare words into familiar pieces, so nothing is ever quite unknown.",
)
_CLAUSE = ", and this one goes on for a little longer so that the lengths within a batch differ"


def made_texts(count: int) -> list[str]:
    """`count` distinct English texts of 15 to 30 words, the same in every run."""
    return [_text(index) for index in range(count)]


def file_texts(path: Path, count: int | None) -> list[str]:
    """The non-empty lines of a UTF-8 file, `.lz4` decompressed; repeated or cut to `count` where that is given.

    Raises:
        InvalidConfig: the file cannot be read, or has no text in it.
    """
    try:
        lines = [line for line in _lines(path) if line]
    except (OSError, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InvalidConfig(f"{path}: no texts in it")
    return lines if count is None else list(itertools.islice(itertools.cycle(lines), count))


def _text(index: int) -> str:
    clause = _CLAUSE if index % 3 == 0 else ""
    return f"{_SENTENCES[index % len(_SENTENCES)]} - sample {index + 1}{clause}"


def _lines(path: Path) -> Iterator[str]:
    opened = lz4.frame.open(path, "rt", encoding="utf-8") if path.suffix == ".lz4" else path.open(encoding="utf-8")
    with opened as file:
        for line in file:
            yield line.strip()


Progress = Callable[[int], None]  # called with the number of texts finished since the last call


@dataclass(slots=True)
class Outcome:
    """Counts of succeeded and failed texts, latencies of answered requests (ms), and failure messages."""

    requests: int = 0
    successful: int = 0
    failed: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


async def standard(
    channel: GrpcChannel, instance: str, texts: Sequence[str], concurrency: int, timeout_s: float, progress: Progress
) -> Outcome:
    """One unary `Embed` per text over one connection, `concurrency` of them at a time."""
    outcome = Outcome(requests=len(texts))
    waiting = iter(texts)

    async def work() -> None:
        for text in waiting:
            request = embed_request(text, {"instance": instance})
            began = time.perf_counter()
            try:
                vector(await channel.unary("Embed", request, timeout_s))
            except TeimgrError as error:
                outcome.failed += 1
                outcome.reasons[error.message] += 1
            else:
                outcome.latencies_ms.append((time.perf_counter() - began) * 1e3)
                outcome.successful += 1
            progress(1)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(texts))):
            group.create_task(work())
    outcome.duration_s = time.perf_counter() - began
    return outcome


async def arrow(
    channel: GrpcChannel,
    options: ArrowOptions,
    texts: Sequence[str],
    batch_rows: int,
    timeout_s: float,
    progress: Progress,
) -> Outcome:
    """`EmbedArrow` of `batch_rows` texts, LZ4 in the request, one call after the other.

    Raises:
        Internal: a reply is no Arrow stream of vectors.
    """
    outcome = Outcome()
    began = time.perf_counter()
    for piece in slices(texts, batch_rows):
        request = arrow_request(pack_texts(piece, "lz4"), options)
        outcome.requests += 1
        sent = time.perf_counter()
        try:
            reply = await channel.unary("EmbedArrow", request, timeout_s)
        except TeimgrError as error:
            outcome.failed += len(piece)
            outcome.reasons[error.message] += 1
        else:
            outcome.latencies_ms.append((time.perf_counter() - sent) * 1e3)
            _count(outcome, reply, len(piece))
        progress(len(piece))
    outcome.duration_s = time.perf_counter() - began
    return outcome


def _count(outcome: Outcome, reply: bytes, rows: int) -> None:
    """Rows with a vector succeeded; rows with a reason, and rows that did not come back, failed."""
    embedded = unpack_vectors(mux_pb2.EmbedArrowResponse.FromString(reply).arrow_ipc)
    if len(embedded.vectors) > rows:
        raise Internal(f"the server answered {len(embedded.vectors)} rows for {rows} texts")
    successful = len(embedded.vectors) - len(embedded.errors)
    outcome.successful += successful
    outcome.failed += rows - successful
    outcome.reasons.update(embedded.errors.values())
    outcome.reasons.update({"no row in the reply": rows - len(embedded.vectors)})
    outcome.reasons += Counter()  # drops what was counted zero times
