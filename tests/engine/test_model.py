"""Every family and kind of model through the whole engine, against sentence-transformers on the same directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.conftest import Served
from tests.fidelity import references
from tests.support import models
from tests.support.models import FAMILIES, PAIRS, TEXTS
from tests.support.models.encoders import write_dense
from tests.support.native import needs_native_forward
from torch import Tensor

from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.job import Input, Job, Lane, Output, Pair
from teimgr.engine.model import VectorRows
from teimgr.errors import EmptyInput, InputTooLong, InvalidInput, WrongModelKind

DENSE, SPARSE, TOKENS, MULTI_VECTOR, SCORES = (frozenset({output}) for output in Output)
LONG_PAIRS = [*(Pair(*pair) for pair in PAIRS), Pair("fog " * 60, "rain and lamps " * 80), Pair("", "fog")]
Scores = NDArray[np.float32]


def run(served: Served, inputs: Sequence[Input], **options: Any) -> Job:
    job = served.embed(inputs, **options)
    assert job.errors == {}
    return job


def scored(path: Path, pairs: Sequence[Any], **options: Any) -> Scores:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(path), device="cpu", local_files_only=True)
    scores = np.asarray(model.predict([tuple(pair) for pair in pairs], show_progress_bar=False, **options))
    return scores.reshape(len(pairs), -1)


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm_roberta"])
def test_a_cross_encoder_scores_pairs(family: str, tmp_path: Path, serve: Callable[..., Served]) -> None:
    from torch import nn

    path = models.build_cross_encoder(family, tmp_path)
    served = serve(path)
    raw = run(served, LONG_PAIRS, outputs=SCORES, raw_scores=True).scores
    sigmoid = run(served, LONG_PAIRS, outputs=SCORES).scores

    assert served.engine.info.outputs == ("scores",)
    np.testing.assert_allclose(raw, scored(path, LONG_PAIRS, activation_fn=nn.Identity()), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp(-raw.astype(np.float64))), atol=1e-6)
    assert len(set(raw[:, 0].tolist())) == len(LONG_PAIRS)


@needs_native_forward
@pytest.mark.parametrize("kind", ["xlm_roberta", "modernbert", "qwen2"])
def test_a_reranker_computes_one_row_of_a_text_behind_the_last_attention(
    kind: str, tmp_path: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the token that its head reads, and the scores are bit for bit those with all rows."""
    is_causal = kind == "qwen2"
    served = serve(
        models.build_prompted_reranker(tmp_path, "qwen2") if is_causal else models.build_cross_encoder(kind, tmp_path)
    )
    assert served.engine.info.forward == "native"
    model = served.engine._runners[0]._model
    [head], rows, own = model._heads.values(), list[bool](), model.backbone.hidden

    def hidden(batch: PackedBatch) -> Tensor:
        found = own(batch)
        rows.append(len(found) == batch.texts < batch.tokens)
        return found

    monkeypatch.setattr(model.backbone, "hidden", hidden)
    batch = pack([Encoded(np.arange(5, 5 + length, dtype=np.int32)) for length in (3, 9, 4)])
    [of_one_row] = model.run(batch, SCORES).values()
    assert rows == [True]
    of_all_rows = head(own(batch), batch)
    assert torch.equal(of_one_row.values, of_all_rows.values)


@needs_native_forward
@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last-token"])
def test_vectors_of_one_call_are_those_of_the_head_behind_the_forward(
    pooling: str, dtype: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """Bit for bit: of texts alone and of a batch, cut and not, scaled and not."""
    served = serve(models.build("bert", tmp_path), pooling=pooling, dtype=dtype)
    model = served.engine._runners[0]._model
    assert served.engine.info.forward == "native"
    lengths = (3, 9, 4, 9, 70)
    batch = pack([Encoded(np.arange(5, 5 + length, dtype=np.int32) % 40) for length in lengths])
    rows, by_steps = model.run(batch, DENSE)[Output.DENSE], model._run(batch, DENSE)[Output.DENSE]
    assert isinstance(rows, VectorRows)
    assert not isinstance(by_steps, VectorRows)
    assert torch.equal(rows.values, by_steps.values)

    inputs = [np.arange(5, 5 + length, dtype=np.int32) % 40 for length in lengths]
    for options in ({}, {"normalize": False}, {"dimensions": 8}):
        together = run(served, inputs, **options).vectors
        for item, row in zip(inputs, together, strict=True):
            alone = run(served, [item], lane=Lane.INTERACTIVE, **options).vectors[0]
            np.testing.assert_array_equal(alone, row)
        if options.get("normalize", True):
            np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)


