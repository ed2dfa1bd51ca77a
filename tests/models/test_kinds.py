"""Which kind a model is: from the files of every layout, and from the instance where the files leave room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teimgr.engine.job import Output
from teimgr.engine.text.tokenizer_config import contradictions
from teimgr.engine.text.tokenizer_library import load_tokenizer
from teimgr.errors import InvalidConfig, InvalidInput, ModelLoadFailed
from teimgr.models.layout import Backbone
from teimgr.models.reading import read_layout
from teimgr.spec import Kind
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import (
    FAMILIES,
    TEXTS,
    build,
    build_classifier,
    build_cross_encoder,
    build_m3,
    build_multi_vector,
    build_splade,
    build_static,
    build_yes_no_reranker,
    edit,
    read,
    write,
)
from tests.support.models.own_code import build_decoder, build_new, build_nomic
from tests.support.models.scoring import build_token_classifier

Make = Callable[[Path], Path]


def _bare_masked_lm(folder: Path) -> Path:
    return build_splade("bert", folder, layout="plain")


@pytest.mark.parametrize(
    ("make", "kind", "backbone"),
    [
        (lambda folder: build("bert", folder), "embedding", "ENCODER"),
        (lambda folder: build("qwen3", folder), "embedding", "ENCODER"),
        (build_m3, "embedding", "ENCODER"),
        (build_static, "embedding", "STATIC"),
        (_bare_masked_lm, "embedding", "ENCODER"),
        (lambda folder: build_splade("bert", folder, layout="version-5"), "sparse", "MASKED_LM"),
        (lambda folder: build_splade("distilbert", folder, layout="saved"), "sparse", "MASKED_LM"),
        (lambda folder: build_multi_vector("bert", folder, layout="saved"), "multi-vector", "ENCODER"),
        (lambda folder: build_multi_vector("bert", folder, layout="pylate"), "multi-vector", "ENCODER"),
        (lambda folder: build_multi_vector("bert", folder, layout="stanford"), "multi-vector", "ENCODER"),
        (lambda folder: build_cross_encoder("bert", folder), "reranker", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_cross_encoder("bert", folder, layout="saved"), "reranker", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_classifier("bert", folder), "classifier", "SEQUENCE_CLASSIFICATION"),
        (lambda folder: build_yes_no_reranker(folder, layout="plain"), "reranker", "CAUSAL_LM"),
        (lambda folder: build_yes_no_reranker(folder, layout="saved"), "reranker", "CAUSAL_LM"),
    ],
)
def test_the_kind_is_told_by_the_files(tmp_path: Path, make: Make, kind: str, backbone: str) -> None:
    layout = read_layout(make(tmp_path))

    assert (layout.kind, layout.backbone) == (Kind(kind), Backbone[backbone])
    assert read_layout(tmp_path, kind=kind).kind is layout.kind  # to name it again changes nothing


def test_a_masked_lm_is_sparse_where_the_instance_says_so(tmp_path: Path) -> None:
    path = _bare_masked_lm(tmp_path)

    for layout in (
        read_layout(path, "splade"),
        read_layout(path, kind="sparse"),
        read_layout(path, "splade", kind="sparse"),
    ):
        assert (layout.kind, layout.pooling, layout.backbone) == (Kind.SPARSE, "splade", Backbone.MASKED_LM)


def test_the_encoder_of_a_scoring_or_sparse_model_may_be_asked_for(tmp_path: Path) -> None:
    classifier = build_classifier("bert", tmp_path / "classifier")
    splade = build_splade("bert", tmp_path / "splade")

    assert read_layout(classifier, "mean", kind="embedding").poolings == ("mean",)
    assert read_layout(splade, "cls", kind="embedding").backbone is Backbone.ENCODER


def test_a_reranker_may_be_served_as_a_classifier_of_one_label(tmp_path: Path) -> None:
    assert read_layout(build_cross_encoder("bert", tmp_path), kind="classifier").kind is Kind.CLASSIFIER


def test_a_language_model_is_a_reranker_where_its_card_or_the_instance_says_so(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path)
    (path / "README.md").unlink()

    with pytest.raises(InvalidConfig, match="set the pooling"):
        read_layout(path)
    assert read_layout(path, "last-token").kind is Kind.EMBEDDING
    assert read_layout(path, kind="reranker").scoring == read_layout(build_yes_no_reranker(tmp_path)).scoring

    edit(path / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelLoadFailed, match="bge-reranker-v2-gemma, monoT5, mT5 on mMARCO are served"):
        read_layout(path, kind="reranker")


@pytest.mark.parametrize(
    ("make", "pooling", "kind", "reason"),
    [
        (lambda folder: build("bert", folder), None, "bi-encoder", "kind 'bi-encoder' is not one of embedding, sparse"),
        (lambda folder: build("bert", folder), "middle", None, "pooling 'middle' is not one of cls"),
        (lambda folder: build("bert", folder), "splade", None, "needs a masked-LM head, and the model is BertModel"),
        (lambda folder: build("bert", folder), None, "sparse", "BertModel has no masked-LM head"),
        (lambda folder: build("bert", folder), None, "reranker", "BertModel has no head that scores texts"),
        (lambda folder: build("bert", folder), None, "classifier", "BertModel has no head that scores texts"),
        (lambda folder: build("bert", folder), None, "multi-vector", "no projection of token vectors"),
        (lambda folder: build_classifier("bert", folder), None, "reranker", "3 labels, and a reranker has one"),
        (lambda folder: build_multi_vector("bert", folder), None, "embedding", "a vector per token and no pooling"),
        (lambda folder: build_yes_no_reranker(folder), None, "classifier", "answers yes or no to pairs"),
        (lambda folder: build_splade("bert", folder), "mean", None, "pooling 'mean' contradicts the sparse"),
        (_bare_masked_lm, "splade", "embedding", 'pooling "splade" makes a sparse model, and kind is "embedding"'),
    ],
)
def test_contradictions_are_refused_with_the_reason(
    tmp_path: Path, make: Make, pooling: str | None, kind: str | None, reason: str
) -> None:
    path = make(tmp_path)

    with pytest.raises(InvalidConfig, match=reason):
        read_layout(path, pooling, kind=kind)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: build_classifier("bert", folder),
        lambda folder: build_yes_no_reranker(folder),
        lambda folder: build_multi_vector("bert", folder),
        build_static,
    ],
)
def test_a_pooling_that_means_nothing_is_a_warning(tmp_path: Path, make: Make) -> None:
    layout = read_layout(make(tmp_path), "cls")

    assert "cls" not in layout.poolings
    kind = layout.kind.value
    assert f"pooling = 'cls' is ignored: models of the kind {kind} have their own pooling" in layout.warnings
    with pytest.raises(ModelLoadFailed, match="strict_model_files"):
        read_layout(tmp_path, "cls", strict=True)


@pytest.mark.parametrize("make", [build_cross_encoder, build_classifier, build_token_classifier])
def test_splade_on_a_model_that_scores_is_ignored_as_by_tei(tmp_path: Path, make: Callable[..., Path]) -> None:
    layout = read_layout(make("bert", tmp_path), "splade")

    assert layout.kind in (Kind.RERANKER, Kind.CLASSIFIER, Kind.TOKEN_CLASSIFIER)
    assert "pooling = 'splade' is ignored" in layout.warnings[-1]


def test_heads_on_tokens_are_refused(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path)
    edit(path / "config.json", architectures=["BertForFrameClassification"])

    with pytest.raises(ModelLoadFailed, match="BertForFrameClassification labels the parts of an input"):
        read_layout(path)


def test_a_head_without_labels_beside_an_encoder_is_not_asked(tmp_path: Path) -> None:
    """As Alibaba's gte-multilingual-base lists it."""
    path = build("bert", tmp_path)
    (path / "modules.json").unlink()
    edit(path / "config.json", architectures=["BertModel", "BertForTokenClassification"])

    assert read_layout(path).kind is Kind.EMBEDDING


CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
SETTINGS, SAVED = "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return build("bert", tmp_path / "model")


def warnings_of(path: Path) -> tuple[str, ...]:
    layout = read_layout(path)
    return (*layout.warnings, *contradictions(layout, load_tokenizer(layout)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_as_its_library_saves_it_has_no_warning(family: str, tmp_path: Path) -> None:
    assert warnings_of(build(family, tmp_path)) == ()


@pytest.mark.parametrize(
    "make",
    [
        build_m3,
        build_static,
        build_yes_no_reranker,
        build_nomic,
        build_new,
        lambda folder: build_splade("bert", folder),
        lambda folder: build_classifier("bert", folder),
        lambda folder: build_cross_encoder("bert", folder),
        lambda folder: build_cross_encoder("bert", folder, layout="saved"),
        lambda folder: build_multi_vector("bert", folder, layout="pylate"),
        lambda folder: build_multi_vector("bert", folder, layout="stanford"),
    ],
)
def test_a_layout_as_its_library_saves_it_has_no_warning(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path)

    assert warnings_of(tmp_path) == ()


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        (CONFIG, {"use_new_attention": True}, r"config\.json has use_new_attention = True"),
        (CONFIG, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (TOKENIZER, {"normalise_twice": 1}, "normalise_twice"),
        (SETTINGS, {"layer_to_take": -2}, "layer_to_take"),
        (SETTINGS, {"processor_kwargs": {"own_setting": True}}, "processor_kwargs of .* has own_setting"),
        (SETTINGS, {"processing_kwargs": {"text": {"stride": 4}}}, "processing_kwargs.text of .* has stride"),
        (SAVED, {"scale": 2.0}, "scale"),
        ("1_Pooling/config.json", {"pooling_mode_attention": True}, "pooling_mode_attention"),
    ],
)
def test_an_unknown_key_that_is_switched_on_is_a_warning_and_a_refusal_where_strict(
    bert: Path, file: str, changes: dict[str, Any], named: str
) -> None:
    write(bert / file, read(bert / file) | changes)

    (warning,) = read_layout(bert).warnings
    assert "is not known here" in warning
    with pytest.raises(ModelLoadFailed, match=rf"{named}.*strict_model_files"):
        read_layout(bert, strict=True)


@pytest.mark.parametrize("step", ["post_processor", "pre_tokenizer", "normalizer", "max_input_chars_per_word"])
def test_a_step_that_the_class_makes_otherwise_is_a_warning(bert: Path, step: str) -> None:
    edit(bert / TOKENIZER, tokenizer_class="BertTokenizer")
    file = read(bert / "tokenizer.json")
    other = {"max_input_chars_per_word": 3} if step.startswith("max") else {}
    steps = {} if other else {step: None}
    write(bert / "tokenizer.json", {**file, **steps, "model": {**file["model"], **other}})

    assert warnings_of(bert) == (f"tokenizer.json has another {step} than BertTokenizer makes: the former counts",)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_unknown_key_that_is_switched_off_is_none(bert: Path, value: object) -> None:
    write(bert / CONFIG, read(bert / CONFIG) | {"use_new_attention": value})

    assert read_layout(bert, strict=True).warnings == ()


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        (CONFIG, {"position_embedding_type": "relative_key_query"}, "position_embedding_type = 'relative_key_query'"),
        (CONFIG, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (CONFIG, {"feed_forward_type": "geglu"}, "feed_forward_type"),
        (CONFIG, {"is_causal": True}, "is_causal"),
        (CONFIG, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (CONFIG, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (CONFIG, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling"),
        (CONFIG, {"quantization_config": {"quant_method": "gptq"}}, "the checkpoint is quantised .gptq."),
        (TOKENIZER, {"split_special_tokens": True}, "split_special_tokens"),
        (TOKENIZER, {"fix_mistral_regex": True}, "fix_mistral_regex"),
        (TOKENIZER, {"truncation_side": "middle"}, "truncation side 'middle'"),
        (SETTINGS, {"config_args": {"num_hidden_layers": 1}}, "changes num_hidden_layers of config.json"),
        (SETTINGS, {"model_kwargs": {"variant": "fp16"}}, "model_kwargs of .* has variant = 'fp16'"),
        (SETTINGS, {"tokenizer_args": {"do_lower_case": False}}, "changes do_lower_case of tokenizer_config.json"),
        (SETTINGS, {"processor_kwargs": {"extra_special_tokens": ["[Q]"]}}, "changes extra_special_tokens of token"),
        (SETTINGS, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens = False"),
        (SETTINGS, {"processing_kwargs": {"text": {"truncation": "only_first"}}}, "truncation = 'only_first'"),
        (SETTINGS, {"processing_kwargs": {"text": {"truncation": None}}}, "truncation = None"),
        (
            SETTINGS,
            {"processing_kwargs": {"text": {"max_length": 8}, "common": {"max_length": 9}}},
            "max_length = 8 for text and 9 in common",
        ),
        (
            SETTINGS,
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            "takes 'pooler_output'",
        ),
        (
            SETTINGS,
            {"modality_config": {"image": {"method": "forward", "method_output_name": "last_hidden_state"}}},
            "embeds image beside text",
        ),
        (SAVED, {"default_prompt_name": "ask"}, "default prompt 'ask', which is not among its prompts: none"),
        (SAVED, {"prompts": {"ask": 3}}, "should be texts by name"),
        (SAVED, {"prompts": ["ask"]}, "should be texts by name"),
        (CONFIG, {"auto_map": ["modeling.Model"]}, "auto_map should map"),
        (SAVED, {"truncate_dim": -3}, "truncate_dim = -3"),
        (SAVED, {"truncate_dim": "8"}, "truncate_dim = '8'"),
    ],
)
def test_a_value_that_changes_vectors_is_refused_by_name(
    bert: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    write(bert / file, read(bert / file) | changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        read_layout(bert)


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("1_Pooling", lambda folder: build("bert", folder)),
        ("2_Dense", lambda folder: build("bert", folder, modules=("Dense", "Normalize"))),
        ("2_LayerNorm", lambda folder: build("bert", folder, modules=("LayerNorm", "Normalize"))),
        ("1_SpladePooling", lambda folder: build_splade("bert", folder)),
        ("1_LogitScore", lambda folder: build_yes_no_reranker(folder, layout="saved")),
    ],
)
def test_a_file_that_modules_json_names_and_that_is_missing_is_named(
    module: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path)
    (tmp_path / module / "config.json").unlink()

    with pytest.raises(
        ModelLoadFailed, match=rf"modules\.json names a {module[2:]} module.*{module}/config\.json is missing"
    ):
        read_layout(tmp_path)


def test_a_normalize_module_has_a_file_since_sentence_transformers_6_alone(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    assert read_layout(build("bert", tmp_path / "old")).poolings == ("mean",)
    SentenceTransformer(str(tmp_path / "old"), device="cpu").save(str(tmp_path / "new"))
    assert read_layout(tmp_path / "new", strict=True).poolings == ("mean",)
    (tmp_path / "new" / "2_Normalize" / "config.json").unlink()
    with pytest.raises(ModelLoadFailed, match="Normalize module"):
        read_layout(tmp_path / "new")


def test_a_row_of_modules_json_with_arguments_is_refused(bert: Path) -> None:
    rows = read(bert / "modules.json")
    write(bert / "modules.json", [rows[0] | {"kwargs": ["task"]}, *rows[1:]])

    with pytest.raises(ModelLoadFailed, match="kwargs"):
        read_layout(bert)


@pytest.mark.parametrize(
    ("config", "senses"),
    [
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "images"),
        ({"model_type": "align"}, "images and text"),
        ({"model_type": "altclip"}, "images and text"),
        ({"model_type": "whisper"}, "sound"),
        ({"model_type": "modernvbert"}, "pages as images"),
    ],
)
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_a_model_of_images_or_sound_is_refused_as_what_it_is(
    bert: Path, config: dict[str, Any], senses: str, pooling: str | None
) -> None:
    write(bert / CONFIG, read(bert / CONFIG) | config)

    with pytest.raises(ModelLoadFailed, match=f"embeds {senses}, which is not served"):
        read_layout(bert, pooling)


@pytest.mark.parametrize("given", ["problem", "activation"])
def test_a_regression_has_no_activation(given: str, tmp_path: Path) -> None:
    build_cross_encoder("bert", tmp_path, layout="plain")
    edit(tmp_path / CONFIG, sbert_ce_default_activation_function=None, sentence_transformers=None)
    scoring = read_layout(tmp_path).scoring
    assert scoring is not None
    assert scoring.activation == "sigmoid"
    if given == "problem":
        edit(tmp_path / CONFIG, problem_type="regression")
        scoring = read_layout(tmp_path).scoring
        assert scoring is not None
        assert scoring.activation == "identity"
    else:
        edit(tmp_path / CONFIG, sbert_ce_default_activation_function="own.Scaled")
        assert read_layout(tmp_path).warnings == (
            "the activation own.Scaled is code of the model's own: sigmoid is used",
        )


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "do_lower_case = false"),
        ("bert", {"tokenizer_class": "BertTokenizer", "strip_accents": False}, "strip_accents = false"),
        (
            "bert",
            {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False},
            "tokenize_chinese_chars = false",
        ),
        ("roberta", {"add_prefix_space": True}, "add_prefix_space = true"),
        ("qwen3", {"add_bos_token": True, "bos_token": "<s>"}, "add_bos_token = true"),
        ("qwen3", {"add_eos_token": True, "eos_token": "<mask>"}, "add_eos_token = true"),
    ],
)
def test_what_the_tokenizers_two_files_say_differently_is_a_warning(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    build(family, tmp_path)
    edit(tmp_path / TOKENIZER, **changes)

    (warning,) = warnings_of(tmp_path)
    assert named in warning


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lowercase": False}, "do_lower_case = true"),
        ({"handle_chinese_chars": False}, "tokenize_chinese_chars = true"),
    ],
)
@pytest.mark.parametrize("declared", ["BertTokenizer", None])
def test_a_setting_that_the_tokenizers_class_has_by_default_is_compared_too(
    declared: str | None, changes: dict[str, bool], named: str, bert: Path
) -> None:
    own = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    edit(bert / "tokenizer.json", normalizer={**own, "lowercase": True, **changes})
    edit(bert / TOKENIZER, tokenizer_class=declared)

    (warning,) = warnings_of(bert)
    assert f"{named} by default" in warning


