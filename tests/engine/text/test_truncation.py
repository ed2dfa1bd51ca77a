"""Very long inputs are cut before they are tokenized, without a change of their tokens."""

from __future__ import annotations

import base64
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.engine.token_ids import ids
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Pair
from teimgr.engine.text.boundaries import Boundaries, breaks_at_spaces
from teimgr.engine.text.templates import CausalTemplate, PiecedTemplate
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.engine.text.tokenizer_library import TokenizerLibrary
from teimgr.engine.text.truncation import MAX_CHARACTERS, Shortener, Text
from teimgr.errors import InputTooLong, InvalidInput
from teimgr.models.layout import PairTemplate
from teimgr.models.reading import read_layout

RIGHT, LEFT = TokenizeOptions(), TokenizeOptions(left=True)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta", "modernbert", "qwen2", "qwen3"])
@pytest.mark.parametrize("reading", [RIGHT, LEFT])
@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox, naïve and São. " * 900,
        " " * 30_000 + "fog on the harbour",  # what counts lies behind the character bound
        "fog on the harbour" + " " * 30_000,
        "x" * 30_000,
        "fog " * 50 + " " * 30_000 + "lamps " * 50,
        "a\n\n b\t" * 6_000,
        "don't  stop!? " * 3_000,
    ],
)
def test_the_cut_of_a_very_long_text_changes_nothing(
    family: str, reading: TokenizeOptions, text: str, model_dir: Callable[..., Path]
) -> None:
    tokenizer, plain = cutting_at(model_dir(family), 96, reading.left)

    assert ids(tokenizer, text, reading) == plain.encode(text).ids


@lru_cache
def cutting_at(path: Path, limit: int, left: bool) -> tuple[TextTokenizer, Tokenizer]:
    """Ours, and the library's that cuts by itself; made once, as it reads the whole model."""
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    plain.no_padding()
    plain.enable_truncation(limit, direction="left" if left else "right")
    return TextTokenizer(read_layout(path), limit), plain


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta", "qwen2"])
def test_a_text_may_be_cut_where_no_token_reaches_over_a_space(family: str, model_dir: Callable[..., Path]) -> None:
    plain = Tokenizer.from_file(str(model_dir(family) / "tokenizer.json"))
    assert breaks_at_spaces(plain)

    plain.add_tokens(["two words"])
    assert not breaks_at_spaces(plain)


WORDS = ["fog", "rain", "lamps", "Zürich", "东京", "jumps", "over", "and", "a,", "b!", "(c)", "harbour"]


texts_of_words = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    halves=st.tuples(*[st.tuples(texts_of_words, st.integers(0, 40), st.integers(0, 12))] * 2),
    limit=st.sampled_from([6, 9, 12]),
    left=st.booleans(),
)
@example(halves=(("fog rain", 10, 1), ("fog and lamps", 0, 1)), limit=12, left=False)  # what is cut is the shorter half
def test_the_cut_of_very_long_halves_changes_nothing(
    halves: tuple[tuple[str, int, int], ...], limit: int, left: bool, model_dir: Callable[..., Path]
) -> None:
    """Texts around and far beyond the bound on characters, with spaces that are no tokens anywhere."""
    pair = Pair(*(f"{text} {' ' * (100 * spaces)}{'lamps rain ' * (10 * words)}" for text, spaces, words in halves))
    tokenizer, plain = cutting_early(model_dir("bert"), limit, left)

    assert ids(tokenizer, pair, TokenizeOptions(left=left)) == plain.encode(*pair).ids


@lru_cache
def cutting_early(path: Path, limit: int, left: bool) -> tuple[TextTokenizer, Tokenizer]:
    """As `cutting_at`, where 20 characters a token are far beyond the bound."""
    tokenizer, plain = cutting_at.__wrapped__(path, limit, left)
    tokenizer._shortener = Shortener(Boundaries(plain), limit)
    tokenizer._shortener.first = limit * 20
    return tokenizer, plain


def test_two_very_long_halves_take_no_more_than_their_tokens(model_dir: Callable[..., Path]) -> None:
    """The library's own truncation makes an encoding of every piece of one with every piece of the other."""
    tokenizer = TextTokenizer(read_layout(model_dir("roberta")), 24)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    (encoded,) = tokenizer.encode([Pair("x" * 20_000, "y" * 20_000)], RIGHT)

    assert isinstance(encoded, Encoded)
    assert len(encoded.ids) == 24
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000


_DRAW = random.Random(0)
MONSTERS = {
    "base64": base64.b64encode(_DRAW.randbytes(3_000_000)).decode(),
    "dots": "." * 1_900_000,
    "Chinese": "".join(chr(_DRAW.randrange(0x4E00, 0x9FFF)) for _ in range(1000)) * 1000,
    "emoji": "\U0001f600" * 1_000_000,
    "marks": "e" + "\u0301" * 2_000_000,
    "one word": "a" * 4_000_000,
    "newlines": "\n" * 4_000_000,
    "words": "fog and rain " * 400_000,
    "umlauts": "Nebel über Zürich " * 200_000,
}


@contextmanager
def _longest_pause() -> Iterator[Callable[[], float]]:
    """Measure for how long another thread gets no turn, in seconds."""
    longest, ended = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: longest
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_texts_of_megabytes_cost_little_and_never_hold_other_threads(
    family: str, model_dir: Callable[..., Path]
) -> None:
    """Each took 3 to 15 s before, with the GIL."""
    tokenizer = TextTokenizer(read_layout(model_dir(family)), 512)
    for name, text in MONSTERS.items():
        for reading in (RIGHT, LEFT, TokenizeOptions(truncate=False)):
            with _longest_pause() as longest_pause:
                began = time.process_time()
                (encoded,) = tokenizer.encode([text], reading)
                seconds = time.process_time() - began
            assert seconds < 2.5, (name, reading)  # of all threads together, for one that no size decides
            assert longest_pause() < 1, (name, reading)
            if name in ("words", "umlauts") and reading.truncate:
                assert isinstance(encoded, Encoded)
                assert len(encoded.ids) == 512
            elif not isinstance(encoded, Encoded):
                assert isinstance(encoded, InvalidInput), (name, encoded)


