"""A scripted worker: a unix-socket server of frames whose answers the test sets.

`python -m tests.support.frame_worker <socket> [delay_ms]` runs one alone, for load tests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from teimgr.errors import TeimgrError
from teimgr.spec import WorkerEndpoint
from teimgr.wire.frames import (
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    HttpReply,
    Method,
    Received,
    Timings,
    pack_error,
    reply_head,
    retry_after_ms,
)
from teimgr.wire.pb.tei.v1 import tei_pb2

TIMINGS = Timings(
    chars=11, tokens=5, total_ns=9_000_000, tokenization_ns=1_000_000, queue_ns=2_000_000, inference_ns=6_999_999
)


@dataclass(eq=False)
class Request:
    """One request as it came, and the ways to answer it."""

    header: Header
    payload: Received
    link: WorkerLink

    @property
    def method(self) -> Method:
        return Method(self.header.method)

    @property
    def flags(self) -> int:
        return self.header.flags

    def reply(self, payload: Received = b"", timings: Timings | None = None) -> None:
        flags = Flag.NONE if timings is None else Flag.TIMINGS
        head = b"" if timings is None else timings.pack()
        self.link.send(FrameType.REPLY, self.method, self.header.id, payload, flags=flags, before=head)

    def fail(self, error: TeimgrError) -> None:
        retry_ms = retry_after_ms(error)
        self.link.send(FrameType.ERROR, self.method, self.header.id, pack_error(error), deadline_ms=retry_ms)


Script = Callable[[Request], None]


def pack_reply(reply: HttpReply) -> bytes:
    """An HTTP reply as a payload."""
    return reply_head(reply) + bytes(reply.body)


def echo(request: Request) -> None:
    """The request's own bytes back."""
    request.reply(request.payload)


def hold(request: Request) -> None:
    """Nothing: the test answers when it likes."""


def lengths(request: Request) -> None:
    """A vector of one number, the length of the text."""
    text = tei_pb2.EmbedRequest.FromString(request.payload).inputs
    request.reply(tei_pb2.EmbedResponse(embeddings=[len(text)]).SerializeToString(), TIMINGS)


class WorkerLink(FrameProtocol):
    """One accepted connection."""

    def __init__(self, worker: FrameWorker) -> None:
        super().__init__(1 << 30)
        self.worker = worker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.worker.links.append(self)

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.CANCEL:
            self.worker.cancels.put_nowait(header.id)
            return
        request = Request(header, payload, self)
        self.worker.requests.put_nowait(request)
        self.worker.script(request)

    def link_lost(self, error: Exception | None) -> None:
        self.worker.lost.put_nowait(self)


@dataclass(eq=False)
class FrameWorker:
    """The server; `script` is called for each request, which also lands in `requests`."""

    path: Path
    incarnation: str
    script: Script
    requests: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)
    cancels: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    lost: asyncio.Queue[WorkerLink] = field(default_factory=asyncio.Queue)
    links: list[WorkerLink] = field(default_factory=list)
    server: asyncio.AbstractServer | None = None

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(str(self.path), self.incarnation)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_unix_server(lambda: WorkerLink(self), self.path)

    def drop(self) -> None:
        """Die: every connection breaks and new ones are refused."""
        if self.server is not None:
            self.server.close()
        self.path.unlink(missing_ok=True)
        for link in self.links:
            link.close()


async def _alone(path: str, delay_s: float) -> None:
    floats = np.linspace(-1, 1, 384, dtype=np.float32)
    payload = tei_pb2.EmbedResponse(embeddings=floats.tolist()).SerializeToString()
    loop = asyncio.get_running_loop()
    waiting: list[Request] = []

    def answer_all() -> None:
        batch, waiting[:] = tuple(waiting), []
        for request in batch:
            request.reply(payload, TIMINGS)

    def batched(request: Request) -> None:
        worker.requests.get_nowait()
        if not delay_s:
            request.reply(payload, TIMINGS)
            return
        if not waiting:
            loop.call_later(delay_s, answer_all)
        waiting.append(request)

    worker = FrameWorker(Path(path), "load", batched)
    await worker.listen()
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_alone(sys.argv[1], float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0))
