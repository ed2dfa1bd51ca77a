"""The keys of a model's JSON files: which are honoured, which are harmless, and which are served at some values only.

One table per file. A key in no table is not read: if it is switched on, the model gets a warning, or is refused by the
setting `strict_model_files`. A key with a value that its table does not allow is refused, since it would change
vectors. For config.json the library's class of the model type declares the keys: `declared_keys` finds them in the
syntax tree of its source, without importing it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed

_MAX_SHOWN = 80  # characters of a value in a message
_OFF: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys of one file: teimgr or the library reads `honoured` ones, `harmless` ones change no result, and those in
    `only` must have one of the listed values.
    """

    honoured: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def warnings(self, file: str, content: Mapping[str, Any], declared: Iterable[str] = ()) -> list[str]:
        """Return a sentence for each key of `content` that is unknown and switched on; `declared` are further honoured
        ones.

        Raises:
            ModelLoadFailed: a key has a value that is not served.
        """
        found = []
        known = self.honoured | self.harmless | frozenset(declared)
        for key, value in content.items():
            if key in self.only:
                if not any(_same(value, one) for one in self.only[key]):
                    raise ModelLoadFailed(f"{file} has {key} = {_shown(value)}, which is not served")
            elif key not in known and value not in _OFF and not _HARMLESS_PATTERN.search(key):
                found.append(f"{file} has {key} = {_shown(value)}, which is not known here")
        return found


