"""Cuts of texts without spaces leave the tokens that are kept as the library makes them, for each kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.support.models import files
from tests.support.models.files import CORPUS
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from teimgr.engine.text import truncation
from teimgr.engine.text.boundaries import Boundaries, breaks_at_spaces
from teimgr.engine.text.truncation import Shortener, Text, Truncation

_NO_SPACES = [
    "東京の夜は静かで、霧が港を覆う。" * 3,
    "我们在北京的街道上走路。" * 3,
    "....!!!====----",
    "aabbabab",
    "😀😀🎉",
]
_FRAGMENTS = [
    *(".", "a", "ab", "aB3x", "fog ", "harbour ", "東", "京", "夜は", "我们", "北京", "。", "😀", "🎉", "👨‍👩‍👧", "🇩🇪"),
    *("\u0301", "\u0323", "é", "e\u0301", "\n", "\r\n", "\t", "  ", " ", "=", "-", "<mask>", "[MASK]", "<ma", "sk>"),
    *("'re", "'", "1", "12345", "ﬁ", "Å", "각", "\u1100", "\u1161", "\u11a8", "가", "\u0e33", "\u200d", "\ufe0f"),
    *("\x00", "\u00ad", "don't", "!", "x", "Zürich", "²", "\U0001f44d\U0001f3fd", "\ufdfa", "\ufdf2"),
]
_NORMALIZERS: list[Callable[[], normalizers.Normalizer] | None] = [
    None,
    normalizers.NFC,
    normalizers.NFD,
    normalizers.NFKC,
    lambda: normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
]


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<mask>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*CORPUS, *_NO_SPACES], trainer)
    return tokenizer


def _metaspace_bpe() -> Tokenizer:
    """Like Llama's: spaces are characters of the vocabulary, and nothing splits words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<mask>"])
    tokenizer.train_from_iterator([*CORPUS, *_NO_SPACES], trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    """Like XLM-RoBERTa's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=["<unk>", "<mask>"], unk_token="<unk>")
    tokenizer.train_from_iterator([*CORPUS, *_NO_SPACES], trainer)
    return tokenizer


_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "WordPiece": lambda: files.word_piece()().backend_tokenizer,
    "byte-level BPE": _byte_level_bpe,
    "byte-level BPE of Qwen": lambda: files.qwen().backend_tokenizer,
    "BPE of Llama": _metaspace_bpe,
    "Unigram": _unigram,
    "CLIP": files.clip,
    "SigLIP": files.siglip,
}


def _text(draw: random.Random) -> str:
    """A few stretches, each of few kinds of characters: those repeated, or at random."""
    parts: list[str] = []
    for _ in range(draw.randrange(1, 7)):
        some = [draw.choice(_FRAGMENTS) for _ in range(draw.randrange(1, 5))]
        count = draw.choice([3, 30, 200, 800])
        parts.append(
            draw.choice(
                [
                    "".join(some) * max(1, count // len(some)),
                    "".join(draw.choice(some) for _ in range(count)),
                    "".join(draw.choice(_FRAGMENTS) for _ in range(count)),
                    "".join(draw.choice("abcdefXYZ0189+/東京夜我们北") for _ in range(count)),
                ]
            )
        )
    return "".join(parts)


def _ids(encoding: Encoding, truncation: Truncation) -> list[int]:
    kept = truncation.kept(encoding)
    return encoding.ids if kept is None else [encoding.ids[place] for place in kept]


@pytest.mark.parametrize("kind", _TOKENIZERS)
def test_an_exact_cut_keeps_the_ids_of_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are small, so that cuts of all kinds are made. Longer:
    `python -m tests.engine.text.test_boundaries 600`."""
    monkeypatch.setattr(truncation, "MAX_CHARACTERS", 4096)
    found = sum(_compare(kind, random.Random(f"{kind} {seed}")) for seed in range(4))
    assert found >= 10  # cuts, not whole texts


def _compare(kind: str, draw: random.Random) -> int:
    tokenizer = _TOKENIZERS[kind]()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if (make := draw.choice(_NORMALIZERS)) is not None:
        own = tokenizer.normalizer
        tokenizer.normalizer = make() if own is None else normalizers.Sequence([make(), own])
    if draw.random() < 0.5:
        mask = AddedToken("<mask>", lstrip=draw.random() < 0.5, normalized=draw.random() < 0.5)
        tokenizer.add_special_tokens([mask])
    boundaries, cuts = Boundaries(tokenizer), 0

    def encode(text: Text) -> Encoding:
        return tokenizer.encode(text) if isinstance(text, str) else tokenizer.encode(*text)

    for _ in range(20):
        limit = draw.choice([5, 12, 40, 100])
        bound = Truncation(limit, left=draw.random() < 0.5)
        shortener = Shortener(boundaries, limit)
        shortener.first = draw.choice([40, 64, 100, 333, 1000])
        text: Text = _text(draw) if draw.random() < 0.8 else (_text(draw), _text(draw))
        for short in shortener.cuts(text, bound.left, shortener.first):
            if shortener.decides(encoding := encode(short.text), short, text, bound):
                cuts += short.text is not text
                expected = _ids(encode(text), bound)
                assert _ids(encoding, bound) == expected, (tokenizer.normalizer, bound, text, short)
                break
    return cuts


_WORDS = ["fog", "rain", "harbour", "lamps", "over", "the", "qzx"]
_FIVE, _SPACES = pre_tokenizers.FixedLength(5), pre_tokenizers.WhitespaceSplit()
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_RAW_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_STEPS: dict[str, tuple[normalizers.Normalizer | None, list[pre_tokenizers.PreTokenizer], AddedToken | None]] = {
    "parts of five characters": (None, [_FIVE, _BYTES], None),
    "spaces that are bytes before words are split": (None, [_RAW_BYTES, _BYTES], None),
    "spaces that the normalizer replaces": (
        normalizers.Replace(" ", "\u2581"),
        [_SPACES, _RAW_BYTES],
        None,
    ),
    "a pattern over spaces": (normalizers.Replace(Regex("[a-z]+ r"), ""), [_BYTES], None),
    "spaces at the beginning that are stripped": (normalizers.Strip(), [_BYTES], None),
    "a word that is marked as the first only where the text began": (
        normalizers.Strip(),
        [pre_tokenizers.Metaspace(prepend_scheme="first")],
        None,
    ),
    "a token that ends with a space": (None, [_BYTES], AddedToken("og ")),
}


@pytest.mark.parametrize("steps", _STEPS)
def test_a_cut_at_a_space_keeps_the_ids_whatever_the_steps_are(steps: str) -> None:
    """By vocabularies with many words in parts, and with pieces over spaces where the steps allow these."""
    for size in (275, 285, 295, 900):
        tokenizer, draw = _made_of(steps, size), random.Random(steps)
        shortener = Shortener(Boundaries(tokenizer), 12)
        for _ in range(120):
            text, left = " ".join(draw.choices(_WORDS, k=60)), draw.random() < 0.5
            short = shortener.short(text, left, draw.randrange(60, 120))
            encoding = tokenizer.encode(short.text)
            bound = Truncation(max(1, len(encoding) - 1 - short.slack), left)
            if shortener.decides(encoding, short, text, bound):
                assert _ids(encoding, bound) == _ids(tokenizer.encode(text), bound), (text, short)


@pytest.mark.parametrize(
    ("dropped", "kept"),
    [
        (r"[!\"\#\-\[\\\]\^\{~]", True),
        (r"[!-x]", False),
        (r"[^,]", False),
        (r"[,\s]", False),
        (r"[, ]", False),
        (r"[,[:space:]]", False),
        (r"[,&&[^.]]", False),
        (r"[,]|o r", False),
    ],
)
def test_spaces_between_words_stay_where_punctuation_alone_is_dropped(dropped: str, kept: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace(Regex(dropped), ""), _BYTES
    assert breaks_at_spaces(tokenizer) is kept


def _made_of(steps: str, size: int) -> Tokenizer:
    normalizer, splitters, token = _STEPS[steps]
    tokenizer, draw = Tokenizer(models.BPE(unk_token="<unk>")), random.Random(size)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(("over", *draw.choices(_WORDS, k=60))) for _ in range(200)], trainer)
    tokenizer.add_tokens([] if token is None else [token])
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("WordPiece", "." * 20_000),
        ("WordPiece", "北京我们" * 5_000),
        ("WordPiece", "aB3+/x" * 4_000),
        ("WordPiece", "fog\n" * 5_000),
        ("byte-level BPE", "東q京x" * 5_000),
        ("byte-level BPE of Qwen", "xQzJ京" * 5_000),
        ("byte-level BPE", "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 5_000),
        ("byte-level BPE", "\ufdfa" * 9_000),
        ("Unigram", "東z京qx" * 5_000),
    ],
)
def test_texts_without_spaces_are_cut_at_the_first_size(kind: str, text: str) -> None:
    shortener = Shortener(Boundaries(_TOKENIZERS[kind]()), 16)

    short = shortener.short(text, False, shortener.first)

    assert short.exact
    assert len(short.text) <= shortener.first


if __name__ == "__main__":
    import sys
    import time

    until, seed = time.monotonic() + float(sys.argv[1]), 1000
    while time.monotonic() < until:
        seed += 1
        for one in _TOKENIZERS:
            _compare(one, random.Random(f"{one} {seed}"))
    print(f"{seed - 1000} rounds")
