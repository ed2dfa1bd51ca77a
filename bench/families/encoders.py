"""Dense embedders on encoders, in sentence-transformers' layouts or bare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tests.support.models import build
from tests.support.models.single_families import build_t5gemma

from bench.families import files
from bench.families.files import Change
from bench.families.references import bare, st_dense
from bench.families.row import ST, TRANSFORMERS, Reference, Row

_IDENTITY = "torch.nn.modules.linear.Identity"


def st(
    key: str,
    family: str,
    hub: str,
    architecture: str,
    *,
    changes: Sequence[Change] = (),
    reference: Reference = st_dense,
    by: str = ST,
    asked: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    tei: bool = False,
    note: str = "",
    **layout: Any,
) -> Row:
    """A row of sentence-transformers' layout, with `changes` to its files; `layout` are keywords of `build`."""

    return Row(
        key,
        family,
        hub,
        files.built(partial(build, architecture, **layout), changes),
        by=by,
        reference=reference,
        asked=asked or {},
        engine_options=engine_options or {},
        is_in_tei_readme=tei,
        note=note,
    )


def _prompted(query: str, **more: Any) -> dict[str, Any]:
    """Keywords of a row whose texts are asked with the prompt of queries."""
    return {
        "prompts": {"query": query, "document": ""},
        "asked": {"prompt_name": "query"},
        "reference": partial(st_dense, prompt_name="query"),
        **more,
    }


def _bert() -> Iterator[Row]:
    yield st("bert-minilm", "BERT", "sentence-transformers/all-MiniLM-L6-v2, all-MiniLM-L12-v2", "bert")
    yield st("bert-paraphrase-minilm", "BERT", "sentence-transformers/paraphrase-MiniLM-L6-v2", "bert", modules=())
    yield st("bert-bge", "BERT", "BAAI/bge-small-en-v1.5, bge-base-en-v1.5, bge-large-zh-v1.5", "bert", pooling="cls")
    yield st("bert-uae", "BERT", "WhereIsAI/UAE-Large-V1", "bert", pooling="cls", modules=(), tei=True)
    yield st("bert-e5", "BERT", "intfloat/e5-small-v2, e5-base-v2, e5-large-v2", "bert")
    yield st("bert-gte", "BERT", "thenlper/gte-small, gte-base, gte-large", "bert", max_length=64)
    query = "Represent this sentence for searching relevant passages: "
    arctic = "Snowflake/snowflake-arctic-embed-xs, snowflake-arctic-embed-m"
    yield st("bert-arctic-query", "BERT", arctic, "bert", pooling="cls", **_prompted(query))
    yield st(
        "bert-mxbai-query",
        "BERT",
        "mixedbread-ai/mxbai-embed-large-v1",
        "bert",
        pooling="cls",
        modules=(),
        **_prompted(query),
    )
    labse = {"pooling": "cls", "modules": ("Dense:Tanh", "Normalize")}
    yield st("bert-labse", "BERT", "sentence-transformers/LaBSE", "bert", **labse)
    multilingual = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
    yield st("bert-multilingual-minilm", "BERT", multilingual, "bert_unigram", modules=(), note="XLM-R's tokenizer")
    yield st("bert-me5-small", "BERT", "intfloat/multilingual-e5-small", "bert_unigram", note="XLM-R's tokenizer")
    yield st(
        "bert-nli-max", "BERT", "sentence-transformers/bert-base-nli-max-tokens", "bert", pooling="max", modules=()
    )
    yield st("bert-nli-cls", "BERT", "sentence-transformers/bert-base-nli-cls-token", "bert", pooling="cls", modules=())
    yield st("bert-nli-mean", "BERT", "sentence-transformers/bert-base-nli-mean-tokens", "bert", modules=())
    yield st("bert-msmarco-dot", "BERT", "sentence-transformers/msmarco-bert-base-dot-v5", "bert", modules=())
    yield st("bert-msmarco-cos", "BERT", "sentence-transformers/msmarco-MiniLM-L6-cos-v5", "bert")
    yield st(
        "bert-sqrt-len", "BERT", "models with pooling_mode_mean_sqrt_len_tokens", "bert", pooling="mean_sqrt_len_tokens"
    )
    yield st(
        "bert-weighted-mean", "BERT", "models with pooling_mode_weightedmean_tokens", "bert", pooling="weightedmean"
    )
    yield st("bert-last-token", "BERT", "models with pooling_mode_lasttoken", "bert", pooling="lasttoken")
    yield st("bert-cls-mean", "BERT", "models with two poolings joined", "bert", pooling="cls+mean")
    yield st("bert-mean-max", "BERT", "models with two poolings joined", "bert", pooling="mean+max", modules=())
    yield st(
        "bert-text2vec",
        "BERT",
        "shibing624/text2vec-base-multilingual, GanymedeNil/text2vec-large-chinese",
        "bert",
        modules=(),
    )
    yield st(
        "bert-dense",
        "BERT",
        "sentence-transformers/clip-ViT-B-32-multilingual-v1's kind, Dense without a bias",
        "bert",
        dense=(24, _IDENTITY),
    )
    yield st(
        "bert-two-dense",
        "BERT",
        "models with Dense modules in a row",
        "bert",
        modules=("Dense", "Dense:Tanh", "Normalize"),
    )
    yield st("bert-layer-norm", "BERT", "models with a LayerNorm module", "bert", modules=("LayerNorm",))
    yield st(
        "bert-normalize-dense", "BERT", "models with Normalize before a Dense", "bert", modules=("Normalize", "Dense")
    )
    yield st(
        "bert-default-prompt",
        "BERT",
        "models with default_prompt_name",
        "bert",
        prompts={"passage": "passage: "},
        default_prompt_name="passage",
    )
    yield st(
        "bert-instructor-like",
        "BERT",
        "models with include_prompt = false",
        "bert",
        include_prompt=False,
        **_prompted("query: "),
    )
    yield st(
        "bert-short", "BERT", "sentence-transformers/all-MiniLM-L12-v2 (128 of 512 positions)", "bert", max_length=32
    )