def _same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) is isinstance(allowed, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of any file that only training reads.
_HARMLESS_PATTERN = re.compile(
    r"(?:^|_)(?:dropout|pdrop)(?:$|_)|_dropout|^initializer_|^unsloth_|^_|^fused_|^use_(?:flash|memory_efficient|xentropy)"
)
_TRAINING = _words(
    """add_cross_attention adapters architectures attn_implementation bad_words_ids begin_suppress_tokens bos_token
    bos_token_id eos_token mask_token pad_token chunk_size_feed_forward classifier_bias cls_token_id
    cross_attention_hidden_size decoder_start_token_id dense_seq_output directionality diversity_penalty
    do_sample dtype early_stopping emb_pooler encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label is_composition label2id language length_penalty mask_token_id
    matryoshka_dimensions matryoshka_dims max_length max_new_tokens min_length model_max_length model_type n_ctx
    name no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id pad_vocab_size_multiple pooler_fc_size
    pooler_hidden_act pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix
    pretraining_tp remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict
    return_dict_in_generate sbert_ce_default_activation_function sentence_transformers sep_token_id
    sparse_pred_ignore_index sparse_prediction suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version transformers.js_config typical_p unk_token_id unpad_inputs use_bfloat16 use_cache
    use_return_dict vocab_size deterministic_flash_attn embedding_size gradient_checkpointing_kwargs
    reference_compile repad_logits_with_grad summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj problem_type auto_map use_mems_eval use_mems_train"""
)

# Keys of config.json besides those that the class of the model type declares. Each key in `only` changes what a layer
# computes; a class that does not declare it computes as with these values.
CONFIG = KnownKeys(
    honoured=_words("text_config n_positions pooling"),
    harmless=_TRAINING,
    only={
        "position_embedding_type": ("absolute", None),
        "feed_forward_type": ("original", None),
        "use_bidirectional_attention": (False, None),
        "bidirectional": (False, None),
        "quantization_config": (None,),
        "pruned_heads": ({}, None),
        "rope_scaling": (None, {}),
        "lora_adaptations": (None, []),
        "num_experts": (None, 0, 1),
        "alibi_starting_size": (None,),
        "prenorm": (False, None),
        "parallel_block": (False, None),
        "rotary_emb_interleaved": (False, None),
        "use_rms_norm": (False, None),
    },
)
# The library reads these keys if its class declares `rope_parameters`.
_ROTARY_KEYS = _words(
    "rope_theta rope_scaling partial_rotary_factor rotary_pct rotary_emb_base original_max_position_embeddings"
)

_TOKENS = _words(
    """bos_token eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens
    extra_special_tokens"""
)
TOKENIZER = KnownKeys(
    honoured=_TOKENS
    | _words(
        """add_bos_token add_eos_token add_prefix_space auto_map chat_template do_lower_case do_lowercase
        max_len model_input_names model_max_length strip_accents tokenizer_class truncation_side"""
    ),
    harmless=_words(
        """add_dummy_prefix added_tokens_decoder added_tokens backend clean_up_tokenization_spaces do_basic_tokenize
        errors from_slow full_tokenizer_file is_local keep_accents legacy legacy_behaviour local_files_only
        mask_token_id max_length name_or_path never_split pad_to_multiple_of pad_token_type_id padding
        padding_side processor_class remove_space return_token_type_ids sep_token_extra_id sp_model_kwargs
        spaces_between_special_tokens special_tokens special_tokens_map_file stride token tokenize_chinese_chars
        tokenizer_file tokenizer_type tokenizers_version torch_dtype trim_offsets trust_remote_code
        truncation truncation_strategy unk_id use_default_system_prompt use_fast vocab_size vocab_type wordpieces_prefix
        backend_tokenizer image_token audio_token video_token model_specific_special_tokens response_schema
        boi_token eoi_token boa_token eoa_token eoc_token eot_token escape_token etc_token etd_token etr_token
        soc_token sot_token stc_token std_token str_token extra_special_tokens
        do_sentence_split vocab_file merges_file extra_ids revision cache_dir split_by_punct unk_index max_seq_len"""
    ),
    only={
        "split_special_tokens": (False, None),
        "fix_mistral_regex": (False, None),
        "add_special_tokens": (True, None),
    },
)

# Keys of a Model2Vec table. The harmless ones state how it was made.
STATIC = KnownKeys(
    honoured=_words("model_type architectures normalize max_length"),
    harmless=_words(
        """tokenizer_name apply_pca apply_zipf sif_coefficient hidden_dim seq_length embedding_dtype cache_dir
        vocabulary_quantization transformers_version median_token_length language dtype torch_dtype
        vocab_size token_remove_pattern quantize_to"""
    ),
    only={"pooling": ("mean", None)},
)

SETTINGS = KnownKeys(
    honoured=_words(
        """max_seq_length do_lower_case transformer_task modality_config processing_kwargs query_length document_length
        query_expansion model_args model_kwargs tokenizer_args processor_kwargs config_args config_kwargs"""
    ),
    harmless=_words("unpad_inputs backend"),
    only={
        "module_output_name": ("token_embeddings", "sentence_embedding", "scores", "causal_logits", None),
        "tokenizer_name_or_path": (None,),
    },
)
# Arguments in sentence_bert_config.json by which the library makes the model, and the tokenizer.
MODEL_KWARGS = KnownKeys(
    harmless=_words(
        """attn_implementation dtype torch_dtype device_map low_cpu_mem_usage revision cache_dir token local_files_only
        trust_remote_code use_safetensors add_pooling_layer file_name provider subfolder"""
    ),
    only={"variant": (None,), "gguf_file": (None,)},
)
PROCESSOR_KWARGS = KnownKeys(
    honoured=_words("model_max_length truncation_side"),
    harmless=MODEL_KWARGS.harmless | _words("padding_side use_fast legacy clean_up_tokenization_spaces"),
    only={"split_special_tokens": (False, None)},
)
OF_TOKENS = _TOKENS | _words(
    """added_tokens_decoder add_bos_token add_eos_token add_prefix_space do_lower_case do_lowercase keep_accents
    model_input_names strip_accents tokenize_chinese_chars tokenizer_class"""
)
"""Arguments of a tokenizer that change the tokens of a text."""
CONFIG_KWARGS = KnownKeys(harmless=MODEL_KWARGS.harmless | _words("use_cache"))
PROCESSING_TEXT = KnownKeys(
    honoured=_words("max_length"),
    harmless=_words(
        "padding pad_to_multiple_of return_tensors return_attention_mask return_token_type_ids logits_to_keep"
    ),
    only={
        "truncation": (True, "longest_first"),
        "add_special_tokens": (True, None),
        "padding_side": ("left", "right", None),
    },
)

SAVED = KnownKeys(
    honoured=_words(
        """prompts default_prompt_name model_type truncate_dim max_active_dims activation_fn query_prefix
        document_prefix query_length document_length query_expansion do_query_expansion attend_to_expansion_tokens
        attend_to_mask_tokens skiplist_words"""
    ),
    harmless=_words("__version__ similarity_fn_name requirements keep_in_fp32_modules"),
)

# Keys of PEFT's configuration. Other values of those in `only` would change vectors and are not merged.
ADAPTER = KnownKeys(
    honoured=_words(
        """peft_type base_model_name_or_path revision r lora_alpha alpha_pattern use_rslora use_dora fan_in_fan_out
        init_lora_weights lora_bias bias rank_pattern"""
    ),
    harmless=_words(
        """auto_mapping task_type inference_mode target_modules exclude_modules lora_dropout layers_to_transform
        layers_pattern modules_to_save peft_version ensure_weight_tying qalora_group_size runtime_config
        loftq_config eva_config corda_config megatron_core modules_to_tie velora_config"""
    ),
    only={
        "megatron_config": (None, {}),
        "layer_replication": (None, []),
        "trainable_token_indices": (None, []),
        "target_parameters": (None, []),
        "alora_invocation_tokens": (None, []),
        "use_qalora": (False, None),
        "arrow_config": (None, {}),
        "lora_ga_config": (None, {}),
        "use_bdlora": (None, False),
        "kasa_config": (None, {}),
        "monteclora_config": (None, {}),
        "parent_library": (None,),
    },
)

POOLING_MODES = _words(
    """pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens pooling_mode_mean_sqrt_len_tokens
    pooling_mode_weightedmean_tokens pooling_mode_lasttoken"""
)
MODULES = {
    "Pooling": KnownKeys(
        honoured=POOLING_MODES | _words("pooling_mode include_prompt"),
        harmless=_words("embedding_dimension word_embedding_dimension pooling_output_dimension"),
    ),
    "Dense": KnownKeys(
        honoured=_words(
            """in_features out_features bias activation_function module_input_name module_output_name use_residual"""
        )
    ),
    "LayerNorm": KnownKeys(honoured=_words("dimension")),
    "Normalize": KnownKeys(honoured=_words("module_input_name module_output_name")),
    "SpladePooling": KnownKeys(
        honoured=_words("pooling_strategy activation_function"),
        harmless=_words("embedding_dimension word_embedding_dimension chunk_size"),
    ),
    "SparseStaticEmbedding": KnownKeys(harmless=_words("frozen"), only={"path": (None,)}),
    "LogitScore": KnownKeys(honoured=_words("true_token_id false_token_id module_input_name")),
    "MultiVectorMask": KnownKeys(honoured=_words("skiplist_words skiplist_tasks keep_only_token_ids")),
}
ROUTER = KnownKeys(honoured=_words("types structure parameters"))
ROUTER_PARAMETERS = KnownKeys(honoured=_words("default_route allow_empty_key route_mappings"))
# A row of modules.json. `kwargs` are arguments that code in the repository takes in a call.
MODULE_ROW = KnownKeys(honoured=_words("idx name path type"), only={"kwargs": (None, [], {})})


def config_warnings(config: Mapping[str, Any], file: str = "config.json") -> list[str]:
    """Return the unknown keys of a config.json, including those of its `text_config`.

    Raises:
        ModelLoadFailed: a key has a value that is not served.
    """
    declared = declared_keys(str(config.get("model_type", "")))
    if declared is None:
        return [f"{file} is of the model type {config.get('model_type')!r}, whose keys are not known"]
    rotates = "rope_parameters" in declared.names
    decodes = bool({"num_key_value_heads", "n_ctx", "n_inner"} & declared.names)
    read = declared.names | declared.read | (_ROTARY_KEYS if rotates else frozenset())
    only = {key: values for key, values in CONFIG.only.items() if key not in read}
    only["is_causal"] = (True, False, None) if decodes else (False, None)
    keys = KnownKeys(CONFIG.honoured, CONFIG.harmless, only)
    found = keys.warnings(file, config, read)
    nested = config.get("text_config")
    if isinstance(nested, dict) and nested.get("model_type"):
        found += config_warnings(nested, f"text_config of {file}")
    return found


# How the code of a configuration class, and that of a model, reads a key.
_OWN_READS = re.compile(r"\bself\.([a-z]\w*)|kwargs\.(?:pop|get)\(\"(\w+)\"")
_READS = re.compile(r"\bconfig\.([a-z]\w*)|getattr\((?:self\.)?config, \"(\w+)\"")

_MODEL_PART = re.compile("_(?:text|vision|audio)_model$")
_OWN = Path(__file__).parents[1] / "engine" / "own_models"


@dataclass(frozen=True, slots=True)
class DeclaredKeys:
    """The keys that a configuration class has, and the defaults that are literals.

    `aliases` are other names of keys in config.json (`n_positions` of GPT-2 is its `max_position_embeddings`). `read`
    are further keys that the model's code reads, such as Qwen2's `head_dim`.
    """

    names: frozenset[str]
    defaults: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    read: frozenset[str] = frozenset()


def setting(config: dict[str, Any], key: str) -> Any:
    """Return the value of a key of config.json as the library reads it: by another name, or the class's default."""
    declared = declared_keys(str(config["model_type"])) or DeclaredKeys(frozenset())
    names = [key, *(alias for alias, name in declared.aliases.items() if name == key)]
    given = next((config[name] for name in names if name in config), None)
    if given is not None or any(name in config for name in names):
        return given
    return next((declared.defaults[name] for name in names if name in declared.defaults), None)


@functools.lru_cache(maxsize=512)
def declared_keys(model_type: str) -> DeclaredKeys | None:
    """Return the keys that the configuration class of a model type declares; None if there is no such class."""
    path = _configuration_file(model_type)
    if path is None:
        return None
    for node in _classes_of(path).values():
        if _literals(node).get("model_type") == model_type:
            return replace(_declared(path, node), read=_read(path))
    return None


def _read(path: Path) -> frozenset[str]:
    """Return the keys that the code of a configuration reads from it."""
    found = _OWN_READS.findall(path.read_text(encoding="utf-8"))
    for model in sorted(path.parent.glob("modeling_*.py")):
        found += _READS.findall(model.read_text(encoding="utf-8"))
    return frozenset(name for names in found for name in names if name)


def _configuration_file(model_type: str) -> Path | None:
    name = model_type.replace("-", "_")
    if not name.isidentifier():  # it becomes part of a path
        return None
    own = _OWN / name / f"configuration_{name}.py"
    if own.is_file():
        return own
    models = _library() / "models"
    for folder in (name, name.removesuffix("_text"), name.removesuffix("_gpt"), _MODEL_PART.sub("", name)):
        # for gemma3_text, openai-gpt, clip_text_model
        path = models / folder / f"configuration_{folder}.py"
        if path.is_file():
            return path
    return next(models.glob(f"*/configuration_{name}.py"), None)  # for data2vec-text


@functools.cache
def _library() -> Path:
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path("/nonexistent")


@functools.cache
def _classes_of(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _declared(path: Path, node: ast.ClassDef) -> DeclaredKeys:
    """The fields of a class, those of its bases in the same file before them."""
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = DeclaredKeys(frozenset())
    for base in bases:
        if base == "PreTrainedConfig":
            found = _joined(found, _common())
        elif (parent := _classes_of(path).get(base)) is not None:
            found = _joined(found, _declared(path, parent))
    literals = _literals(node)
    aliases = literals.get("attribute_map")
    own = DeclaredKeys(_fields(node), literals, {ours: theirs for theirs, ours in (aliases or {}).items()})
    return _joined(found, own)


@functools.cache
def _common() -> DeclaredKeys:
    node = _classes_of(_library() / "configuration_utils.py")["PreTrainedConfig"]
    return DeclaredKeys(_fields(node), _literals(node))


def _joined(before: DeclaredKeys, behind: DeclaredKeys) -> DeclaredKeys:
    return DeclaredKeys(
        before.names | behind.names | behind.aliases.keys(),
        before.defaults | behind.defaults,
        before.aliases | behind.aliases,
    )


def _fields(node: ast.ClassDef) -> frozenset[str]:
    """Annotated fields, and plain ones, of which some classes have a few."""
    names = {
        line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    plain = [target for line in node.body if isinstance(line, ast.Assign) for target in line.targets]
    return frozenset(names | {target.id for target in plain if isinstance(target, ast.Name)})


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in node.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = line.value if isinstance(line, (ast.Assign, ast.AnnAssign)) else None
        if value is None:
            continue
        try:
            literal = ast.literal_eval(value)
        except ValueError:  # not a literal
            continue
        found.update((target.id, literal) for target in targets if isinstance(target, ast.Name))
    return found
