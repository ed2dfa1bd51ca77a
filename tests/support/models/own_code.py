"""Models whose repositories carry code of their own: config.json and weights as the hub has them, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.models.families import FAMILIES, WIDTH
from tests.support.models.files import (
    byte_level,
    edit,
    pad_and_truncate,
    read,
    unigram,
    with_marks,
    word_piece,
    write,
    write_modules,
)
from torch import Tensor

INNER, HEADS, LAYERS = 64, 4, 2
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 48,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_positions": 192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.37.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}
# nomic-embed-text-v2-moe, beside the keys of v1.
NOMIC_MOE = {
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_layer": 4,
    "num_experts": 8,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "router_aux_loss_coef": 0.1,
    "type_vocab_size": 1,
}
NEW = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
        "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
        "AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM",
        "AutoModelForMultipleChoice": "Alibaba-NLP/new-impl--modeling.NewForMultipleChoice",
        "AutoModelForQuestionAnswering": "Alibaba-NLP/new-impl--modeling.NewForQuestionAnswering",
        "AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification",
        "AutoModelForTokenClassification": "Alibaba-NLP/new-impl--modeling.NewForTokenClassification",
    },
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 192,
    "model_type": "new",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float32",
    "transformers_version": "4.39.1",
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}

JINA_XLM = {
    "architectures": ["XLMRobertaModel"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel",
        "AutoModelForMaskedLM": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaForMaskedLM",
        "AutoModelForPreTraining": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta."
        "XLMRobertaForPreTraining",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-5,
    "load_trained_adapters": True,
    "matryoshka_dimensions": [8, 16, WIDTH],
    "max_position_embeddings": 194,
    "model_type": "xlm-roberta",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": False,
    "use_flash_attn": True,
}
# jina-reranker-v2: the same code in the model's own repository.
JINA_RERANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "auto_map": {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
        "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
    },
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "position_embedding_type": "absolute",
}

Drawn = Callable[..., Tensor]


def drawn(scale: float = 0.2) -> Drawn:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: scale * torch.randn(*shape, generator=generator)


def _norm(weights: dict[str, Tensor], name: str, make: Drawn) -> None:
    weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + make(WIDTH), make(WIDTH)


def nomic_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a NomicBERT with gated or plain layers, biases, and experts, as `config` has them."""
    make, weights = drawn(), {}
    weights["embeddings.word_embeddings.weight"] = make(config["vocab_size"], WIDTH)
    if config["type_vocab_size"]:
        weights["embeddings.token_type_embeddings.weight"] = make(config["type_vocab_size"], WIDTH)
    _norm(weights, "emb_ln", make)

    def add(name: str, rows: int, columns: int, bias: str) -> None:
        weights[f"{name}.weight"] = make(rows, columns)
        if config[bias]:
            weights[f"{name}.bias"] = make(rows)

    for i, own in enumerate(f"encoder.layers.{i}" for i in range(config["n_layer"])):
        add(f"{own}.attn.Wqkv", 3 * WIDTH, WIDTH, "qkv_proj_bias")
        add(f"{own}.attn.out_proj", WIDTH, WIDTH, "qkv_proj_bias")
        if config.get("moe_every_n_layers") and i % config["moe_every_n_layers"] == 1:
            experts = config["num_experts"]
            weights[f"{own}.mlp.router.layer.weight"] = make(experts, WIDTH)
            weights |= {f"{own}.mlp.experts.mlp.{name}": make(experts * INNER, WIDTH) for name in ("w1", "w2")}
            weights[f"{own}.mlp.experts.bias"] = make(WIDTH)
        else:
            for name in ("fc11", "fc12") if config["activation_function"] == "swiglu" else ("fc1",):
                add(f"{own}.mlp.{name}", INNER, WIDTH, "mlp_fc1_bias")
            add(f"{own}.mlp.fc2", WIDTH, INNER, "mlp_fc2_bias")
        _norm(weights, f"{own}.norm1", make)
        _norm(weights, f"{own}.norm2", make)
    return weights


def new_weights(vocabulary: int, types: int) -> dict[str, Tensor]:
    make, weights = drawn(), {}
    weights["embeddings.word_embeddings.weight"] = make(vocabulary, WIDTH)
    if types:
        weights["embeddings.token_type_embeddings.weight"] = make(types, WIDTH)
    _norm(weights, "embeddings.LayerNorm", make)
    for own in (f"encoder.layer.{i}" for i in range(LAYERS)):
        for name, rows, columns, bias in (
            ("attention.qkv_proj", 3 * WIDTH, WIDTH, True),
            ("attention.o_proj", WIDTH, WIDTH, True),
            ("mlp.up_gate_proj", 2 * INNER, WIDTH, False),
            ("mlp.down_proj", WIDTH, INNER, True),
        ):
            weights[f"{own}.{name}.weight"] = make(rows, columns)
            if bias:
                weights[f"{own}.{name}.bias"] = make(rows)
        _norm(weights, f"{own}.attn_ln", make)
        _norm(weights, f"{own}.mlp_ln", make)
    return weights