def _bert_files() -> Iterator[Row]:
    """The same weights in other files."""
    forms: list[tuple[str, str, Sequence[Change]]] = [
        ("bin", "sentence-transformers/bert-base-nli-mean-tokens and thousands: pytorch_model.bin", [files.as_bin]),
        ("both", "repositories with both formats", [files.beside_bin]),
        ("shards", "sharded safetensors", [files.sharded]),
        ("bin-shards", "sharded pytorch_model.bin", [files.sharded_bin]),
        ("fp16", "float16 weights", [files.in_dtype(torch.float16)]),
        ("bf16", "bfloat16 weights", [files.in_dtype(torch.bfloat16)]),
        ("mlm-names", "masked-LM checkpoints: `bert.` before the names, heads", [files.prefixed("bert.")]),
        ("gamma", "TensorFlow's names: LayerNorm.gamma", [files.prefixed("bert.", old_norms=True), files.as_bin]),
        ("position-ids", "files of transformers before 4.31: position_ids", [files.with_positions]),
        ("0-transformer", "sentence-transformers 0.3 to 1.x: 0_Transformer", [files.in_first_folder]),
        ("0-transformer-bin", "the same, pytorch_model.bin", [files.as_bin, files.in_first_folder]),
        ("saved-now", "saved by sentence-transformers 6", [files.saved_again]),
        ("vocab-txt", "vocab.txt and no tokenizer.json (older Chinese embedders)", [files.without_fast_tokenizer]),
        ("links", "the hub's cache: links to blobs", [files.linked_modules]),
        ("no-length", "max_seq_length null", [files.editing("sentence_bert_config.json", max_seq_length=None)]),
        ("lower-case", "do_lower_case true", [files.editing("sentence_bert_config.json", do_lower_case=True)]),
    ]
    for name, hub, changes in forms:
        yield st(f"files-{name}", "BERT", hub, "bert", changes=changes)
    dense = {"modules": ("Dense:Tanh",)}
    yield st(
        "files-dense-bin",
        "BERT",
        "every Dense saved before sentence-transformers 3.0.1",
        "bert",
        changes=[files.modules_as_bin],
        **dense,
    )
    yield st(
        "files-transformer-bin",
        "BERT",
        "the reverse: pytorch_model.bin beside a Dense in safetensors",
        "bert",
        changes=[files.transformer_as_bin],
        **dense,
    )
    truncated = files.editing("config_sentence_transformers.json", truncate_dim=16)
    yield st("files-truncate-dim", "BERT", "Matryoshka models saved cut (truncate_dim)", "bert", changes=[truncated])
    bpe = [files.without_fast_bpe]
    yield st("files-bpe-vocab", "RoBERTa", "vocab.json and merges.txt and no tokenizer.json", "roberta", changes=bpe)


