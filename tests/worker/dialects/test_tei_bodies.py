"""The types of TEI's parser and the request classes of teimgr have the same fields, and take the same bodies."""

from __future__ import annotations

import re
from contextlib import suppress
from random import Random

import orjson
import pytest

from teimgr.errors import InvalidInput
from teimgr.wire import json_scan
from teimgr.wire.json_scan import completed
from teimgr.worker import http_inference
from teimgr.worker.dialects import serde_json, serde_text, tei, tei_bodies
from teimgr.worker.dialects.serde_json import Fault
from teimgr.worker.dialects.serde_types import Optional, Struct, read_body
from teimgr.worker.dialects.tei_bodies import is_ambiguous, may_be_deep
from teimgr.worker.http_inference import Body

PAIRS = [
    (tei.TeiEmbedRequest, tei_bodies.EMBED),
    (tei.TeiEmbedAllRequest, tei_bodies.EMBED_ALL),
    (tei.TeiEmbedSparseRequest, tei_bodies.EMBED_SPARSE),
    (tei.TeiPredictRequest, tei_bodies.PREDICT),
    (tei.TeiRerankRequest, tei_bodies.RERANK),
    (tei.TeiSimilarityRequest, tei_bodies.SIMILARITY),
    (tei.OpenAICompatRequest, tei_bodies.OPENAI),
    (tei.TokenizeRequest, tei_bodies.TOKENIZE),
    (tei.DecodeRequest, tei_bodies.DECODE),
    (tei.TeiVertexRequest, tei_bodies.VERTEX),
]


@pytest.mark.parametrize(("kind", "struct"), PAIRS, ids=[struct.name for _, struct in PAIRS])
def test_fields_and_those_required_are_the_same(kind: type[Body], struct: Struct) -> None:
    assert set(kind.model_fields) == set(struct.fields) | set(struct.own)
    required = {
        name
        for name, (field, has_default) in struct.fields.items()
        if not has_default and not isinstance(field, Optional)
    }
    assert {name for name, field in kind.model_fields.items() if field.is_required()} == required


GOOD = {
    "inputs": ('"a"', '["a","b"]', "[1,2]", '[["a"],["b","c"]]', '{"source_sentence":"a","sentences":["b"]}'),
    "input": ('"a"', '["a"]', "[1]"),
    "query": ('"q"',),
    "texts": ('["a","b"]',),
    "ids": ("[1,2]", "[[1],[2]]"),
    "instances": ('[{"inputs":"a"}]', "[]"),
}
ODD = (
    *("null", "true", "0", "1", "-1", "-0", "-0.0", "1.0", "1.5", "1E2", "1e400", "4294967296", "18446744073709551616"),
    *('""', '"a"', r'"\ud83d"', r'"\ud83d\ude00"', '"left"', '"LEFT"', '"float"', '"é"', "01", "+1", ".5", "NaN"),
    *("[]", "{}", "[null]", "[-0]", '["a","b","c"]', '[["a"],"b"]', '["a",["b"]]', '[[1],"a"]', '["a",1]', "[[[1]]]"),
    *('{"truncate":1}', '{"truncate":true}', '[true,"Left"]', '["q",["t"]]', "[" * 127 + "]" * 127),
    *("[" * 200 + "]" * 200, '{"a":' * 126 + "1" + "}" * 126, '{"a":' * 200 + "1" + "}" * 200),
)


def odd_body(random: Random, struct: Struct) -> bytes:
    """A body of a route with odd values, fields that are there twice, escaped names, white space and broken syntax."""
    required = [name for name in struct.fields if name in GOOD]
    chosen = [*required, *random.choices([*struct.fields, "nope"], k=random.randrange(4))]
    random.shuffle(chosen)

    def name_of(field: str) -> str:
        at = random.randrange(len(field))
        return f"{field[:at]}\\u{ord(field[at]):04x}{field[at + 1 :]}" if random.random() < 0.1 else field

    def value_of(field: str) -> str:
        return random.choice(GOOD[field]) if field in GOOD and random.random() < 0.7 else random.choice(ODD)

    pairs = (f'"{name_of(each)}"{random.choice(("", " "))}:{value_of(each)}' for each in chosen)
    text = random.choice((",", ", ", "\n,")).join(pairs)
    text = f"[{','.join(map(value_of, struct.fields))}]" if random.random() < 0.1 else f"{{{text}}}"
    if random.random() < 0.1:
        at = random.randrange(len(text))
        text = text[:at] + random.choice(("", ",", "]", '"', "\\", "x", "\ufeff")) + text[at + random.randrange(2) :]
    return text.encode("utf-8", "surrogatepass")


