"""Reading texts of files: every format gives the same rows, from any row on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from teimgr.client.corpus.sources import open_source
from teimgr.errors import InvalidConfig

ROWS = [{"id": row, "text": f"text {row}, “quoted”\tand tabbed", "lang": "en"} for row in range(100)]


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=30)


def arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def csv(path: Path) -> None:
    pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), path)


def txt(path: Path) -> None:
    path.write_text("".join(f"{row['text']}\n" for row in ROWS))


WRITERS = {
    **{"a.parquet": parquet, "a.arrow": arrow, "b.arrow": arrow_stream, "a.jsonl": jsonl, "a.csv": csv, "a.txt": txt}
}


@pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS)
@pytest.mark.parametrize("first_row", [0, 1, 30, 47, 99, 100])
def test_a_source_gives_the_same_rows_from_any_row_on(
    name: str, write: Callable[[Path], None], first_row: int, tmp_path: Path
) -> None:
    write(tmp_path / name)
    source = open_source(tmp_path / name)

    batches = list(source.batches(first_row, 8))

    assert all(0 < batch.num_rows <= 8 for batch in batches)
    assert [text for batch in batches for text in batch["text"].to_pylist()] == [
        row["text"] for row in ROWS[first_row:]
    ]
    assert source.rows == (None if name in ("a.csv", "b.arrow") else 100)
    assert source.kept.names == ([] if name.endswith(".txt") else ["id"])
    if name.endswith((".parquet", ".arrow", ".jsonl")):
        assert [key for batch in batches for key in batch["id"].to_pylist()] == list(range(first_row, 100))


def test_lines_that_hold_no_text_have_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\nnope\n[1]\n{"t": 1}\n{"text": 5}\n{"text": "\\ud800"}\n')
    [batch] = open_source(file).batches(0, 10)
    assert batch["text"].to_pylist() == ["a", None, None, None, None, None]
    assert [(fault or "").partition(":")[0] for fault in batch["fault"].to_pylist()] == [
        *("", "no JSON", "no JSON object", "no key 'text'", "'text' is not a string"),
        "'text' has half of a surrogate pair",
    ]

    lines = tmp_path / "a.txt"
    lines.write_bytes(b"a\n\n\xff\r\nlast")
    [batch] = open_source(lines).batches(0, 10)
    assert batch["text"].to_pylist() == ["a", None, None, "last"]
    assert batch["fault"].to_pylist() == [None, "empty line", "no UTF-8 at byte 0 of the line", None]

    table = tmp_path / "a.csv"
    table.write_text("id,text\n1,a\n2\n")
    [batch] = open_source(table).batches(0, 10)
    assert batch["fault"].to_pylist() == [None, "1 columns in a file of 2"]
    assert batch["id"].to_pylist() == ["1", "2"]


def test_a_blank_line_of_csv_is_no_row(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\nid,text\n\n1,a\n\n\n2,b\n\n")
    source = open_source(file)
    for first_row, left in ((0, ["a", "b"]), (1, ["b"])):
        [batch] = source.batches(first_row, 10)
        assert batch["text"].to_pylist() == left
        assert batch["fault"].null_count == len(left)


def test_an_odd_line_of_json_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    huge = 10**30
    nested = '{"text": "a", "x": ' + "[" * 300_000 + "]" * 300_000 + "}"
    file.write_text(f'{{"id": 1, "text": "a"}}\n{nested}\n{{"id": {huge}, "text": "b"}}\n')
    [batch] = open_source(file).batches(0, 10)
    assert batch["text"].to_pylist() == ["a", None, "b"]
    assert "recursion" in batch["fault"][1].as_py()
    assert batch["id"].to_pylist() == ["1", None, str(huge)]


def test_a_csv_field_may_be_as_long_as_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"id,text\n1,{'a' * (16 << 20)}\n")
    [batch] = open_source(file).batches(0, 10)
    assert batch["fault"].to_pylist() == [None]
    assert len(batch["text"][0].as_py()) == 16 << 20


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b'2,"' + b"a" * (33 << 20), r"after line 100001: field larger than field limit"),
        (b"2,\xff", r"after line \d+: 'utf-8'"),
    ],
    ids=["a quote that is not closed", "no UTF-8"],
)
def test_csv_that_cannot_be_read_is_named_with_its_line(row: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"id,text\n" + b"1,a\n" * 100_000 + row)
    with pytest.raises(InvalidConfig, match=says):
        list(open_source(file).batches(0, 1000))


def test_headings_of_csv_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'"' + b"a" * (33 << 20))
    with pytest.raises(InvalidConfig, match="field larger than field limit"):
        open_source(file)


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("a.pdf", b"", {}, r"a\.pdf: the suffix is not one of \.parquet"),
        ("a.csv", b"id,body\n", {}, "no column 'text'; there are id, body"),
        ("a.csv", b"id,text\n", {"keep": ["lang"]}, "no column 'lang'"),
        ("a.csv", b"id,text,id\n", {}, "2 columns 'id'; there are id, text, id"),
        ("a.jsonl", b'{"body": "a"}\n', {}, "no key 'text' in its first lines; there are body"),
        ("a.parquet", b"nope", {}, r"a\.parquet: "),
        ("a.txt", b"a\n", {"keep": ["id"]}, "a text file has no columns"),
    ],
)
def test_what_cannot_be_read_is_named(
    name: str, content: bytes, options: dict[str, list[str]], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidConfig, match=says):
        open_source(tmp_path / name, **options)


@pytest.mark.parametrize("name", ["pictures", "a.txt", "a.webm"])
def test_what_does_not_exist_is_said_to_be_missing(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}: no such file or folder"):
        open_source(tmp_path / name)


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        (["x"], [0, 999, "x"]),
        ([1.5], [0.0, 999.0, 1.5]),
        ([None, 7], [0, 999, None, 7]),
        ([True], [0, 999, "true"]),
        ([[1]], [0, 999, "[1]"]),
    ],
    ids=str,
)
def test_a_kept_column_has_a_type_for_all_its_values(later: list[object], kept: list[object], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"id": each, "text": "a"}) + "\n" for each in [*range(1000), *later]))
    found = [each for batch in open_source(file).batches(0, 300) for each in batch["id"].to_pylist()]
    if any(isinstance(each, str) for each in kept):
        kept = list(map(str, kept))
    assert [found[0], *found[999:]] == kept


def test_a_kept_value_that_no_type_holds_is_named_with_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    values = [2**60 + 1, *range(999), 1.5]
    file.write_text("".join(json.dumps({"id": each, "text": "a"}) + "\n" for each in values))
    with pytest.raises(InvalidConfig, match=r"rows 0 to 499: 'id' is not always double.*without it: --keep"):
        list(open_source(file).batches(0, 500))


def test_half_of_a_surrogate_pair_in_a_kept_column_is_named_with_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "a", "text": "a"}\n{"id": "\\ud800", "text": "a"}\n')
    with pytest.raises(InvalidConfig, match=r"rows 0 to 1: 'id' is not always string: .*surrogates.*--keep"):
        list(open_source(file).batches(0, 500))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_not_of_the_text(name: str, tmp_path: Path) -> None:
    contents = {
        "a.txt": "a\n\ufeffb\n",
        "a.jsonl": '{"text": "a"}\n{"text": "\ufeffb"}\n',
        "a.csv": "text\na\n\ufeffb\n",
    }
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + contents[name].encode())
    source = open_source(tmp_path / name)
    for first_row, left in ((0, ["a", "\ufeffb"]), (1, ["\ufeffb"])):
        for size in (1, 10):
            texts = [text for batch in source.batches(first_row, size) for text in batch["text"].to_pylist()]
            assert texts == left


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ('1,"hello\n2,world\n3,foo\n', "the row after line 2: unexpected end of data; a quote in a row is closed"),
        ('1,"hello\n2,"world"\n3,foo\n', "the row after line 2: ',' expected after '\"'"),
        ('1,"', "the row after line 2: unexpected end of data"),
    ],
)
def test_a_quote_of_csv_that_is_not_closed_takes_no_rows(rows: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("id,text\n0,a\n" + rows)
    read = open_source(file).batches(0, 1)
    assert next(read)["text"].to_pylist() == ["a"]
    with pytest.raises(InvalidConfig, match=says):
        list(read)
    file.write_text('id,text\n0,"a\n""b"", c"\n')
    [batch] = open_source(file).batches(0, 10)
    assert batch["text"].to_pylist() == ['a\n"b", c']