def _bare() -> Iterator[Row]:
    """Repositories without sentence-transformers' files: the instance names the pooling."""
    for key, family, hub, architecture, pooling, tei in (
        (
            "bare-bert-cls",
            "BERT",
            "princeton-nlp/sup-simcse-bert-base-uncased, cambridgeltl/SapBERT-from-PubMedBERT-fulltext",
            "bert",
            "cls",
            False,
        ),
        ("bare-bert-mean", "BERT", "facebook/contriever, contriever-msmarco", "bert", "mean", False),
        ("bare-roberta-cls", "RoBERTa", "princeton-nlp/unsup-simcse-roberta-base", "roberta", "cls", False),
        ("bare-xlmr-mean", "XLM-RoBERTa", "FacebookAI/xlm-roberta-base", "xlm_roberta", "mean", False),
        (
            "bare-modernbert-cls",
            "ModernBERT",
            "answerdotai/ModernBERT-large, ModernBERT-base",
            "modernbert",
            "cls",
            True,
        ),
    ):
        yield st(
            key,
            family,
            hub,
            architecture,
            changes=[files.without_modules, files.editing("tokenizer_config.json", model_max_length=96)],
            reference=bare(pooling, 96),
            by=TRANSFORMERS,
            engine_options={"pooling": pooling},
            tei=tei,
            note=f"pooling = {pooling}",
        )


