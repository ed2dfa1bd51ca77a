"""The metadata files of a model directory and of its PEFT adapters, read once; refuses untrusted code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed, ModelNotFound
from teimgr.files import expanded
from teimgr.models import hub
from teimgr.models.bounded_json import check_size, read_list, read_object
from teimgr.models.directory import (
    adapter_base,
    adapter_weights,
    base_model_of,
    check_fetched,
    configuration_folder,
    files_below,
    gguf_file,
    only_in,
    onnx_file,
    other_format,
)
from teimgr.models.gguf_head import read_gguf
from teimgr.models.json_files import ServedConfig, TokenFiles, read_settings
from teimgr.models.known_keys import ADAPTER
from teimgr.models.layout import Adapter
from teimgr.models.modules import GME_TRANSFORMER, JINA_TRANSFORMER, Chain, read_chain
from teimgr.models.own_code import ONNX, added_end, has_own_tokenizer, served_config
from teimgr.models.source import names_a_path

MODEL2VEC = "model2vec"
# Further files that the engine's libraries parse.
_READ_BY_LIBRARIES = (
    *("tokenizer.json", "vocab.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.json", "processor_config.json"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_STATIC = (MODEL2VEC, "static")
DUAL_ENCODERS = ("clip", "siglip", "siglip2")
"""Served model types of texts and images in one space."""
IMAGE_ENCODERS = ("dinov2", "dinov2_with_registers")
"""Served model types of images alone."""
PAGE_ENCODERS = ("colpali", "colqwen2", "colmodernvbert")
"""Served model types of queries and page images, with a vector for each token."""
VISION_CHATS = ("qwen3_vl", "qwen2_vl", "embedding_gemma2")
"""Model types of texts and images in one input, whose embedding models and rerankers are served."""
SOUND_ENCODERS = ("clap",)
"""Served model types of texts and sounds in one space."""
SENSES = (*DUAL_ENCODERS, *IMAGE_ENCODERS, *PAGE_ENCODERS, *VISION_CHATS, *SOUND_ENCODERS)
"""Served model types of images or sounds, with or without texts."""
_CARD_CHARACTERS = 10_000  # read of a model card
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata files of a model directory.

    `transformer_dir` is the directory of the first module: its config.json is `config`, as the library must read it
    (`config_is_changed` if it differs from the file), its sentence_bert_config.json `settings`. `saved` is
    config_sentence_transformers.json. `weight_names` is the naming scheme of the weights. `own_tokenizer` means that
    the tokenizer is the model's own trusted code; that appends `end_token` to every text. `own` has the prompts, tasks
    and pooling of known own code. `task_adapters` are PEFT's, by task. With `adapters`, `weights_dir` is the directory
    of the base model, which may have the tokenizer as well. `notes` are for the log, `warnings` are about the files.
    """

    root: Path
    transformer_dir: Path
    weights_dir: Path
    adapters: tuple[Adapter, ...]
    warnings: tuple[str, ...]
    config: dict[str, Any]
    config_is_changed: bool
    weight_names: str | None
    own: ServedConfig
    task_adapters: tuple[Adapter, ...]
    end_token: str | None
    own_tokenizer: bool
    notes: tuple[str, ...]
    saved: dict[str, Any]
    settings: dict[str, Any]
    chain: Chain
    tokens: TokenFiles
    static: bool

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(str(name) for name in self.config.get("architectures") or ())

    def has_head(self, ending: str) -> bool:
        """True if an architecture has this suffix, such as "ForMaskedLM"."""
        return any(name.endswith(ending) for name in self.architectures)

    @property
    def card(self) -> str:
        """The beginning of the model card in lower case; "" without one."""
        path = self.root / "README.md"
        if not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_CARD_CHARACTERS).lower()

    @property
    def card_front(self) -> list[str]:
        """The lines of the model card's front matter, in lower case."""
        head = [line.strip() for line in self.card.splitlines()]
        return head[1 : head.index("---", 1)] if head[:1] == ["---"] and "---" in head[1:] else []

    @property
    def prompts(self) -> dict[str, str]:
        given = self.saved.get("prompts")  # `models/kinds.py` refuses anything but an object
        saved = {name: text for name, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {}
        return {**self.own.prompts, **saved}


def read_metadata(root: Path, trust_remote_code: bool, chain: Chain | None = None) -> ModelMetadata:
    """Read the metadata files in `root`; `chain` is one of the routes of its modules.json.

    Raises:
        ModelNotFound: there is no such directory, or no config.json in it.
        ModelLoadFailed: a file is broken, or the model needs code that the instance does not trust.
    """
    _check_folder(root)
    chain = chain or read_chain(root, trust_remote_code)
    transformer = chain.modules[0].path if chain.modules else root
    config = read_object(transformer / "config.json")
    static = chain.first == "StaticEmbedding" or (config or {}).get("model_type") in _STATIC
    adapters, weights_dir, warnings = read_adapters(transformer)
    if config is None and adapters:
        config = read_object(weights_dir / "config.json")
    alone = None if config is not None or static else gguf_file(transformer)
    gguf = None if alone is None else read_gguf(alone)
    config = gguf.config.config if gguf else config
    if config is None and not static:
        raise _no_config(root, transformer)
    config = config or {}
    if static:
        config.setdefault("model_type", "static")
    if not config.get("model_type"):
        raise ModelLoadFailed("config.json has no model_type, so its architecture is unknown")
    _refuse_other_models(config)
    _check_sizes(config, alone.name if alone else "config.json")
    served = gguf.config if gguf else served_config(config, trust_remote_code)
    chain = _read_by_own_code(chain, served, root, trust_remote_code)
    if chain.reader is not None:
        _refuse_adapters(adapters, chain.reader.name)
        served = ServedConfig(config)  # unchanged, for its own code
    settings = read_settings(transformer)
    if adapters and not any((transformer / name).is_file() for name in _TOKENIZERS):
        transformer = weights_dir  # with the base model's tokenizer
    for name in _READ_BY_LIBRARIES:
        check_size(transformer / name)
    tokens = TokenFiles(transformer)
    return ModelMetadata(
        root=root,
        transformer_dir=transformer,
        weights_dir=weights_dir,
        adapters=adapters,
        warnings=warnings,
        config=served.config,
        config_is_changed=served.is_changed,
        own=served,
        task_adapters=read_task_adapters(weights_dir, served.adapters),
        weight_names=None if chain.reader is not None else _weight_names(weights_dir, served.weight_names),
        own_tokenizer=has_own_tokenizer(tokens.config),
        end_token=gguf.end_token if gguf else added_end(tokens.config, str(config["model_type"]), trust_remote_code),
        notes=served.notes,
        saved=read_object(root / "config_sentence_transformers.json") or {},
        settings=settings,
        chain=chain,
        tokens=tokens,
        static=static,
    )


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise ModelNotFound(f"No model directory at {root}")
    check_fetched(root)
    if (root / "gliner_config.json").is_file():
        raise ModelLoadFailed(
            "the model is a GLiNER (gliner_config.json), which finds entities of kinds that a request names; "
            "it is not served. Token classifiers with their own labels are"
        )


def _no_config(root: Path, transformer: Path) -> ModelLoadFailed | ModelNotFound:
    if (form := other_format(path.name for path in files_below(root, depth=1))) is not None:
        return ModelLoadFailed(f"the weights are {only_in(form, base_model_of(root))}")
    return ModelNotFound(f"{transformer} has no config.json")


def _read_by_own_code(chain: Chain, served: ServedConfig, root: Path, trust_remote_code: bool) -> Chain:
    """The chain, read by the repository's own code where it is of a family whose configuration is not known."""
    named = {row.get("type") for row in read_list(root / "modules.json")}
    for code, is_known in ((JINA_TRANSFORMER, served.tasks), (GME_TRANSFORMER, served.chat_limits)):
        if code in named and not is_known:
            chain = chain.read_by(code, root, trust_remote_code)
    return chain


def _refuse_adapters(adapters: tuple[Adapter, ...], reader: str) -> None:
    if adapters:
        raise ModelLoadFailed(
            f"{reader}, the first module of modules.json, is code in the model's own repository, and "
            "has an adapter of PEFT, which is not served"
        )


# Limits on sizes in config.json by which the library allocates memory before it reads weights. The largest known models
# have 126 layers, 128 heads, 16,384 columns, 262,144 ids and 131,072 positions.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "n_layer"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "n_head", "num_key_value_heads"), 4096),
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size", "head_dim"), 1 << 17),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "n_inner"), 1 << 20),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "type_vocab_size"), 1 << 24),
    # The library first makes a name for each label.
    **dict.fromkeys(("num_labels", "relative_attention_num_buckets"), 1 << 20),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 14),
    "moe_intermediate_size": 1 << 20,
}
_MAY_BE_ZERO = ("type_vocab_size", "max_position_embeddings", "num_labels", "num_experts", "num_local_experts")
_MAX_STAGES = 16  # of a Swin transformer, whose config has a list of head counts
_PARTS = ("encoder", "decoder")  # checked like `text_config` and the others


