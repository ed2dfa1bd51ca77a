"""Models with their own code: the known code, and the config.json with which the library computes the same.

Code is recognised by its file and class (`_CODE`), and by its repository if config.json names another one. The class
name alone is not enough, since a class with a name of the library may compute something else: in
`modeling_qwen.Qwen2Model` tokens attend in both directions. The tests compare each entry with a plain forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models import jina_code
from teimgr.models.bounded_json import read_object
from teimgr.models.directory import module_places
from teimgr.models.json_files import (
    HEADS,
    Config,
    ServedConfig,
    check_heads,
    classes_of,
    count,
    flag,
    number,
    refuse_unless,
)
from teimgr.models.modules import is_own_module

OWN_MODELS = frozenset({"jina_bert", "nomic_bert_moe"})
"""Model types of `engine/own_models`, to which config.json is converted."""


@dataclass(frozen=True, slots=True)
class _Code:
    """Known code: its model type, the owner of its repository if not in the model's own, and its classes."""

    model_type: str
    repository: str
    classes: frozenset[str]
    convert: Callable[[Config], ServedConfig]


def served_config(config: Config, trust_remote_code: bool) -> ServedConfig:
    """Return the config.json of a model, without `auto_map` if the library computes the same as the model's own code.

    Raises:
        ModelLoadFailed: the model needs code that the instance does not trust, or the known code has a setting that is
            not served.
    """
    if config["model_type"] in OWN_MODELS:
        raise ModelLoadFailed(f"config.json has the model_type {config['model_type']}, which no published model has")
    classes = references(config)
    code = next((code for code in _CODE if code.model_type == config["model_type"] and _has(code, classes)), None)
    if classes and code is not None:
        try:
            served = code.convert({key: value for key, value in config.items() if key != "auto_map"})
        except ModelLoadFailed:
            if not trust_remote_code:
                raise
            return ServedConfig(config)  # its own code reads that setting
        return replace(served, is_changed=True)
    if classes and not trust_remote_code:
        names = ", ".join(sorted({name for _, name in classes}))
        raise ModelLoadFailed(
            f"the model brings its own code ({names}), which is not known to be the same as the library's: "
            "it is run only where the instance sets trust_remote_code = true"
        )
    return ServedConfig(config) if classes else _without_code(config)


def references(config: Config) -> list[tuple[str, str]]:
    """Return the repository ("" for the model's own) and `file.Class` of every entry of `auto_map`.

    Raises:
        ModelLoadFailed: it is not an object.
    """
    named = config.get("auto_map") or {}
    if not isinstance(named, dict):
        raise ModelLoadFailed("auto_map should map the library's classes to own ones, and is a list or a text")
    entries = named.values()
    flat = [str(one) for entry in entries for one in (entry if isinstance(entry, list) else [entry]) if one]
    return [(one.rpartition("--")[0], one.rpartition("--")[2]) for one in flat]


def _has(code: _Code, classes: Iterable[tuple[str, str]]) -> bool:
    """True if all `classes` are of this code; a repository that ends in "/" is any of its owner."""
    of_owner = code.repository.endswith("/")
    return all(
        (where in ("", code.repository) or (of_owner and where.startswith(code.repository))) and name in code.classes
        for where, name in classes
    )


def _without_code(config: Config) -> ServedConfig:
    """Keys that decide about attention in a config.json without code, and models that are another under a name."""
    if config["model_type"] == "dpr":
        return _dpr(config)
    if config["model_type"] == "nomic_bert" and _OLD_NOMIC_KEYS & config.keys():
        return ServedConfig(_nomic(config).config, True)
    if config["model_type"] in _DECODERS and config.get("use_bidirectional_attention"):
        return ServedConfig(_both_ways(config), True)
    return ServedConfig(config)


DPR = "dpr"


def _dpr(config: Config) -> ServedConfig:
    """Facebook's DPR: the first token of a BERT, whose weights have `question_encoder.bert_model.` or the like before
    their names.
    """
    if config.get("projection_dim"):
        raise ModelLoadFailed(
            f"config.json has projection_dim = {config['projection_dim']!r}, which is not served for DPR"
        )
    kept = {key: value for key, value in config.items() if key != "projection_dim"}
    return ServedConfig({**kept, "model_type": "bert"}, True, weight_names=DPR)


