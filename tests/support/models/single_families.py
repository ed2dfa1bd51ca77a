"""Models of one family each: Jina's, bidirectional decoders, MonoT5, T5Gemma."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.models.encoders import build
from tests.support.models.families import FAMILIES, MAX_LENGTH, WIDTH, widened
from tests.support.models.files import byte_level, edit, pad_and_truncate, read, unigram, with_marks, word_piece, write
from tests.support.models.own_code import INNER, LAYERS, build_decoder, drawn, save_tokenizer, sentence_transformers
from torch import Tensor

from teimgr.engine.job import Input, Pair

JINA_BERT_WIDTH, _JINA_BERT_HEADS = 48, 6  # a number of heads that is no power of two, as in jina-embeddings-v2-base

_JINA_BERT_CONFIG = {
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
    "hidden_size": JINA_BERT_WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 192,
    "model_max_length": 192,
    "model_type": "bert",
    "num_attention_heads": _JINA_BERT_HEADS,
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
    weights["embeddings.word_embeddings.weight"] = make(vocabulary, JINA_BERT_WIDTH)
    weights["embeddings.token_type_embeddings.weight"] = make(2, JINA_BERT_WIDTH)
    norms = ["embeddings.LayerNorm"]
    for own in (f"encoder.layer.{i}" for i in range(LAYERS)):
        names = ("query", "key", "value")
        layers = [(f"attention.self.{name}", JINA_BERT_WIDTH, JINA_BERT_WIDTH, True) for name in names]
        layers += [("attention.output.dense", JINA_BERT_WIDTH, JINA_BERT_WIDTH, True)]
        layers += [("mlp.up_gated_layer" if code else "mlp.gated_layers", 2 * INNER, JINA_BERT_WIDTH, False)]
        layers += [("mlp.down_layer" if code else "mlp.wo", JINA_BERT_WIDTH, INNER, True)]
        for name, rows, columns, bias in layers:
            weights[f"{own}.{name}.weight"] = make(rows, columns)
            if bias:
                weights[f"{own}.{name}.bias"] = make(rows)
        further = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
        norms += [f"{own}.{name}" for name in ("attention.output.LayerNorm", *(further if code else ["mlp.layernorm"]))]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + make(JINA_BERT_WIDTH), make(JINA_BERT_WIDTH)
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
    config = {**_JINA_BERT_CONFIG, "auto_map": auto_map(repository), "vocab_size": size, **changes}
    weights, make = jina_bert_weights(size, code=layout == "code"), drawn()
    pooler = {"pooler.dense.weight": make(JINA_BERT_WIDTH, JINA_BERT_WIDTH), "pooler.dense.bias": make(JINA_BERT_WIDTH)}
    if layout == "reranker":
        config |= {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        heads = {"classifier.weight": make(1, JINA_BERT_WIDTH), "classifier.bias": make(1)}
        saved = {f"bert.{name}": tensor for name, tensor in (weights | pooler).items()} | heads
        weights |= pooler | heads
    elif layout == "colbert":
        config["architectures"] = ["HF_ColBERT"]
        weights["linear.weight"] = make(16, JINA_BERT_WIDTH)
        saved = {name if name.startswith("linear") else f"bert.{name}": tensor for name, tensor in weights.items()}
        artifact = {"query_token_id": marks[0], "doc_token_id": marks[1], "query_maxlen": 12, "doc_maxlen": 180}
        write(folder / "artifact.metadata", {**artifact, "dim": 16, "attend_to_mask_tokens": True})
    else:
        saved = weights | pooler
        sentence_transformers(folder, "mean", 192, width=JINA_BERT_WIDTH)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    return weights, config


TASKS = ("retrieval", "text-matching", "clustering", "classification")
ADAPTED = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
RANK, ALPHA = 4, 8
_LONGEST = 192
_OF_NANO = {
    "is_decoder": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "mask_token": "<mask>",
    "mask_token_id": 4,
    "hidden_dropout": 0.0,
    "rope_scaling": None,
    "rope_theta": 5000,
    "torch_dtype": "float32",
}


def build_jina_v5(folder: Path, *, nano: bool = False) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Gives the merged weights by task, and config.json."""
    torch.manual_seed(0)
    kind = FAMILIES["eurobert" if nano else "qwen3"]
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    edit(
        folder / "config.json",
        architectures=["JinaEmbeddingsV5Model"],
        task_names=list(TASKS),
        auto_map={
            "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
            "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
        },
        model_type="jina_embeddings_v5",
        max_position_embeddings=_LONGEST,
        **({**_OF_NANO, "rope_parameters": None} if nano else {}),
    )
    if nano:
        write(folder / "config.json", {key: v for key, v in read(folder / "config.json").items() if v is not None})
    row = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    write(folder / "modules.json", [{**row, "kwargs": ["task", "truncate_dim"]}])
    saved = {"prompts": {"query": "Query: ", "document": "Document: "}, "default_prompt_name": "document"}
    write(folder / "config_sentence_transformers.json", {**saved, "similarity_fn_name": "cosine"})
    weights = load_file(folder / "model.safetensors")
    return _adapters(folder, weights), read(folder / "config.json")


