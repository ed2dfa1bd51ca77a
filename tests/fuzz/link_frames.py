"""Frames between processes: to the workers' own sockets, and in process to the decoder with random chunk borders."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from teimgr.errors import InvalidInput, TeimgrError
from teimgr.observability.request_context import CallStats, RequestContext
from teimgr.wire.frames import (
    HEADER,
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    HttpRequest,
    Method,
    Received,
    pack_error,
    pack_header,
    read_reply,
    read_request,
    request_head,
    unpack_error,
)
from teimgr.wire.pb.tei.v1 import tei_pb2
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Address, Report, flood
from tests.fuzz.target import SEED, Target

# Orders of the daemon, which a worker obeys; all other methods are sent.
_ORDERS = (Method.DRAIN,)
_MAX_BYTES = 1 << 20
_NO_METHOD = "No method has the number"


def _recordings() -> list[bytes]:
    context = RequestContext("a-request", None).pack()
    embed = tei_pb2.EmbedRequest(inputs="rain on the harbour", truncate=True).SerializeToString()
    rerank = tei_pb2.RerankRequest(query="rain", texts=["fog", "sun"]).SerializeToString()
    http = HttpRequest(
        "openai", "POST", "/v1/embeddings", headers={"content-type": "application/json"}, body=b'{"input": "rain"}'
    )
    sent = [
        _frame(Method.INFO, b""),
        _frame(Method.EMBED, embed, context=context),
        _frame(Method.EMBED, embed, flags=Flag.BULK | Flag.WAIT, deadline_ms=5000),
        _frame(Method.EMBED_SPARSE, embed),
        _frame(Method.EMBED_ALL, embed),
        _frame(Method.PREDICT, embed),
        _frame(Method.RERANK, rerank),
        _frame(Method.TOKENIZE, embed),
        _frame(Method.HTTP, request_head(http) + http.body, context=context),
        _frame(Method.PROBE, b"", deadline_ms=3000),
        _frame(Method.STATS, b""),
        _frame(Method.METRICS, b""),
        _frame(Method.WATCH, b""),
        _frame(Method.THREADS, json.dumps({"threads": 1, "most": 1}).encode()),
        _frame(Method.SHARE_PORTS, b""),
    ]
    batch = b"".join(_frame(Method.EMBED, embed, id=id) for id in range(8)) + pack_header(0, FrameType.CANCEL, 0, 3)
    return [*sent, batch, sent[1] + sent[6] + sent[8]]


def _frame(
    method: int,
    payload: bytes,
    *,
    type: FrameType = FrameType.REQUEST,
    flags: int = 0,
    deadline_ms: int = 0,
    context: bytes = b"",
    id: int = 7,
) -> bytes:
    head = pack_header(len(context) + len(payload), type, method, id, flags, deadline_ms, len(context))
    return head + context + payload


def changed_header(chance: random.Random, raw: bytes) -> bytes:
    """One field of the first header changed, mostly with the payload it had."""
    fields: list[int] = list(HEADER.unpack_from(raw))
    at = chance.randrange(len(fields))
    sizes = (32, 8, 8, 16, 64, 32, 32)
    value = chance.choice((0, 1, 2, 3, 5, 13, 14, 15, 64, 66, 67, 70, 71, 255, 2 ** sizes[at] - 1))
    fields[at] = chance.choice((value, chance.getrandbits(sizes[at]), fields[at] ^ 1)) % 2 ** sizes[at]
    return HEADER.pack(*fields) + raw[HEADER.size :]


def run(target: Target, cases: int, report: Report) -> None:
    """Nine tenths to the decoder, which takes many a second, and the rest to the sockets of the workers."""
    to_sockets = max(1, cases // 10)
    mutator = Mutator(SEED + report.cases, _recordings(), structured=changed_header)
    asyncio.run(_decode(mutator, cases - to_sockets, report))
    sockets = sorted((target.daemon.folder / "run").glob("*.sock"))
    harmless = (case for case in iter(mutator.case, None) if not _has_order(case))
    flood([Address(path=str(path)) for path in sockets], (next(harmless) for _ in range(to_sockets)), _judge, report)


def _judge(received: bytes) -> str:
    """What came first; every answer is a whole frame, and an error has a code of its own."""
    decoded = _Received()
    decoded.feed(received, [len(received)])
    kinds = [FrameType(header.type).name for header, _ in decoded.frames]
    for header, payload in decoded.frames:
        if header.type == FrameType.ERROR:
            error = unpack_error(payload)
            assert error.code.name != "INTERNAL_ERROR" or error.message.startswith(_NO_METHOD), error
    return kinds[0] if kinds else "closed"


class _Received(FrameProtocol):
    """Takes bytes in chunks and keeps the frames."""

    def __init__(self) -> None:
        super().__init__(_MAX_BYTES)
        self.frames: list[tuple[Header, bytes]] = []
        self.is_broken = False

    def frame_received(self, header: Header, payload: Received) -> None:
        self.frames.append((header, payload))

    def link_lost(self, error: Exception | None) -> None:
        pass

    def _break(self) -> None:
        super()._break()
        self.is_broken = True

    def feed(self, raw: bytes, borders: list[int]) -> None:
        at = 0
        for border in borders:
            while at < border and not self.is_broken:
                buffer = self.get_buffer(-1)
                size = min(len(buffer), border - at)
                buffer[:size] = raw[at : at + size]
                at += size
                self.buffer_updated(size)


def _has_order(case: bytes) -> bool:
    whole = _Received()
    whole.feed(case, [len(case)])
    return any(header.method in _ORDERS for header, _ in whole.frames)


async def _decode(mutator: Mutator, cases: int, report: Report) -> None:
    """Whatever the borders of the chunks, the frames are the same; and what reads their payloads fails by type."""
    for case in mutator.cases(cases):
        whole, parts = _Received(), _Received()
        whole.feed(case, [len(case)])
        borders = sorted(mutator.random.randrange(len(case) + 1) for _ in range(4))
        parts.feed(case, [*borders, len(case)])
        outcome = "frames" if whole.frames else "broken" if whole.is_broken else "incomplete"
        if whole.frames != parts.frames or whole.is_broken != parts.is_broken:
            report.fail(f"other frames with borders {borders}", case)
        for header, payload in whole.frames:
            try:
                _read(header, payload)
            except (ValueError, TeimgrError):
                outcome = "refused"
            except Exception as error:
                report.fail(repr(error), case)
        report.count(outcome)


def _read(header: Header, payload: bytes) -> Any:
    """As the receivers do: contexts, replies, requests of the dialects, errors, messages."""
    context = RequestContext.unpack(header.context)
    context.log_fields()
    error = unpack_error(pack_error(InvalidInput("a")) + payload)
    unpack_error(payload)
    if header.context:
        _stats(header.context)
    return (
        read_request(payload) if header.method == Method.HTTP else read_reply(payload),
        error,
    )


def _stats(block: bytes) -> None:
    try:
        CallStats.unpack(block)
    except Exception as error:  # struct.error is no ValueError, and neither may reach the event loop
        if not isinstance(error, ValueError):
            return