# Decoders of the library that honour `is_causal: false` and ignore `use_bidirectional_attention`.
_DECODERS = frozenset({"qwen2", "qwen3", "llama", "mistral"})


def _both_ways(config: Config) -> Config:
    """`config` of a decoder whose tokens attend to all others; raises if it sets the opposite."""
    if config.get("is_causal") is True:
        raise ModelLoadFailed("config.json has use_bidirectional_attention and is_causal true, which contradict")
    kept = {key: value for key, value in config.items() if key != "use_bidirectional_attention"}
    return {**kept, "is_causal": False}


def _same(config: Config) -> ServedConfig:
    """The library's class computes the same from the same keys."""
    return ServedConfig(config)


def _qwen2(config: Config) -> ServedConfig:
    """Alibaba's gte-Qwen and NovaSearch's stella: `is_causal` is false by default in the forward of their class."""
    given = config.get("is_causal")
    causal = bool(given)
    how = "by config.json" if given is not None else "it is their class's default"
    reach = "to those before them" if causal else "in both directions"
    note = f"modeling_qwen.Qwen2Model: tokens attend {reach} ({how}); `is_causal` in config.json decides otherwise"
    return ServedConfig({**config, "is_causal": causal}, notes=(note,))


_DECODER_OF = {"llama_bidirec": "llama", "bidirectional_pplx_qwen3": "qwen3"}


def _both_ways_by_class(config: Config) -> ServedConfig:
    """voyage-4-nano: its linear layer, `num_labels` wide, is read as a Dense (`reading`)."""
    if config.get("use_bidirectional_attention") is not True or config.get("num_labels") is None:
        raise ModelLoadFailed(
            "config.json lacks use_bidirectional_attention = true or num_labels, which its code needs"
        )
    return ServedConfig(_both_ways(config))


def _encoder(config: Config) -> ServedConfig:
    """A decoder whose own class lets tokens attend to all others: NVIDIA's llama_bidirec, LLM2Vec's, pplx-embed-v1."""
    kept = {key: value for key, value in config.items() if key not in ("use_bidirectional_attention", "is_causal")}
    model_type = _DECODER_OF.get(config["model_type"], config["model_type"])
    return ServedConfig({**kept, "model_type": model_type, "is_causal": False})


_EMBED = "<|embed|>\n"


def _gritlm(config: Config) -> ServedConfig:
    """GritLM: a Mistral whose tokens attend to all others, without its sliding window, and the mean of those behind the
    instruction "<|user|>\n…\n<|embed|>\n", or behind "<|embed|>\n" alone, as its authors send documents.
    """
    kept = {key: value for key, value in config.items() if key not in ("is_causal", "sliding_window")}
    return ServedConfig(
        {**kept, "is_causal": False, "sliding_window": None},
        prompts={"document": _EMBED},
        pooling="mean",
        instruction_end=_EMBED,
    )


_NTK_KEYS = ("rope_scaling", "rope_theta")


