"""The two kinds of load, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from teimgr.client.batches import pack_texts, slices, unpack_vectors
from teimgr.client.calls import Calls
from teimgr.client.messages import HowArrow, arrow_request, embed_request, vector
from teimgr.errors import Internal, TeimgrError
from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

Progress = Callable[[int], None]  # told how many more texts are over with


@dataclass(slots=True)
class Outcome:
    """Texts that succeeded and failed; a latency in ms for each request that was answered; reasons of failures."""

    requests: int = 0
    successful: int = 0
    failed: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


async def standard(
    calls: Calls, instance: str, texts: Sequence[str], concurrency: int, timeout_s: float, progress: Progress
) -> Outcome:
    """One unary `Embed` per text over one connection, `concurrency` of them at a time."""
    outcome = Outcome(requests=len(texts))
    waiting = iter(texts)

    async def work() -> None:
        for text in waiting:
            request = embed_request(text, {"instance": instance})
            began = time.perf_counter()
            try:
                vector(await calls.unary("Embed", request, timeout_s))
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
    calls: Calls, how: HowArrow, texts: Sequence[str], batch_rows: int, timeout_s: float, progress: Progress
) -> Outcome:
    """`EmbedArrow` of `batch_rows` texts, LZ4 in the request, one call after the other.

    Raises:
        Internal: a reply is no Arrow stream of vectors.
    """
    outcome = Outcome()
    began = time.perf_counter()
    for piece in slices(texts, batch_rows):
        request = arrow_request(pack_texts(piece, "lz4"), how)
        outcome.requests += 1
        sent = time.perf_counter()
        try:
            reply = await calls.unary("EmbedArrow", request, timeout_s)
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
