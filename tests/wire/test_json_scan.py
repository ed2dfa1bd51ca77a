"""Reading a member of a JSON text in steps: what it finds, and that no text takes more than linear time."""

from __future__ import annotations

import gc
import json
import re
import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.measures import held_s

from teimgr.errors import InvalidInput
from teimgr.wire import json_scan
from teimgr.wire.json_scan import (
    MAX_CONTAINERS,
    MAX_TEXT_BYTES,
    MAX_VALUES,
    WINDOW_BYTES,
    broken_text,
    completed,
    copied,
    decoded,
    loads,
    mentions,
    occurrences,
    text_member,
)

TEXT = st.text(max_size=20)
LEAVES = st.none() | st.booleans() | st.integers() | TEXT
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


def member(text: bytes, start: int = 0) -> str | None:
    return completed(text_member(text, "model", start))


@settings(max_examples=60)
@given(st.dictionaries(TEXT | st.sampled_from(["model", "input"]), VALUES, max_size=6), st.booleans(), TEXT)
def test_the_text_found_is_the_one_that_a_parser_finds(body: dict[str, Any], ascii_only: bool, before: str) -> None:
    raw = before.encode()
    text = json.dumps(body, ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()

    model = body.get("model")
    assert member(raw + text, len(raw)) == (model if isinstance(model, str) else None)


@pytest.mark.parametrize(
    ("size", "key"),
    [
        *((size, b'"model"') for size in (WINDOW_BYTES - 3, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES)),
        *((WINDOW_BYTES, key) for key in (b'"mode\\u006c"', b'"\\u006dodel"')),
    ],
)
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
def test_a_member_is_found_across_windows(before: Any, size: int, key: bytes) -> None:
    for shift in range(9):
        spaces = b" " * shift
        assert member(before(size) + spaces + key + spaces + b":" + spaces + b'"x"}') == "x"
    assert member(before(size) + key + b" " * WINDOW_BYTES + b":" + b" " * WINDOW_BYTES + b'"x"') == "x"


@pytest.mark.parametrize("key", [b'"model"', b'"m\\u006fdel"'])
def test_the_last_of_several_members_counts_however_far_it_is(key: bytes) -> None:
    for size in range(256 * 1024 - 45, 256 * 1024 - 25):
        text = b'{"model": "first", "input": "' + b"a" * size
        assert member(text + b'", ' + key + b': "last"}') == "last"
        assert member(text + b'", "x": {' + key + b': "inner"}}') == "first"


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
    "names": lambda size: b"{" + b'"model":"a",' * (size // 12),
    "escaped names": lambda size: b"{" + b'"mod\\u0065l":"a",' * (size // 17),
    "names, one of them far": lambda size: b'{"model":"a","a":"' + b'"mode' * (size // 6) + b'","model":"b"}',
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

    small, _ = cost(make(32 * 1024))
    large, longest = cost(make(512 * 1024))
    assert large < 16 * 4 * max(small, 0.001)  # quadratic: 256 times as long
    assert longest < 0.1


@pytest.mark.parametrize("unit", [b'"a","', b'"",', b"[[]],", b"1,"])
def test_a_step_reads_few_kilobytes_element_by_element(unit: bytes) -> None:
    """With 16 KiB of short strings it held the GIL for 2.6 ms."""
    text = b'{"input": [' + unit * (2**18 // len(unit))
    assert sum(1 for _ in text_member(text, "model")) >= len(text) // (4 * 1024)


def test_a_text_of_too_many_lists_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "MAX_TOKENS", 50_000)
    with pytest.raises(InvalidInput, match=r"50000 lists, objects and long texts before `model`"):
        member(b'{"a": [' + b"[[]]," * 50_001 + b'0], "model": "far"}')
    assert member(b'{"a": [' + b"[]," * 49_990 + b'0], "model": "near"}') == "near"


# Decoding a whole text.

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=6),
    max_leaves=40,
)


def outcome(decode: Any, text: bytes) -> str:
    try:
        return repr(decode(text))
    except ValueError:
        return "refused"


@given(ANY_VALUE, st.booleans(), st.sampled_from([16, 24, 40, 64, 200]), st.data())
def test_a_text_decoded_in_pieces_is_the_same_as_at_once(value: Any, plain: bool, window: int, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=plain, indent=1 if plain else None).encode()
    at = data.draw(st.integers(0, len(text)))
    other = data.draw(
        st.sampled_from([b"", b",", b"[", b"]", b"{", b"}", b'"', b"\\", b":", b" ", b"1", b"\xe4", b"\\ud83d"])
    )
    damaged = text[:at] + other + text[at + data.draw(st.integers(0, 2)) :]
    with pytest.MonkeyPatch.context() as patch:
        # No piece of a string may be shorter than a pair of escapes, no number longer than a window.
        patch.setattr(json_scan, "WINDOW_BYTES", window)
        longest = max((len(token) for token in re.findall(rb"[-+.0-9eE]+", text)), default=0)
        if longest < window:
            assert outcome(loads, text) == outcome(orjson.loads, text)
            assert outcome(loads, memoryview(text)) == outcome(orjson.loads, text)
        longest = max((len(token) for token in re.findall(rb"[-+.0-9eE]+", damaged)), default=0)
        if longest < window:
            assert outcome(loads, damaged) == outcome(orjson.loads, damaged)


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"[,]",
            b"[1,]",
            b"[,1]",
            b"{,}",
            b'{"a":1,}',
            b"[1 2]",
            b"[1}",
            b'{"a"}',
            b'{"a":}',
            b"[[1],]",
            b"[]]",
            b"[",
            b"{",
        ),
        *(
            b"",
            b" ",
            b'"',
            b"tru",
            b"nul",
            b"-",
            b"01",
            b"[1],",
            b"[[[[[1]]]]",
            b'["\xff"]',
            b'["\\x"]',
            b'["\\ud800"]',
        ),
        *(
            b'{"a":1,"b":2,"a":3}',
            b'{"a":[[[[[1]]]]],"b":2,"a":3}',
            b"[[[[[[]]]]],[]]",
            b"[[[[[[],]]]]]",
            b"NaN",
            b"[\x01]",
        ),
    ],
)
@pytest.mark.parametrize("window", [16, WINDOW_BYTES])
def test_what_is_no_json_is_refused_in_pieces_too(text: bytes, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "WINDOW_BYTES", window)
    for spaced in (text, text.replace(b",", b" , ").replace(b"]", b" ] "), b" " * 20 + text + b" " * 20):
        assert outcome(loads, spaced) == outcome(orjson.loads, spaced)


