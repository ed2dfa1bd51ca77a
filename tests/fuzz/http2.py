"""Raw bytes of HTTP/2 to the mux port and the instances' ports: frames changed, left out, repeated, out of order."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
import hpack

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Address, Report, flood
from tests.fuzz.target import SEED, Target
from tests.support.http_peers import framed, head

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TOKENS = (b"\x00\x00\x08\x06\x00\x00\x00\x00\x00", b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08", PREFACE)
_HEAD = struct.Struct(">BHBBI")
HEADERS = 1
_UNKNOWN = "2"


def recordings() -> list[bytes]:
    """Connections as clients open them, with calls of either port."""
    inner = tei_pb2.EmbedRequest(inputs="rain on the harbour", truncate=True)
    outer = multiplexer_pb2.EmbedRequest(request=inner)
    outer.target.instance_name = "fuzz-embedding"
    calls: tuple[tuple[str, bytes, dict[str, str]], ...] = (
        ("/tei.v1.Embed/Embed", inner.SerializeToString(), {"x-teimgr-instance": "fuzz-embedding"}),
        ("/tei.v1.Info/Info", b"", {"x-teimgr-instance": "fuzz-reranker"}),
        ("/tei_multiplexer.v1.TeiMultiplexer/Embed", outer.SerializeToString(), {"grpc-timeout": "9S"}),
        ("/tei_multiplexer.v1.TeiMultiplexer/EmbedStream", outer.SerializeToString(), {}),
        ("/grpc.health.v1.Health/Check", b"", {"grpc-encoding": "gzip", "user-agent": "a"}),
        ("/nobody.Nothing/Never", b"\x0a\x03abc", {}),
    )
    made = []
    for path, message, more in calls:
        for extra in range(3):
            client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
            client.initiate_connection()
            for _ in range(extra + 1):
                stream = client.get_next_available_stream_id()
                client.send_headers(stream, head(path, **more))
                if extra:
                    client.ping(b"12345678")
                    client.increment_flow_control_window(1000, stream)
                client.send_data(stream, framed(message), end_stream=extra < 2)
            if extra == 2:
                client.reset_stream(stream, 8)
                client.update_settings({4: 10, 3: 1})
            made.append(client.data_to_send())
    return made


def frames_of(raw: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of the complete frames behind the preface, if there is one."""
    at = len(PREFACE) if raw.startswith(PREFACE) else 0
    found = []
    while at + _HEAD.size <= len(raw):
        high, low, kind, flags, stream = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        size = (high << 16) + low
        if at + size > len(raw):
            break
        found.append((kind, flags, stream & 0x7FFFFFFF, raw[at : at + size]))
        at += size
    return found


def _packed(kind: int, flags: int, stream: int, payload: bytes, size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    return _HEAD.pack(length >> 16 & 0xFF, length & 0xFFFF, kind, flags, stream) + payload


def changed_frames(chance: random.Random, raw: bytes) -> bytes:
    """The connection with a few of its frames changed as frames."""
    frames = frames_of(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(frames)) if frames else 0
        new = (chance.randrange(12), chance.randrange(256), chance.choice((0, 1, 2, 3, 2**31 - 1)), b"")
        if not frames:
            break
        kind, flags, stream, payload = frames[at]
        match chance.randrange(8):
            case 0:
                frames[at] = (new[0], flags, stream, payload)
            case 1:
                frames[at] = (kind, new[1], stream, payload)
            case 2:
                frames[at] = (kind, flags, new[2], payload)
            case 3:
                frames.insert(at, (*new[:3], chance.randbytes(chance.randint(0, 24))))
            case 4:
                del frames[at]
            case 5:
                frames[at:at] = [frames[at]] * chance.randint(1, 30)
            case 6:
                chance.shuffle(frames)
            case 7:
                frames[at] = (kind, flags, stream, payload[: chance.randint(0, len(payload))])
    packed = [_packed(*frame) for frame in frames]
    if packed and chance.random() < 0.1:  # a length that is not that of the payload
        at = chance.randrange(len(packed))
        packed[at] = _packed(*frames[at], size=chance.choice((0, 1, 16384, 16385, 2**24 - 1)))
    return PREFACE + b"".join(packed)


def judge(received: bytes) -> str:
    """The gRPC status of the first reply; UNKNOWN would be an exception that nobody caught."""
    decoder, status = hpack.Decoder(), "closed"
    decoder.max_allowed_table_size = 2**32 - 1  # a case may have allowed it
    for kind, flags, _, payload in frames_of(received):
        if kind == HEADERS:
            if flags & 0x20:  # priority
                payload = payload[5:]
            fields = _text(decoder.decode(payload, raw=True))
            assert not fields.get(":status", "200").startswith("5"), fields
            assert fields.get("grpc-status") != _UNKNOWN, fields
            if status == "closed":
                status = f"grpc {fields['grpc-status']}" if "grpc-status" in fields else f"HTTP {fields.get(':status')}"
    return status


def _text(fields: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Statuses and messages are ASCII, whatever was sent; but gRPC's core quotes the reason of a client's GOAWAY."""
    read = {bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in fields}
    quoted = "GOAWAY received" in read.get("grpc-message", "") or "Failed parsing HTTP/2" in read.get(
        "grpc-message", ""
    )
    assert quoted or all(value.isascii() for value in read.values()), read
    return read


def run(target: Target, cases: int, report: Report) -> None:
    """Half of the cases to the mux, the other half to the instances."""
    mux = Address(target.daemon.grpc_port)
    addresses = [each for port in target.ports.values() for each in (mux, Address(port))]
    mutator = Mutator(SEED + report.cases, recordings(), TOKENS, changed_frames)
    flood(addresses, mutator.cases(cases), judge, report)
