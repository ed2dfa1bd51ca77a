"""Dense embedders on language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.fidelity.figures import Matrix
from tests.support import plain_forwards
from tests.support.models import edit, read
from tests.support.models.own_code import build_decoder, build_gritlm
from tokenizers import Tokenizer

from bench.families import files
from bench.families.encoders import st
from bench.families.references import plain
from bench.families.row import PLAIN, Reference, Row
from teimgr.engine.job import Input

_LONGEST = 192
_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def _plain_layouts() -> Iterator[Row]:
    asked: dict[str, Any] = {"prompts": {"query": _QUERY, "document": ""}, "asked": {"prompt_name": "query"}}
    asked["reference"] = _st_query
    qwen3 = "Qwen/Qwen3-Embedding-{}"
    yield st("qwen3-embedding-0.6b", "Qwen3", qwen3.format("0.6B"), "qwen3_wide", tei=True)
    yield st("qwen3-embedding-4b", "Qwen3", qwen3.format("4B"), "qwen3_wide", tei=True, **asked)
    yield st("qwen3-embedding-8b", "Qwen3", qwen3.format("8B"), "qwen3_wide", tei=True, changes=[files.sharded])
    yield st(
        "qwen3-causal-lm",
        "Qwen3",
        "embedders saved as ForCausalLM (`model.` before the names)",
        "qwen3_wide",
        changes=[files.prefixed("model.", heads=False)],
    )
    yield st(
        "qwen2-jina-code", "Qwen2", "jinaai/jina-code-embeddings-0.5b, nomic-ai/nomic-embed-code", "qwen2", **asked
    )
    yield st("qwen2-yarn", "Qwen2", "Qwen2 embedders with YaRN", "qwen2_yarn")
    yield st("qwen2-moe", "Qwen2 MoE", "Qwen2 MoE embedders", "qwen2_moe")
    yield st("qwen3-moe", "Qwen3 MoE", "Qwen3 MoE embedders", "qwen3_moe")
    mistral = "Salesforce/SFR-Embedding-2_R, intfloat/e5-mistral-7b-instruct, Linq-AI-Research/Linq-Embed-Mistral"
    yield st("mistral-sfr", "Mistral", mistral, "mistral", tei=True, **asked)
    yield st("mistral-bf16", "Mistral", "the same, bfloat16 in shards", "mistral", changes=[files.sharded])
    yield st("llama", "Llama", "samaya-ai/promptriever-llama2-7b-v1's kind, merged", "llama")
    yield st("llama3", "Llama", "Llama 3 embedders (rope type llama3)", "llama3")
    yield st("gemma", "Gemma", "Gemma embedders", "gemma")
    yield st("gemma2-bge", "Gemma 2", "BAAI/bge-multilingual-gemma2", "gemma2", **asked)
    gemma = {"modules": ("Dense", "Dense", "Normalize")}
    yield st("embeddinggemma", "Gemma 3", "google/embeddinggemma-300m", "gemma3_wide", tei=True, **gemma)
    yield st("gemma3-harrier", "Gemma 3", "microsoft/harrier-oss-v1-270m", "gemma3_causal_wide")
    for key, family, hub in (
        ("bloom", "BLOOM", "bigscience/sgpt-bloom-7b1-msmarco"),
        ("gpt2", "GPT-2", "GPT-2 embedders"),
        ("gpt_neo", "GPT-Neo", "Muennighoff/SGPT-125M-weightedmean-nli-bitfit, SGPT-1.3B-weightedmean"),
        ("gpt_neox", "GPT-NeoX", "Pythia embedders"),
        ("gptj", "GPT-J", "Muennighoff/SGPT-5.8B-weightedmean-msmarco-specb-bitfit"),
        ("granite", "Granite", "Granite language models as embedders"),
        ("lfm2", "LFM2", "LFM2 embedders, causal"),
        ("ministral", "Ministral", "Ministral embedders"),
        ("olmo2", "OLMo 2", "OLMo 2 embedders"),
        ("opt", "OPT", "OPT embedders"),
        ("phi3", "Phi-3", "Phi-3 embedders"),
        ("smollm3", "SmolLM3", "SmolLM3 embedders"),
        ("modernbert_decoder", "ModernBERT decoder", "jhu-clsp/ettin-decoder-150m embedders"),
        ("gpt_oss", "gpt-oss", "gpt-oss embedders"),
        ("granite_hybrid", "Granite 4 hybrid", "ibm-granite/granite-4.0-h-micro embedders"),
        ("qwen3_5", "Qwen3.5", "Qwen3.5 text embedders"),
        ("stablelm", "StableLM", "StableLM embedders"),
    ):  # fmt: skip
        yield st(key.replace("_", "-"), family, hub, key)


def _st_query(folder: Path, texts: Any, **options: Any) -> Any:
    """sentence-transformers with the prompt of queries."""
    from bench.families.references import st_dense

    return st_dense(folder, texts, prompt_name="query", **options)


def _own(
    key: str,
    family: str,
    hub: str,
    architecture: str,
    config: dict[str, Any],
    *,
    both_ways: bool,
    pooling: str = "lasttoken",
    prepare: Callable[[Path], None] = lambda folder: None,
    end: str | None = None,
    tei: bool = False,
    note: str = "",
) -> Row:
    """A decoder with keys or code of its own, compared with a plain forward."""

    def make(folder: Path) -> Reference:
        weights, found = build_decoder(architecture, folder, pooling=pooling, **config)
        prepare(folder)
        found = read(folder / "config.json")

        def forward(ids: Any) -> Any:
            return plain_forwards.causal(weights, found, ids, both_ways=both_ways)

        return plain(forward, pooling, _LONGEST, end=end)

    return Row(key, family, hub, make, by=PLAIN, longest=_LONGEST, is_in_tei_readme=tei, note=note)


def _gte_qwen(folder: Path) -> None:
    """Its own tokenizer, which puts the end token behind every text."""
    edit(folder / "tokenizer.json", post_processor=None)
    own = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": own}, add_eos_token=True, eos_token="</s>")


def _mistral_end(folder: Path) -> None:
    """tokenizer.json without the end token that its authors put behind every text."""
    edit(folder / "tokenizer.json", post_processor=None)
    edit(folder / "tokenizer_config.json", add_eos_token=True, eos_token="</s>")


def _averaged(folder: Path) -> None:
    """A key of NVIDIA's class."""
    edit(folder / "config.json", pooling="avg")


