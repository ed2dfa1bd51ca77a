"""Embedders whose repositories carry code of their own: without trust, compared with plain forwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.fidelity.figures import Matrix
from tests.support import plain_forwards
from tests.support.models import FAMILIES, build, edit
from tests.support.models.encoders import IDENTITY, write_dense
from tests.support.models.families import WIDTH
from tests.support.models.files import write_modules
from tests.support.models.own_code import (
    NOMIC_MOE,
    TASKS,
    build_jina_v3,
    build_jina_xlm,
    build_lfm2,
    build_new,
    build_nomic,
)
from tests.support.models.single_families import TASKS as V5_TASKS
from tests.support.models.single_families import build_jina_bert, build_jina_v5, build_pplx, build_voyage
from torch import Tensor

from bench.families.references import plain, st_dense
from bench.families.row import PLAIN, ST, TRANSFORMERS, Reference, Row

_LONGEST = 192
Built = tuple[dict[str, Tensor], dict[str, Any]]
Forward = Callable[[dict[str, Tensor], dict[str, Any], Tensor], Tensor]


def own(
    key: str,
    family: str,
    hub: str,
    built: Callable[[Path], Built],
    forward: Forward,
    pooling: str = "mean",
    *,
    longest: int = _LONGEST,
    tei: bool = False,
    note: str = "",
    after: Callable[[Path], Callable[[Tensor], Tensor]] | None = None,
) -> Row:
    """A row of `built`, whose hidden states `forward` gives; `after` writes what follows the pooling, and gives it."""

    def make(folder: Path) -> Reference:
        weights, config = built(folder)
        project = (lambda vector: vector) if after is None else after(folder)
        return plain(lambda ids: forward(weights, config, ids), pooling, longest, project=project)

    return Row(key, family, hub, make, by=PLAIN, longest=longest, is_in_tei_readme=tei, note=note)


def _dense_behind(folder: Path) -> Callable[[Tensor], Tensor]:
    """stella's Dense, in the folder of one of its widths."""
    torch.manual_seed(1)
    write_dense(folder / "2_Dense", WIDTH, 24, IDENTITY)
    write_modules(folder, *(f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Dense")))
    w = load_file(folder / "2_Dense" / "model.safetensors")
    return lambda vector: w["linear.weight"] @ vector + w["linear.bias"]


def _nomic() -> Iterator[Row]:
    def row(key: str, hub: str, *, tei: bool = False, max_length: int = _LONGEST, **changes: Any) -> Row:
        def built(folder: Path) -> Built:
            return build_nomic(folder, max_length=max_length, **changes)

        return own(key, "NomicBERT", hub, built, plain_forwards.nomic, tei=tei, longest=max_length)

    yield row("nomic-v1", "nomic-ai/nomic-embed-text-v1", tei=True, rotary_scaling_factor=2)
    yield row("nomic-v1.5", "nomic-ai/nomic-embed-text-v1.5", tei=True)
    both = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    yield row("nomic-v1.5-both-keys", "nomic-ai/nomic-embed-text-v1.5 with transformers' keys beside its own", **both)
    yield row("nomic-coderank", "nomic-ai/CodeRankEmbed", rotary_scaling_factor=None)
    yield row("nomic-arctic-long", "Snowflake/snowflake-arctic-embed-m-long", rotary_scaling_factor=2, max_length=128)
    yield row("nomic-rotary-base", "NomicBERT with rotary_emb_base 10000", rotary_emb_base=10000)
    plain_mlp = {"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    yield row("nomic-gelu", "nomic-ai/nomic-xlm-2048's kind: plain layers and biases", **plain_mlp)
    yield row("nomic-v2-moe", "nomic-ai/nomic-embed-text-v2-moe", tei=True, **NOMIC_MOE)


def _gte() -> Iterator[Row]:
    def row(key: str, hub: str, *, pooling: str = "cls", tei: bool = False, dense: bool = False, **changes: Any) -> Row:
        def built(folder: Path) -> Built:
            return build_new(folder, pooling=pooling, **changes)

        after = _dense_behind if dense else None
        return own(key, "GTE (new-impl)", hub, built, plain_forwards.new_impl, pooling, tei=tei, after=after)

    en: dict[str, Any] = {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_theta": 500000, "type_vocab_size": 0}
    yield row("gte-multilingual", "Alibaba-NLP/gte-multilingual-base")
    yield row("gte-large-en-v1.5", "Alibaba-NLP/gte-large-en-v1.5, gte-base-en-v1.5", tei=True, **en)
    yield row("gte-plain-rope", "new-impl without rope_scaling, two token types", rope_scaling=None, type_vocab_size=2)
    yield row("stella-400m", "NovaSearch/stella_en_400M_v5", pooling="mean", dense=True, **en)
    snowflake = {
        "model_type": "gte",
        "architectures": ["GteModel"],
        "auto_map": {
            "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
            "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
        },
    }
    yield row("gte-arctic-m-v2", "Snowflake/snowflake-arctic-embed-m-v2.0", tei=True, **snowflake)


def _jina() -> Iterator[Row]:
    def bert(key: str, hub: str, *, layout: str = "embedding", tei: bool = False, **changes: Any) -> Row:
        def built(folder: Path) -> Built:
            return build_jina_bert(folder, layout=layout, **changes)

        return own(key, "JinaBERT v2", hub, built, plain_forwards.jina_bert, tei=tei)

    yield bert("jina-v2-base", "jinaai/jina-embeddings-v2-base-en, -de, -es, -zh", tei=True)
    yield bert("jina-v2-small", "jinaai/jina-embeddings-v2-small-en", num_attention_heads=4)
    yield bert("jina-v2-code", "jinaai/jina-embeddings-v2-base-code", layout="code", tei=True)
    yield bert("jina-v2-reglu", "JinaBERT with feed_forward_type reglu", feed_forward_type="reglu")

    def xlm(key: str, hub: str, **changes: Any) -> Row:
        def built(folder: Path) -> Built:
            return build_jina_xlm(folder, **changes)

        return own(key, "Jina XLM-RoBERTa (flash)", hub, built, plain_forwards.jina_xlm_roberta)

    yield xlm("jina-xlm-rotary", "jinaai/xlm-roberta-flash-implementation's models without LoRA, rotary")
    yield xlm("jina-xlm-absolute", "the same, absolute positions", position_embedding_type="absolute")


def _voyage(folder: Path) -> Reference:
    weights, config = build_voyage(folder)

    def forward(ids: Tensor) -> Tensor:
        return plain_forwards.causal(weights, config, ids, both_ways=True) @ weights["linear.weight"].T

    return plain(forward, "mean", _LONGEST)


def _pplx(folder: Path) -> Reference:
    weights, config = build_pplx(folder)
    return plain(
        lambda ids: plain_forwards.causal(weights, config, ids, both_ways=True),
        "mean",
        _LONGEST,
        project=lambda vector: (vector.tanh() * 127).round(),
    )


def _jina_v3() -> Iterator[Row]:
    """LoRA weights by task: the plain forward has the weights with those of the task merged."""
    prompts = {"retrieval.query": "query: ", "retrieval.passage": "passage: "}
    for task in ("", *TASKS):

        def make(folder: Path, task: str = task) -> Reference:
            merged, config = build_jina_v3(folder)
            return plain(
                lambda ids: plain_forwards.jina_xlm_roberta(merged[task], config, ids),
                "mean",
                _LONGEST,
                prompt=prompts.get(task, ""),
            )

        hub = f"jinaai/jina-embeddings-v3, {f'task {task}' if task else 'without a task'}"
        key = f"jina-v3-{task.replace('.', '-') or 'no-task'}"
        asked = {"prompt_name": task} if task else {}
        yield Row(key, "Jina XLM-RoBERTa (flash)", hub, make, by=PLAIN, asked=asked, longest=_LONGEST)


def _jina_v5() -> Iterator[Row]:
    """LoRA weights by task, as those of v3."""
    asked: tuple[tuple[str | None, str, str], ...] = (
        (None, "retrieval", "Document: "),
        ("query", "retrieval", "Query: "),
        *((task, task, "Document: ") for task in V5_TASKS),
    )
    for nano in (False, True):
        for name, task, prompt in asked:

            def make(folder: Path, nano: bool = nano, task: str = task, prompt: str = prompt) -> Reference:
                merged, config = build_jina_v5(folder, nano=nano)
                return plain(
                    lambda ids: plain_forwards.causal(merged[task], config, ids, both_ways=nano),
                    "lasttoken",
                    _LONGEST,
                    prompt=prompt,
                )

            size, family = ("nano", "EuroBERT") if nano else ("small", "Qwen3")
            hub = f"jinaai/jina-embeddings-v5-text-{size}, {f'task or role {name}' if name else 'without a task'}"
            given = {"prompt_name": name} if name else {}
            key = f"jina-v5-{size}-{name or 'no-task'}"
            yield Row(key, family, hub, make, by=PLAIN, asked=given, longest=_LONGEST)


def _others() -> Iterator[Row]:
    yield own("lfm2.5-embedding", "LFM2", "LiquidAI/LFM2.5-Embedding-350M", build_lfm2, plain_forwards.lfm2, "cls")
    hub = "voyageai/voyage-4-nano"
    yield Row("voyage-4-nano", "Qwen3", hub, _voyage, by=PLAIN, longest=_LONGEST, is_in_tei_readme=True)
    hub = "perplexity-ai/pplx-embed-v1-0.6b, -4b"
    yield Row("pplx-embed", "Qwen3", hub, _pplx, by=PLAIN, longest=_LONGEST, note="vectors of integers")

    def bilingual(folder: Path) -> None:
        shutil.copytree(build("xlm_roberta", folder.parent / "plain"), folder)
        code = "dangvantuan/bilingual_impl--modeling.Bilingual"
        classes = {"AutoModel": f"{code}Model", "AutoModelForMaskedLM": f"{code}ForMaskedLM"}
        auto_map = {"AutoConfig": "dangvantuan/bilingual_impl--config.BilingualConfig", **classes}
        edit(folder / "config.json", model_type="bilingual", architectures=["BilingualModel"], auto_map=auto_map)

    def beside(folder: Path, texts: Any, **options: Any) -> list[Matrix]:
        return st_dense(folder.parent / "plain", texts, **options)

    hub = "Lajavaness/bilingual-embedding-large, dangvantuan/vietnamese-embedding"
    yield Row("bilingual", "XLM-RoBERTa", hub, bilingual, by=ST, reference=beside)
    for kind in ("Question", "Context"):
        hub = f"facebook/dpr-{'question' if kind == 'Question' else 'ctx'}_encoder-single-nq-base"
        yield Row(f"dpr-{kind.lower()}", "DPR", hub, _dpr(f"DPR{kind}Encoder"), by=TRANSFORMERS, longest=512)
    for family, classes in (
        (
            "eurobert",
            {"AutoConfig": "configuration_eurobert.EuroBertConfig", "AutoModel": "modeling_eurobert.EuroBertModel"},
        ),
    ):
        yield _same_code("eurobert-code", "EuroBERT", "EuroBERT/EuroBERT-210m with its own code", family, classes)


def _same_code(key: str, family: str, hub: str, architecture: str, auto_map: dict[str, str]) -> Row:
    """Code that computes what the library does."""

    def make(folder: Path) -> None:
        shutil.copytree(build(architecture, folder.parent / "plain"), folder)
        edit(folder / "config.json", auto_map=auto_map)

    def beside(folder: Path, texts: Any, **options: Any) -> list[Matrix]:
        return st_dense(folder.parent / "plain", texts, **options)

    return Row(key, family, hub, make, by=ST, reference=beside)


def _dpr(kind: str) -> Callable[[Path], Reference]:
    def make(folder: Path) -> Reference:
        import transformers

        torch.manual_seed(0)
        tokenizer = FAMILIES["bert"].tokenizer()
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.DPRConfig(vocab_size=len(tokenizer), initializer_range=0.2, **shape)
        model = getattr(transformers, kind)(config).eval()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

        def truth(folder: Path, texts: Any) -> list[Matrix]:
            found = []
            with torch.inference_mode():
                for text in texts:
                    encoded = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
                    found.append(model(**encoded).pooler_output.numpy())
            return found

        return truth

    return make


ROWS = (*_nomic(), *_gte(), *_jina(), *_jina_v3(), *_jina_v5(), *_others())
