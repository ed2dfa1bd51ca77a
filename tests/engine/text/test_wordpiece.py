"""The native WordPiece gives the ids of the tokenizers library, and is used for what it covers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.token_ids import ids
from tests.support.native import needs_native_forward
from tokenizers import Tokenizer, normalizers

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Pair
from teimgr.engine.text import tokenizer as tokenizer_module
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.engine.text.tokenizer_library import load_tokenizer
from teimgr.engine.text.truncation import Truncation
from teimgr.engine.text.wordpiece import WordPiece, wordpiece
from teimgr.models.reading import read_layout
from teimgr.wire.text_column import TextColumn

pytestmark = needs_native_forward

WORDS = [
    "fog",
    "unaffable",
    "RAIN",
    "a'b",
    "x" * 100,
    "y" * 101,
    "z" * 300,
    "deep-learning?",
    "\x00",
    "\t\n",
    "\x0b",
    "#",
]
ADDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BEYOND_ASCII = [
    "naïve",
    "“don’t”",
    "—",
    "日本",
    "ΑΣ",
    "İ",
    "e\u0301",
    "\u0338",
    "<\u0338",
    "a\u00a0b",
    "ﬁne",
    "x\u200b\ufeff",
    "é" * 90,
    "[MASK]é",
    "\x00é",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(st.characters(max_codepoint=127), max_size=12))).map(
    " ".join
)


@pytest.fixture(scope="module")
def library(minilm: Path) -> Tokenizer:
    return load_tokenizer(read_layout(minilm))


@lru_cache
def native_form(tokenizer: Tokenizer, specials: bool = True) -> WordPiece:
    """Made once of each tokenizer: it reads the whole vocabulary."""
    found = wordpiece(tokenizer, specials)
    assert found is not None
    return found


@pytest.mark.parametrize("specials", [True, False])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_ids_are_those_of_the_library(library: Tokenizer, specials: bool, texts: list[str]) -> None:
    native = native_form(library, specials)
    covered = [text for text in texts if text and not any(token in text for token in ADDED)]
    found, ends = native.encode(TextColumn.of(covered), None)
    want = library.encode_batch_fast(covered, add_special_tokens=specials)

    assert found.tolist() == [id for encoding in want for id in encoding.ids]
    assert ends.tolist() == [sum(len(one) for one in want[: i + 1]) for i in range(len(want))]


def test_every_character_is_taken_as_by_the_library(library: Tokenizer) -> None:
    native = native_form(library)
    for code in range(128):
        text = f"ab{chr(code)}cd {chr(code)}{chr(code)}"
        assert native.encode(TextColumn.of([text]), None)[0].tolist() == library.encode(text).ids, code


@pytest.mark.parametrize("change", ["cased", "lower-case", "unknown characters"])
def test_other_normalizers(library: Tokenizer, change: str) -> None:
    spec = json.loads(library.to_str())
    if change == "unknown characters":
        del spec["model"]["vocab"]["q"], spec["model"]["vocab"]["##q"]
    spec["normalizer"]["lowercase"] = change != "cased"
    other = Tokenizer.from_str(json.dumps(spec))
    if change == "lower-case":
        other.normalizer = normalizers.Sequence(
            [normalizers.Lowercase(), normalizers.NFD(), normalizers.StripAccents()]
        )
    text = "The QUICK brown fox, IKEA and quiz; iqiq \x01 control"

    assert native_form(other).encode(TextColumn.of([text]), None)[0].tolist() == other.encode(text).ids


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 7, 50])
def test_truncation_keeps_either_end(library: Tokenizer, left: bool, limit: int) -> None:
    texts = [" ", "fog", "one two three four five six", "unaffable " * 40]
    found, ends = native_form(library).encode(TextColumn.of(texts), Truncation(limit, left))
    own = Tokenizer.from_str(library.to_str())
    own.enable_truncation(limit, direction="left" if left else "right")

    assert found.tolist() == [id for text in texts for id in own.encode(text).ids]
    assert int(ends[-1]) == len(found)


MIXED = st.lists(st.one_of(st.sampled_from(WORDS + BEYOND_ASCII), st.text(max_size=8)), max_size=12).flatmap(
    lambda words: st.sampled_from([" ", "\n", " \t", "\r\n", "\x0b"]).map(lambda space: space.join(words))
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.one_of(TEXTS, MIXED, st.text(max_size=20), st.just("a [MASK] b")), min_size=1, max_size=6))
@pytest.mark.parametrize("options", [TokenizeOptions(), TokenizeOptions(left=True), TokenizeOptions(truncate=False)])
def test_results_are_the_same_without_it(minilm: Path, texts: list[str], options: TokenizeOptions) -> None:
    """Texts that it covers beside those that it does not or only in part, empty and too long ones."""
    with_it, without = with_and_without(minilm)
    with mock.patch.object(tokenizer_module, "_MIN_MIXED", 0):
        found = [with_it.encode(inputs, options) for inputs in (texts, TextColumn.of(texts))]
    for ours, from_column, theirs in zip(*found, without.encode(texts, options), strict=True):
        assert type(ours) is type(from_column) is type(theirs)
        assert [str(ours)] == [str(from_column)] == [str(theirs)]


@lru_cache
def with_and_without(folder: Path) -> tuple[TextTokenizer, TextTokenizer]:
    layout = read_layout(folder)
    with_it, without = TextTokenizer(layout, 16), TextTokenizer(layout, 16)
    without._wordpiece = None
    return with_it, without


def test_what_it_does_not_cover(library: Tokenizer, minilm: Path) -> None:
    """Nothing comes of these, and what is between them is found where its end says."""
    texts = ["plain [text]", "naïve", "a [MASK] b", "", "[MASK]", "[MAS", "x" * 21, "plain"]
    ids_of, ends = native_form(library).encode(TextColumn.of([*texts, None]), None, longest=20)
    counts = np.diff(ends, prepend=0).tolist()

    assert [text for text, count in zip([*texts, None], counts, strict=True) if count] == [
        "plain [text]",
        "[MAS",
        "plain",
    ]
    assert ids_of.tolist() == [id for text in ("plain [text]", "[MAS", "plain") for id in library.encode(text).ids]
    tokenizer = TextTokenizer(read_layout(minilm), 96)
    assert ids(tokenizer, "a [MASK] b") == library.encode("a [MASK] b").ids
    assert ids(tokenizer, Pair("fog", "rain")) == library.encode("fog", "rain").ids


def test_words_beyond_ascii_are_the_librarys_and_all_others_its_own(library: Tokenizer) -> None:
    prose = "the harbour and the rain are near " * 3
    texts = [f"{prose}naïve fog", "plain", f"“Don’t”\n{prose}", "日本語 fog", f"{prose}[MASK] é", "", f"é{prose}\x00 ö"]
    found, ends = native_form(library).encode_mixed(TextColumn.of(texts), Truncation(20, False))
    own = Tokenizer.from_str(library.to_str())
    own.enable_truncation(20)
    covered = [0, 1, 2, 6]

    assert np.flatnonzero(np.diff(ends, prepend=0)).tolist() == covered
    assert found.tolist() == [id for row in covered for id in own.encode(texts[row]).ids]


@pytest.mark.parametrize("added", ["two words", "naïve"])
def test_a_text_is_not_split_where_an_added_token_reaches_over_words(library: Tokenizer, added: str) -> None:
    other = Tokenizer.from_str(library.to_str())
    other.add_special_tokens([added])
    native = wordpiece(other, True)
    assert native is not None

    assert (
        native.encode_mixed(TextColumn.of(["two words and the harbour in the rain, naïve and more"]), None)[0].size == 0
    )


def test_one_word_beyond_ascii_does_not_leave_a_long_text_to_the_library(library: Tokenizer, minilm: Path) -> None:
    tokenizer = TextTokenizer(read_layout(minilm), 256)
    texts = ["the harbour and the rain " * 40 + " café " + "and fog " * 100] * 2
    own = Tokenizer.from_str(library.to_str())
    own.enable_truncation(256)
    want = own.encode(texts[0]).ids

    with mock.patch.object(tokenizer, "_one_by_one", side_effect=AssertionError):
        ours = tokenizer.encode(texts, TokenizeOptions())
        one = tokenizer.encode(TextColumn.of(texts[:1]), TokenizeOptions())

    assert [each.ids.tolist() for each in (*ours, *one) if isinstance(each, Encoded)] == [want] * 3


def test_a_slice_of_a_column_has_the_ids_of_its_texts(library: Tokenizer) -> None:
    native, texts = native_form(library), ["fog", "rain and fog", "naïve", "the harbour"]
    found, ends = native.encode(TextColumn.of(texts)[1:], None)

    assert found.tolist() == [*library.encode(texts[1]).ids, *library.encode(texts[3]).ids]
    assert ends.tolist() == [5, 5, 9]


@pytest.mark.parametrize("family", ["roberta", "xlm_roberta", "qwen2", "modernbert"])
def test_tokenizers_of_another_kind_have_no_native_form(family: str, model_dir: Callable[..., Path]) -> None:
    assert wordpiece(load_tokenizer(read_layout(model_dir(family))), True) is None


def test_added_tokens_that_are_normalized_are_left_to_the_library(library: Tokenizer) -> None:
    other = Tokenizer.from_str(library.to_str())
    other.add_tokens(["Zweitausend"])

    assert wordpiece(other, True) is None


def test_without_the_native_library_there_is_none(library: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", "attention")

    assert wordpiece(library, True) is None
