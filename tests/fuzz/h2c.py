"""Raw bytes of HTTP/2 with HTTP requests to the daemon's port and the instances' ports: heads and frames changed."""

from __future__ import annotations

import random

import h2.config
import h2.connection
import hpack

from tests.fuzz.http2 import HEADERS, TOKENS, changed_frames, frames_of
from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Address, Report, flood
from tests.fuzz.target import SEED, Target
from tests.support.http_peers import request

_JSON = {"content-type": "application/json"}
_REQUESTS: tuple[tuple[list[tuple[str, str]], bytes], ...] = (
    (request("/health"), b""),
    (request("/metrics", "HEAD"), b""),
    (request("/instances?state=running&tag=a%3Db"), b""),
    (request("/instances/fuzz-embedding/logs?start=-5"), b""),
    (request("/v1/models", **{"authorization": "Bearer abc", "cookie": "a=1"}), b""),
    (request("/embed", "OPTIONS", origin="http://localhost"), b""),
    (request("/embed", "POST", **_JSON), b'{"inputs": "rain", "truncate": true}'),
    (request("/embed", "POST", **_JSON, expect="100-continue"), b'{"inputs": ["rain", "fog"]}'),
    (request("/v1/embeddings", "POST", **_JSON), b'{"model": "fuzz-embedding", "input": ["rain"]}'),
    (request("/v1/rerank", "POST", **_JSON), b'{"model": "fuzz-reranker", "query": "a", "documents": ["b"]}'),
    (request("/instances", "POST", **_JSON), b'{"name": "nobody", "model_id": "/nowhere", "port": 1}'),
)
# What a head has beside or instead of its fields.
_FIELDS = (
    (":path", ""),
    (":path", "//evil/.."),
    (":path", "/%00"),
    (":path", "/a b"),
    (":path", "*"),
    (":method", "CONNECT"),
    (":method", "get"),
    (":authority", "user@evil"),
    (":protocol", "websocket"),
    (":status", "200"),
    ("host", "evil"),
    ("content-length", "5"),
    ("content-length", "-1"),
    ("content-length", "9" * 25),
    ("transfer-encoding", "chunked"),
    ("connection", "close"),
    ("te", "gzip"),
    ("X-Upper", "a"),
    ("x", "a\r\nb: c"),
    ("x", "y" * 3000),
    ("x", "\0"),
    ("", "a"),
    ("content-type", "application/grpc"),
    ("grpc-timeout", "1n"),
    ("expect", "100-continue"),
    ("origin", "null"),
    ("cookie", "b=2"),
)
_TYPED = ("application/json", "text/plain")


def recordings(chance: random.Random, count: int) -> list[bytes]:
    """Connections with up to three requests each, most of them with heads that are malformed."""
    made = []
    for _ in range(count):
        config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        client = h2.connection.H2Connection(config)
        client.initiate_connection()
        for _ in range(chance.randint(1, 3)):
            head, body = chance.choice(_REQUESTS)
            stream = client.get_next_available_stream_id()
            client.send_headers(stream, _changed(chance, head), end_stream=not body)
            if body:
                border = chance.randint(0, len(body))
                client.send_data(stream, body[:border])
                client.send_data(stream, body[border:], end_stream=chance.random() < 0.8)
            if chance.random() < 0.1:
                client.reset_stream(stream, 8)
        made.append(client.data_to_send())
    return made


def _changed(chance: random.Random, head: list[tuple[str, str]]) -> list[tuple[str, str]]:
    head = list(head)
    for _ in range(chance.choice((0, 0, 1, 2))):
        name, value = chance.choice(_FIELDS)
        match chance.randrange(3):
            case 0:
                head.append((name, value))
            case 1:
                head.insert(0, (name, value))
            case 2:
                head = [(key, value if key == name else old) for key, old in head]
    return head


def judge(received: bytes) -> str:
    """The status of the first response; a 5xx must be an error of a dialect."""
    decoder, status = hpack.Decoder(), "closed"
    decoder.max_allowed_table_size = 2**32 - 1  # a case may have allowed it
    for kind, _, _, payload in frames_of(received):
        if kind == HEADERS:
            fields = {name.decode(): value.decode() for name, value in decoder.decode(payload, raw=True)}
            found = fields.get(":status", "")
            assert found != "500", fields
            assert not found.startswith("5") or fields.get("content-type", "").startswith(_TYPED), fields
            status = f"HTTP {found}" if status == "closed" and found else status
    return status


def run(target: Target, cases: int, report: Report) -> None:
    ports = [target.daemon.api_port, *target.ports.values()]
    addresses = [Address(port) for port in (ports[0], ports[1], ports[0], *ports[2:])]
    seed = SEED + report.cases
    mutator = Mutator(seed, recordings(random.Random(seed), 200), TOKENS, changed_frames)
    flood(addresses, mutator.cases(cases), judge, report)