QWEN_CODE = {
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    }
}
_NEMOTRON = {
    "model_type": "llama_bidirec",
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    },
}


def _own_ways() -> Iterator[Row]:
    end = {"prepare": _gte_qwen, "end": "</s>"}
    causal = {**QWEN_CODE, "is_causal": True}
    yield _own(
        "gte-qwen2-1.5b",
        "Qwen2",
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        "qwen2",
        QWEN_CODE,
        both_ways=True,
        tei=True,
        **end,
    )
    yield _own(
        "gte-qwen2-7b",
        "Qwen2",
        "Alibaba-NLP/gte-Qwen2-7B-instruct, gte-Qwen1.5-7B-instruct",
        "qwen2",
        {**QWEN_CODE, "is_causal": False},
        both_ways=True,
        tei=True,
        **end,
    )
    yield _own(
        "gte-qwen2-causal",
        "Qwen2",
        "the same with is_causal true in config.json",
        "qwen2",
        causal,
        both_ways=False,
        **end,
    )
    yield _own(
        "stella-1.5b",
        "Qwen2",
        "NovaSearch/stella_en_1.5B_v5",
        "qwen2",
        QWEN_CODE,
        both_ways=True,
        pooling="mean",
        **end,
    )
    yield _own(
        "mistral-add-eos",
        "Mistral",
        "intfloat/e5-mistral-7b-instruct (add_eos_token)",
        "mistral",
        {"sliding_window": None},
        both_ways=False,
        prepare=_mistral_end,
        end="</s>",
    )
    for family in ("qwen2", "qwen3", "mistral", "llama"):
        given = {"is_causal": False} | ({"sliding_window": None} if family == "mistral" else {})
        yield _own(
            f"{family}-is-causal-false",
            family.capitalize(),
            f"bidirectional {family.capitalize()} without code (is_causal false)",
            family,
            given,
            both_ways=True,
            pooling="mean",
        )
    both = {"use_bidirectional_attention": True}
    yield _own(
        "qwen3-bidirectional",
        "Qwen3",
        "Qwen3 with use_bidirectional_attention and no code",
        "qwen3",
        both,
        both_ways=True,
        pooling="mean",
    )
    yield _own(
        "llama-nemotron",
        "Llama",
        "nvidia/llama-embed-nemotron-8b, llama-nemotron-embed-1b-v2",
        "llama",
        _NEMOTRON,
        prepare=_averaged,
        both_ways=True,
        pooling="mean",
    )
    llm2vec = {
        "auto_map": {
            "AutoModel": "McGill-NLP/LLM2Vec-Meta-Llama-3-8B-Instruct-mntp--modeling_llama_encoder.LlamaEncoderModel"
        }
    }
    yield _own(
        "llm2vec-llama",
        "Llama",
        "McGill-NLP/LLM2Vec-Meta-Llama-3-8B-Instruct, merged",
        "llama",
        llm2vec,
        both_ways=True,
        pooling="mean",
    )
    mistral = {
        "auto_map": {
            "AutoModel": "McGill-NLP/LLM2Vec-Mistral-7B-Instruct-v2-mntp--modeling_mistral_encoder.MistralEncoderModel"
        },
        "sliding_window": None,
    }
    yield _own(
        "llm2vec-mistral",
        "Mistral",
        "McGill-NLP/LLM2Vec-Mistral-7B-Instruct-v2, merged",
        "mistral",
        mistral,
        both_ways=True,
        pooling="mean",
    )
    for key, name in (("", None), ("-document", "document")):

        def make(folder: Path, name: str | None = name) -> Reference:
            weights, config = build_gritlm(folder)
            return partial(_gritlm, weights=weights, config=config, instruction="<|embed|>\n" if name else "")

        hub = "GritLM/GritLM-7B, prompt document" if name else "GritLM/GritLM-7B, without an instruction"
        asked = {"prompt_name": name} if name else {}
        yield Row(f"gritlm{key}", "Mistral", hub, make, by=PLAIN, asked=asked, longest=_GRITLM_LONGEST)


_GRITLM_LONGEST = 128


def _gritlm(
    folder: Path, texts: Sequence[Input], weights: dict[str, Any], config: dict[str, Any], instruction: str
) -> list[Matrix]:
    """The mean of the tokens behind an instruction, as `gritlm.GritLM.encode`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_GRITLM_LONGEST)
    behind = 0
    if instruction:
        encoded = tokenizer.encode(instruction)
        behind = len(encoded.ids) - encoded.special_tokens_mask[-1]
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor(tokenizer.encode(f"{instruction}{text}").ids)
            hidden = plain_forwards.causal(weights, config, ids, both_ways=True)
            found.append(hidden[min(behind, len(ids) - 1) :].mean(0).numpy()[None])
    return found


ROWS = (*_plain_layouts(), *_own_ways())