def _gte(config: Config) -> ServedConfig:
    """Alibaba's new-impl as the library's Gte.

    Its `ntk` multiplies the base by the factor f and divides the frequencies by f^(2/d), for heads of size d, at every
    length: the library's linear scaling with another base.
    """
    refuse_unless(config, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True)
    refuse_unless(config, logn_attention_scale=False)
    scaling = config.get("rope_scaling") or {}
    base = float(config.get("rope_theta", 10000.0))  # the default of the class NewConfig
    rope: Config = {"rope_type": "default", "rope_theta": base}
    kind = scaling.get("type") or scaling.get("rope_type")
    if kind == "ntk":
        factor = number(scaling, "factor")
        if scaling.get("mixed_b") is not None:
            raise ModelLoadFailed("config.json has mixed_b in rope_scaling, which is not served")
        size = int(config["hidden_size"]) // int(config["num_attention_heads"])
        rope = {"rope_type": "linear", "factor": factor ** (2 / size), "rope_theta": base * factor}
    elif kind == "linear":
        rope = {"rope_type": "linear", "factor": number(scaling, "factor"), "rope_theta": base}
    elif kind not in (None, "default"):
        raise ModelLoadFailed(f"config.json has rope_scaling of type {kind}, which is not served for this model")
    kept = {key: value for key, value in config.items() if key not in (*_NTK_KEYS, *_GTE_KEYS)}
    defaults = {"type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    return ServedConfig({**defaults, **kept, "model_type": "gte", "rope_parameters": rope})


_GTE_KEYS = (
    *("position_embedding_type", "layer_norm_type", "pack_qkv", "logn_attention_scale", "logn_attention_clip1"),
    *("unpad_inputs", "use_memory_efficient_attention"),
)

ONNX = "onnx"
"""The weights are in an ONNX graph, with the names in the library's model at its export."""


def _bilingual(config: Config) -> ServedConfig:
    """XLM-RoBERTa under another name."""
    return ServedConfig({**config, "model_type": "xlm-roberta"})


def _lfm2(config: Config) -> ServedConfig:
    """LFM2 whose tokens attend to all others, and whose convolutions are centred (`engine/library_model.py`)."""
    if int(config.get("conv_L_cache", 3)) % 2 == 0:
        raise ModelLoadFailed(f"config.json has conv_L_cache = {config['conv_L_cache']}; centred ones are odd")
    return ServedConfig({**config, "is_causal": False})


# Sizes in Nomic's own code, with their names in the library.
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
_OLD_NOMIC_KEYS = frozenset({*_NOMIC_NAMES, "rotary_emb_base", "rotary_scaling_factor", "activation_function"})
# Its other settings, with the values that are served.
_NOMIC_FIXED: dict[str, tuple[Any, ...]] = {
    "causal": (False, None),
    "prenorm": (False, None),
    "parallel_block": (False, None),
    "parallel_block_tied_norm": (False, None),
    "use_rms_norm": (False, None),
    "rotary_emb_fraction": (1, None),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "expert_choice_router": (False, None),
    "ffn_div": (1, None),
    "moe_normalize_expert_weights": (False, None),
    "num_shared_experts": (0, None),
}
_NOMIC_UNUSED = frozenset({"moe_impl", "moe_resid_pdrop", "router_aux_loss_coef", "max_trained_positions"})
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu"}
_NOMIC_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_NOMIC_EXPERTS = ("num_experts", "moe_every_n_layers", "moe_top_k")


def _nomic(config: Config) -> ServedConfig:
    """Nomic's own configuration as the library's, or where it lacks what is set, as a model of our own
    (`engine/own_models`); the old keys win, which its own code reads.

    Past the trained length `rotary_scaling_factor` f makes the base grow with the length L of the text (dynamic NTK):
    base · (f·L/trained − (f − 1))^(d/(d − 2)), as the library's rope type "dynamic" does.
    """
    for key, values in _NOMIC_FIXED.items():
        if key in config and config[key] not in values:
            raise ModelLoadFailed(f"config.json has {key} = {config[key]!r}, which is not served for NomicBERT")
    if config.get("rotary_emb_fraction") == 0:
        raise ModelLoadFailed("config.json has rotary_emb_fraction = 0, which is not served for NomicBERT")
    named = {name: config[old] for old, name in _NOMIC_NAMES.items() if config.get(old) is not None}
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1000.0})
    if config.get("rotary_emb_base") is not None:
        rope = {"rope_type": "default", "rope_theta": float(config["rotary_emb_base"])}
    trained = int(config.get("max_trained_positions") or 2048)
    if config.get("rotary_scaling_factor"):
        rope = {**rope, "rope_type": "dynamic", "factor": number(config, "rotary_scaling_factor")}
    dropped = {*_NOMIC_NAMES, *_NOMIC_FIXED, *_NOMIC_UNUSED, "rotary_emb_base", "rotary_scaling_factor"}
    dropped |= {"rope_scaling", "rope_theta", "activation_function", *_NOMIC_BIASES, *_NOMIC_EXPERTS}
    kept = {key: value for key, value in config.items() if key not in dropped}
    served = {**kept, **named, **_nomic_layers(config), "max_position_embeddings": trained, "rope_parameters": rope}
    check_heads(served)
    return ServedConfig(served)