def _check_sizes(config: dict[str, Any], file: str) -> None:
    """Refuse sizes that no model has; the library would take memory and time for them first.

    Raises:
        ModelLoadFailed: one is not a whole number, below 1, or far beyond the largest known model, or a part that is
            read of every model is not an object.
    """
    _check_sizes_of(config, file)
    _check_object(config, "text_config", "")
    _check_object(config, "vlm_config", "")
    _check_object(config.get("vlm_config") or {}, "text_config", "vlm_config.")
    for name, part in config.items():
        if isinstance(part, dict) and (name.endswith("_config") or name in _PARTS):
            _check_sizes_of(part, f"{name} of config.json")
            for inner, nested in part.items() if name == "vlm_config" else ():
                if isinstance(nested, dict) and inner.endswith("_config"):
                    _check_sizes_of(nested, f"{name}.{inner} of config.json")


def _check_object(config: dict[str, Any], key: str, above: str) -> None:
    if (part := config.get(key)) is not None and not isinstance(part, dict):
        shown = repr(part)[:_MAX_SHOWN_CHARS]
        raise ModelLoadFailed(f"config.json has {above}{key} = {shown}, which should be an object")


def _check_sizes_of(config: dict[str, Any], where: str) -> None:
    for key, most in _SIZES.items():
        value = config.get(key)
        least = 0 if key in _MAY_BE_ZERO else 1
        if value is None:
            continue
        if key == "num_attention_heads" and isinstance(value, list) and 1 <= len(value) <= _MAX_STAGES:
            value = next((one for one in value if not isinstance(one, int) or not 1 <= one <= most), 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            shown = repr(value)[:_MAX_SHOWN_CHARS]
            raise ModelLoadFailed(f"{where} has {key} = {shown}, which should be a whole number of {least} to {most}")


def _weight_names(folder: Path, own: str | None) -> str | None:
    """Whose names the weights in `folder` have: `own`, or ONNX's where they are in a graph alone."""
    graph = onnx_file(folder)
    if graph is not None and own is not None:
        raise ModelLoadFailed(
            f"the weights are in {graph.name} alone, which is not read for models with their own code"
        )
    return own if graph is None else ONNX


# Model types that embed something other than texts, and what they embed.
_OTHER_MODELS = {
    **dict.fromkeys(("align", "altclip", "chinese_clip", "blip", "flava"), "images and text"),
    **dict.fromkeys(("whisper", "wav2vec2", "hubert", "wavlm"), "sound"),
    "modernvbert": "pages as images",
    **dict.fromkeys(("vit", "beit", "deit", "convnext"), "images"),
}
_KEYS_OF_SENSES = {"vision_config": "images", "visual": "images", "audio_config": "sound"}


def _refuse_other_models(config: dict[str, Any]) -> None:
    """Refuse models of images and sound by what they are: their text alone would go without their chat template."""
    model_type = str(config["model_type"])
    if model_type == "embedding_gemma2" and not config.get("vision_config"):
        raise ModelLoadFailed(
            "the EmbeddingGemma 2 lacks the part that reads images (vision_config of config.json), without which it is "
            "not served: use the files with all parts, like those of google/embeddinggemma-2"
        )
    if model_type in SENSES:
        return
    senses = _OTHER_MODELS.get(model_type) or next(
        (_KEYS_OF_SENSES[key] for key in _KEYS_OF_SENSES if config.get(key)), None
    )
    if senses is None and model_type.endswith(("_vl", "_omni")):
        senses = "images"
    if senses is not None:
        raise ModelLoadFailed(f"the model ({model_type}) embeds {senses}, which is not served")


FILE = "adapter_config.json"
# Initialisations of an adapter. Others change the weights of the base model as well.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
# The accepted patterns of layer names: names, alternatives, `.*`. The cost of other expressions has no bound: compiling
# 7 KB of character classes takes 5 s, matching nested repetitions takes forever.
_MAX_PATTERNS, _MAX_REPETITIONS = 256, 3
_PATTERN = re.compile(r"(?:[A-Za-z0-9_.|^$-]|\\[.dw]|\((?!\?)|\)(?![*+?])|(?<=[\w.])[*+?](?![*+?])){1,256}", re.ASCII)


def read_adapters(folder: Path) -> tuple[tuple[Adapter, ...], Path, tuple[str, ...]]:
    """The adapters of a transformer's directory in the order in which they are merged, the directory of their base
    model's transformer, and warnings; without an adapter no adapters and `folder` itself.

    Raises:
        ModelLoadFailed: an adapter is of a kind that cannot be merged, or its base model is not on this machine.
    """
    found: list[Adapter] = []
    warnings: list[str] = []
    while (config := read_object(folder / FILE)) is not None:
        if len(found) == hub.MAX_ADAPTERS:
            limit = hub.MAX_ADAPTERS
            raise ModelLoadFailed(f"more than {limit} adapters are stacked, the last in {folder}")
        found.insert(0, _adapter(folder, config))
        warnings += ADAPTER.warnings(FILE, config)
        folder = configuration_folder(_base_of(folder))
    return tuple(found), folder, tuple(warnings)


def read_task_adapters(root: Path, folders: Sequence[str]) -> tuple[Adapter, ...]:
    """Return the adapters in `folders` of a model, one for each task.

    Raises:
        ModelLoadFailed: one is missing, or of a kind that cannot be merged.
    """
    found = []
    for name in folders:
        config = read_object(root / name / FILE)
        if config is None:
            raise ModelLoadFailed(f"config.json names a task whose adapter is missing: {name}/{FILE}")
        ADAPTER.warnings(f"{name}/{FILE}", config)  # for its refusals
        found.append(_adapter(root / name, config))
    return tuple(found)


def _adapter(folder: Path, config: Mapping[str, Any]) -> Adapter:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadFailed(f"{FILE} has an adapter of the kind {kind}; only LORA is merged into its base model")
    if (beginning := config.get("init_lora_weights", True)) not in _PLAIN_BEGINNINGS:
        raise ModelLoadFailed(
            f"{FILE} has init_lora_weights = {beginning!r}, by which the weights of the base model were changed too: "
            "merge it into its model (merge_and_unload of peft) and serve that"
        )
    weights = adapter_weights(folder)
    if weights is None:
        raise ModelLoadFailed(f"{folder} has {FILE} and no adapter_model.safetensors")
    return Adapter(
        weights=weights,
        alpha=_number(config, "lora_alpha", 8),
        alphas=_by_pattern(config, "alpha_pattern"),
        by_root=bool(config.get("use_rslora")),
        transposed=bool(config.get("fan_in_fan_out")),
        has_magnitudes=bool(config.get("use_dora")),
        rank=_number(config, "r", 8),
        ranks=_by_pattern(config, "rank_pattern"),
    )


def _by_pattern(config: Mapping[str, Any], key: str) -> dict[str, float]:
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or len(given) > _MAX_PATTERNS:
        raise ModelLoadFailed(f"{FILE}: {key} should be an object with at most {_MAX_PATTERNS} patterns")
    for pattern in given:
        if not _PATTERN.fullmatch(pattern) or sum(pattern.count(sign) for sign in "*+?") > _MAX_REPETITIONS:
            raise ModelLoadFailed(
                f"{FILE} has the {key} {pattern[:80]!r}; served are layers' names with `.`, `|`, groups, \\d, \\w, and "
                f"up to {_MAX_REPETITIONS} of `*`, `+`, `?`, in 256 characters"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadFailed(f"{FILE} has the {key} {pattern!r}, which is not a pattern: {error}") from error
    return {pattern: _number(given, pattern) for pattern in given}


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    given = config.get(key, default)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ModelLoadFailed(f"{FILE} has {key} = {given!r}, which should be a number")
    return float(given)


def _base_of(folder: Path) -> Path:
    """Return the directory of the base model that an adapter names.

    Raises:
        ModelLoadFailed: it names none, or one that is not on this machine.
    """
    named = adapter_base(folder)
    if named is None:
        raise ModelLoadFailed(f"{FILE} names no base model (base_model_name_or_path)")
    model_id, revision = named
    if names_a_path(model_id):
        path = expanded(model_id)
        if hub.is_in_cache(folder) or not path.is_dir():
            raise ModelLoadFailed(f"the model is an adapter of {model_id}, a directory that is not on this machine")
        return path
    found = hub.find_cached(model_id, revision) or (hub.find_packaged(model_id) if revision is None else None)
    if found is None:
        at = f" (revision {revision})" if revision else ""
        raise ModelLoadFailed(f"the model is an adapter of {model_id}{at}, which is not on this machine: download it")
    return found.path