def test_what_is_decoded_quickly_is_what_the_real_parser_takes() -> None:
    """Over random odd bodies, with one seed: the quick way accepts nothing that TEI refuses, and in the same sense."""
    random, accepted = Random(7), 0
    for _ in range(3000):
        kind, struct = random.choice(PAIRS)
        body = odd_body(random, struct)
        quick, is_sure = http_inference._parse_quickly(kind, body, tei.TEI_BODY)
        try:
            real = kind.model_validate(completed(read_body(struct, body)))
        except Fault:
            real = None
        if is_sure:
            accepted += 1
            assert quick == real, body
    assert accepted > 200


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (tei.TeiEmbedRequest, rb'{"inputs":"a","inp\u0075ts":"b"}', "duplicate field `inputs` at line 1 column 27"),
        (tei.OpenAICompatRequest, rb'{"\u0069nput":"a","input":"b"}', "duplicate field `input` at line 1 column 25"),
        (tei.TeiVertexRequest, b'{"instances":' + b"[" * 130 + b"]" * 130 + b"}", "recursion limit exceeded"),
        (tei.TeiVertexRequest, b'{"instances":[' + b'{"a":' * 130 + b"1" + b"}" * 130 + b"]}", "recursion limit"),
    ],
)
def test_what_tei_alone_refuses_is_refused_in_its_words(kind: type[Body], body: bytes, sentence: str) -> None:
    with pytest.raises(http_inference.BadRequest, match=re.escape(sentence)):
        http_inference.parse(kind, body, tei.TEI_BODY)


@pytest.mark.parametrize("text", [r"a\u005fb", "below -0 degrees"])
def test_fields_of_ours_survive_the_parser_of_tei(text: str) -> None:
    body = f'{{"inputs":"{text}","aggregation_strategy":"none"}}'.encode()
    assert http_inference.parse(tei.TeiPredictRequest, body, tei.TEI_BODY).aggregation_strategy == "none"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (tei.TeiEmbedRequest, rb'{"inputs":"run \u0060make\u0060"}'),  # as .NET escapes a backtick
        (tei.TeiEmbedRequest, rb'{"inputs":"\u0072\u0075\u006e"}'),
        (tei.TeiEmbedRequest, rb'{"inputs":"write \\u0061 for a","truncate":true}'),
        (tei.TeiEmbedRequest, rb'{"inputs":["from -5, -0 or 0","\"inputs\":","say \"a\": [-0]"]}'),
        (tei.TeiRerankRequest, b'{"query":"texts","texts":["query","texts","query"]}'),
        (tei.TeiVertexRequest, b'{"instances":[' + b",".join([b'{"inputs":"a -0 b"}'] * 120) + b"]}"),
    ],
)
def test_a_correct_body_never_comes_to_the_slow_parser(
    kind: type[Body], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tei, "read_body", lambda *_: pytest.fail("a correct body was read by the slow parser"))
    assert http_inference.parse(kind, body, tei.TEI_BODY) == kind.model_validate_json(body)


def test_minus_zero_and_fields_that_are_there_twice_come_to_the_slow_parser() -> None:
    for body in (b'{"inputs":[1,-0]}', rb'{"inputs":"a\"","truncate":true,"trunc\u0061te":true}'):
        with pytest.raises(http_inference.BadRequest):
            http_inference.parse(tei.TeiEmbedRequest, body, tei.TEI_BODY)