def _others() -> Iterator[Row]:
    yield st("roberta-distil", "RoBERTa", "sentence-transformers/all-distilroberta-v1, all-roberta-large-v1", "roberta")
    yield st(
        "roberta-granite",
        "RoBERTa",
        "ibm-granite/granite-embedding-30m-english, -125m-english",
        "roberta",
        pooling="cls",
    )
    yield st("roberta-ko", "RoBERTa", "jhgan/ko-sroberta-multitask", "roberta", modules=())
    yield st("roberta-max-dense", "RoBERTa", "models with Dense and Tanh", "roberta", modules=("Dense:Tanh",))
    yield st(
        "xlmr-me5", "XLM-RoBERTa", "intfloat/multilingual-e5-base, multilingual-e5-large", "xlm_roberta", pooling="mean"
    )
    instruct = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
    yield st(
        "xlmr-me5-instruct",
        "XLM-RoBERTa",
        "intfloat/multilingual-e5-large-instruct",
        "xlm_roberta",
        pooling="mean",
        tei=True,
        **_prompted(instruct),
    )
    yield st(
        "xlmr-arctic-l-v2",
        "XLM-RoBERTa",
        "Snowflake/snowflake-arctic-embed-l-v2.0",
        "xlm_roberta",
        pooling="cls",
        tei=True,
        **_prompted("query: "),
    )
    yield st(
        "xlmr-paraphrase",
        "XLM-RoBERTa",
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2, paraphrase-xlm-r-multilingual-v1",
        "xlm_roberta",
        pooling="mean",
        modules=(),
    )
    yield st(
        "xlmr-granite",
        "XLM-RoBERTa",
        "ibm-granite/granite-embedding-107m-multilingual, -278m-multilingual",
        "xlm_roberta",
        pooling="cls",
    )
    yield st(
        "xlmr-bin", "XLM-RoBERTa", "BAAI/bge-m3-retromae (pytorch_model.bin)", "xlm_roberta", changes=[files.as_bin]
    )
    yield st("xlmr-xl", "XLM-RoBERTa-XL", "facebook/xlm-roberta-xl embedders", "xlm_roberta_xl", pooling="mean")
    yield st(
        "camembert",
        "CamemBERT",
        "dangvantuan/sentence-camembert-large, antoinelouis/biencoder-camembert-base-mmarcoFR",
        "camembert",
        modules=(),
    )
    yield st(
        "distilbert-tas-b",
        "DistilBERT",
        "sentence-transformers/msmarco-distilbert-base-tas-b",
        "distilbert",
        pooling="cls",
        modules=(),
    )
    yield st("distilbert-multi-qa", "DistilBERT", "sentence-transformers/multi-qa-distilbert-cos-v1", "distilbert")
    yield st(
        "distilbert-distiluse",
        "DistilBERT",
        "sentence-transformers/distiluse-base-multilingual-cased-v2",
        "distilbert",
        modules=("Dense:Tanh",),
    )
    yield st(
        "distilbert-clip",
        "DistilBERT",
        "sentence-transformers/clip-ViT-B-32-multilingual-v1 (its text half)",
        "distilbert",
        dense=(24, _IDENTITY),
    )
    yield st(
        "distilbert-bin",
        "DistilBERT",
        "sentence-transformers/quora-distilbert-multilingual",
        "distilbert",
        changes=[files.as_bin],
        modules=(),
    )
    yield st("mpnet-all", "MPNet", "sentence-transformers/all-mpnet-base-v2", "mpnet", tei=True)
    yield st(
        "mpnet-multi-qa",
        "MPNet",
        "sentence-transformers/multi-qa-mpnet-base-dot-v1",
        "mpnet",
        pooling="cls",
        modules=(),
    )
    yield st("mpnet-paraphrase", "MPNet", "sentence-transformers/paraphrase-mpnet-base-v2", "mpnet", modules=())
    yield st("albert", "ALBERT", "sentence-transformers/paraphrase-albert-small-v2", "albert", modules=())
    yield st("electra", "ELECTRA", "ELECTRA embedders", "electra")
    yield st("ernie", "ERNIE", "shibing624/text2vec-base-chinese-paraphrase", "ernie", modules=())
    yield st("sentence-t5", "T5", "sentence-transformers/sentence-t5-base", "t5", modules=("Dense", "Normalize"))
    yield st(
        "gtr-t5",
        "T5",
        "sentence-transformers/gtr-t5-base, gtr-t5-large",
        "t5_relu",
        modules=("Dense", "Normalize"),
        changes=[files.modules_as_bin],
    )
    yield st(
        "instructor",
        "T5",
        "hkunlp/instructor-large, instructor-xl",
        "t5",
        include_prompt=False,
        modules=("Dense", "Normalize"),
        **_prompted("Represent the sentence: "),
    )
    yield st("mt5", "mT5", "mT5 encoders", "mt5", modules=())
    yield st("umt5", "UMT5", "UMT5 encoders", "umt5", modules=())
    yield st("esm", "ESM", "facebook/esm2_t6_8M_UR50D's kind, with a tokenizer.json", "esm", modules=())
    for whole, hub in (
        (False, "T5Gemma encoders saved by sentence-transformers"),
        (True, "embedders in the files of google/t5gemma-2b-2b-ul2, decoder and all"),
    ):
        make = files.built(partial(build_t5gemma, whole=whole))
        yield Row(f"t5gemma{'-whole' if whole else ''}", "T5Gemma", hub, make, by=ST, reference=st_dense)
    yield st("deberta-v3", "DeBERTa v2/v3", "embedders on microsoft/deberta-v3-base", "deberta_v2", modules=())
    yield st("deberta-v1", "DeBERTa", "embedders on microsoft/deberta-base", "deberta", modules=())
    yield st(
        "modernbert-gte",
        "ModernBERT",
        "Alibaba-NLP/gte-modernbert-base, ibm-granite/granite-embedding-english-r2",
        "modernbert",
        pooling="cls",
        modules=(),
    )
    yield st(
        "modernbert-embed",
        "ModernBERT",
        "nomic-ai/modernbert-embed-base",
        "modernbert",
        pooling="mean",
        **_prompted("search_query: "),
    )
    yield st("modernbert-ruri", "ModernBERT", "cl-nagoya/ruri-v3-310m", "modernbert", pooling="mean", modules=())
    yield st(
        "modernbert-mlm-names",
        "ModernBERT",
        "mmBERT embedders saved from a masked-LM",
        "modernbert",
        pooling="mean",
        changes=[files.prefixed("model.", heads=False)],
    )
    yield st("gte-library", "GTE", "Alibaba-NLP/gte-multilingual-base in the library's layout", "gte")
    yield st("nomic-library", "NomicBERT", "nomic-ai/nomic-embed-text-v1.5 in the library's layout", "nomic_bert")
    yield st("jina-v3-library", "Jina v3", "jinaai/jina-embeddings-v3-hf", "jina_v3")
    yield st("eurobert", "EuroBERT", "EuroBERT/EuroBERT-210m embedders", "eurobert")
    for key, family, hub in (
        ("big_bird", "BigBird", "embedders on google/bigbird-roberta-base, original_full"),
        ("convbert", "ConvBERT", "dbmdz/convbert-base-turkish-mc4-cased embedders"),
        ("data2vec_text", "data2vec-text", "embedders on facebook/data2vec-text-base"),
        ("ibert", "I-BERT", "embedders on kssteven/ibert-roberta-base"),
        ("longformer", "Longformer", "allenai/longformer-base-4096 embedders"),
        ("luke", "LUKE", "pkshatech/GLuCoSE-base-ja, sonoisa/sentence-luke-japanese-base-lite"),
        ("megatron_bert", "Megatron BERT", "KBLab/megatron-bert embedders"),
        ("mobilebert", "MobileBERT", "embedders on google/mobilebert-uncased"),
        ("nystromformer", "Nyströmformer", "uw-madison/nystromformer-512 embedders"),
        ("rembert", "RemBERT", "embedders on google/rembert"),
        ("roberta_prelayernorm", "RoBERTa-PreLayerNorm", "andreasmadsen/efficient_mlm embedders"),
        ("roc_bert", "RoCBert", "weiweishi/roc-bert-base-zh embedders"),
        ("roformer", "RoFormer", "junnyu/roformer_chinese_base embedders"),
        ("squeezebert", "SqueezeBERT", "squeezebert/squeezebert-uncased embedders"),
        ("xlnet", "XLNet", "XLNet embedders"),
        ("xmod", "X-MOD", "embedders on facebook/xmod-base"),
    ):
        yield st(key.replace("_", "-"), family, hub, key, modules=())


ROWS = (*_bert(), *_bert_files(), *_bare(), *_others())
