"""Reading a member of a JSON text in steps: what it finds, and that no text takes more than linear time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teimgr.errors import InvalidInput
from teimgr.wire.json_scan import WINDOW_BYTES, completed, text_member

TEXT = st.text(max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


def member(text: bytes, start: int = 0) -> str | None:
    return completed(text_member(text, "model", start))


@given(st.dictionaries(TEXT | st.sampled_from(["model", "input"]), VALUES, max_size=6), st.booleans(), TEXT)
def test_the_text_found_is_the_one_that_a_parser_finds(body: dict[str, Any], ascii_only: bool, before: str) -> None:
    raw = before.encode()
    text = json.dumps(body, ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()

    model = body.get("model")
    assert member(raw + text, len(raw)) == (model if isinstance(model, str) else None)


@pytest.mark.parametrize("size", [WINDOW_BYTES - 3, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES])
@pytest.mark.parametrize(
    "before",
    [
        lambda size: b'{"input": "' + b"a" * size + b'", ',
        lambda size: b'{"input": "' + b'\\"' * (size // 2) + b'", ',
        lambda size: b'{"input": "' + b"\\\\" * (size // 2) + b'", ',
        lambda size: b'{"input": [' + b"[[1, 2]]," * (size // 9) + b'"model"], ',
        lambda size: b'{"input": ' + b"[" * size + b"]" * size + b", ",
        lambda size: b'{"input": [' + b'{"model": {"a": "]"}},' * (size // 22) + b"0], ",
        lambda size: b'{"input": "model"' + b" " * size + b", ",
        lambda size: b'{"' + b"k" * size + b'": "model",',
        lambda size: b" " * size + b"{",
        lambda size: b'{"input": 1' + b"1" * size + b", ",
    ],
)
@pytest.mark.parametrize("key", [b'"model"', b'"mode\\u006c"', b'"\\u006dodel"'])
def test_a_member_is_found_across_windows(before: Any, size: int, key: bytes) -> None:
    for shift in range(9):
        spaces = b" " * shift
        assert member(before(size) + spaces + key + spaces + b":" + spaces + b'"x"}') == "x"
    assert member(before(size) + key + b" " * WINDOW_BYTES + b":" + b" " * WINDOW_BYTES + b'"x"') == "x"


def test_of_a_long_text_the_beginning_is_read() -> None:
    for one in ("x", "é", "中", "😀"):
        for written in (one, json.dumps(one)[1:-1]):
            found = member(b'{"model": "a' + written.encode() * 100_000 + b'"}')
            assert found is not None
            assert ("a" + one * 100_000).startswith(found)
            assert len(found) > 1000


_MONSTERS = {
    "an unterminated text of escaped quotes": lambda size: b'{"input": "' + b'\\"' * (size // 2),
    "escaped quotes alone": lambda size: b'{"a":' + b'\\"' * (size // 2),
    "an unterminated text of backslashes": lambda size: b'{"input": "' + b"\\" * (size | 1),
    "quotes": lambda size: b'{"a": [' + b'"' * (size | 1),
    "opening brackets": lambda size: b'{"a": ' + b"[" * size,
    "lists of nothing": lambda size: b'{"a": [' + b"[]," * (size // 3),
    "lists in lists": lambda size: b'{"a": [' + b"[[]]," * (size // 5),
    "lists of texts": lambda size: b'{"a": [' + b'[""],' * (size // 5),
    "ever deeper lists": lambda size: b'{"a": ' + b"[1," * (size // 3),
    "keys": lambda size: b"{" + b'"":0,' * (size // 5),
    "keys of escapes": lambda size: b"{" + b'"\\u006dodem":0,' * (size // 15),
    "the name as a text": lambda size: b"{" + b'"model" ,' * (size // 9),
    "blanks": lambda size: b'{"model"' + b" " * size,
    "digits": lambda size: b'{"a": ' + b"1" * size,
    "a long name": lambda size: b'{"model": "' + b"\\u4e2d" * (size // 6) + b'"',
}


@pytest.mark.parametrize("make", _MONSTERS.values(), ids=_MONSTERS)
def test_no_text_takes_more_than_linear_time_nor_long_steps(make: Any) -> None:
    def cost(text: bytes) -> tuple[float, float]:
        """Seconds of processor time for all steps, and for the longest."""
        steps, longest, began = text_member(text, "model"), 0.0, time.thread_time()
        try:
            while True:
                before = time.thread_time()
                next(steps)
                longest = max(longest, time.thread_time() - before)
        except (StopIteration, InvalidInput):
            return time.thread_time() - began, longest

    small, _ = cost(make(64 * 1024))
    large, longest = cost(make(1024 * 1024))
    assert large < 16 * 4 * max(small, 0.002)  # quadratic: 256 times as long
    assert longest < 0.1


def test_a_text_of_too_many_lists_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"1000000 lists, objects and long texts before `model`"):
        member(b'{"a": [' + b"[[]]," * 1_000_001 + b'0], "model": "far"}')