@pytest.mark.parametrize(
    "value", ["1e400", r'"\ud800"', '["\\ud83d", -1e999]', "[" * 200 + "]" * 200, '"none","aggregation_strategy":[]']
)
def test_a_field_of_ours_has_no_faults_that_tei_does_not_find(value: str) -> None:
    body = f'{{"inputs":"a","aggregation_strategy":{value}}}'.encode()
    found = http_inference.parse(tei.TeiPredictRequest, body, tei.TEI_BODY)
    assert found.aggregation_strategy not in (None, "none", "simple")


KEY_OR_ZERO = re.compile(rb'("(?:[^"\\]|\\.)*")[ \t\r\n]*(:)?|(?<![eE])-0(?![.eE\d])', re.DOTALL)


def is_ambiguous_at_once(fields: frozenset[bytes], body: bytes) -> bool:
    found = [match.groups() for match in KEY_OR_ZERO.finditer(body)]
    keys = [b'"%b"' % str(orjson.loads(name)).encode() for name, colon in found if name and colon]
    return any(name is None for name, _ in found) or any(keys.count(name) > 1 for name in fields)


@pytest.mark.parametrize("window", [5, 40])
def test_windows_find_what_one_search_of_the_body_finds(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is passed over in windows: no edge of one hides a key, an escape, a zero or a fault."""
    random = Random(11)
    bodies = [(kind, struct, odd_body(random, struct)) for kind, struct in PAIRS for _ in range(100)]
    at_once = [_outcome(struct, body) for _, struct, body in bodies]
    monkeypatch.setattr(json_scan, "WINDOW_BYTES", window)
    monkeypatch.setattr(serde_json, "WINDOW_BYTES", window)
    monkeypatch.setattr(serde_text, "WINDOW_BYTES", window)
    valid = 0
    for (kind, struct, body), expected in zip(bodies, at_once, strict=True):
        assert window < 40 or _outcome(struct, body) == expected  # a number has as many digits as a window at most
        with suppress(orjson.JSONDecodeError):
            orjson.loads(body)
            fields = tei._quoted_fields(kind)
            assert completed(is_ambiguous(fields, body)) == is_ambiguous_at_once(fields, body), body
            valid += 1
    assert valid > 100


@pytest.mark.parametrize("key", [b'"k%d"', rb'"\u0069nput"', rb'"\n"', rb'"inputs of %d"'])
def test_keys_that_are_no_fields_are_passed_over_in_runs(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(tei_bodies, "end_of_string", lambda *given: calls.append(given))
    members = b",".join(key.replace(b"%d", b"%d" % number) + b":0" for number in range(1000))
    assert not completed(is_ambiguous(tei._quoted_fields(tei.TeiEmbedRequest), b'{"x":{' + members + b"}}"))
    assert calls == []


@pytest.mark.parametrize("window", [5, 40, json_scan.WINDOW_BYTES])
@pytest.mark.parametrize(("start", "end"), [(b"[", b"]"), (b'{"a":', b"}"), (b'["[",', b"]"), (b"[[0],{},", b"]")])
def test_depth_is_counted_without_parsing(
    start: bytes, end: bytes, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_scan, "WINDOW_BYTES", window)
    monkeypatch.setattr(serde_text, "WINDOW_BYTES", window)
    for depth in (60, 97, 101, 300):  # 98 and 99 may look so
        body = start * depth + b"0" + end * depth
        assert may_be_deep(b"[" + b'{"a":["[["]},' * 200 + body + b"]") == (depth > 98)


def _outcome(struct: Struct, body: bytes) -> object:
    try:
        return completed(read_body(struct, body))
    except Fault as fault:
        return fault.sentence(body)


@pytest.mark.parametrize("value", ["9", "0.0", "1e0"])
def test_a_number_of_more_digits_than_a_window_is_refused(value: str) -> None:
    value += value[-1] * 140_000
    for body in (f'{{"inputs":"a","other":{value}}}', f'{{"inputs":{value}}}'):
        with pytest.raises(InvalidInput, match="a number of more than 65536 digits"):
            http_inference.parse(tei.TeiEmbedRequest, body.encode(), tei.TEI_BODY)