def _nomic_layers(config: Config) -> Config:
    """What the layers of a NomicBERT are made of: nothing where they are those of the library."""
    activation = config.get("activation_function", "swiglu")
    if activation not in _NOMIC_ACTIVATIONS:
        raise ModelLoadFailed(
            f"config.json has activation_function = {activation!r}, which is not served for NomicBERT"
        )
    biases = {key: flag(config, key, default=True) for key in _NOMIC_BIASES if key in config}
    every, experts = config.get("moe_every_n_layers") or 0, config.get("num_experts") or 0
    if activation == "swiglu" and not any(biases.values()) and not (every and experts):
        return {}
    layers: Config = {"model_type": "nomic_bert_moe", "hidden_act": _NOMIC_ACTIVATIONS[activation], **biases}
    if not (every and experts):
        return layers
    counts = {key: count(config, key, 0) for key in _NOMIC_EXPERTS}
    if counts["moe_top_k"] > counts["num_experts"]:
        raise ModelLoadFailed(
            f"config.json has moe_top_k = {counts['moe_top_k']} of num_experts = {counts['num_experts']}"
        )
    return layers | counts


def _gme(config: Config) -> ServedConfig:
    """GME, of the forward of Qwen2-VL (`models/vision_chats`)."""
    bounds = {"min_image_tokens": 256, "max_image_tokens": 1280, "max_length": 1800}
    least, most, longest = (count(config, key, default) for key, default in bounds.items())
    left = {key: value for key, value in config.items() if key not in bounds}
    return ServedConfig(left, chat_limits=(least, most, longest))


_NOMIC = classes_of("configuration_hf_nomic_bert", "modeling_hf_nomic_bert", "NomicBert", *HEADS, "ForPreTraining")
_SNOWFLAKE = classes_of("configuration_hf_alibaba_nlp_gte", "modeling_hf_alibaba_nlp_gte", "Gte", *HEADS)
_NVIDIA = classes_of(
    "llama_bidirectional_model", "llama_bidirectional_model", "LlamaBidirectional", "ForSequenceClassification"
)
_VOYAGE = frozenset({"modeling_qwen3_bidirectional.Qwen3BidirectionalModel"})
_GRITLM = frozenset(f"modeling_gritlm7b.Mistral{kind}" for kind in ("Model", "ForCausalLM"))
_PPLX = frozenset({"configuration.PPLXQwen3Config", "modeling.PPLXQwen3Model"})
_LFM2 = frozenset({f"modeling_lfm2_bidirectional.Lfm2Bidirectional{kind}" for kind in ("Model", "ForMaskedLM")})
_GME = frozenset(f"modeling_gme_qwen2vl.GmeQwen2VL{end}" for end in ("", "Config"))
_CODE = (
    _Code("nomic_bert", "nomic-ai/nomic-bert-2048", _NOMIC, _nomic),
    _Code("new", "Alibaba-NLP/new-impl", classes_of("configuration", "modeling", "New", *HEADS), _gte),
    _Code("gte", "Snowflake/snowflake-arctic-embed-m-v2.0", _SNOWFLAKE, _gte),
    _Code("xlm-roberta", "jinaai/xlm-roberta-flash-implementation", jina_code.XLM_CLASSES, jina_code.jina_xlm_roberta),
    _Code("jina_embeddings_v5", "jinaai/", jina_code.V5_CLASSES, jina_code.jina_v5),
    _Code("bert", "jinaai/jina-bert-implementation", jina_code.BERT_CLASSES, jina_code.jina_bert),
    _Code(
        "bert", "jinaai/jina-bert-v2-qk-post-norm", jina_code.BERT_CLASSES, partial(jina_code.jina_bert, qk_norm=True)
    ),
    _Code(
        "eurobert", "EuroBERT/", classes_of("configuration_eurobert", "modeling_eurobert", "EuroBert", *HEADS), _same
    ),
    _Code("bilingual", "dangvantuan/bilingual_impl", classes_of("config", "modeling", "Bilingual", *HEADS), _bilingual),
    _Code("lfm2", "LiquidAI/", _LFM2, _lfm2),
    _Code("phi3", "microsoft/", classes_of("configuration_phi3", "modeling_phi3", "Phi3", *HEADS), _same),
    _Code("qwen3", "voyageai/voyage-4-nano", _VOYAGE, _both_ways_by_class),
    _Code("qwen3", "jinaai/", frozenset({"modeling.JinaForRanking"}), _same),  # read by `models/scoring`
    _Code("bidirectional_pplx_qwen3", "perplexity-ai/", _PPLX, _encoder),
    _Code("qwen2_vl", "Alibaba-NLP/", _GME, _gme),
    _Code("qwen2", "Alibaba-NLP/", classes_of("configuration_qwen", "modeling_qwen", "Qwen2", *HEADS), _qwen2),
    _Code("llama_bidirec", "nvidia/", _NVIDIA, _encoder),
    _Code("llama", "McGill-NLP/", frozenset({"modeling_llama_encoder.LlamaEncoderModel"}), _encoder),
    _Code("mistral", "GritLM/", _GRITLM, _gritlm),
    _Code("mistral", "McGill-NLP/", frozenset({"modeling_mistral_encoder.MistralEncoderModel"}), _encoder),
)

