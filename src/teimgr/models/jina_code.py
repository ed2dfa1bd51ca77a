"""Jina's own code: XLM-RoBERTa (embeddings v3, reranker v2, colbert v2), embeddings v5 and JinaBERT v2."""

from __future__ import annotations

from teimgr.errors import ModelLoadFailed
from teimgr.models.directory import TASK_NAME
from teimgr.models.json_files import HEADS, Config, ServedConfig, check_heads, classes_of, number, refuse_unless

JINA_XLM_ROBERTA = "jina-xlm-roberta"
# Defaults of the class XLMRobertaFlashConfig that differ from the library's.
_JINA_DEFAULTS: Config = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
    "hidden_act": "gelu",
}
_JINA_KEYS = frozenset(
    {
        *(
            "position_embedding_type",
            "rotary_emb_base",
            "rope_theta",
            "use_flash_attn",
            "lora_adaptations",
            "lora_rank",
        ),
        *("lora_alpha", "lora_dropout_p", "lora_main_params_trainable", "load_trained_adapters", "lora_prompts"),
        *("task_instructions", "emb_pooler", "truncate_dim", "matryoshka_dimensions"),
    }
)


def jina_xlm_roberta(config: Config) -> ServedConfig:
    """Jina's flash implementation of XLM-RoBERTa, as the library's JinaEmbeddingsV3 where positions are rotary, else as
    its XLM-RoBERTa.
    """
    kept = {key: value for key, value in config.items() if key not in _JINA_KEYS}
    served = {**_JINA_DEFAULTS, **kept}
    positions = config.get("position_embedding_type", "absolute")
    if positions == "rotary":
        base = number(config, "rotary_emb_base") if "rotary_emb_base" in config else 10000.0  # the default of the class
        rope = {"rope_type": "default", "rope_theta": base}
        served |= {"model_type": "jina_embeddings_v3", "rope_parameters": rope}
    elif positions not in ("absolute", None):
        raise ModelLoadFailed(f"config.json has position_embedding_type = {positions!r}, which is not served here")
    names = config.get("lora_adaptations") or []
    if not names:
        return ServedConfig(served, weight_names=JINA_XLM_ROBERTA)
    if positions != "rotary" or config.get("load_trained_adapters") is False:
        raise ModelLoadFailed("config.json has lora_adaptations of a model whose LoRA weights are not served")
    given = config.get("task_instructions") or config.get("lora_prompts") or {}
    prompts = {str(name): str(given.get(name) or "") for name in names}
    numbers = {name: at for at, name in enumerate(prompts, 1)}
    scale = number(config, "lora_alpha") / number(config, "lora_rank")
    return ServedConfig(served, weight_names=JINA_XLM_ROBERTA, prompts=prompts, tasks=numbers, task_scale=scale)


_QUERY, _DOCUMENT = "Query: ", "Document: "
_RETRIEVAL = {"retrieval.query": _QUERY, "retrieval.passage": _DOCUMENT, "query": _QUERY, "document": _DOCUMENT}


def jina_v5(config: Config) -> ServedConfig:
    """jina-embeddings-v5-text: Qwen3 (small), or a EuroBERT (nano, by `is_decoder: false`), the last token, and a LoRA
    adapter of PEFT for each task. Texts are documents of the task that is asked for; roles are those of retrieval,
    which is the task of texts without one.
    """
    names = config.get("task_names")
    if not isinstance(names, list) or "retrieval" not in names or not all(map(_is_name, names)):
        raise ModelLoadFailed(f"config.json has task_names = {names!r}, which should be names, retrieval among them")
    kept = {key: value for key, value in config.items() if key not in ("task_names", "is_decoder")}
    places = {name: at for at, name in enumerate(names, 1)}
    prompts = {**_RETRIEVAL, **dict.fromkeys(names, _DOCUMENT)}
    retrieval = places["retrieval"]
    return ServedConfig(
        {**kept, "model_type": "eurobert" if config.get("is_decoder") is False else "qwen3"},
        notes=("texts without a task have that of retrieval",),
        prompts=prompts,
        tasks={name: places.get(name, retrieval) for name in prompts},
        default_task=retrieval,
        adapters=tuple(f"adapters/{name}" for name in names),
        pooling="last-token",
    )


def _is_name(given: object) -> bool:
    return isinstance(given, str) and TASK_NAME.fullmatch(given) is not None


def jina_bert(config: Config, qk_norm: bool = False) -> ServedConfig:
    """JinaBERT v2, a model of our own (`engine/own_models`); `qk_norm` is the variant for code."""
    refuse_unless(config, is_decoder=False, add_cross_attention=False)
    if config.get("position_embedding_type") != "alibi":
        given = config.get("position_embedding_type", "absolute")  # the default of the class
        raise ModelLoadFailed(
            f"config.json has position_embedding_type = {given!r}; for this model only 'alibi' is served"
        )
    if config.get("feed_forward_type") not in ("geglu", "reglu"):
        given = config.get("feed_forward_type", "original")  # the default of the class
        raise ModelLoadFailed(
            f"config.json has feed_forward_type = {given!r}; for this model only 'geglu' and 'reglu' are served"
        )
    check_heads(config)
    kept = {key: value for key, value in config.items() if key not in _JINA_BERT_UNUSED}
    return ServedConfig({**kept, "model_type": "jina_bert", "qk_norm": qk_norm})


# Keys that JinaBERT's code reads and that change nothing here: the activation of plain layers, the initial size of the
# table of slopes, the implementation of attention.
_JINA_BERT_UNUSED = frozenset(
    {"hidden_act", "alibi_starting_size", "attn_implementation", "is_decoder", "add_cross_attention"}
)

XLM_CLASSES = classes_of(
    "configuration_xlm_roberta", "modeling_xlm_roberta", "XLMRoberta", *HEADS, "ForPreTraining"
) | {"configuration_xlm_roberta.XLMRobertaFlashConfig", "modeling_lora.XLMRobertaLoRA"}
V5_CLASSES = frozenset(
    {"configuration_jina_embeddings_v5.JinaEmbeddingsV5Config", "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"}
)
BERT_CLASSES = classes_of("configuration_bert", "modeling_bert", "JinaBert", *HEADS)
