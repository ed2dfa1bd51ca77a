"""Faults of bodies in serde_json's words; `tests/conformance/test_recording.py` has thousands from the real one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from teimgr.worker.dialects import tei_types
from teimgr.worker.dialects.serde_json import Fault, shown
from teimgr.worker.dialects.serde_types import read_body


def fault(body: bytes) -> tuple[bool, str]:
    with pytest.raises(Fault) as caught:
        read_body(tei_types.EMBED, body)
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
    assert read_body(tei_types.EMBED, body)["inputs"] == "a"


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
                read_body(tei_types.EMBED, body)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(40_000) < 40 * (seconds(4_000) + 0.002)
