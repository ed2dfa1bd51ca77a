"""JinaBERT v2 as the hub has it: jina-embeddings-v2-*, -base-code, jina-reranker-v1-* and jina-colbert-v1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .files import write
from .own_code import INNER, LAYERS, drawn, save_tokenizer, sentence_transformers
from .vocabularies import byte_level, with_marks, word_piece

WIDTH, HEADS = 48, 6  # a number of heads that is no power of two, as in jina-embeddings-v2-base

CONFIG = {
    "alibi_starting_size": 64,
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": None,
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 192,
    "model_max_length": 192,
    "model_type": "bert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float16",
    "transformers_version": "4.26.0",
    "type_vocab_size": 2,
    "use_cache": True,
}


def auto_map(repository: str) -> dict[str, str]:
    heads = ("Model", "ForMaskedLM", "ForSequenceClassification")
    classes = {f"Auto{head if head == 'Model' else f'Model{head}'}": f"modeling_bert.JinaBert{head}" for head in heads}
    found = {"AutoConfig": "configuration_bert.JinaBertConfig", **classes}
    return {auto: f"{repository}--{name}" for auto, name in found.items()}


def jina_bert_weights(vocabulary: int, *, code: bool) -> dict[str, Tensor]:
    """Names without `bert.`."""
    make, weights = drawn(), {}
    weights["embeddings.word_embeddings.weight"] = make(vocabulary, WIDTH)
    weights["embeddings.token_type_embeddings.weight"] = make(2, WIDTH)
    norms = ["embeddings.LayerNorm"]
    for own in (f"encoder.layer.{i}" for i in range(LAYERS)):
        names = ("query", "key", "value")
        layers = [(f"attention.self.{name}", WIDTH, WIDTH, True) for name in names]
        layers += [("attention.output.dense", WIDTH, WIDTH, True)]
        layers += [("mlp.up_gated_layer" if code else "mlp.gated_layers", 2 * INNER, WIDTH, False)]
        layers += [("mlp.down_layer" if code else "mlp.wo", WIDTH, INNER, True)]
        for name, rows, columns, bias in layers:
            weights[f"{own}.{name}.weight"] = make(rows, columns)
            if bias:
                weights[f"{own}.{name}.bias"] = make(rows)
        further = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
        norms += [f"{own}.{name}" for name in ("attention.output.LayerNorm", *(further if code else ["mlp.layernorm"]))]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + make(WIDTH), make(WIDTH)
    return weights


def build_jina_bert(
    folder: Path, *, layout: str = "embedding", **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The layouts "embedding", "code", "reranker" and "colbert"; gives the weights, without `bert.`, and config.json
    with `changes`.
    """
    marks = ("[QueryMarker]", "[DocumentMarker]")
    make_tokenizer = byte_level(framed=True) if layout == "code" else word_piece()
    size = save_tokenizer(
        folder, (lambda: with_marks(word_piece()(), *marks)) if layout == "colbert" else make_tokenizer
    )
    repository = "jinaai/jina-bert-v2-qk-post-norm" if layout == "code" else "jinaai/jina-bert-implementation"
    config = {**CONFIG, "auto_map": auto_map(repository), "vocab_size": size, **changes}
    weights, make = jina_bert_weights(size, code=layout == "code"), drawn()
    pooler = {"pooler.dense.weight": make(WIDTH, WIDTH), "pooler.dense.bias": make(WIDTH)}
    if layout == "reranker":
        config |= {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        heads = {"classifier.weight": make(1, WIDTH), "classifier.bias": make(1)}
        saved = {f"bert.{name}": tensor for name, tensor in (weights | pooler).items()} | heads
        weights |= pooler | heads
    elif layout == "colbert":
        config["architectures"] = ["HF_ColBERT"]
        weights["linear.weight"] = make(16, WIDTH)
        saved = {name if name.startswith("linear") else f"bert.{name}": tensor for name, tensor in weights.items()}
        artifact = {"query_token_id": marks[0], "doc_token_id": marks[1], "query_maxlen": 12, "doc_maxlen": 180}
        write(folder / "artifact.metadata", {**artifact, "dim": 16, "attend_to_mask_tokens": True})
    else:
        saved = weights | pooler
        sentence_transformers(folder, "mean", 192, width=WIDTH)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    return weights, config
