"""Models with code of their own, as the hub has them: known code is served exactly by the library, other refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Output, Pair
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import ModelLoadFailed
from teimgr.models.own_code import code_repositories
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.engine.exact_models import assert_exact, ids_of
from tests.support import plain_forwards
from tests.support.models import FAMILIES, TEXTS, build, edit
from tests.support.models.own_code import (
    build_decoder,
    build_jina_v3,
    build_jina_xlm,
    build_lfm2,
    build_new,
    build_nomic,
)


@pytest.mark.parametrize("native", [True, False], ids=["native", "library"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_scaling_factor": 2},
        {"rotary_emb_base": 10000},
        {"rotary_emb_base": 20000, "rotary_scaling_factor": 4},
    ],
    ids=["v1.5", "v1", "base", "base-and-scaling"],
)
def test_nomic_bert_of_the_hub_is_exact_up_to_its_own_length(
    changes: dict[str, Any],
    native: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes in its own keys alone, and positions past those of the training."""
    if not native:
        monkeypatch.setenv("TEIMGR_NATIVE", "attention")
    weights, config = build_nomic(tmp_path, **changes)
    served = serve(tmp_path)

    assert served.engine.info.max_input_length == 192
    assert served.engine.info.forward == ("native" if native else "library")
    assert_exact(served, lambda ids: plain_forwards.nomic(weights, config, ids), "mean")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_theta": 500000, "type_vocab_size": 0},
        {"rope_scaling": None, "type_vocab_size": 2},
    ],
    ids=["multilingual", "en-v1.5", "plain"],
)
def test_alibabas_new_impl_is_exact_as_the_librarys_gte(
    changes: dict[str, Any],
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    weights, config = build_new(tmp_path, **changes)
    served = serve(tmp_path)

    assert served.engine.info.forward == "native"
    assert_exact(served, lambda ids: plain_forwards.new_impl(weights, config, ids), "cls")


def test_alibabas_reranker_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    weights, config = build_new(tmp_path, head=True)
    served = serve(tmp_path)
    pairs = [Pair("the lazy fox", "fog"), Pair("a ship", "The quick brown fox jumps over the lazy dog.")]
    job = served.embed(pairs, outputs=frozenset({Output.SCORES}), raw_scores=True)
    encoded = TextTokenizer(read_layout(tmp_path), 192).encode(pairs, TokenizeOptions())

    assert served.engine.info.kind == "reranker"
    for score, each in zip(job.scores, encoded, strict=True):
        assert isinstance(each, Encoded)
        hidden = plain_forwards.new_impl(weights, config, torch.from_numpy(each.ids.astype(np.int64)))
        truth = plain_forwards.classified(weights, hidden)
        np.testing.assert_allclose(score, truth.numpy(), atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary_emb_base": 10000}, {"position_embedding_type": "absolute"}],
    ids=["rotary", "base", "absolute"],
)
def test_jinas_xlm_roberta_is_exact(
    changes: dict[str, Any],
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    weights, config = build_jina_xlm(tmp_path, **changes)
    served = serve(tmp_path)

    assert served.engine.info.forward == "native"
    assert served.engine.info.max_input_length == 192
    assert_exact(served, lambda ids: plain_forwards.jina_xlm_roberta(weights, config, ids), "mean")


def test_jina_embeddings_v3_is_exact_for_every_task(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    """Each text by the LoRA weights of its request's task, also in one batch with others; without a task by none."""
    merged, config = build_jina_v3(tmp_path)
    served = serve(tmp_path)
    texts = ids_of()
    sent = [(task, served.send(texts, prompt_name=task or None)) for task in merged]
    sent += [(task, served.send(texts[:3], prompt_name=task or None)) for task in merged]

    assert served.engine.info.warnings == ()
    assert served.engine.info.prompts == tuple(task for task in merged if task)
    for task, job in sent:
        found = served.wait(job)
        assert found.errors == {}
        prompt = {"retrieval.query": "query: ", "retrieval.passage": "passage: "}.get(task, "")
        tokenizer = served.engine.tokenizer
        for row, text in enumerate(texts[: len(found.vectors)]):
            ids = text
            if prompt:
                options = TokenizeOptions(prompt=prompt)
                (each,) = tokenizer.encode([text], options)
                assert isinstance(each, Encoded)
                ids = each.ids
            hidden = plain_forwards.jina_xlm_roberta(merged[task], config, torch.from_numpy(ids.astype(np.int64)))
            truth = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
            np.testing.assert_allclose(found.vectors[row], truth, atol=3e-5)


def test_jina_v3_in_texts_has_the_prompt_and_the_weights_of_the_default_task(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    merged, config = build_jina_v3(tmp_path)
    served = serve(tmp_path, default_prompt_name="retrieval.passage")
    texts = [*TEXTS[:6], *TEXTS[:6]]
    job = served.embed(texts)
    encoded = served.engine.tokenizer.encode(texts, TokenizeOptions(prompt="passage: "))

    for vector, each in zip(job.vectors, encoded, strict=True):
        assert isinstance(each, Encoded)
        ids = torch.from_numpy(each.ids.astype(np.int64))
        hidden = plain_forwards.jina_xlm_roberta(merged["retrieval.passage"], config, ids)
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy(), atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_adaptations": ["a", "b"]}, "are not those of 2 tasks"),
        ({"load_trained_adapters": False}, "LoRA weights are not served"),
        ({"lora_rank": 0}, "lora_rank = 0"),
    ],
)
def test_tasks_that_contradict_the_weights_are_refused(
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build_jina_v3(tmp_path)
    edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelLoadFailed, match=reason):
        serve(tmp_path)


def test_jina_reranker_v2_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    weights, config = build_jina_xlm(tmp_path, layout="reranker")
    served = serve(tmp_path)
    pairs = [Pair("the lazy fox", "fog"), Pair("a ship", "The quick brown fox jumps over the lazy dog. " * 30)]
    job = served.embed(pairs, outputs=frozenset({Output.SCORES}), raw_scores=True)
    encoded = TextTokenizer(read_layout(tmp_path), 192).encode(pairs, TokenizeOptions())

    assert served.engine.info.kind == "reranker"
    for score, each in zip(job.scores, encoded, strict=True):
        assert isinstance(each, Encoded)
        hidden = plain_forwards.jina_xlm_roberta(weights, config, torch.from_numpy(each.ids.astype(np.int64)))
        np.testing.assert_allclose(score, plain_forwards.roberta_score(weights, hidden).numpy(), atol=2e-5)


def test_jina_colbert_v2_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    weights, config = build_jina_xlm(tmp_path, layout="colbert")
    served = serve(tmp_path)
    texts = ["the lazy fox", "The quick brown fox jumps over the lazy dog " * 5]
    for role in ("query", "document"):
        options = TokenizeOptions(query=role == "query")
        encoded = TextTokenizer(read_layout(tmp_path), 192).encode(texts, options)
        job = served.embed(texts, outputs=frozenset({Output.MULTI_VECTOR}), prompt_name=role)
        for found, each in zip(job.multi_vectors, encoded, strict=True):
            assert isinstance(each, Encoded)
            hidden = plain_forwards.jina_xlm_roberta(weights, config, torch.from_numpy(each.ids.astype(np.int64)))
            truth = torch.nn.functional.normalize(hidden @ weights["linear.weight"].T, dim=-1)
            assert found is not None
            assert len(found) == len(truth)
            np.testing.assert_allclose(found, truth.numpy(), atol=3e-5)


def test_lfm2_whose_tokens_see_all_others_is_exact(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    """LFM2.5-Embedding: attention both ways, and convolutions that are centred."""
    weights, config = build_lfm2(tmp_path)
    served = serve(tmp_path)

    assert served.engine.info.warnings == ()
    assert_exact(served, lambda ids: plain_forwards.lfm2(weights, config, ids), "cls", batching="equal-length")


def test_bilingual_embedding_is_xlm_roberta(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    truth = serve(build("xlm_roberta", tmp_path / "plain"))
    path = shutil.copytree(tmp_path / "plain", tmp_path / "hub")
    code = "dangvantuan/bilingual_impl--modeling.Bilingual"
    classes = {"AutoModel": f"{code}Model", "AutoModelForMaskedLM": f"{code}ForMaskedLM"}
    auto_map = {"AutoConfig": "dangvantuan/bilingual_impl--config.BilingualConfig", **classes}
    edit(path / "config.json", model_type="bilingual", architectures=["BilingualModel"], auto_map=auto_map)
    served = serve(path)

    assert served.engine.info.forward == "native"
    assert served.engine.info.max_input_length == truth.engine.info.max_input_length
    np.testing.assert_array_equal(served.embed(TEXTS).vectors, truth.embed(TEXTS).vectors)


@pytest.mark.parametrize("kind", ["DPRQuestionEncoder", "DPRContextEncoder"])
def test_dpr_is_the_first_token_of_a_bert(kind: str, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    torch.manual_seed(0)
    tokenizer = FAMILIES["bert"].tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.DPRConfig(vocab_size=len(tokenizer), initializer_range=0.2, **shape)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    served = serve(tmp_path)
    encoded = TextTokenizer(read_layout(tmp_path), 512).encode(TEXTS, TokenizeOptions())
    with torch.inference_mode():
        rows = [model(torch.from_numpy(each.ids.astype(np.int64))[None]).pooler_output[0] for each in encoded]

    assert served.engine.info.forward == "native"
    np.testing.assert_allclose(served.embed(TEXTS, normalize=False).vectors, torch.stack(rows).numpy(), atol=3e-5)
    edit(tmp_path / "config.json", projection_dim=16)
    with pytest.raises(ModelLoadFailed, match="projection_dim = 16"):
        read_layout(tmp_path)


GTE_QWEN = {
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    }
}
NEMOTRON = {
    "model_type": "llama_bidirec",
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    },
}


@pytest.mark.parametrize(
    ("family", "changes", "both_ways"),
    [
        ("qwen2", GTE_QWEN, True),
        ("qwen2", {**GTE_QWEN, "is_causal": False}, True),
        ("qwen2", {**GTE_QWEN, "is_causal": True}, False),
        ("qwen3", {"is_causal": False}, True),
        ("qwen3", {"use_bidirectional_attention": True}, True),
        ("qwen3", {"use_bidirectional_attention": False}, False),
        ("llama", NEMOTRON, True),
        ("llama", {"auto_map": {"AutoModel": "McGill-NLP/LLM2Vec-x--modeling_llama_encoder.LlamaEncoderModel"}}, True),
        ("llama", {}, False),
    ],
)
def test_a_decoder_attends_as_its_own_code_does(
    family: str,
    changes: dict[str, Any],
    both_ways: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    weights, config = build_decoder(family, tmp_path, pooling="mean", **changes)
    served = serve(tmp_path)

    assert served.engine.info.max_input_length == 192
    assert_exact(served, lambda ids: plain_forwards.causal(weights, config, ids, both_ways=both_ways), "mean")


@pytest.mark.parametrize("class_name", ["Qwen2Tokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("adds", [True, False])
def test_the_end_token_of_gte_qwens_own_tokenizer_is_behind_every_text_within_the_length(
    adds: bool, class_name: str, tmp_path: Path
) -> None:
    build_decoder("qwen2", tmp_path, **GTE_QWEN)
    edit(tmp_path / "tokenizer.json", post_processor=None)
    auto_map = {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", f"tokenization_qwen.{class_name}"]}
    edit(tmp_path / "tokenizer_config.json", auto_map=auto_map, add_eos_token=adds, eos_token="<mask>")
    tokenizer = TextTokenizer(read_layout(tmp_path), 16)
    end = tokenizer.tokenize("<mask>", False, "")[0].id
    short, long, pair = tokenizer.encode(["fog", "the lazy fox " * 20, Pair("fog", "dog")], TokenizeOptions())

    assert isinstance(short, Encoded)
    assert isinstance(long, Encoded)
    assert isinstance(pair, Encoded)
    assert len(long.ids) == 16
    for one in (short, long, pair):
        assert (one.ids[-1] == end) is np.bool_(adds)
    assert (pair.ids == end).sum() == (2 if adds else 0)


@pytest.mark.parametrize(
    ("family", "auto_map", "named"),
    [
        ("qwen3", {"AutoModel": "modeling_qwen3.Qwen3Model"}, "Qwen3Model"),
        ("qwen3", {"AutoModel": "modeling_qwen.Qwen2Model"}, "Qwen2Model"),
        ("qwen2", {"AutoModel": "someone/else--modeling_qwen.Qwen2Model"}, "Qwen2Model"),
        ("mistral", {"AutoModel": "modeling_mistral.MistralModel"}, "MistralModel"),
        ("bert", {"AutoModel": "modeling_bert.BertModel"}, "BertModel"),
        ("gte", {"AutoModel": "modeling.GteModel"}, "GteModel"),
        ("bert", {"AutoModel": "someone/else--modeling_bert.JinaBertModel"}, "JinaBertModel"),
    ],
)
def test_code_is_never_known_by_the_name_of_its_class(
    family: str, auto_map: dict[str, str], named: str, tmp_path: Path
) -> None:
    build(family, tmp_path)
    edit(tmp_path / "config.json", auto_map=auto_map)

    with pytest.raises(ModelLoadFailed, match=rf"{named}.*trust_remote_code = true"):
        read_layout(tmp_path)
    assert read_layout(tmp_path, trust_remote_code=True).trust_remote_code


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "glu"),
        ("causal", True),
        ("prenorm", True),
        ("qkv_proj_bias", "yes"),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_fraction", 0.5),
        ("num_shared_experts", 1),
        ("moe_normalize_expert_weights", True),
        ("n_head", 5),
        ("use_rms_norm", True),
    ],
)
def test_a_setting_of_nomic_bert_that_the_library_does_not_have_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    build_nomic(tmp_path, **{key: value})

    with pytest.raises(ModelLoadFailed, match="width" if key == "n_head" else key):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding_type", "absolute"),
        ("layer_norm_type", "rms_norm"),
        ("logn_attention_scale", True),
        ("pack_qkv", False),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}),
        ("rope_scaling", {"type": "ntk"}),
    ],
)
def test_a_setting_of_new_impl_that_the_library_does_not_have_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    build_new(tmp_path, **{key: value})

    with pytest.raises(ModelLoadFailed, match=r"config\.json (has|is)"):
        read_layout(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_refused_without_trust(tmp_path: Path) -> None:
    build("bert", tmp_path)
    edit(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.XTokenizer", None]})

    with pytest.raises(ModelLoadFailed, match=r"tokenizer.*XTokenizer.*trust_remote_code = true"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("config", "tokenizer", "repositories"),
    [
        ({"auto_map": {"AutoModel": "acme/code--m.A", "AutoConfig": "acme/code--c.B"}}, {}, ["acme/code"]),
        ({"auto_map": {"AutoModel": "m.A"}}, {"auto_map": {"AutoTokenizer": ["acme/tok--t.T", None]}}, ["acme/tok"]),
        ({"auto_map": {"AutoModel": "m.A"}}, {}, []),
        ({"model_type": "new", "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}}, {}, []),
    ],
)
def test_code_that_is_known_is_not_fetched(
    config: dict[str, Any], tokenizer: dict[str, Any], repositories: list[str]
) -> None:
    assert code_repositories(config, tokenizer) == repositories
