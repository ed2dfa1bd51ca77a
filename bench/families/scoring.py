"""Rerankers and classifiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tests.fidelity import references
from tests.fidelity.figures import Matrix
from tests.support import plain_forwards
from tests.support.models import (
    MAX_LENGTH,
    build_classifier,
    build_cross_encoder,
    build_modular_cross_encoder,
    build_prompted_reranker,
    build_yes_no_reranker,
)
from tests.support.models.listwise import PlainList, build_listwise
from tests.support.models.own_code import build_jina_xlm, build_new
from tests.support.models.scoring import build_token_classifier
from tests.support.models.single_families import build_jina_bert, build_monot5, build_nemotron, monot5_scores
from tokenizers import Tokenizer

from bench.families import files
from bench.families.files import Change
from bench.families.references import none, plain_scores
from bench.families.row import CARD, PLAIN, ST, TRANSFORMERS, Reference, Row
from teimgr.engine.job import Input, Output, Pair
from teimgr.spec import Kind

_IDENTITY = "torch.nn.modules.linear.Identity"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_LOGITS = {"raw_scores": True}


def _reranker(
    key: str,
    family: str,
    hub: str,
    architecture: str,
    *,
    changes: Sequence[Change] = (),
    tei: bool = False,
    note: str = "",
    **layout: Any,
) -> Row:
    return Row(
        key,
        family,
        hub,
        files.built(partial(build_cross_encoder, architecture, **layout), changes),
        kind=Kind.RERANKER,
        by=ST,
        reference=references.scores,
        output=Output.SCORES,
        takes_pairs=True,
        is_in_tei_readme=tei,
        note=note,
    )


def _rerankers() -> Iterator[Row]:
    minilm = "cross-encoder/ms-marco-MiniLM-L6-v2, ms-marco-TinyBERT-L2-v2"
    yield _reranker("rerank-msmarco-minilm", "BERT", minilm, "bert", layout="version-4", note="Identity in the files")
    yield _reranker("rerank-msmarco-old", "BERT", "the same at older revisions", "bert", activation=_IDENTITY)
    yield _reranker("rerank-bert-sigmoid", "BERT", "BERT rerankers without an activation in their files", "bert")
    yield _reranker(
        "rerank-saved-now", "BERT", "cross-encoders saved by sentence-transformers 6", "bert", layout="saved"
    )
    yield _reranker("rerank-bin", "BERT", "cross-encoders with pytorch_model.bin", "bert", changes=[files.as_bin])
    yield _reranker("rerank-bge-base", "XLM-RoBERTa", "BAAI/bge-reranker-base", "xlm_roberta", tei=True)
    yield _reranker(
        "rerank-bge-large", "XLM-RoBERTa", "BAAI/bge-reranker-large", "xlm_roberta", tei=True, changes=[files.sharded]
    )
    yield _reranker("rerank-bge-v2-m3", "XLM-RoBERTa", "BAAI/bge-reranker-v2-m3", "xlm_roberta")
    yield _reranker(
        "rerank-electra", "ELECTRA", "cross-encoder/ms-marco-electra-base, Dongjin-kr/ko-reranker's kind", "electra"
    )
    yield _reranker("rerank-roberta", "RoBERTa", "cross-encoder/stsb-roberta-base, quora-roberta-base", "roberta")
    yield _reranker("rerank-distilroberta", "DistilBERT", "DistilBERT cross-encoders", "distilbert")
    mxbai = "mixedbread-ai/mxbai-rerank-xsmall-v1, -base-v1, -large-v1"
    yield _reranker("rerank-mxbai-v1", "DeBERTa v2/v3", mxbai, "deberta_v2")
    modern = "Alibaba-NLP/gte-reranker-modernbert-base, ibm-granite/granite-embedding-reranker-english-r2"
    yield _reranker("rerank-gte-modernbert", "ModernBERT", modern, "modernbert", tei=True)
    yield _reranker("rerank-camembert", "CamemBERT", "antoinelouis/crossencoder-camembert-base-mmarcoFR", "camembert")
    yield _reranker("rerank-albert", "ALBERT", "ALBERT cross-encoders", "albert")
    yield _reranker("rerank-mpnet", "MPNet", "MPNet cross-encoders", "mpnet")
    yield _reranker("rerank-gte-library", "GTE", "gte-multilingual-reranker-base in the library's layout", "gte")
    seqcls = "tomaarsen/Qwen3-Reranker-0.6B-seq-cls"
    yield _reranker("rerank-qwen3-seqcls", "Qwen3", seqcls, "qwen3_wide")
    for family in ("bert", "modernbert"):
        ettin = (
            "cross-encoder/ettin-reranker-17m-v1 to -1b-v1" if family == "modernbert" else "BERT with modules of scores"
        )
        yield _scored(
            f"rerank-modules-{family}",
            "ModernBERT" if family == "modernbert" else "BERT",
            ettin,
            partial(_made, partial(build_modular_cross_encoder, family)),
            references.scores,
        )


def _made(build: Callable[[Path], Any], folder: Path) -> None:
    build(folder)


def _scored(
    key: str,
    family: str,
    hub: str,
    make: Callable[[Path], Reference | None],
    reference: Reference | None = None,
    *,
    by: str = ST,
    asked: dict[str, Any] | None = None,
    longest: int = MAX_LENGTH,
    tei: bool = False,
    **more: Any,
) -> Row:
    return Row(
        key,
        family,
        hub,
        make,
        Kind.RERANKER,
        by,
        reference,
        Output.SCORES,
        asked=asked or {},
        longest=longest,
        is_in_tei_readme=tei,
        takes_pairs=True,
        **more,
    )


def _llm_rerankers() -> Iterator[Row]:
    hub = "Qwen/Qwen3-Reranker-0.6B, -4B, -8B"
    card = partial(references.qwen3_reranker, instruction=_INSTRUCTION, max_length=256)
    plain = partial(_made, partial(build_yes_no_reranker, layout="plain"))
    yield _scored(
        "rerank-qwen3-card", "Qwen3", f"{hub} (before sentence-transformers' files)", plain, card, by=CARD, longest=256
    )
    saved = partial(_made, partial(build_yes_no_reranker, layout="saved"))
    yield _scored(
        "rerank-qwen3-logitscore",
        "Qwen3",
        f"{hub} with sentence-transformers 5.4's files",
        saved,
        references.scores,
        longest=256,
    )
    classifier = partial(_made, partial(build_yes_no_reranker, layout="classifier"))
    yield _scored(
        "rerank-qwen3-seqcls-chat",
        "Qwen3",
        "Qwen3 sequence classifiers with a chat template",
        classifier,
        references.scores,
        longest=256,
    )
    families: tuple[tuple[Literal["qwen2", "gemma"], str, str], ...] = (
        ("qwen2", "Qwen2", "mixedbread-ai/mxbai-rerank-base-v2, -large-v2"),
        ("gemma", "Gemma", "BAAI/bge-reranker-v2-gemma"),
    )
    for architecture, family, models in families:
        make = partial(_prompted, architecture)
        reference = partial(references.prompted_reranker, family=architecture, max_length=512)
        yield _scored(
            f"rerank-{architecture}-prompt", family, models, make, reference, by=CARD, asked=_LOGITS, longest=512
        )


def _prompted(family: Literal["qwen2", "gemma"], folder: Path) -> None:
    build_prompted_reranker(folder, family)


def _own_code() -> Iterator[Row]:
    def gte(folder: Path) -> Reference:
        weights, config = build_new(folder, head=True)
        return plain_scores(
            lambda ids, types: plain_forwards.classified(weights, plain_forwards.new_impl(weights, config, ids)), 192
        )

    def jina(folder: Path) -> Reference:
        weights, config = build_jina_bert(folder, layout="reranker")
        return plain_scores(
            lambda ids, types: plain_forwards.classified(
                weights, plain_forwards.jina_bert(weights, config, ids, types)
            ),
            192,
        )

    def jina_v2(folder: Path) -> Reference:
        weights, config = build_jina_xlm(folder, layout="reranker")
        return plain_scores(
            lambda ids, types: plain_forwards.roberta_score(
                weights, plain_forwards.jina_xlm_roberta(weights, config, ids)
            ),
            192,
        )

    logits: dict[str, Any] = {"by": PLAIN, "asked": _LOGITS, "longest": 192}
    yield _scored(
        "rerank-gte-multilingual",
        "GTE (new-impl)",
        "Alibaba-NLP/gte-multilingual-reranker-base",
        gte,
        tei=True,
        **logits,
    )
    yield _scored("rerank-jina-v1", "JinaBERT v2", "jinaai/jina-reranker-v1-turbo-en, -tiny-en", jina, **logits)
    yield _scored(
        "rerank-jina-v2", "Jina XLM-RoBERTa (flash)", "jinaai/jina-reranker-v2-base-multilingual", jina_v2, **logits
    )

    def nemotron(folder: Path) -> Reference:
        weights, config = build_nemotron(folder)
        return partial(_nemotron, weights=weights, config=config)

    yield _scored(
        "rerank-nemotron", "Llama", "nvidia/llama-nemotron-rerank-1b-v2", nemotron, **(logits | {"longest": 128})
    )
    for kind, hub in (
        ("t5", "castorini/monot5-base-msmarco, unicamp-dl/InRanker-base"),
        ("mt5", "unicamp-dl/mt5-base-mmarco-v2"),
    ):
        written = partial(_made, partial(build_monot5, kind=kind))
        score = partial(monot5_scores, kind=kind)
        yield _scored(f"rerank-mono-{kind}", "mT5" if kind == "mt5" else "T5", hub, written, score, by=TRANSFORMERS)

    jina_v3 = Row(
        "rerank-jina-v3",
        "Qwen3",
        "jinaai/jina-reranker-v3",
        partial(_made, partial(build_listwise, capacity=4000)),
        Kind.RERANKER,
        PLAIN,
        _listed,
        Output.SCORES,
        note="whole lists of a query, as its authors divide them",
        reads_lists=True,
    )
    yield jina_v3
    yield replace(jina_v3, key="rerank-jina-v3.5", hub="jinaai/jina-reranker-v3.5", make=_jina_v3_5, reference=none)


def _listed(folder: Path, lists: Sequence[Any]) -> list[Matrix]:
    plain = PlainList(folder)
    return [score for query, documents in lists for score in plain.scores(query, documents)[:, None]]


def _jina_v3_5(folder: Path) -> None:
    build_listwise(folder, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"])


def _nemotron(
    folder: Path, pairs: Sequence[Input], weights: dict[str, torch.Tensor], config: dict[str, Any]
) -> list[Matrix]:
    """The model card's: one text of each pair, cut at its end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    found = []
    with torch.inference_mode():
        for pair in pairs:
            assert isinstance(pair, Pair)
            ids = torch.tensor(tokenizer.encode(f"question:{pair.first} \n \n passage:{pair.second}").ids)
            pooled = plain_forwards.causal(weights, config, ids, both_ways=True).mean(0)
            found.append((weights["score.weight"] @ pooled / config["temperature"]).numpy())
    return found


