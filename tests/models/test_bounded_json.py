"""Reading models' JSON: limits of size, values and depth; every odd content is one typed refusal."""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teimgr.errors import ModelLoadFailed, TeimgrError
from teimgr.models import bounded_json as model_json
from teimgr.models.bounded_json import read_head
from teimgr.models.reading import read_layout
from tests.support.models import build

DEEP = b'{"model_type":' + b"[" * 40_000 + b"]" * 40_000 + b"}"


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_depth_is_limited_to_the_level() -> None:
    assert model_json.parse(nested(model_json.MAX_DEPTH), "a.json")
    for levels in (model_json.MAX_DEPTH + 1, 900, 90_000):
        with pytest.raises(ModelLoadFailed, match=r"a\.json is nested more than 64 levels deep"):
            model_json.parse(nested(levels), "a.json")


def test_values_are_counted_before_any_is_made() -> None:
    many = b"[" + b"{}," * model_json.MAX_VALUES + b"{}]"

    with pytest.raises(ModelLoadFailed, match="has more than 4,000,000 values"):
        model_json.parse(many, "tokenizer.json")


def test_the_values_of_other_files_than_vocabularies_are_fewer() -> None:
    with pytest.raises(ModelLoadFailed, match=r"config\.json has more than 1,000,000 values"):
        model_json.parse(b"[" + b"0," * 1_000_000 + b"0]", "config.json")
    with pytest.raises(ModelLoadFailed, match=r"config\.json has more than 100,000 objects and lists"):
        model_json.parse(b"[" + b"[]," * 100_000 + b"0]", "config.json")


@pytest.mark.parametrize("padding", ["", " " * 70_000])
def test_a_number_that_takes_long_to_calculate_with_is_refused(padding: str) -> None:
    longest = "9" * 40
    text = f'{padding}{{"a": [{longest}, "{longest}9", 0.{longest}9]}}'
    assert model_json.parse(text.encode(), "config.json") == {"a": [int(longest), f"{longest}9", 1.0]}
    for number in (f"{longest}9", f"-{longest}9", "9" * 4300, "9" * 10_000):
        digits = f"{len(number.lstrip('-')):,}"
        with pytest.raises(ModelLoadFailed, match=rf"config\.json is not valid JSON: .*a number of {digits} digits"):
            model_json.parse(f'{padding}{{"a": [0, {number}]}}'.encode(), "config.json")


def long_values() -> Iterator[Any]:
    """Values whose text is longer than one window, of every shape at every level."""
    text = 'a, "b": [1], {}\\ é \u2028' * 400
    rows = [[f"a{n}", n, None, {"b]": [n / 7]}] for n in range(3000)]
    yield from (text, [text] * 20, {text: text, "b": text * 9}, rows, {"rows": rows, "more": [rows, {"a": rows}]})
    yield {f"key {n}, ": n for n in range(9000)}
    yield [{"id": n, "content": "[,]{,}", "special": n % 2 == 0} for n in range(5000)]
    yield [[0.5, "x"] * 9000, {}, [], "", {"": text}, True, None, -1e300, 2**70]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("value", list(long_values()), ids=lambda value: type(value).__name__)
def test_a_long_text_has_the_value_that_the_library_reads(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=indent is None)
    padded = " " * 70_000 + text + "\n"

    assert model_json.parse(padded.encode(), "tokenizer.json") == value


LONG_TEXTS = [json.dumps(value) for value in long_values()]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_long_text_that_is_no_json_is_refused_as_by_the_library(data: st.DataObject) -> None:
    text = LONG_TEXTS[data.draw(st.integers(0, len(LONG_TEXTS) - 1))]
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", '"', ":", "\\", "0", "[", "{"])) + text[at + 1 :]
    padded = (" " * 70_000 + text).encode()
    try:
        expected = json.loads(padded)
    except ValueError:
        with pytest.raises(ModelLoadFailed):
            model_json.parse(padded, "tokenizer.json")
    else:
        try:
            assert model_json.parse(padded, "tokenizer.json") == expected
        except ModelLoadFailed as error:
            assert "has two values" in error.message


def test_other_threads_run_while_a_long_file_is_parsed() -> None:
    """What holds the GIL at a time is one window: a loop beside it is never late by more than the watchdog reports."""
    text = b'{"merges":[' + b'["a","b"],' * 50_000 + b"0]}"
    calls: list[int] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            calls.append(0)

    sys.setprofile(trace)
    try:
        model_json.parse(text, "tokenizer.json")
    finally:
        sys.setprofile(None)

    assert len(calls) > len(text) / 8192  # between two calls the interpreter gives the GIL away