def test_a_prompt_that_is_not_pooled_is_left_out_of_the_mean(tmp_path: Path, serve: Callable[..., Served]) -> None:
    """The one call has the mean of all tokens."""
    model = serve(models.build("bert", tmp_path)).engine._runners[0]._model
    ids = np.arange(5, 15, dtype=np.int32)
    with_prompt, without = (pack([Encoded(ids, prompt_tokens=count)]) for count in (4, 0))

    hidden = model.run(with_prompt, TOKENS)[Output.TOKENS].values
    for batch, first in ((with_prompt, 4), (without, 0)):
        found = model.run(batch, DENSE)[Output.DENSE].values
        torch.testing.assert_close(found[0], hidden[first:].mean(dim=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("family", "labels"), [("modernbert", 1), ("bert", 3)])
def test_a_cross_encoder_of_modules_scores_pairs(
    family: str, labels: int, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    path = models.build_modular_cross_encoder(family, tmp_path, labels=labels)
    served = serve(path)
    together = run(served, LONG_PAIRS, outputs=SCORES).scores
    alone = np.concatenate([run(served, [pair], outputs=SCORES).scores for pair in LONG_PAIRS])

    assert served.engine.info.kind == ("reranker" if labels == 1 else "classifier")
    assert served.engine.info.batching == "packed"
    np.testing.assert_allclose(together, scored(path, LONG_PAIRS), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-4)


def test_a_classifier_gives_a_score_to_every_label(tmp_path: Path, serve: Callable[..., Served]) -> None:
    served = serve(models.build_classifier("bert", tmp_path))
    job = run(served, [*TEXTS, Pair(*PAIRS[0])], outputs=SCORES)

    assert job.scores.shape == (len(TEXTS) + 1, len(models.LABELS))
    np.testing.assert_allclose(job.scores.sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("layout", ["saved", "classifier"])
def test_a_reranker_with_a_chat_template_scores_by_it(
    layout: Literal["saved", "classifier"], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """A pair that is too long loses its end, never the template's; braces in a text are only text."""
    path = models.build_yes_no_reranker(tmp_path, layout=layout)
    pairs = [*LONG_PAIRS[:-1], Pair("{document}", "{query} and {0}")]
    served = serve(path)
    job = run(served, pairs, outputs=SCORES, raw_scores=True)

    np.testing.assert_allclose(job.scores, scored(path, pairs), rtol=1e-4, atol=1e-5)
    refused = served.embed([pairs[-2], "alone"], outputs=SCORES, truncate=False)
    assert {row: type(error) for row, error in refused.errors.items()} == {0: InputTooLong, 1: InvalidInput}
    assert "less than 256 tokens" in refused.errors[0].message
    kept_end = run(served, [Pair("fog", f"{'rain ' * 300} {word}") for word in ("fog", "dog")], outputs=SCORES)
    cut_left = run(
        served,
        [Pair("fog", f"{'rain ' * 300} {word}") for word in ("fog", "dog")],
        outputs=SCORES,
        raw_scores=True,
        truncation_left=True,
    )
    assert kept_end.scores[0] == kept_end.scores[1]
    assert cut_left.scores[0] != cut_left.scores[1]


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_a_language_model_scores_by_the_prompt_of_its_authors(
    family: Literal["qwen2", "gemma"], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """mxbai-rerank-v2 and bge-reranker-v2-gemma: no file has their prompt, and its pieces are tokenized one by one."""
    path = models.build_prompted_reranker(tmp_path, family)
    pairs = [
        *LONG_PAIRS,
        Pair("{document}?", "\n{query} and {0} "),
        Pair("rain " * 900, "fog"),
        Pair("fog", "rain " * 900),
    ]
    served = serve(path)
    truth = np.stack(references.prompted_reranker(path, pairs, family, 512))
    together = run(served, pairs, outputs=SCORES, raw_scores=True).scores
    alone = np.concatenate([run(served, [pair], outputs=SCORES, raw_scores=True).scores for pair in pairs])

    assert (served.engine.info.kind, served.engine.info.warnings) == ("reranker", ())
    np.testing.assert_allclose(together, truth, rtol=1e-5, atol=3e-5)
    np.testing.assert_allclose(alone, truth, rtol=1e-5, atol=3e-5)
    refused = served.embed([pairs[-1], pairs[-2], "alone"], outputs=SCORES, truncate=False)
    assert {row: type(error) for row, error in refused.errors.items()} == {
        0: InputTooLong,
        1: InputTooLong,
        2: InvalidInput,
    }
    left = run(
        served,
        [Pair("fog", f"{'rain ' * 900} {word}") for word in ("fog", "dog")],
        outputs=SCORES,
        truncation_left=True,
    )
    assert left.scores[0] != left.scores[1]


def test_a_sparse_model_gives_its_weights_both_ways(tmp_path: Path, serve: Callable[..., Served]) -> None:
    from sentence_transformers import SparseEncoder

    path = models.build_splade("bert", tmp_path)
    served = serve(path)
    job = run(served, TEXTS, outputs=SPARSE | DENSE, normalize=False)
    truth = SparseEncoder(str(path), device="cpu").encode(list(TEXTS), convert_to_sparse_tensor=False).numpy()

    assert served.engine.info.dimension == truth.shape[1]
    np.testing.assert_allclose(job.vectors, truth, atol=2e-5)
    for sparse, vector in zip(job.sparse, job.vectors, strict=True):
        assert sparse is not None
        assert (sparse.indices.dtype, sparse.values.dtype) == (np.uint32, np.float32)
        assert sparse.indices.tolist() == np.flatnonzero(vector).tolist()
        assert sparse.values.tolist() == vector[vector != 0].tolist()


@pytest.mark.parametrize("layout", ["saved", "pylate", "stanford"])
@pytest.mark.parametrize("attend", [False, True])
def test_a_late_interaction_model_gives_queries_and_documents_their_vectors(
    layout: Literal["saved", "pylate", "stanford"], attend: bool, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    from sentence_transformers import MultiVectorEncoder

    path = models.build_multi_vector("bert", tmp_path, layout=layout, attend=attend)
    served = serve(path)
    reference = MultiVectorEncoder(str(path), device="cpu")
    ours = {name: run(served, TEXTS, outputs=MULTI_VECTOR, prompt_name=name) for name in ("query", "document")}

    assert served.engine.info.batching == "packed"
    same(ours["query"].multi_vectors, reference.encode_query(list(TEXTS), convert_to_numpy=True))
    same(ours["document"].multi_vectors, reference.encode_document(list(TEXTS), convert_to_numpy=True))
    same(run(served, TEXTS, outputs=MULTI_VECTOR).multi_vectors, ours["document"].multi_vectors)
    with pytest.raises(InvalidInput, match="default-prompt-name"):
        served.send(TEXTS, outputs=MULTI_VECTOR, prompt_name="passage")


def same(ours: Sequence[NDArray[np.float32] | None], theirs: Sequence[NDArray[np.float32] | None]) -> None:
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        assert here is not None
        assert there is not None
        np.testing.assert_allclose(here, there, atol=2e-5)


@pytest.mark.clause("D-card")
def test_bge_m3_gives_all_its_outputs_of_one_forward(tmp_path: Path, serve: Callable[..., Served]) -> None:
    served = serve(models.build_m3(tmp_path))
    batches = served.engine.stats().batches
    job = run(served, TEXTS, outputs=DENSE | SPARSE | TOKENS | MULTI_VECTOR)

    assert served.engine.stats().batches == batches + 1
    assert all(sparse is not None and len(sparse.indices) for sparse in job.sparse)
    lengths = [len(served.engine.tokenize(text, True, None)) for text in TEXTS]
    for tokens, vectors, length in zip(job.tokens_of, job.multi_vectors, lengths, strict=True):
        assert tokens is not None
        assert vectors is not None
        assert len(tokens) == min(length, 96)
        assert len(vectors) == len(tokens) - 1


def test_a_static_model_adds_no_special_tokens_and_gives_zeros_for_a_text_without_any(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    from sentence_transformers import SentenceTransformer

    path, texts = models.build_static(tmp_path), ["fog", "   ", "the lazy fox", "\n\t", " "]
    served = serve(path)
    truth = SentenceTransformer(str(path), device="cpu").encode(texts, normalize_embeddings=True)
    assert not truth[[1, 3, 4]].any()

    job = run(served, texts)
    np.testing.assert_allclose(job.vectors, truth, atol=1e-6)
    assert served.engine.stats().failed_texts == 0
    assert not run(served, ["  "], outputs=DENSE).vectors.any()  # alone, as a query
    assert isinstance(served.embed([""]).errors[0], EmptyInput)
    assert isinstance(served.embed([" "], outputs=TOKENS).errors[0], EmptyInput)  # it has no tokens


def test_a_dense_module_behind_a_table_may_change_the_width(tmp_path: Path, serve: Callable[..., Served]) -> None:
    path = models.build_static(tmp_path)
    write_dense(path / "1_Dense", 32, 12, "torch.nn.modules.activation.Tanh")
    rows = models.read(path / "modules.json")
    rows.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"})
    models.write(path / "modules.json", rows)
    served = serve(path)

    found = served.embed(models.TEXTS).vectors
    np.testing.assert_allclose(
        found[:, None], references.dense(path, models.TEXTS, normalize_embeddings=True), atol=1e-5
    )
    assert served.engine.info.dimension == 12


def test_a_static_model_cuts_texts_where_its_tokenizers_file_does(tmp_path: Path, serve: Callable[..., Served]) -> None:
    from sentence_transformers import SentenceTransformer

    path = models.build_static(tmp_path)
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    models.edit(path / "0_StaticEmbedding" / "tokenizer.json", truncation=cut)
    served, texts = serve(path), ["fog", "the quick brown fox jumps over the lazy dog"]
    truth = SentenceTransformer(str(path), device="cpu").encode(texts, normalize_embeddings=True)

    assert served.engine.info.max_input_length == 4
    np.testing.assert_allclose(run(served, texts).vectors, truth, atol=1e-6)


@pytest.mark.parametrize("layout", ["model2vec", "sentence-transformers"])
def test_an_unknown_token_counts_for_nothing_in_model2vec_alone(
    layout: Literal["model2vec", "sentence-transformers"], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    """As `StaticModel.encode` of model2vec has it; sentence-transformers' StaticEmbedding counts every token."""
    served = serve(models.build_static(tmp_path, layout=layout))
    known, strange = run(served, ["the fog", "the \u4e16 fog"]).vectors
    as_ids = [np.array([token.id for token in served.engine.tokenize("the \u4e16 fog", False, None)], dtype=np.int32)]

    assert np.array_equal(known, strange) is (layout == "model2vec")
    np.testing.assert_allclose(run(served, as_ids).vectors[0], strange, atol=1e-6)
    nothing = served.embed(["\u4e16", as_ids[0][1:2]])
    assert not nothing.errors
    assert nothing.vectors.any() == (layout != "model2vec")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_default_prompt_goes_before_the_query_of_a_reranker(
    family: str, tmp_path: Path, serve: Callable[..., Served]
) -> None:
    path = models.build_cross_encoder(family, tmp_path, layout="saved")
    models.edit(path / "config_sentence_transformers.json", prompts={"ask": "ask: "}, default_prompt_name="ask")
    pairs = [Pair(*pair) for pair in PAIRS]

    np.testing.assert_allclose(run(serve(path), pairs, outputs=SCORES).scores, scored(path, pairs), atol=1e-5)


def test_token_vectors_are_the_last_hidden_states(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    from sentence_transformers import SentenceTransformer

    path = model_dir("bert")
    job = run(serve(path), TEXTS, outputs=TOKENS)
    truth = SentenceTransformer(str(path), device="cpu").encode(
        list(TEXTS), output_value="token_embeddings", convert_to_numpy=False
    )

    same(job.tokens_of, [vectors.numpy() for vectors in truth])


@pytest.mark.parametrize(
    ("kind", "outputs", "options", "message"),
    [
        ("reranker", DENSE, {}, "Backend error: Model is not an embedding model"),
        ("reranker", TOKENS, {}, "Backend error: Model is not an embedding model"),
        ("reranker", SPARSE, {}, "Backend error: Model is not an embedding model with SPLADE pooling"),
        ("bert", SPARSE, {}, "Backend error: Model is not an embedding model with SPLADE pooling"),
        ("bert", SCORES, {}, "Backend error: Model is not a classifier model"),
        ("bert", MULTI_VECTOR, {}, "Backend error: Model is not a late-interaction (multi-vector) model"),
        ("bert", DENSE | SCORES, {}, "Backend error: Model is not a classifier model"),
        ("splade", TOKENS, {}, "Backend error: `embed_all` is not available for SPLADE models"),
        ("splade", DENSE, {}, "Backend error: `normalize` is not available for SPLADE models"),
        ("splade", SCORES, {}, "Backend error: Model is not a classifier model"),
    ],
)
def test_what_a_kind_does_not_have_is_refused_in_teis_words(
    kind: str,
    outputs: frozenset[Output],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    serve: Callable[..., Served],
) -> None:
    builders: dict[str, Callable[..., Path]] = {
        "reranker": models.build_cross_encoder,
        "splade": models.build_splade,
        "bert": models.build,
    }
    served = serve(builders[kind]("bert", tmp_path))

    with pytest.raises(WrongModelKind) as refusal:
        served.send(["fog"], outputs=outputs, **options)
    assert refusal.value.message == message


MINILM_TEST = (0.020964134, 0.04565805, -0.066505864, 0.10739273, -0.013054413, -0.07467599, 0.13989426, 0.06780755)


def reference(path: Path, texts: Sequence[str], **options: Any) -> NDArray[np.float32]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    return np.asarray(model.encode(list(texts), show_progress_bar=False, **options))


def assert_same(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Cosine and largest difference of unit vectors."""
    ours, theirs = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
    assert (ours * theirs).sum(axis=1).min() >= 0.99999


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_gives_the_vectors_of_sentence_transformers(
    family: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir(family)
    served = serve(path)
    job = served.embed(TEXTS)

    assert job.errors == {}
    assert served.engine.info.batching == ("equal-length" if family in ("deberta_v2", "mpnet", "t5") else "packed")
    assert_same(job.vectors, reference(path, TEXTS, normalize_embeddings=True))
    np.testing.assert_allclose(np.linalg.norm(job.vectors, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_neighbours_do_not_change_a_vector(
    family: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    """Alone, with all others, and with its own copies: the same within what a matrix product's shape changes."""
    served = serve(model_dir(family))
    together = served.embed(TEXTS).vectors
    alone = np.concatenate([served.embed([text]).vectors for text in TEXTS])
    copies = served.embed([TEXTS[3]] * 20 + [TEXTS[6]]).vectors

    np.testing.assert_allclose(together, alone, atol=1e-6, rtol=0)
    np.testing.assert_allclose(copies[:20], np.repeat(alone[3:4], 20, axis=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "cls+mean"]
)
def test_every_pooling_of_the_files_is_served(
    pooling: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir("bert", pooling=pooling)
    job = serve(path).embed(TEXTS, normalize=False)

    assert_same(job.vectors, reference(path, TEXTS, normalize_embeddings=False))


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"])
def test_dense_modules_change_the_vectors_and_their_dimension(
    activation: str, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir("bert", dense=(24, activation))
    served = serve(path)

    assert served.engine.info.dimension == 24
    assert_same(served.embed(TEXTS).vectors, reference(path, TEXTS))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_go_before_the_text_and_may_be_left_out_of_the_pooling(
    include_prompt: bool, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    prompts = {"query": "The lazy fox asks: ", "document": ""}
    path = model_dir("bert", prompts=prompts, default_prompt_name="query", include_prompt=include_prompt)
    served = serve(path)

    assert_same(served.embed(TEXTS).vectors, reference(path, TEXTS))
    assert_same(served.embed(TEXTS, prompt_name="query").vectors, reference(path, TEXTS, prompt_name="query"))
    assert_same(served.embed(TEXTS, prompt_name="document").vectors, reference(path, TEXTS, prompt_name="document"))


def test_a_special_token_at_the_end_of_a_prompt_is_pooled_where_the_template_adds_none(
    model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    path = model_dir("bert", prompts={"query": "The fox [SEP]"}, default_prompt_name="query", include_prompt=False)
    models.edit(path / "tokenizer.json", post_processor=None)
    models.edit(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")

    assert_same(serve(path).embed(TEXTS).vectors, reference(path, TEXTS))


def test_dimensions_are_cut_before_the_norm(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    served = serve(model_dir("bert"))
    raw = served.embed(TEXTS, normalize=False).vectors
    cut = served.embed(TEXTS, dimensions=8).vectors

    assert cut.shape == (len(TEXTS), 8)
    np.testing.assert_allclose(cut, raw[:, :8] / np.linalg.norm(raw[:, :8], axis=1, keepdims=True), atol=2e-6)


def test_bfloat16_stays_close(model_dir: Callable[..., Path], serve: Callable[..., Served]) -> None:
    path = model_dir("bert")
    served = serve(path, dtype="bfloat16")
    cosines = (served.embed(TEXTS).vectors * reference(path, TEXTS, normalize_embeddings=True)).sum(axis=1)

    assert served.engine.info.dtype == "bfloat16"
    assert cosines.min() >= 0.999


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_real_minilm_gives_its_published_vector(dtype: str, minilm: Path, serve: Callable[..., Served]) -> None:
    served = serve(minilm, dtype=dtype)
    job = served.embed(["test"] * 3, Lane.INTERACTIVE, dimensions=128)

    assert served.engine.info.max_input_length == 256
    np.testing.assert_allclose(job.vectors[:, :8], [MINILM_TEST] * 3, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(job.vectors, axis=1), 1.0, atol=1e-6)


def test_the_real_minilm_is_sentence_transformers_exactly(minilm: Path, serve: Callable[..., Served]) -> None:
    texts = [" ".join(TEXTS[i % 6 : i % 6 + 1 + i % 3]) for i in range(40)] + [" ".join(TEXTS) * 4]
    job = serve(minilm).embed(texts)

    assert_same(job.vectors, reference(minilm, texts))
