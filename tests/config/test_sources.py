"""Keys and their lines, for every way that TOML has to write them."""

from __future__ import annotations

import tomllib

from teimgr.config.sources import key_lines, line_of

TEXT = '''# a comment
a = 1
"b c".d = 2
list = [
  1, # one
  [2],
]
long = """
[no.header]
x = 1
"""
inline = { k = { l = 1 } }

[t.u]  # a table
v = 'x'
[[arr]]
k = 1
[[arr]]
k = 2
[arr.sub]
z = 1
[[arr.deep]]
y = 1
[[arr.deep]]
y = 2
'''


def test_each_key_has_the_line_where_its_statement_begins() -> None:
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)
    assert lines["a"] == 2
    assert lines["b c.d"] == 3
    assert lines["list"] == lines["list[1][0]"] == 4
    assert lines["long"] == 8
    assert lines["inline.k.l"] == 12
    assert lines["t.u"] == 14
    assert lines["t.u.v"] == 15
    assert (lines["arr[0]"], lines["arr[0].k"]) == (16, 17)
    assert (lines["arr[1]"], lines["arr[1].k"], lines["arr[1].sub.z"]) == (18, 19, 21)
    assert "no.header" not in lines
    assert "x" not in lines


def test_what_is_missing_has_the_line_of_what_it_should_be_in() -> None:
    lines = key_lines(TEXT)
    assert line_of("arr[1].missing.deeper", lines) == 18
    assert line_of("a[3]", lines) == 2
    assert line_of("nowhere.at.all", lines) is None


def test_an_empty_file_has_no_lines() -> None:
    assert key_lines("") == {}


def test_arrays_inside_arrays_begin_anew() -> None:
    lines = key_lines("[[a]]\n[[a.b]]\nk = 1\n[[a]]\n[[a.b]]\nk = 2\n")
    assert lines["a[0].b[0].k"] == 3
    assert lines["a[1].b[0].k"] == 6
