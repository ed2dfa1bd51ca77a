"""JinaBERT v2 as the hub has it, without trust: exact, native and as torch computes it, at every length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.conftest import Served
from tests.engine.exact_models import assert_close, assert_exact, assert_scores_exact
from tests.support import plain_forwards
from tests.support.models import edit
from tests.support.models.single_families import build_jina_bert

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Output, Pair
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout

PAIRS = [Pair("the lazy fox", "fog"), Pair("a ship", "The quick brown fox jumps over the lazy dog. " * 30)]


@pytest.mark.parametrize("ways", ["1", "attention", "0"], ids=["native", "varlen", "by-run"])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [("embedding", {}), ("embedding", {"feed_forward_type": "reglu", "num_attention_heads": 4}), ("code", {})],
    ids=["v2-base", "reglu", "base-code"],
)
def test_embeddings_are_exact(
    layout: str,
    changes: dict[str, Any],
    ways: str,
    tmp_path: Path,
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEIMGR_NATIVE", ways)
    weights, config = build_jina_bert(tmp_path, layout=layout, **changes)
    served = serve(tmp_path)

    assert served.engine.info.warnings == ()
    assert served.engine.info.forward == ("native" if ways == "1" else "library")
    assert served.engine.info.max_input_length == 192
    assert_exact(served, lambda ids: plain_forwards.jina_bert(weights, config, ids), "mean")


def test_long_texts_are_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Beyond the blocks of keys of the kernel, with distances that most slopes make vanish."""
    weights, config = build_jina_bert(tmp_path, max_position_embeddings=2100)
    edit(tmp_path / "sentence_bert_config.json", max_seq_length=2100)
    served = serve(tmp_path, max_batch_tokens=8192)

    assert served.engine.info.max_input_length == 2100
    lengths = (1030, 2100)
    assert_exact(served, lambda ids: plain_forwards.jina_bert(weights, config, ids), "mean", lengths=lengths)


def test_jina_reranker_v1_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:
    weights, config = build_jina_bert(tmp_path, layout="reranker")
    served = serve(tmp_path)

    def score(pair: Encoded) -> torch.Tensor:
        types = None if pair.type_ids is None else torch.from_numpy(pair.type_ids.astype(np.int64))
        hidden = plain_forwards.jina_bert(weights, config, torch.from_numpy(pair.ids.astype(np.int64)), types)
        return plain_forwards.classified(weights, hidden)

    assert served.engine.info.kind == "reranker"
    assert served.engine.info.forward == "native"
    assert_scores_exact(served, PAIRS, score)


def test_jina_colbert_v1_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:
    weights, config = build_jina_bert(tmp_path, layout="colbert")
    served = serve(tmp_path)
    texts = ["the lazy fox", "The quick brown fox jumps over the lazy dog " * 5]
    for role in ("query", "document"):
        encoded = TextTokenizer(read_layout(tmp_path), 192).encode(texts, TokenizeOptions(query=role == "query"))
        job = served.embed(texts, outputs=frozenset({Output.MULTI_VECTOR}), prompt_name=role)
        for found, each in zip(job.multi_vectors, encoded, strict=True):
            assert isinstance(each, Encoded)
            hidden = plain_forwards.jina_bert(weights, config, torch.from_numpy(each.ids.astype(np.int64)))
            truth = torch.nn.functional.normalize(hidden @ weights["linear.weight"].T, dim=-1)
            assert found is not None
            assert len(found) == len(truth)
            np.testing.assert_allclose(found, truth.numpy(), atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
        ({"feed_forward_type": "original"}, "feed_forward_type = 'original'"),
        ({"num_attention_heads": 7}, "a width of 48, which its 7 heads"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"lora_adaptations": ["x"]}, "lora_adaptations"),
        ({"auto_map": None, "model_type": "jina_bert"}, "model_type jina_bert"),
    ],
)
def test_another_setting_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    build_jina_bert(tmp_path)
    edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(tmp_path)


def test_weights_of_the_other_variant_are_refused(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Code in the model's own repository is taken for that of jina-bert-implementation."""
    build_jina_bert(tmp_path, layout="code")
    edit(tmp_path / "config.json", auto_map={"AutoModel": "modeling_bert.JinaBertModel"})

    with pytest.raises(ModelLoadFailed, match="weights are missing"):
        serve(tmp_path)


@pytest.mark.parametrize("layout", ["embedding", "code"])
def test_bfloat16_on_request_is_close(layout: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    weights, config = build_jina_bert(tmp_path, layout=layout)
    served = serve(tmp_path, dtype="bfloat16")

    assert served.engine.info.dtype == "bfloat16"
    assert_close(served, lambda ids: plain_forwards.jina_bert(weights, config, ids), "mean", least=0.999)
