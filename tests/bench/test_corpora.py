"""The texts of `bench peers` have the lengths in tokens that their names promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import corpora as texts_by_tokens
from bench import weights
from bench.corpora import CORPORA, DESCRIBED, corpora, names, token_counts


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM's tokenizer for a model that takes 512 tokens."""
    folder = tmp_path_factory.mktemp("longer") / "model"
    weights.copy_tokenizer(folder, weights.minilm())
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    return folder


@pytest.fixture(scope="module")
def found(longer: Path) -> dict[str, list[str]]:
    return corpora(longer, 60)


def test_every_corpus_is_of_the_lengths_in_its_name(longer: Path, found: dict[str, list[str]]) -> None:
    counts = {name: token_counts(longer, texts) for name, texts in found.items()}

    assert tuple(counts) == CORPORA
    assert DESCRIBED.keys() == counts.keys()
    assert {name: len(each) for name, each in counts.items()} == {
        "mixed": 60,
        "short": 240,
        "all-256": 10,
        "all-512": 5,
    }
    assert min(counts["mixed"]) >= 8
    assert max(counts["mixed"]) <= 512
    assert sorted(set(counts["short"])) == list(range(5, 21))
    assert set(counts["all-256"]) == {256}
    assert set(counts["all-512"]) == {512}


def test_mixed_lengths_have_a_long_tail_that_is_cut_at_512_tokens(longer: Path) -> None:
    counts = sorted(token_counts(longer, corpora(longer, 300)["mixed"]))

    assert 25 < counts[150] < 70
    assert counts[-1] > 400
    assert sum(counts) / 300 > 1.4 * counts[150]


def test_texts_are_always_the_same_and_differ(longer: Path, found: dict[str, list[str]]) -> None:
    assert corpora(longer, 60) == found
    assert all(len(set(texts)) == len(texts) for texts in found.values())


def test_a_model_that_cuts_at_256_tokens_has_no_texts_of_512() -> None:
    assert names(weights.minilm()) == ("mixed", "short", "all-256")
    assert tuple(corpora(weights.minilm(), 12)) == names(weights.minilm())


def test_too_little_prose_is_an_error(longer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_by_tokens.corpus, "corpus", lambda count: ["one text of seven tokens or so"] * count)

    with pytest.raises(RuntimeError, match="of 10 texts only"):
        corpora(longer, 10)