def test_a_long_text_that_must_not_be_truncated_is_refused_by_its_tokens(model_dir: Callable[..., Path]) -> None:
    tokenizer = TextTokenizer(read_layout(model_dir("roberta")), 512)

    exact, long = tokenizer.encode(["fog " * 10_000, "fog " * 30_000], TokenizeOptions(truncate=False))

    assert isinstance(exact, InvalidInput)
    assert "must have less than 512 tokens. Given: " in exact.message
    assert isinstance(long, InvalidInput)
    assert "must have less than 512 tokens. Given: at least " in long.message


class _Seen:
    """Counts the characters that the tokenizers library is given."""

    def __init__(self, library: TokenizerLibrary) -> None:
        self._library = library
        self.characters = 0

    def encode(self, texts: Sequence[Text], *args: Any, **options: Any) -> list[Encoding]:
        self.characters += sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in texts)
        return self._library.encode(texts, *args, **options)


_UNCUTTABLE = "\ud55c\uae00" * 600_000


@pytest.mark.parametrize(
    "item", [_UNCUTTABLE, Pair("fog", _UNCUTTABLE), Pair(_UNCUTTABLE, "fog"), Pair(_UNCUTTABLE, _UNCUTTABLE)]
)
@pytest.mark.parametrize("reading", [RIGHT, LEFT, RIGHT._replace(prompt="find: "), LEFT._replace(prompt="find: ")])
def test_a_text_that_can_be_cut_nowhere_is_refused_before_it_is_tokenized(
    item: str | Pair, reading: TokenizeOptions, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 million Hangul syllables, five parts were tokenized before: 3.7 s of a core."""
    tokenizer = TextTokenizer(read_layout(model_dir("bert")), 256)
    seen = _Seen(tokenizer._library)
    monkeypatch.setattr(tokenizer, "_library", seen)

    refusal, fine = tokenizer.encode([item, "fog"], reading)

    assert isinstance(refusal, InvalidInput)
    assert "must have at most 524288 characters where these can be cut nowhere. Given: 12000" in refusal.message
    assert isinstance(fine, Encoded)
    assert seen.characters < 50


def test_pairs_in_templates_that_can_be_cut_nowhere_are_refused_before_they_are_tokenized() -> None:
    plain = Tokenizer(models.WordLevel({"fog": 0, "[UNK]": 1}, unk_token="[UNK]"))
    shortener, seen = Shortener(Boundaries(plain), 64), _Seen(TokenizerLibrary(plain))
    whole = partial(seen.encode, specials=False, offsets=True)
    pieces = ("A: {query}", "B: {document}", "\n")
    template = PairTemplate("<", "{query}{document}", ">", pieces)
    for causal in (CausalTemplate(template, whole, shortener, 64), PiecedTemplate(pieces, whole, shortener, 64)):
        for truncate, left in ((True, False), (True, True), (False, False)):
            seen.characters = 0
            pairs = [Pair("fog", _UNCUTTABLE), Pair(_UNCUTTABLE, "fog"), Pair("fog", "fog")]
            *refusals, fine = causal.encode(pairs, truncate, left)
            for refusal in refusals:
                assert isinstance(refusal, InvalidInput)
                assert "must have at most 524288 characters where these can be cut nowhere" in refusal.message
            assert isinstance(fine, np.ndarray)
            assert seen.characters < 100


def test_the_cut_of_a_pair_whose_template_loses_its_beginning_changes_nothing() -> None:
    """The first cut had enough tokens with those of the prefix alone, which stayed before it."""
    long = "a" * 80
    plain = Tokenizer(models.WordLevel({"fog": 0, long: 1, "[UNK]": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = partial(TokenizerLibrary(plain).encode, specials=False, offsets=True)
    template = PairTemplate("fog " * 30, "{query} {document}", " fog", cuts_prefix=True)
    causal = CausalTemplate(template, whole, Shortener(Boundaries(plain), 64), 64)

    [found] = causal.encode([Pair("fog", f"{long} " * 200)], truncate=True, left=True)

    assert isinstance(found, np.ndarray)
    assert found.tolist() == [1] * 63 + [0]


def test_a_text_that_can_be_cut_nowhere_is_tried_whole_up_to_the_bound() -> None:
    plain = Tokenizer(models.BPE({"a": 0, "[UNK]": 1}, [], unk_token="[UNK]"))
    shortener = Shortener(Boundaries(plain), 64)
    cuts = [len(cut.text) for cut in shortener.cuts("a\u0e01" * 150_000, False, shortener.first)]
    assert cuts == [MAX_CHARACTERS, 300_000]


def test_the_length_of_a_prompt_is_bounded_work(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TextTokenizer(replace(read_layout(model_dir("bert")), include_prompt=False), 256)
    seen = _Seen(tokenizer._library)
    monkeypatch.setattr(tokenizer, "_library", seen)

    assert tokenizer.prompt_len("fog and rain " * 400_000) == 255
    with pytest.raises(InputTooLong, match="can be cut nowhere"):
        tokenizer.prompt_len(_UNCUTTABLE)

    assert seen.characters <= 4096
    assert tokenizer._prompt_lens == {}
