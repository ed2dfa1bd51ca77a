"""Pieces of a text, one for each token, of every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.models import build

from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.models.reading import read_layout
from teimgr.worker.dialects.tokens import pieces

TEXTS = [
    "Hello world",
    "  two  spaces,\ttabs\nand lines  ",
    "naïve café — “quoted” 東京タワー",
    "an emoji 🦊 and a family 👩‍👩‍👧‍👦!",
    "e\u0301 combining, \u200bzero width, \x07bell",
    "ﬁ ligature ① ﷺ",
]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "xlm_roberta", "gemma3", "t5", "qwen2", "llama"])
def test_joined_pieces_are_the_text(family: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_layout(build(family, tmp_path)), 512)
    for text in TEXTS:
        tokens = tokenizer.tokenize(text, False, "")
        parts = pieces(text, tokens)
        assert len(parts) == len(tokens)
        framed = tokenizer.tokenize(text, True, "")
        named = zip(framed, pieces(text, framed), strict=True)
        assert [part for token, part in named if not token.special] == parts
        assert "".join(parts) == text


def test_a_text_without_tokens_is_one_piece(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(read_layout(build("bert", tmp_path)), 512)
    for text in (" ", " \n\t", "\x07", "\u200b\u200d"):
        tokens = tokenizer.tokenize(text, False, "")
        assert not tokens
        assert pieces(text, tokens) == [text]