def _adapters(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    make = drawn(0.3)
    merged = {}
    for task in TASKS:
        saved, changed = {}, dict(weights)
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            if layer.endswith(ADAPTED):
                a, b = make(RANK, weight.shape[1]), make(weight.shape[0], RANK)
                saved |= {f"base_model.model.{layer}.lora_{half}.weight": w for half, w in (("A", a), ("B", b))}
                changed[name] = weight + ALPHA / RANK * b @ a
        own = folder / "adapters" / task
        own.mkdir(parents=True)
        save_file(saved, own / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "base_model_name_or_path": "jinaai/jina-embeddings-v5-text", "r": RANK}
        config |= {"lora_alpha": ALPHA, "init_lora_weights": "gaussian", "bias": "none", "inference_mode": True}
        write(own / "adapter_config.json", {**config, "target_modules": list(ADAPTED), "use_rslora": False})
        merged[task] = changed
    return merged


WIDER = 2 * WIDTH
VOYAGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "num_labels": WIDER,
    "use_bidirectional_attention": True,
}
PPLX = {
    "architectures": ["PPLXQwen3Model"],
    "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
    "use_cache": False,
}


def build_voyage(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    extra = {"linear.weight": drawn()(WIDER, WIDTH)}
    weights, config = build_decoder("qwen3", folder, pooling="mean", extra=extra, **VOYAGE | changes)
    return weights | extra, config


def build_pplx(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = build_decoder("qwen3", folder, pooling="mean", **PPLX)
    rows = read(folder / "modules.json")[:2]
    own = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    (folder / "modules.json").unlink()
    write(folder / "modules.json", [*rows, own])
    return found


NEMOTRON_CLASSES = {
    "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
    "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    "AutoModelForSequenceClassification": "llama_bidirectional_model.LlamaBidirectionalForSequenceClassification",
}
NEMOTRON = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "auto_map": NEMOTRON_CLASSES,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 1.0,
}


def build_nemotron(folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Gives the weights, without `model.`, and config.json."""
    torch.manual_seed(0)
    kind = FAMILIES["llama"]
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    weights = load_file(folder / "model.safetensors")
    score = {"score.weight": drawn()(1, WIDTH)}
    saved = {f"model.{name}": tensor for name, tensor in weights.items()} | score
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", **NEMOTRON | changes)
    return weights | score, read(folder / "config.json")


_WORDS = {"t5": ("▁true", "▁false"), "mt5": ("▁yes", "▁no")}
_CARDS = {"t5": "castorini/monot5-base-msmarco", "mt5": "unicamp-dl/mt5-base-mmarco-v2"}
_MONOT5_LONGEST = 96


def build_monot5(folder: Path, kind: str = "t5") -> Path:
    torch.manual_seed(0)
    tokenizer = unigram(None)()
    tokenizer.add_tokens(list(_WORDS[kind]))
    tokenizer.model_max_length = _MONOT5_LONGEST
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config: Any = transformers.T5Config if kind == "t5" else transformers.MT5Config
    model = transformers.AutoModelForSeq2SeqLM.from_config(config(vocab_size=len(tokenizer), **shape, **ids))
    widened(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    (folder / "README.md").write_text(f"---\nlicense: apache-2.0\n---\n# {_CARDS[kind]}\n")
    return folder


def monot5_scores(folder: Path, pairs: Sequence[Input], kind: str = "t5") -> list[np.ndarray]:
    """The probability of "true" against "false" as the first token, of one pair at a time: as mteb's MonoT5Reranker."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    yes, no = tokenizer.convert_tokens_to_ids(list(_WORDS[kind]))
    found = []
    with torch.inference_mode():
        for pair in pairs:
            assert isinstance(pair, Pair)
            text = f"Query: {pair.first} Document: {pair.second} Relevant:"
            given = tokenizer(text, truncation=True, max_length=_MONOT5_LONGEST, return_tensors="pt")
            start = torch.tensor([[model.config.decoder_start_token_id]])
            given.pop("token_type_ids", None)
            logits = model(**given, decoder_input_ids=start).logits[0, 0]
            found.append(logits[[no, yes]].softmax(-1)[1:].numpy())
    return found


_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def build_t5gemma(folder: Path, *, whole: bool = False, max_length: int = MAX_LENGTH) -> Path:
    """Write the model to `folder`; `whole`: with its decoder, and all weights below `model.`."""
    build("gemma2", folder, pooling="mean", modules=(), max_length=max_length)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = max(len(tokenizer["model"]["vocab"]), *(token["id"] + 1 for token in tokenizer["added_tokens"]))
    shape: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        "attn_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention"],
        **_IDS,
    }
    torch.manual_seed(1)
    config = transformers.T5GemmaConfig(encoder=shape, decoder=shape, vocab_size=size, initializer_range=0.2, **_IDS)
    model = widened(transformers.T5GemmaForConditionalGeneration(config))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if "lm_head" not in name}
    written = config.to_dict() | {"architectures": ["T5GemmaForConditionalGeneration"]}
    if not whole:
        weights = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.encoder.")}
        written |= {"is_encoder_decoder": False, "architectures": ["T5GemmaEncoderModel"]}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", written)
    return folder
