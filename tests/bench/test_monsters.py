"""The inputs of `bench monsters` and of the fuzzing are what they are called, at the size that is wanted."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from bench import monster_inputs as inputs
from bench.monsters import Found, monsters, record

from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

SIZE = 60_000


@pytest.mark.parametrize("name", inputs.TEXTS)
def test_a_text_has_its_size_and_is_always_the_same(name: str) -> None:
    text = inputs.TEXTS[name](SIZE)

    assert SIZE * 0.9 <= len(text.encode()) <= SIZE
    assert text == inputs.TEXTS[name](SIZE)


@pytest.mark.parametrize("name", inputs.BROKEN_JSON)
def test_broken_json_is_none(name: str) -> None:
    body = inputs.BROKEN_JSON[name](SIZE)

    assert len(body) * 1.1 >= SIZE
    if name not in ("exponent", "surrogates"):  # Python's reader takes these
        with pytest.raises((ValueError, RecursionError)):
            json.loads(body)


def test_odd_json_names_its_model() -> None:
    for name, make in inputs.ODD_JSON.items():
        body = make("mini", SIZE)
        assert len(body) >= SIZE * 0.8
        if "deep" not in name and name != "long name":  # deeper than Python's reader goes
            assert json.loads(body)["model"] == "mini"


def test_messages_with_many_fields_are_an_embed_where_they_are_whole() -> None:
    for name, make in inputs.FIELDS.items():
        message = make("mini", SIZE)
        assert len(message) >= SIZE * 0.9
        if name not in ("nested groups", "targets again"):  # no end of a group; the last target counts
            read = multiplexer_pb2.EmbedRequest.FromString(message)
            assert (read.target.instance_name, read.request.inputs) == ("mini", "rain")


def test_arrow_streams_can_be_read() -> None:
    for make in inputs.ARROW.values():
        with pa.ipc.open_stream(make(SIZE // 10)) as reader:
            assert "text" in reader.read_all().column_names


def test_every_monster_fits_into_the_limit_of_its_surface() -> None:
    made = {(each.name, each.surface): each for each in monsters()}

    assert len(made) == len(list(monsters()))
    for each in made.values():
        path, body = each.make(SIZE // 10)
        assert path.startswith("/")
        assert len(body) > SIZE * 0.005
    for each in made.values():
        if each.name in ("dots", "quotes", "combining marks"):
            assert len(each.make(each.most // 4)[1]) <= each.most  # a quote is two characters of JSON


def test_a_line_compares_the_queries_of_the_median_window_with_idle_ones_and_counts_the_failures_of_all() -> None:
    quick = Found("200", 0.5, 30.0, [10.0] * 100)
    slow = Found("200", 0.6, 30.0, [10.0] * 98 + [40.0] * 2, ["Embed UNAVAILABLE"], 1, ["mux"])
    slower = Found("200", 0.7, 30.0, [90.0] * 100, ["Embed UNAVAILABLE"])

    line = record(("dots", "REST /v1/embeddings", "this"), [slower, quick, slow], [5.0] * 98 + [10.0] * 2)

    assert line["of_idle"] == pytest.approx(4.0)
    assert (line["windows"], line["failed"], line["probes_missed"], line["replaced"]) == (3, 2, 1, "mux")