def build_nomic(folder: Path, *, max_length: int = 192, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """nomic-embed-text-v1 and its like, with `changes` such as `NOMIC_MOE`; gives the weights and config.json."""
    moe = changes.get("num_experts")
    size = save_tokenizer(folder, unigram("<s>") if moe else word_piece())
    config = {**NOMIC, "vocab_size": size, **changes}
    weights = nomic_weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    sentence_transformers(folder, "mean", max_length)
    return weights, config


def build_new(
    folder: Path, *, pooling: str = "cls", head: bool = False, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """gte-multilingual-base, or with `head` its reranker; gives the weights, without `new.`, and config.json."""
    size = save_tokenizer(folder, unigram("<s>"))
    config = {**NEW, "vocab_size": size, **changes}
    weights = new_weights(size, config["type_vocab_size"])
    if head:
        config["architectures"] = ["NewForSequenceClassification"]
        make = drawn()
        weights |= {"pooler.dense.weight": make(WIDTH, WIDTH), "pooler.dense.bias": make(WIDTH)}
        saved = {f"new.{name}": tensor for name, tensor in weights.items()}
        weights |= {"classifier.weight": make(1, WIDTH), "classifier.bias": make(1)}
        saved |= {name: weights[name] for name in ("classifier.weight", "classifier.bias")}
    else:
        saved = weights
        sentence_transformers(folder, pooling, 192)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    return weights, config


def build_new_masked(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The transformer of opensearch-neural-sparse-encoding-doc-v3-gte: a masked-LM head that shares its matrix.
    Its config.json is given and not written: with it there, transformers asks about the code that it names.
    """
    size = save_tokenizer(folder, word_piece())
    config = {**NEW, "vocab_size": size, "type_vocab_size": 0, "architectures": ["NewForMaskedLM"]}
    make, weights = drawn(), new_weights(size, 0)
    heads = {"lm_head.dense.weight": make(WIDTH, WIDTH), "lm_head.dense.bias": make(WIDTH)}
    _norm(heads, "lm_head.norm", make)
    heads["lm_head.decoder.bias"] = make(size)
    saved = {f"new.{name}": tensor for name, tensor in weights.items()} | heads
    saved["lm_head.decoder.weight"] = weights["embeddings.word_embeddings.weight"].clone()
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return weights | heads | {"lm_head.decoder.weight": saved["lm_head.decoder.weight"]}, config


def jina_xlm_weights(vocabulary: int, positions: int) -> dict[str, Tensor]:
    """Names without `roberta.`; `positions` rows in the table of positions, 0 for none."""
    make, weights = drawn(), {}
    weights["embeddings.word_embeddings.weight"] = make(vocabulary, WIDTH)
    weights["embeddings.token_type_embeddings.weight"] = make(1, WIDTH)
    if positions:
        weights["embeddings.position_embeddings.weight"] = make(positions, WIDTH)
    _norm(weights, "emb_ln", make)
    for own in (f"encoder.layers.{i}" for i in range(LAYERS)):
        for name, rows, columns in (
            ("mixer.Wqkv", 3 * WIDTH, WIDTH),
            ("mixer.out_proj", WIDTH, WIDTH),
            ("mlp.fc1", INNER, WIDTH),
            ("mlp.fc2", WIDTH, INNER),
        ):
            weights[f"{own}.{name}.weight"], weights[f"{own}.{name}.bias"] = make(rows, columns), make(rows)
        _norm(weights, f"{own}.norm1", make)
        _norm(weights, f"{own}.norm2", make)
    return weights


def build_jina_xlm(
    folder: Path, *, layout: str = "embedding", **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Models on Jina's XLM-RoBERTa: "embedding", "reranker" (jina-reranker-v2) or "colbert" (jina-colbert-v2); gives
    the weights, without `roberta.`, and config.json.
    """
    marks = ("[QueryMarker]", "[DocumentMarker]")
    size = save_tokenizer(folder, _marked(*marks) if layout == "colbert" else unigram("<s>"))
    config = {**JINA_XLM, **(JINA_RERANKER if layout == "reranker" else {}), "vocab_size": size, **changes}
    is_absolute = config["position_embedding_type"] == "absolute"
    weights = jina_xlm_weights(size, config["max_position_embeddings"] if is_absolute else 0)
    saved = {f"roberta.{name}": tensor for name, tensor in weights.items()}
    make, heads = drawn(), {}
    if layout == "reranker":
        heads = {"classifier.dense.weight": make(WIDTH, WIDTH), "classifier.dense.bias": make(WIDTH)}
        heads |= {"classifier.out_proj.weight": make(1, WIDTH), "classifier.out_proj.bias": make(1)}
    elif layout == "colbert":
        config["architectures"] = ["HF_ColBERT"]
        heads = {"linear.weight": make(16, WIDTH)}
        artifact = {"query_token_id": marks[0], "doc_token_id": marks[1], "query_maxlen": 12, "doc_maxlen": 180}
        write(folder / "artifact.metadata", {**artifact, "dim": 16, "attend_to_mask_tokens": True})
    else:
        sentence_transformers(folder, "mean", 192)
    save_file({**saved, **heads}, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    return weights | heads, config


TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
RANK = 4


def build_jina_v3(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """jina-embeddings-v3: LoRA weights of five tasks on every layer and table. Gives the merged weights by task, under
    "" those of no task, without `roberta.`, and config.json.
    """
    weights, _ = build_jina_xlm(folder)
    instructions = {"retrieval.query": "query: ", "retrieval.passage": "passage: "}
    code = "jinaai/xlm-roberta-flash-implementation--"
    edit(
        folder / "config.json",
        architectures=["XLMRobertaLoRA"],
        auto_map={
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_lora.XLMRobertaLoRA",
            "AutoModelForMaskedLM": f"{code}modeling_xlm_roberta.XLMRobertaForMaskedLM",
        },
        lora_adaptations=list(TASKS),
        lora_alpha=2,
        lora_dropout_p=0.0,
        lora_main_params_trainable=False,
        lora_rank=RANK,
        task_instructions={task: instructions.get(task, "") for task in TASKS},
    )
    make = drawn(0.3)
    merged = {task: dict(weights) for task in ("", *TASKS)}
    saved: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if weight.dim() != 2 or layer == name:
            saved[f"roberta.{name}"] = weight
            continue
        own, is_table = f"roberta.{layer}.parametrizations.weight", "embeddings" in layer
        rows, columns = weight.shape
        a = make(len(TASKS), rows, RANK) if is_table else make(len(TASKS), RANK, columns)
        b = make(len(TASKS), RANK, columns) if is_table else make(len(TASKS), rows, RANK)
        saved |= {f"{own}.original": weight, f"{own}.0.lora_A": a, f"{own}.0.lora_B": b}
        for k, task in enumerate(TASKS):
            merged[task][name] = weight + (a[k] @ b[k] if is_table else b[k] @ a[k]) * (2 / RANK)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    rows_of = read(folder / "modules.json")
    write(folder / "modules.json", [{**rows_of[0], "type": "custom_st.Transformer", "kwargs": ["task"]}, *rows_of[1:]])
    return merged, read(folder / "config.json")


def build_decoder(
    family: str, folder: Path, *, pooling: str = "lasttoken", extra: dict[str, Tensor] | None = None, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A decoder's checkpoint in sentence-transformers' layout, with `changes` to config.json, which is given back."""
    torch.manual_seed(0)
    kind = FAMILIES[family]
    tokenizer = kind.tokenizer()
    kind.encoder(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    edit(folder / "config.json", **changes)
    sentence_transformers(folder, pooling, 192)
    weights = load_file(folder / "model.safetensors")
    if extra:
        save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})
    return weights, read(folder / "config.json")


def build_gritlm(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """GritLM-7B: a Mistral with code of its own and no file of sentence-transformers."""
    code = {
        "AutoModel": "modeling_gritlm7b.MistralModel",
        "AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM",
    }
    found = build_decoder("mistral", folder, auto_map=code, architectures=["MistralForCausalLM"], sliding_window=24)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (folder / name).unlink()
    return found


def build_lfm2(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """LFM2.5-Embedding: LFM2 with code of its own, the first token pooled; gives the weights and config.json."""
    torch.manual_seed(0)
    size = save_tokenizer(folder, byte_level(framed=True))
    config = transformers.Lfm2Config(
        vocab_size=size,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        max_position_embeddings=192,
        initializer_range=0.2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    own = "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"
    edit(folder / "config.json", architectures=["Lfm2BidirectionalModel"], auto_map={"AutoModel": own})
    sentence_transformers(folder, "cls", 192)
    return load_file(folder / "model.safetensors"), read(folder / "config.json")


def _marked(*marks: str) -> Callable[[], Any]:
    return lambda: with_marks(unigram("<s>")(), *marks)


def save_tokenizer(folder: Path, make: Callable[[], Any]) -> int:
    """Make the folder, with a tokenizer; the number of its ids."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make()
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    return len(tokenizer)


def sentence_transformers(folder: Path, pooling: str, max_length: int, *, width: int = WIDTH) -> None:
    """modules.json and the files that it names: Transformer, Pooling, Normalize."""
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{name}": mode == pooling for mode, name in modes.items()}
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    names = ("Transformer", "Pooling", "Normalize")
    write_modules(folder, *(f"sentence_transformers.models.{name}" for name in names))