def test_a_file_beyond_its_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory

    with pytest.raises(ModelLoadFailed, match=r"config\.json has 1,099,511,627,776 bytes, and at most 4,194,304 are"):
        model_json.read_object(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),  # digits beyond what Python converts
        (b"[]", "should hold a JSON object"),
        (DEEP, "nested more than"),
    ],
)
def test_what_is_no_object_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(ModelLoadFailed, match=reason):
        model_json.read_object(path)


def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    (tmp_path / "modules.json").mkdir()
    os.mkfifo(tmp_path / "fifo.json")

    with pytest.raises(ModelLoadFailed, match=r"config\.json is a device, not a file"):
        model_json.read_object(tmp_path / "config.json")
    with pytest.raises(ModelLoadFailed, match=r"modules\.json is a directory, not a file"):
        model_json.read_list(tmp_path / "modules.json")
    with pytest.raises(ModelLoadFailed, match=r"fifo\.json is a FIFO, not a file"):
        model_json.read_object(tmp_path / "fifo.json")
    assert model_json.read_object(tmp_path / "absent.json") is None


def test_a_key_has_one_value() -> None:
    assert model_json.parse(b'{"a": {"b": 1, "b": 1}}', "a.json") == {"a": {"b": 1}}
    with pytest.raises(ModelLoadFailed, match="the key 'b' has two values"):
        model_json.parse(b'{"a": {"b": 1, "b": 2}}', "a.json")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("odd") / "model")


ODD: tuple[Any, ...] = (
    None, True, -1, 10**30, float("inf"), float("nan"), "\ud800", [[]], {"a": {}},
)  # fmt: skip
FILES = (
    "config.json", "tokenizer_config.json", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_odd_values_are_typed_refusals(name: str, bert: Path) -> None:
    """Whatever stands in the place of each value of each file that is read, and of the file."""
    path = bert / name
    kept = path.read_bytes() if path.exists() else None
    original = json.loads(kept) if kept else {}
    keys: list[Any] = list(original) if isinstance(original, dict) else list(range(len(original)))
    try:
        # Three for each key, others for the next: all for each would take half a minute.
        odd = itertools.cycle(ODD)
        for key, value in [*((key, next(odd)) for key in keys for _ in range(3)), *((None, value) for value in ODD)]:
            changed = value
            if key is not None:
                changed = json.loads(kept or b"{}")
                changed[key] = value
            path.write_text(json.dumps(changed))
            for kind in (None, "reranker", "sparse", "multi-vector", "classifier"):
                try:
                    read_layout(bert, kind=kind)
                except TeimgrError as error:
                    error.message.encode(errors="surrogatepass")
        for content in (DEEP, b"\x00", b"[" * 10_000):
            path.write_bytes(content)
            with pytest.raises(TeimgrError):
                read_layout(bert)
    finally:
        path.unlink() if kept is None else path.write_bytes(kept)


def file_of(folder: Path, shape: str, dtype: str = "F32", size: int = 64) -> Path:
    head = f'{{"embeddings":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{size}]}}}}'.encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 64)
    return file


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (json.dumps([1 << 63]), "tensor embeddings has a size of 9,223,372,036,854,775,808"),
        (json.dumps([2**62] * 8), "tensor embeddings of 64 bytes has the shape"),
        (json.dumps([513]), "tensor embeddings of 64 bytes has the shape"),
        (json.dumps([1] * 400_000), "tensor embeddings has 400,000 dimensions"),
        ("[" + ",".join(["9" * 4300] * 3600) + "]", "has a number of 4,300 digits"),
        ("[" + "9" * 5000 + "]", "has a number of 5,000 digits"),
        (json.dumps([4, True]), "tensor embeddings"),
        (json.dumps([-16]), "tensor embeddings"),
    ],
    ids=lambda value: value[:20],
)
def test_a_shape_that_no_tensor_has_is_refused_by_name_in_little_time(tmp_path: Path, shape: str, message: str) -> None:
    file = file_of(tmp_path, shape)
    begun = time.thread_time()
    with pytest.raises(ModelLoadFailed, match=re.escape(message)):
        read_head(file)
    assert time.thread_time() - begun < 3  # squared in the sizes it was 11 s for 400,000, and hours for 3,600 numbers


def test_sizes_that_a_tensor_has_are_read(tmp_path: Path) -> None:
    assert read_head(file_of(tmp_path, "[2,1,4,2]"))[0].elements == 16
    assert read_head(file_of(tmp_path, "[]", size=4))[0].elements == 1
    assert read_head(file_of(tmp_path, "[0,9]", size=0))[0].elements == 0
    assert read_head(file_of(tmp_path, "[128]", "F4"))[0].elements == 128
