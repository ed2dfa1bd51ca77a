"""A language model as reranker: two logits behind the last token, and no others are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers
from tests.engine.plain_models import CPU, layout_of, logits_of, random_texts, run, save_headed

from teimgr.engine.backbone import Batching
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Backbone, CausalRerank, ScoringConfig
from teimgr.spec import Kind

CAUSAL = transformers.AutoModelForCausalLM


def load(folder: Path, yes: int, no: int | None) -> Model:
    scoring = ScoringConfig(("score",), "sigmoid", CausalRerank(yes, no))
    return load_model(layout_of(folder, Backbone.CAUSAL_LM, Kind.RERANKER, scoring=scoring), CPU)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_score_is_the_difference_of_two_logits(family: str, tied: bool, tmp_path: Path) -> None:
    theirs = save_headed(family, CAUSAL, tmp_path, tie_word_embeddings=tied)
    model, texts = load(tmp_path, 9, 40), random_texts()
    model.backbone.use(Batching.BY_RUN)

    assert model.widths == {Output.SCORES: 1}
    for text, score in zip(texts, run(model, texts, Output.SCORES), strict=True):
        logits = logits_of(theirs, text)[-1]
        np.testing.assert_allclose(score, [logits[9] - logits[40]], atol=1e-5)


def test_without_a_false_token_the_score_is_one_logit(tmp_path: Path) -> None:
    theirs = save_headed("qwen3", CAUSAL, tmp_path)
    texts = random_texts()

    for text, score in zip(texts, run(load(tmp_path, 9, None), texts, Output.SCORES), strict=True):
        np.testing.assert_allclose(score, [logits_of(theirs, text)[-1, 9]], atol=1e-5)


def test_what_the_model_does_to_its_logits_is_done_to_two(tmp_path: Path) -> None:
    """Gemma 2 caps them."""
    config = transformers.Gemma2Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
    )
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    texts = random_texts()

    for text, score in zip(texts, run(load(tmp_path, 9, 40), texts, Output.SCORES), strict=True):
        logits = logits_of(theirs, text)[-1]
        np.testing.assert_allclose(score, [logits[9] - logits[40]], atol=1e-5)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    save_headed("qwen3", CAUSAL, tmp_path)

    with pytest.raises(ModelLoadFailed, match="no output for the tokens"):
        load(tmp_path, 9, 120)