def _classifier(
    key: str,
    family: str,
    hub: str,
    architecture: str,
    *,
    changes: Sequence[Change] = (),
    activation: str = "softmax",
    tei: bool = False,
    pairs: bool = False,
    **layout: Any,
) -> Row:
    reference = partial(references.classes, activation=activation)
    return Row(
        key,
        family,
        hub,
        files.built(partial(build_classifier, architecture, **layout), changes),
        Kind.CLASSIFIER,
        TRANSFORMERS,
        reference,
        Output.SCORES,
        is_in_tei_readme=tei,
        takes_pairs=pairs,
    )


def _classifiers() -> Iterator[Row]:
    emotions = "SamLowe/roberta-base-go_emotions"
    yield _classifier(
        "classify-go-emotions", "RoBERTa", emotions, "roberta", multi_label=True, activation="sigmoid", tei=True
    )
    yield _classifier("classify-twitter", "RoBERTa", "cardiffnlp/twitter-roberta-base-sentiment-latest", "roberta")
    yield _classifier(
        "classify-sst2",
        "DistilBERT",
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        "distilbert",
        labels=("NEGATIVE", "POSITIVE"),
    )
    yield _classifier("classify-finbert", "BERT", "ProsusAI/finbert", "bert")
    yield _classifier("classify-toxic", "BERT", "unitary/toxic-bert", "bert", multi_label=True, activation="sigmoid")
    yield _classifier(
        "classify-stars",
        "BERT",
        "nlptown/bert-base-multilingual-uncased-sentiment",
        "bert",
        labels=("1", "2", "3", "4", "5"),
    )
    yield _classifier("classify-langid", "XLM-RoBERTa", "papluca/xlm-roberta-base-language-detection", "xlm_roberta")
    yield _classifier("classify-xnli", "XLM-RoBERTa", "joeddav/xlm-roberta-large-xnli", "xlm_roberta", pairs=True)
    yield _classifier(
        "classify-deberta-nli",
        "DeBERTa v2/v3",
        "MoritzLaurer/deberta-v3-base-zeroshot-v2.0, cross-encoder/nli-deberta-v3-base",
        "deberta_v2",
        pairs=True,
    )
    yield _classifier(
        "classify-prompt-guard",
        "DeBERTa v2/v3",
        "protectai/deberta-v3-base-prompt-injection-v2, meta-llama/Prompt-Guard-86M",
        "deberta_v2",
    )
    yield _classifier("classify-deberta-v1", "DeBERTa", "microsoft/deberta-base-mnli", "deberta", pairs=True)
    yield _classifier("classify-bart-mnli", "BART", "facebook/bart-large-mnli", "bart", pairs=True)
    yield _classifier("classify-modernbert", "ModernBERT", "tasksource/ModernBERT-base-nli", "modernbert", pairs=True)
    yield _classifier(
        "classify-modernbert-mean",
        "ModernBERT",
        "ModernBERT classifiers that pool by mean",
        "modernbert",
        classifier_pooling="mean",
    )
    yield _classifier(
        "classify-albert", "ALBERT", "textattack/albert-base-v2-SST-2", "albert", labels=("LABEL_0", "LABEL_1")
    )
    yield _classifier("classify-electra", "ELECTRA", "ELECTRA classifiers", "electra")
    yield _classifier("classify-xlnet", "XLNet", "textattack/xlnet-base-cased-imdb", "xlnet")
    yield _classifier("classify-camembert", "CamemBERT", "cmarkea/distilcamembert-base-sentiment", "camembert")
    yield _classifier("classify-mpnet", "MPNet", "MPNet classifiers", "mpnet")
    yield _classifier("classify-longformer", "Longformer", "Longformer classifiers", "longformer")
    yield _classifier("classify-qwen3", "Qwen3", "Qwen3 guard models with a head", "qwen3_wide")
    yield _classifier("classify-llama", "Llama", "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2's kind", "llama")
    yield _classifier("classify-gemma2", "Gemma 2", "Gemma 2 classifiers", "gemma2")
    yield _classifier("classify-gpt2", "GPT-2", "microsoft/DialogRPT-updown's kind", "gpt2")
    bare = [files.editing("config.json", id2label=None, label2id=None, num_labels=None)]
    yield _classifier(
        "classify-unnamed",
        "BERT",
        "textattack/bert-base-uncased-SST-2: two labels without names",
        "bert",
        labels=("LABEL_0", "LABEL_1"),
        changes=bare,
    )
    yield _classifier(
        "classify-regression",
        "BERT",
        "problem_type regression of several numbers",
        "bert",
        activation="identity",
        changes=[files.editing("config.json", problem_type="regression")],
    )
    yield _classifier(
        "classify-fp16", "DistilBERT", "classifiers in float16", "distilbert", changes=[files.in_dtype(torch.float16)]
    )