@pytest.mark.parametrize(
    "unit", ["a", "é", "中", "😀", "\\n", '\\"', "\\\\", "\\u4e2d", "\\ud83d\\ude00", "a\\ud83d\\ude00é😀\\\\"]
)
def test_a_long_string_is_cut_between_characters(unit: str) -> None:
    for shift in range(13):
        text = b'{"input": "' + b"x" * shift + (unit * (3 * WINDOW_BYTES // len(unit))).encode() + b'"}'
        assert loads(text) == orjson.loads(text)


SIZE = 8 * 2**20


@pytest.fixture
def heap_of_a_worker() -> None:
    """A worker freezes what lives as long as itself: collections of garbage see only what its requests made."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "text",
    [
        b'{"input":"' + b"a" * (MAX_TEXT_BYTES - 9) + b'"}',
        b'{"input":"' + b'\\"' * (MAX_TEXT_BYTES // 2 - 9) + b'"}',
        b'{"input":[' + b"54321," * (MAX_VALUES - 10) + b"1]}",
        b'{"input":[' + b'"hello",' * (MAX_VALUES - 10) + b'""]}',
        b'{"input":[' + b"[0]," * (MAX_CONTAINERS - 10) + b"0]}",
        b'{"input":[' + b"[[[[0]]]]," * (MAX_CONTAINERS // 4 - 10) + b"0]}",
        b'{"input":[' + b'[["' + b"[" * (MAX_TEXT_BYTES - 9) + b'"]]]}',
        b" " * SIZE + b"0",
    ],
    ids=["text", "escapes", "ids", "texts", "lists", "deep lists", "brackets", "spaces"],
)
def test_no_step_of_a_large_text_takes_long(text: bytes, heap_of_a_worker: None) -> None:
    steps, longest = decoded(text), 0.0
    try:
        while True:
            before = time.thread_time()
            next(steps)
            longest = max(longest, time.thread_time() - before)
    except StopIteration as end:
        assert end.value == orjson.loads(text)
    assert longest < 0.06  # some milliseconds on a machine of its own


@pytest.mark.parametrize(
    "text", [b"[" + b"[0]," * MAX_CONTAINERS + b"0]", b"[" + b"[[[[[]]]]]," * MAX_CONTAINERS], ids=["flat", "deep"]
)
def test_too_many_lists_are_refused_by_name(text: bytes) -> None:
    with pytest.raises(InvalidInput, match=f"more than {MAX_CONTAINERS} lists and objects"):
        loads(text)


def test_brackets_in_texts_are_no_lists() -> None:
    text = b"[" + b'"[[[[{{{{[[[[{{{{",' * (MAX_CONTAINERS // 8) + b"0]"
    assert loads(text) == orjson.loads(text)


HALVES = (rb"\ud83d", rb"\uDE00", rb"\ud83d\ud83d", rb"a\ud83d b", rb"\\\ud83d", b"\xed\xa0\xbd", b"\xff", b"a\xc3")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("template", "path"),
    [
        (b'{"input": ["fog", "X"]}', ("input", 1)),
        (b'{"input": "X"}', ("input",)),
        (b'{"a": {"b": [1, [], {}, ["]{", "\\"", {"c": "X", "d": 1}, "z"]]}}', ("a", "b", 3, 2, "c")),
        (b'["X"]', (0,)),
        (b'"X"', ()),
    ],
)
def test_a_text_that_is_not_unicode_is_found(half: bytes, template: bytes, path: tuple[str | int, ...]) -> None:
    found = broken_text(template.replace(b"X", half))

    assert found is not None
    assert found.path == path
    assert ("surrogate" if b"\\u" in half else "UTF-8") in found.fault


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        rb'{"input": "\ud83d\ude00 \\ud83d"}',
        rb'{"input": "\ud8"}',
        b'["a" "b"]',
        '["é😀"]'.encode(),
    ],
)
def test_a_text_that_is_unicode_or_malformed_otherwise_is_left_alone(text: bytes) -> None:
    assert broken_text(text) is None


def test_a_broken_text_at_the_end_of_megabytes_is_found_in_linear_time() -> None:
    texts = b'"fog \\ud83d\\ude00 [{ \\" rain",' * 50_000
    for last in (rb'"\ud83d"', b'"\xed\xa0\xbd"'):
        began = time.process_time()
        found = broken_text(b'{"input": [' + texts + last + b"]}")
        assert found is not None
        assert found.path == ("input", 50_000)
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (b'{"input":[' + b"12345," * MAX_VALUES + b"0]}", f"more than {MAX_VALUES} values"),
        (b'{"input":[[' + b"1," * (MAX_VALUES // 2) + b"0],[" + b"1," * (MAX_VALUES // 2) + b"0]]}", "values"),
        (b"{" + b"".join(b'"%d":0,' % n for n in range(MAX_CONTAINERS)) + b'"a":0}', f"{MAX_CONTAINERS} members"),
        (b'{"input":"' + b"a" * MAX_TEXT_BYTES + b'b"}', f"a text of more than {MAX_TEXT_BYTES} bytes in `input`"),
        (
            b'{"a":[1],"inputs":[[2],{"type":"image","data":"' + b"a" * MAX_TEXT_BYTES + b'b"}]}',
            "in `inputs.1.data`: in base64 a file may have 6 MiB",
        ),
        (b'{"inputs":[1,{},"' + b"a" * MAX_TEXT_BYTES + b'b"]}', "in `inputs.2`: in base64"),
    ],
    ids=["ids", "lists of ids", "members", "text", "file", "element"],
)
def test_what_takes_long_to_free_or_to_join_is_refused(text: bytes, refusal: str) -> None:
    with pytest.raises(InvalidInput, match=refusal):
        loads(text)


def test_the_limit_on_values_is_the_callers() -> None:
    assert loads(b"[[1,2],[3]]", 5) == [[1, 2], [3]]
    with pytest.raises(InvalidInput, match="more than 4 values"):
        loads(b"[[1,2],[3]]", 4)


def test_other_threads_run_while_megabytes_are_copied_searched_or_counted() -> None:
    """TEI's dialect did each in one call: 20 ms with the GIL for 32 MB, on one core."""
    body = b"[" * 32 * 2**20
    view = memoryview(body)
    assert held_s(lambda: copied(view), 12) < held_s(lambda: bytes(view), 2)  # the allocator may move it once
    assert held_s(lambda: occurrences(body, b"["), 12) < held_s(lambda: body.count(b"["), 2) / 2
    assert held_s(lambda: mentions(body, b"[]"), 12) < held_s(lambda: b"[]" in body, 2) / 3


@pytest.mark.parametrize("size", [0, 10, 2**18, 2**18 + 1, 2**19 + 3])
def test_what_lies_across_windows_is_found_and_copied(size: int) -> None:
    for at in (0, 2**18 - 4, 2**18 - 1, 2**18, size - 3):
        text = bytearray(size)
        text[max(at, 0) : max(at, 0) + 3] = b"abc"
        assert copied(memoryview(text)) == text
        for word in (b"abc", b"c", b"abd"):
            assert mentions(memoryview(text), word) == (word in text)
            assert occurrences(bytes(text), word) == text.count(word)
            for stop in (0, at + 1, at, size):
                assert occurrences(bytes(text), word, max(stop, 0)) == (0 <= bytes(text).find(word) < stop)
