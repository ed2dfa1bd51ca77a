"""JSON in pieces has the bytes of one call, for all forms of replies."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from tests.support.measures import held_s

from teimgr.wire import json_pieces

RANDOM = np.random.default_rng(7)
ROWS = RANDOM.standard_normal((300, 384), dtype=np.float32)
VALUES: dict[str, Any] = {
    "embed": list(ROWS),
    "embed, one array": ROWS,
    "one row": [ROWS[0]],
    "openai": {
        "object": "list",
        "data": [{"object": "embedding", "index": row, "embedding": each} for row, each in enumerate(ROWS)],
        "model": 'a"ä\u2028',
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    },
    "openai, base64": {"data": [{"embedding": base64.b64encode(each.tobytes()).decode()} for each in ROWS]},
    "embed all": [RANDOM.standard_normal((700, 128), dtype=np.float32), ROWS[:3]],
    "one matrix": {"data": [{"index": 0, "data": RANDOM.standard_normal((900, 128), dtype=np.float32)}]},
    "sparse": [[{"index": at, "value": float(at) / 3} for at in range(900)] for _ in range(40)],
    "ints": {"embeddings": {"int8": list((ROWS * 40).astype(np.int8)), "ubinary": [], "float": list(ROWS)}},
    "scores": {
        "results": [{"index": at, "score": np.float32(at) / 7, "document": {"text": "ä" * at}} for at in range(500)]
    },
    "tokens": [[{"id": at, "text": "x", "special": False, "start": None} for at in range(500)] for _ in range(9)],
    "long text": [{"text": "ö" * 1_000_000}, {"text": ""}],
    "many empty": [[], {}, (), "", None] * 50,
    "empty": [],
    "object": {},
    "wide": RANDOM.standard_normal((2, 90_000), dtype=np.float32),
    "not finite": np.array([np.nan, np.inf] * 40_000, np.float32),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("at_once", [1, 50, 2**15])
def test_pieces_are_the_bytes_of_one_call(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "_AT_ONCE", at_once)
    value = VALUES[name]
    whole = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    assert json_pieces.dumps(value) == whole
    assert b"".join(json_pieces._pieces(value)) == whole


@pytest.mark.parametrize("size", [0, 1, 2, 3 * 2**16, 3 * 2**16 + 1, 10**6 + 1])
def test_base64_in_pieces_is_that_of_one_call(size: int) -> None:
    data = RANDOM.integers(0, 256, size, np.uint8)
    text = base64.b64encode(data.tobytes()).decode()
    for around in (lambda one: one, lambda one: {"data": [{"embedding": one, "index": 0}] * 3, "a": one}):
        assert json_pieces.dumps(around(json_pieces.in_base64(data))) == orjson.dumps(around(text))


def test_base64_of_a_matrix_is_that_of_its_bytes() -> None:
    wide = RANDOM.standard_normal((300, 700)).astype(np.float16)
    assert json_pieces.dumps(json_pieces.in_base64(wide)) == b'"%b"' % base64.b64encode(wide.tobytes())
    for rows in (wide, wide.reshape(1, -1)):  # the row of the second is encoded in pieces
        texts = [json_pieces.dumps(row) for row in json_pieces.rows_in_base64(rows)]
        assert texts == [b'"%b"' % base64.b64encode(row.tobytes()) for row in rows]


def test_no_piece_of_a_large_reply_is_large() -> None:
    value = {"data": [{"embedding": row} for row in ROWS] * 10 + [{"embedding": ROWS}]}
    assert json_pieces._may_be_large(value)
    assert max(map(len, json_pieces._pieces(value))) < 2**15 * 16


def test_a_known_weight_takes_the_place_of_weighing_and_the_bound_stays() -> None:
    value = [{"embedding": np.arange(256, dtype=np.float32), "index": row} for row in range(200)]
    whole = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    for weight in (None, 200 * 256 + 200 * 8):
        assert json_pieces.dumps(value, weight) == whole
    assert json_pieces.dumps(value[:64], 64 * 256 + 64 * 8) == orjson.dumps(
        value[:64], option=orjson.OPT_SERIALIZE_NUMPY
    )


def test_pieces_of_120_mib_are_joined_beside_other_threads() -> None:
    """A buffer that grew was moved as it came to 32 MiB, for 35 ms."""
    pieces = [bytes([number % 256]) * 2**18 for number in range(480)]
    assert json_pieces.joined(iter(pieces)) == b"".join(pieces)
    assert held_s(lambda: json_pieces.joined(iter(pieces)), 5) < 0.02
