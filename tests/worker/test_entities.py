"""Entities of token classifiers, against the pipeline of transformers on the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import TEXTS, edit
from tests.support.models.scoring import build_token_classifier

from teimgr.engine.job import Output
from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.reading import read_layout
from teimgr.worker.entities import Aggregation, entities

TOKENS = frozenset({Output.TOKENS})
LONG = "The lazy dog sleeps while the boats lie in Zürich fog. " * 9
KEYS = ("entity", "entity_group", "index", "start", "end")


def found_in(served: Served, texts: list[str], how: Aggregation, **options: Any) -> list[list[Any]]:
    job = served.embed(texts, outputs=TOKENS, **options)
    labels, tokenizer, left = served.engine.info.labels, served.engine.tokenizer, "truncation_left" in options
    return [
        list(map(dict, entities(text, logits, labels, tokenizer, how, left)))
        for text, logits in zip(texts, job.tokens_of, strict=True)
        if logits is not None
    ]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta"])
def test_entities_are_those_of_transformers(family: str, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    path = build_token_classifier(family, tmp_path)
    served = serve(path)
    assert (served.engine.info.kind, served.engine.info.batching) == ("token-classifier", "packed")
    assert_those_of_transformers(served, path)


def test_labels_of_other_schemes_and_a_long_unknown_word(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    path = build_token_classifier("bert", tmp_path)
    edit(path / "config.json", id2label=dict(enumerate(("O", "b-LOC", "I-PER", "L-PER", "U-PER"))))

    assert_those_of_transformers(serve(path), path)


def assert_those_of_transformers(served: Served, path: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    texts = [
        text for text in (*TEXTS, "Zürich 🙂 東京 and\tÅrhus", "x" * 300) if len(tokenizer(text)["input_ids"]) <= 96
    ]

    for how in ("none", "simple"):
        pipe = pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=how, device="cpu"
        )
        for text, ours in zip(texts, found_in(served, texts, how), strict=True):
            theirs = pipe(text)
            assert [{key: one.get(key) for key in KEYS} for one in ours] == [
                {key: one.get(key) for key in KEYS} for one in theirs
            ]
            np.testing.assert_allclose([one["score"] for one in ours], [one["score"] for one in theirs], atol=1e-5)
            assert all(one["word"] == text[one["start"] : one["end"]] for one in ours)
    with torch.inference_mode():
        ids = tokenizer(TEXTS[4], return_tensors="pt")
        truth = model(**ids).logits[0].numpy()
    together = served.embed([TEXTS[4], TEXTS[2]], outputs=TOKENS).tokens_of[0]
    np.testing.assert_allclose(together, truth, atol=3e-5)


@pytest.mark.parametrize("left", [False, True])
def test_a_text_that_is_too_long_has_the_entities_of_what_was_kept(
    left: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    served = serve(build_token_classifier("bert", tmp_path))
    (ours,) = found_in(served, [LONG], "none", **({"truncation_left": True} if left else {}))
    tokens = served.engine.tokenizer.tokenize(LONG, False, "")
    kept = tokens[-94:] if left else tokens[:94]
    places = {(len(LONG.encode()[: t.start].decode()), len(LONG.encode()[: t.stop].decode())) for t in kept}

    assert ours
    assert {(one["start"], one["end"]) for one in ours} <= places
    assert max(one["end"] for one in ours) > (len(LONG) - 60 if left else 0)


def test_a_gliner_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gliner_config.json").write_text("{}")

    with pytest.raises(ModelLoadFailed, match="GLiNER"):
        read_layout(tmp_path)


def test_a_token_classifier_scores_no_pairs(tmp_path: Path) -> None:
    path = build_token_classifier("bert", tmp_path)

    for kind in ("reranker", "classifier"):
        with pytest.raises(InvalidConfig, match="BertForTokenClassification has no head that scores texts"):
            read_layout(path, kind=kind)
    edit(path / "config.json", architectures=["BertModel"])
    with pytest.raises(InvalidConfig, match="BertModel has no head that labels tokens"):
        read_layout(path, kind="token-classifier")
