"""Raw bytes of HTTP/1 to the daemon's port and the instances' ports: broken heads, framings and bodies."""

from __future__ import annotations

import re

from tests.fuzz.mutation import Mutator
from tests.fuzz.surface import Address, Report, flood
from tests.fuzz.target import SEED, Target

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
_TYPED = (b"application/json", b"text/plain")


def _request(line: str, body: bytes = b"", *headers: str) -> bytes:
    length = [f"content-length: {len(body)}"] if body and not any("chunked" in each for each in headers) else []
    head = [f"{line} HTTP/1.1", "host: 127.0.0.1", *headers, *length]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


_JSON = "content-type: application/json"
RECORDINGS = (
    _request("GET /health"),
    _request("GET /metrics", b"", "accept-encoding: gzip"),
    _request("GET /instances?state=running&tag=a%3Db"),
    _request("GET /instances/fuzz-embedding/logs?start=-5"),
    _request("GET /v1/models", b"", "authorization: Bearer abc", "x-request-id: 1"),
    _request("GET /info", b"", "connection: close"),
    _request("HEAD /ready"),
    _request("OPTIONS /embed", b"", "origin: http://localhost", "access-control-request-method: POST"),
    _request("POST /embed", b'{"inputs": "rain", "truncate": true}', _JSON),
    _request(
        "POST /embed", b'{"inputs": ["rain", "fog"]}', _JSON, "upgrade: h2c", "connection: upgrade, http2-settings"
    ),
    _request("POST /embed", b'18\r\n{"inputs": "rain", "a":0}\r\n0\r\n\r\n', _JSON, "transfer-encoding: chunked"),
    _request("POST /embed", b'{"inputs": "rain"}', _JSON, "expect: 100-continue"),
    _request("POST /v1/embeddings", b'{"model": "fuzz-embedding", "input": ["rain"]}', _JSON),
    _request("POST /instances/fuzz-embedding/embed", b'{"inputs": "rain"}', _JSON),
    _request("POST /rerank", b'{"query": "rain", "texts": ["fog", "sun"], "return_text": true}', _JSON),
    _request("POST /v1/rerank", b'{"model": "fuzz-reranker", "query": "a", "documents": ["b"]}', _JSON),
    _request("POST /instances", b'{"name": "nobody", "model_id": "/nowhere", "port": 1}', _JSON),
    _request("GET /health") * 4,  # pipelined
    _request("POST /embed", b'{"inputs": "rain"}', _JSON) + _request("GET /health", b"", "connection: close"),
)
TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b" ",
    b"\t",
    b":",
    b"%00",
    b"%",
    b"?",
    b"../",
    b"//",
    b"HTTP/1.0",
    b"HTTP/9.9",
    b"\r\ncontent-length: 5",
    b"\r\ncontent-length: -1",
    b"\r\ncontent-length: 99999999999999999999",
    b"\r\ntransfer-encoding: chunked",
    b"\r\ntransfer-encoding: identity",
    b"\r\nconnection: upgrade\r\nupgrade: h2c",
    b"\r\nhost: evil",
    b"\r\nx: " + b"y" * 3000,
    b"FFFFFFFFFFFFFFFF\r\n",
    b"0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"[" * 2000,
    b'{"a":' * 500,
    b"1e999",
    b"\\ud800",
    "🙂".encode(),
    b"fuzz-embedding",
)


def judge(received: bytes) -> str:
    """The statuses of the replies; a 5xx must be an error of a dialect."""
    statuses = [found.decode() for found in _STATUS.findall(received)]
    assert "500" not in statuses, received[:500]
    if any(status.startswith("5") for status in statuses):
        assert any(kind in received for kind in _TYPED), received[:500]
    return statuses[0] if statuses else "closed"


def run(target: Target, cases: int, report: Report) -> None:
    ports = [target.daemon.api_port, *target.ports.values()]
    addresses = [Address(port) for port in (ports[0], ports[1], ports[0], *ports[2:])]
    flood(addresses, Mutator(SEED + report.cases, RECORDINGS, TOKENS).cases(cases), judge, report)