@pytest.mark.parametrize(
    ("family", "declared", "kinds"),
    [
        ("bert", "RobertaTokenizer", "which is BPE, and tokenizer.json has WordPiece"),
        ("bert", "XLMRobertaTokenizerFast", "which is Unigram, and tokenizer.json has WordPiece"),
        ("roberta", "BertTokenizer", "which is WordPiece, and tokenizer.json has BPE"),
    ],
)
def test_a_tokenizer_class_of_another_kind_of_model_is_a_warning(
    family: str, declared: str, kinds: str, tmp_path: Path
) -> None:
    build(family, tmp_path)
    edit(tmp_path / TOKENIZER, tokenizer_class=declared)

    assert any(f"tokenizer_class = {declared}, {kinds}" in warning for warning in warnings_of(tmp_path))


def test_without_a_tokenizer_class_the_librarys_for_the_model_type_counts(tmp_path: Path) -> None:
    build("roberta", tmp_path)
    edit(tmp_path / TOKENIZER, tokenizer_class=None)
    assert warnings_of(tmp_path) == ()
    edit(tmp_path / CONFIG, tokenizer_class="BertTokenizer")
    (warning,) = warnings_of(tmp_path)
    assert "config.json has tokenizer_class = BertTokenizer, which is WordPiece, and tokenizer.json has BPE" in warning
    build("mpnet", tmp_path / "other")
    edit(tmp_path / "other" / TOKENIZER, tokenizer_class=None)
    (warning,) = warnings_of(tmp_path / "other")
    assert "no file has a tokenizer_class, the library's for mpnet is MPNetTokenizer, which is WordPiece" in warning