def _token_classifiers() -> Iterator[Row]:
    for key, family, hub, architecture in (
        ("bert", "BERT", "dslim/bert-base-NER, dbmdz/bert-large-cased-finetuned-conll03-english", "bert"),
        ("distilbert", "DistilBERT", "dslim/distilbert-NER", "distilbert"),
        ("roberta", "RoBERTa", "Jean-Baptiste/roberta-large-ner-english", "roberta"),
        ("xlmr", "XLM-RoBERTa", "Davlan/xlm-roberta-base-ner-hrl", "xlm_roberta"),
        ("camembert", "CamemBERT", "Jean-Baptiste/camembert-ner", "camembert"),
        ("deberta", "DeBERTa-v2", "lakshyakh93/deberta_finetuned_pii, DeBERTa-v3 for PII", "deberta_v2"),
        ("electra", "ELECTRA", "ELECTRA for NER", "electra"),
        ("modernbert", "ModernBERT", "ModernBERT for NER", "modernbert"),
    ):
        yield Row(
            f"tokens-{key}",
            family,
            hub,
            files.built(partial(build_token_classifier, architecture)),
            Kind.TOKEN_CLASSIFIER,
            TRANSFORMERS,
            references.token_classes,
            Output.TOKENS,
            note="the logits of every token",
        )


ROWS = (*_rerankers(), *_llm_rerankers(), *_own_code(), *_classifiers(), *_token_classifiers())
