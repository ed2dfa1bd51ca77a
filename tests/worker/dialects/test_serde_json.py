"""Faults of bodies in serde_json's words; `tests/conformance/test_recording.py` has thousands from the real one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from teimgr.errors import InvalidInput
from teimgr.wire.json_scan import completed
from teimgr.worker.dialects import serde_text, tei_bodies
from teimgr.worker.dialects.serde_json import Fault, Reader
from teimgr.worker.dialects.serde_text import shown
from teimgr.worker.dialects.serde_types import read_body


def fault(body: bytes) -> tuple[bool, str]:
    with pytest.raises(Fault) as caught:
        completed(read_body(tei_bodies.EMBED, body))
    return caught.value.is_syntax, caught.value.sentence(body)


@pytest.mark.parametrize(
    ("body", "is_syntax", "sentence"),
    [
        (b"", True, "EOF while parsing a value at line 1 column 0"),
        (b'{"inputs": [1, tru', True, "inputs[1]: EOF while parsing a value at line 1 column 18"),
        (b'{"inputs":\n [1, nil]}', True, "inputs[1]: expected ident at line 2 column 7"),
        (b'{"inputs": "\\udc00"}', True, "inputs: lone leading surrogate in hex escape at line 1 column 18"),
        (b'{"inputs": 1.}', True, "inputs: invalid number at line 1 column 14"),
        (b'{"inputs": 1e999}', True, "inputs: number out of range at line 1 column 16"),
        (b'{"a": [1 2]}', True, "a: expected `,` or `]` at line 1 column 10"),
        (b'{"a": {"b" 2}}', True, "a: expected `:` at line 1 column 12"),
        (b"{a: 1}", True, "key must be a string at line 1 column 2"),
        (
            b'{"inputs": "a", "dimensions": 18446744073709551616}',
            False,
            "dimensions: invalid type: floating point `1.8446744073709552e19`, expected usize at line 1 column 50",
        ),
        (
            b'{"inputs": "a", "dimensions": -1}',
            False,
            "dimensions: invalid value: integer `-1`, expected usize at line 1 column 32",
        ),
        (
            b'{"inputs": "a", "truncate": "\xc3\xa9\\n"}',
            False,
            'truncate: invalid type: string "\u00e9\\n", expected a boolean at line 1 column 34',
        ),
        (
            b'{"inputs": "a", "truncation_direction": {"left": 1}}',
            False,
            "truncation_direction.left: invalid type: integer `1`, expected unit at line 1 column 50",
        ),
        (
            b'{"inputs": "a", "truncation_direction": {"left": nul}}',
            True,
            "truncation_direction.left: expected ident at line 1 column 53",
        ),
    ],
)
def test_the_first_fault_decides(body: bytes, is_syntax: bool, sentence: str) -> None:
    assert fault(body) == (is_syntax, sentence)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": "a"} and more',
        b'["a", null, "left", null, true, 4]',
        b'{"inputs": "a", "odd": ["\\ud800", 1e999, 123456789012345678901234567890]}',
        b'{"inputs": "a", "truncation_direction": {"Left": null}}',
    ],
)
def test_what_tei_takes_is_taken(body: bytes) -> None:
    assert completed(read_body(tei_bodies.EMBED, body))["inputs"] == "a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e16, "1e16"),
        (1e15, "1000000000000000.0"),
        (1e-5, "0.00001"),
        (1.5e-5, "0.000015"),
        (1e-7, "1e-7"),
        (-0.0, "-0.0"),
    ],
)
def test_numbers_are_printed_as_ryu_does(value: float, text: str) -> None:
    assert shown(value) == f"floating point `{text}`"


BODIES: list[Callable[[int], bytes]] = [
    lambda size: b'{"inputs":[' + b"1," * size,
    lambda size: b'{"inputs":"' + b'\\"' * size,
    lambda size: b'{"inputs":["' + b'","' * size,
    lambda size: b'{"a":' + b"[" * size,
    lambda size: b'{"a":' + b'{"":' * size,
    lambda size: b'{"inputs":' + b"1" * size,
    lambda size: b'{"inputs":1e' + b"1" * size,
    lambda size: b"{" + b'"inputs" :1, ' * size,
    lambda size: b" " * size + b"{",
]


@pytest.mark.parametrize("make", BODIES)
def test_the_time_is_in_proportion_to_the_body(make: Callable[[int], bytes]) -> None:
    def seconds(size: int) -> float:
        body, times = make(size), []
        for _ in range(3):
            began = time.process_time()
            with pytest.raises(Fault):
                completed(read_body(tei_bodies.EMBED, body))
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(40_000) < 40 * (seconds(4_000) + 0.002)


_MEGABYTES = 1
# Of an unread field, or of one that is read as any value: each took 10 µs a value before, 40 s of the largest body.
UNREAD = {
    "numbers": b"-1, ",
    "strings": b'"",',
    "escapes": b'"\\n\\u00e9",',
    "literals": b"null,true,",
    "empty lists": b"[],",
    "nested lists": b"[[1]],",
    "deeper lists": b"[[[[[1]]]]],",
    "objects": b'{"a":{"b":1}},',
    "deeper objects": b'[{"a":[{"a":[1]}]}],',
    "white space": b"1 ,\n",
    "open lists": b"[",
    "open objects": b'{"":',
}


@pytest.mark.parametrize("unit", UNREAD.values(), ids=UNREAD)
def test_values_that_no_one_reads_are_skipped_in_runs(unit: bytes) -> None:
    body = b'{"a": [' + unit * (_MEGABYTES * 2**20 // len(unit)) + b'-0], "inputs": 3}'
    began = time.process_time()
    with pytest.raises((Fault, InvalidInput)):
        completed(read_body(tei_bodies.EMBED, body))
    assert (
        time.process_time() - began < 4
    )  # 10 before, on the same loaded cores: at most 100,000 values are read one by one


@pytest.mark.parametrize("window", [12, 2**16])
def test_runs_change_no_fault(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without runs, byte by byte, says the same of the same body."""
    monkeypatch.setattr(serde_text, "WINDOW_BYTES", window)
    draw = random.Random(window)
    for _ in range(300):
        body = "".join(draw.choice(_PARTS) for _ in range(draw.randrange(1, 25))).encode()
        with_runs = _outcome(body)
        with monkeypatch.context() as patch:
            patch.setattr(serde_text, "_end", lambda run, body, at: at)
            assert _outcome(body) == with_runs, body


_PARTS = ["[", "]", "{", "}", '"a"', ":", ",", ",", "1", "-0", "01", "1.5", "1e5", "-", '"\\n"', '"\\x"', "\x01", " "]
_PARTS += ["null", "tru", '"', '{"k":', '"b":1,', "[1,2],", "[[1],{}],", '{"x":[1]},', "[1,2,3],", "4,", "5,"]


def _outcome(body: bytes) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for read in (Reader.skip, Reader.any_value):
        reader = Reader(body)
        try:
            found.append((repr(completed(read(reader, ()))), reader.at))
        except Fault as fault:
            found.append((fault.message, fault.index, fault.path))
    return found