# Own tokenizers that append the end token to every text if `add_eos_token` is set, and otherwise follow tokenizer.json.
_KNOWN_TOKENIZERS = ("", "Alibaba-NLP/gte-Qwen2-7B-instruct")
_ENDING_TOKENIZERS = frozenset({"tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"})


def added_end(tokenizer: Config, model_type: str, trust_remote_code: bool) -> str | None:
    """Return the token that follows every text by tokenizer_config.json, even if tokenizer.json lacks it; None for
    none.

    It is put there by the model's own tokenizer; and by the authors of e5-mistral and the models made like it, who
    measured them so: their tokenizer_config.json has `add_eos_token`.

    Raises:
        ModelLoadFailed: the tokenizer has its own code that is not known, and that the instance does not trust.
    """
    classes = references(tokenizer)
    if not classes:
        return _end_of(tokenizer) if model_type == "mistral" else None
    if not has_own_tokenizer(tokenizer):
        return _end_of(tokenizer)
    if trust_remote_code:
        return None
    names = ", ".join(sorted({name for _, name in classes}))
    raise ModelLoadFailed(
        f"the tokenizer brings its own code ({names}, in auto_map of tokenizer_config.json): "
        "it is run only where the instance sets trust_remote_code = true"
    )


def has_own_tokenizer(tokenizer: Config) -> bool:
    """True if tokenizer_config.json names code that is not known: where it is trusted, tokenizer.json is not enough."""
    return any(
        where not in _KNOWN_TOKENIZERS or name not in _ENDING_TOKENIZERS for where, name in references(tokenizer)
    )


def code_repositories(config: Config, tokenizer: Config) -> list[str]:
    """Return the other repositories whose code a trusted model runs, by its config.json and tokenizer_config.json."""
    classes = references(config)
    known = any(code.model_type == config.get("model_type") and _has(code, classes) for code in _CODE)
    found = [] if known else [where for where, _ in classes]
    found += [where for where, _ in references(tokenizer)] if has_own_tokenizer(tokenizer) else []
    return sorted({where for where in found if where})


def code_repositories_of(model: Path) -> list[str]:
    """`code_repositories` of a model's directory. Raises ModelLoadFailed: a file cannot be read."""
    found: set[str] = set()
    for place in module_places(model):
        config, tokenizer = (read_object(place.path / name) or {} for name in ("config.json", "tokenizer_config.json"))
        if is_own_module(place.type):  # it may load all code that the files name, known or not
            found |= {where for where, _ in (*references(config), *references(tokenizer))}
            found.add(place.type.rpartition("--")[0])
        else:
            found.update(code_repositories(config, tokenizer))
    return sorted(found - {""})


def _end_of(tokenizer: Config) -> str | None:
    """Return the end token if `add_eos_token` is set."""
    if not tokenizer.get("add_eos_token"):
        return None
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelLoadFailed("tokenizer_config.json has add_eos_token, and no eos_token")
    return text