@pytest.mark.parametrize("declared", ["BertTokenizerFast", "PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_a_tokenizer_class_of_the_same_kind_or_of_none_that_is_known_is_no_warning(
    declared: str | None, bert: Path
) -> None:
    edit(bert / TOKENIZER, tokenizer_class=declared)

    assert not any("tokenizer_class" in warning for warning in warnings_of(bert))


@pytest.mark.parametrize("key", ["model_args", "model_kwargs"])
def test_safetensors_that_the_settings_rule_out_are_not_read(key: str, bert: Path) -> None:
    write(bert / SETTINGS, read(bert / SETTINGS) | {key: {"use_safetensors": False}})
    (bert / "pytorch_model.bin").write_bytes(b"other weights")
    with pytest.raises(ModelLoadFailed, match=rf"use_safetensors = False \({key}\)"):
        read_layout(bert)

    (bert / "model.safetensors").unlink()
    assert read_layout(bert, strict=True).warnings == ()


def test_e5_mistrals_end_token_is_behind_every_text_as_its_authors_measured(tmp_path: Path) -> None:
    build_decoder("mistral", tmp_path)
    edit(tmp_path / "tokenizer.json", post_processor=None)
    edit(tmp_path / TOKENIZER, add_eos_token=True, eos_token="</s>")

    assert load_tokenizer(read_layout(tmp_path)).encode("fog").tokens[-1] == "</s>"
    assert warnings_of(tmp_path) == ()


def test_dimensions_of_the_files_are_the_default_and_a_request_may_ask_for_more(
    bert: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(bert), device="cpu", truncate_dim=8)
    model.save(str(bert / "cut"))
    served = serve(bert / "cut")
    truth = SentenceTransformer(str(bert / "cut"), device="cpu").encode(list(TEXTS))
    whole = served.embed(TEXTS, dimensions=32).vectors

    assert served.engine.info.dimension == 8
    assert truth.shape[1] == 8
    np.testing.assert_allclose(served.embed(TEXTS, normalize=False).vectors, whole[:, :8] * _lengths(served), atol=2e-6)
    cosines = (served.embed(TEXTS).vectors * truth).sum(axis=1) / np.linalg.norm(truth, axis=1)
    assert cosines.min() >= 0.99999
    with pytest.raises(InvalidInput, match="dimensions"):
        served.send(TEXTS, dimensions=33)


def _lengths(served: Served) -> Any:
    return np.linalg.norm(served.embed(TEXTS, normalize=False, dimensions=32).vectors, axis=1, keepdims=True)


def test_the_most_entries_of_a_sparse_model_are_those_of_its_files(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    from sentence_transformers import SparseEncoder

    path = build_splade("bert", tmp_path)
    write(path / SAVED, read(path / SAVED) | {"max_active_dims": 12})
    served = serve(path)
    job = served.embed(TEXTS, outputs=frozenset({Output.SPARSE, Output.DENSE}), normalize=False)
    truth = SparseEncoder(str(path), device="cpu").encode(list(TEXTS), convert_to_sparse_tensor=False).numpy()

    assert (truth != 0).sum(axis=1).max() == 12
    np.testing.assert_allclose(job.vectors, truth, atol=2e-5)
    for sparse, vector in zip(job.sparse, job.vectors, strict=True):
        assert sparse is not None
        assert sparse.indices.tolist() == np.flatnonzero(vector).tolist()


@pytest.mark.parametrize("file", [TOKENIZER, SETTINGS, "tokenizer.json"])
def test_a_text_loses_its_beginning_where_the_files_say_so_and_the_request_does_not(
    file: str,
    bert: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    from sentence_transformers import SentenceTransformer

    side: dict[str, Any] = {"truncation_side": "left"}
    cut = {"direction": "Left", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    changes = {TOKENIZER: side, SETTINGS: {"processor_kwargs": side}, "tokenizer.json": {"truncation": cut}}
    write(bert / file, read(bert / file) | changes[file])
    served = serve(bert)
    texts = [f"{'the lazy fox ' * 60} fog", f"{'the lazy fox ' * 60} dog"]
    truth = SentenceTransformer(str(bert), device="cpu").encode(texts)

    found = served.embed(texts).vectors
    assert (found * truth).sum(axis=1).min() >= 0.99999
    assert np.abs(found[0] - found[1]).max() > 1e-3
    right = served.embed(texts, names_side=True).vectors
    np.testing.assert_allclose(right[0], right[1], atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_seq_length": 96, "processor_kwargs": {"model_max_length": 20}},
        {"max_seq_length": 96, "processing_kwargs": {"text": {"max_length": 20}}},
        {"max_seq_length": 96, "processing_kwargs": {"common": {"max_length": 20}}},
    ],
)
def test_a_length_among_the_settings_of_processing_counts(
    settings: dict[str, Any],
    bert: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    from sentence_transformers import SentenceTransformer

    write(bert / SETTINGS, settings)
    served = serve(bert)
    texts = ["the lazy fox and the fog " * 12]
    truth = SentenceTransformer(str(bert), device="cpu").encode(texts)

    assert served.engine.info.max_input_length == 20
    assert (served.embed(texts).vectors * truth).sum(axis=1).min() >= 0.99999
