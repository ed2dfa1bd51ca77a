"""Special tokens that a text itself has: the library takes positions, lengths and scales from their ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import Served
from tests.support.models import build, edit

TEXTS = (
    "fog",
    "fog <pad> dog [PAD] rain",
    "the quick brown fox",
    "rain [MASK] on <mask> harbour",
    "<pad> <pad> [PAD] [PAD] lamps",
    "the lamps are lit [PAD] <pad>",
)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("roberta", {}, id="positions-native"),
        pytest.param("xlm_roberta", {}, id="positions-unigram"),
        pytest.param("xmod", {}, id="positions-packed"),
        pytest.param("esm", {"token_dropout": True}, id="scale-by-masks"),
        pytest.param("flaubert", {}, id="lengths"),
    ],
)
def test_a_text_with_special_tokens_has_its_own_vector_in_any_batch(
    family: str, changes: dict[str, Any], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    from sentence_transformers import SentenceTransformer

    edit(build(family, tmp_path) / "config.json", **changes)
    truth = SentenceTransformer(str(tmp_path), device="cpu").encode(list(TEXTS), batch_size=1)

    found = serve(tmp_path).embed(TEXTS).vectors
    assert (found * truth).sum(axis=1).min() >= 0.99999
