"""A trial compares a model with the library that its files are made for, and says plainly where it cannot."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import MAX_LENGTH, build, build_cross_encoder, build_splade, build_static, edit
from tests.support.models.scoring import build_token_classifier

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.library_comparison import LibraryComparison, compare_with_library
from teimgr.spec import OWN_FORWARD

ST = f"sentence-transformers {importlib.metadata.version('sentence-transformers')}"
TRANSFORMERS = f"transformers {importlib.metadata.version('transformers')}"


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[Engine]:
    engine = Engine.load(EngineOptions(path=folder, model_id="m", dtype="float32", **options), lambda jobs: None)
    try:
        yield engine
    finally:
        engine.close(1.0)


def compared(folder: Path, room_bytes: int | None = None, limit_s: float = 100.0, **options: Any) -> LibraryComparison:
    with loaded(folder, **options) as engine:
        return compare_with_library(engine, 1, room_bytes, limit_s)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("bert") / "model")


def test_an_embedder_is_verified_with_a_long_text_a_prompt_and_a_blank_one(bert: Path) -> None:
    found = compared(bert)
    assert (found.compared_with, found.not_compared, found.agrees) == (ST, None, True)
    assert found.min_cosine is not None
    assert found.min_cosine >= 0.99999
    assert found.longest_tokens > MAX_LENGTH // 2
    assert found.inputs == 7  # three short ones, the long one, the blank one, and two behind a prompt


def test_a_text_of_white_space_alone_is_compared(tmp_path: Path) -> None:
    file = build("bert", tmp_path / "model") / "tokenizer.json"
    saved = file.read_bytes()
    blank = {"type": "Replace", "pattern": {"Regex": "^ $"}, "content": "hello"}
    own = json.loads(saved)["normalizer"]
    edit(file, normalizer={"type": "Sequence", "normalizers": [blank, own]})
    with loaded(file.parent) as engine:
        file.write_bytes(saved)
        found = compare_with_library(engine, 1, None, 100.0)
    assert (found.compared_with, found.agrees) == (ST, False)


def test_another_pooling_than_the_files_have_is_found(bert: Path) -> None:
    found = compared(bert, pooling="last-token")
    assert not found.agrees
    assert found.min_cosine is not None
    assert found.min_cosine < 0.99


def test_without_sentence_transformers_it_says_so(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    found = compared(bert)
    assert (found.compared_with, found.agrees) == (OWN_FORWARD, True)
    assert "sentence-transformers is not installed" in str(found.not_compared)
    assert found.min_cosine is not None


def test_memory_and_time_are_bounded(bert: Path) -> None:
    with loaded(bert) as engine:
        short_of_memory = compare_with_library(engine, 1, 1_000_000, 100.0)
        short_of_time = compare_with_library(engine, 1, None, 0.0)
    assert "of memory, and 0.0 GB are free" in str(short_of_memory.not_compared)
    assert "took too long" in str(short_of_time.not_compared)


def test_scores_sparse_vectors_and_labels_of_tokens_are_compared(tmp_path: Path) -> None:
    ranker = compared(build_cross_encoder("bert", tmp_path / "ranker", layout="saved"))
    assert (ranker.agrees, ranker.min_cosine) == (True, None), ranker
    assert ranker.score_difference is not None
    assert ranker.longest_tokens > MAX_LENGTH // 2
    sparse = compared(build_splade("bert", tmp_path / "sparse"))
    assert (sparse.compared_with, sparse.agrees) == (ST, True), sparse
    ner = compared(build_token_classifier("bert", tmp_path / "ner"))
    assert (ner.compared_with, ner.agrees) == (TRANSFORMERS, True), ner


def test_a_pair_with_an_empty_text_is_a_pair_for_the_library_too(tmp_path: Path) -> None:
    ranker = compared(build_cross_encoder("mpnet", tmp_path / "ranker"))
    assert (ranker.compared_with, ranker.agrees) == (TRANSFORMERS, True), ranker


def test_model2vec_is_not_compared_with_a_library_that_counts_unknown_tokens(tmp_path: Path) -> None:
    table = compared(build_static(tmp_path / "table", layout="model2vec"))
    assert (table.compared_with, table.agrees) == (OWN_FORWARD, True), table
    assert "unknown tokens" in str(table.not_compared)
