"""Chooses the kind of a model, by its files or the instance's configuration, and checks that its files can be served.

`check_files` compares every file with the tables of known keys: a key that cannot be served correctly is refused by
name; an unknown key is a warning of the model. `engine/text/tokenizer_config.py`, which has the tokenizer, checks
tokenizer_config.json against tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.bounded_json import read_list
from teimgr.models.directory import ROUTERS, base_model_of, router_file, use_original, weight_files
from teimgr.models.known_keys import (
    CONFIG_KWARGS,
    MODEL_KWARGS,
    MODULE_ROW,
    MODULES,
    OF_TOKENS,
    PROCESSING_TEXT,
    PROCESSOR_KWARGS,
    ROUTER,
    ROUTER_PARAMETERS,
    SAVED,
    SETTINGS,
    STATIC,
    TOKENIZER,
    config_warnings,
)
from teimgr.models.late_interaction import is_pylate
from teimgr.models.metadata import IMAGE_ENCODERS, PAGE_ENCODERS, SENSES, ModelMetadata
from teimgr.models.modules import KNOWN_OWN
from teimgr.models.scoring import has_prompt_of_its_own, is_listwise, label_count, writes_text
from teimgr.models.vision_chats import is_vision_chat, kind_of_vision_chat
from teimgr.spec import KINDS, Kind

_SCORING = (Kind.RERANKER, Kind.CLASSIFIER, Kind.TOKEN_CLASSIFIER)


def choose_kind(metadata: ModelMetadata, configured: str | None, pooling: str | None) -> Kind:
    """Return the kind to serve; `configured` and `pooling` of the instance take precedence over the files.

    Raises:
        InvalidConfig: `configured` or `pooling` contradicts the files; the message has the reason.
        ModelLoadFailed: the files describe an unsupported kind.
    """
    if configured is not None and configured not in KINDS:
        raise InvalidConfig(f"kind {configured!r} is not one of {', '.join(KINDS)}")
    own = _own_kind(metadata)
    wanted = Kind(configured) if configured is not None else own
    if pooling == "splade" and wanted not in _SCORING:  # TEI ignores the pooling of scoring models
        wanted = _splade(metadata, own, configured)
    elif pooling is not None and wanted is Kind.SPARSE:
        raise InvalidConfig(
            f"pooling {pooling!r} contradicts the sparse (SPLADE) model; "
            'set kind = "embedding" as well to serve the vectors of its encoder'
        )
    if wanted is own:
        return own
    if reason := _obstacle(metadata, own, wanted):
        raise InvalidConfig(f'kind = "{wanted.value}" contradicts the model\'s files: {reason}')
    return wanted


def _own_kind(metadata: ModelMetadata) -> Kind:
    named = metadata.saved.get("model_type")
    if metadata.config["model_type"] in PAGE_ENCODERS:
        return Kind.MULTI_VECTOR
    if metadata.config["model_type"] in IMAGE_ENCODERS:
        return Kind.EMBEDDING
    if is_vision_chat(metadata):
        return kind_of_vision_chat(metadata)
    if metadata.static:
        return Kind.EMBEDDING
    if named == "SparseEncoder" or metadata.chain.has("SpladePooling"):
        return Kind.SPARSE
    if named in ("MultiVectorEncoder", "ColBERT") or metadata.chain.has("MultiVectorMask") or is_pylate(metadata):
        return Kind.MULTI_VECTOR
    if named == "CrossEncoder" or metadata.chain.has("LogitScore"):
        return _scoring(metadata)
    return Kind.EMBEDDING if metadata.chain.modules else _kind_of_bare(metadata)


def _kind_of_bare(metadata: ModelMetadata) -> Kind:
    """Return the kind of a directory without modules.json, by the head of its architecture."""
    if "HF_ColBERT" in metadata.architectures:
        return Kind.MULTI_VECTOR
    if is_listwise(metadata):
        return Kind.RERANKER
    for name in metadata.architectures:
        if name.endswith("ForSequenceClassification"):
            return _scoring(metadata)
        if name.endswith("ForTokenClassification") and "id2label" in metadata.config:
            return Kind.TOKEN_CLASSIFIER
        if name.endswith("Classification") and "id2label" in metadata.config:
            raise ModelLoadFailed(
                f"{name} labels the parts of an input, not the text as a whole; such a head is not served"
            )
    if writes_text(metadata) and has_prompt_of_its_own(metadata):
        return Kind.RERANKER
    return Kind.EMBEDDING


def _scoring(metadata: ModelMetadata) -> Kind:
    return Kind.RERANKER if is_causal(metadata) or label_count(metadata) == 1 else Kind.CLASSIFIER


def is_causal(metadata: ModelMetadata) -> bool:
    """True if scores come from a causal language model's next token."""
    if metadata.chain.has("LogitScore"):
        return True
    if metadata.chain.behind:  # modules give the scores
        return False
    return writes_text(metadata) and not metadata.has_head("ForSequenceClassification")


def _splade(metadata: ModelMetadata, own: Kind, configured: str | None) -> Kind:
    if configured not in (None, Kind.SPARSE.value):
        raise InvalidConfig(f'pooling "splade" makes a sparse model, and kind is "{configured}"')
    if own is not Kind.SPARSE and not metadata.has_head("ForMaskedLM"):
        raise InvalidConfig(f'pooling "splade" needs a masked-LM head, and the model is {_architecture(metadata)}')
    return Kind.SPARSE


def _obstacle(metadata: ModelMetadata, own: Kind, wanted: Kind) -> str | None:
    """Why a model of kind `own` cannot be served as `wanted`; None if it can."""
    if is_listwise(metadata):
        return "they are those of a reranker that compares the documents of a list"
    if is_vision_chat(metadata):
        return f"they are those of a model of the kind {own.value}"
    if wanted is Kind.EMBEDDING:
        return "they describe a vector per token and no pooling" if own is Kind.MULTI_VECTOR else None
    if wanted is Kind.SPARSE:
        return None if metadata.has_head("ForMaskedLM") else f"{_architecture(metadata)} has no masked-LM head"
    if wanted is Kind.TOKEN_CLASSIFIER:
        is_one = metadata.has_head("ForTokenClassification")
        return None if is_one else f"{_architecture(metadata)} has no head that labels tokens"
    if wanted is Kind.MULTI_VECTOR:
        return "they hold no projection of token vectors"
    if own in (Kind.RERANKER, Kind.CLASSIFIER):
        if wanted is Kind.RERANKER:
            return f"they have {label_count(metadata)} labels, and a reranker has one"
        return "a language model answers yes or no to pairs, and has no labels" if is_causal(metadata) else None
    if wanted is Kind.RERANKER and writes_text(metadata) and not metadata.chain.modules:
        return None
    return f"{_architecture(metadata)} has no head that scores texts"


def _architecture(metadata: ModelMetadata) -> str:
    return ", ".join(metadata.architectures) or f"a {metadata.config['model_type']} model"


_SETTINGS_FILE, _SAVED_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
# Tables by key of sentence_bert_config.json: names before and since sentence-transformers 5.4.
_KWARGS = {
    **dict.fromkeys(("model_args", "model_kwargs"), MODEL_KWARGS),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), PROCESSOR_KWARGS),
    **dict.fromkeys(("config_args", "config_kwargs"), CONFIG_KWARGS),
}
_OUTPUTS = ("last_hidden_state", "logits", ["last_hidden_state"], ["logits"])
_SENSES = ("image", "audio", "video")
_SAVES_ALL = 6  # version of sentence-transformers; older ones often saved no folder for a Normalize
_SAVED_SINCE = ("Normalize", "MultiVectorMask")


def check_files(metadata: ModelMetadata) -> tuple[str, ...]:
    """The warnings about a model's files, each a sentence.

    Raises:
        ModelLoadFailed: a file that modules.json names is missing, or a key has a value that is not served.
    """
    found = [*_config(metadata), *_settings(metadata), *_saved(metadata), *_modules(metadata)]
    _check_modalities(metadata)
    found += TOKENIZER.warnings("tokenizer_config.json", metadata.tokens.config)
    return tuple(dict.fromkeys(found))


def _config(metadata: ModelMetadata) -> list[str]:
    config = metadata.config
    if config.get("auto_map") or metadata.chain.reader is not None:  # its own code may read any key
        return []
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelLoadFailed(
            f"the checkpoint is quantised ({method}), which is not served: {use_original(base_model_of(metadata.root))}"
        )
    if metadata.static:
        return [] if config["model_type"] == "static" else STATIC.warnings("config.json", config)
    return config_warnings(config)


def _settings(metadata: ModelMetadata) -> Iterator[str]:
    settings, tokenizer, weights_dir = metadata.settings, metadata.tokens.config, metadata.weights_dir
    if metadata.chain.reader is not None:  # arguments of the reader, which is the model's code
        return
    yield from SETTINGS.warnings(_SETTINGS_FILE, settings)
    for key, known in _KWARGS.items():
        given = settings.get(key) or {}
        if known is CONFIG_KWARGS and (changed := sorted(set(given) - known.harmless)):
            raise ModelLoadFailed(
                f"{_SETTINGS_FILE} changes {', '.join(changed)} of config.json ({key}): write it into config.json"
            )
        pickled = known is MODEL_KWARGS and given.get("use_safetensors") is False
        if pickled and any(file.name.endswith(".safetensors") for file in weight_files(weights_dir)):
            raise ModelLoadFailed(
                f"{_SETTINGS_FILE} has use_safetensors = False ({key}), and the model has safetensors, which are "
                "read first: remove the setting or the unwanted files"
            )
        if known is PROCESSOR_KWARGS:
            changed = sorted(name for name in OF_TOKENS & given.keys() if given[name] != tokenizer.get(name))
            if changed:
                raise ModelLoadFailed(
                    f"{_SETTINGS_FILE} changes {', '.join(changed)} of tokenizer_config.json ({key}): write it there"
                )
            given = {name: value for name, value in given.items() if name not in OF_TOKENS}
        yield from known.warnings(f"{key} of {_SETTINGS_FILE}", given)
    processing = settings.get("processing_kwargs") or {}
    for key in ("text", "common"):
        yield from PROCESSING_TEXT.warnings(f"processing_kwargs.{key} of {_SETTINGS_FILE}", processing.get(key) or {})


def _check_modalities(metadata: ModelMetadata) -> None:
    modalities: Mapping[str, Any] = metadata.settings.get("modality_config") or {}
    if metadata.config["model_type"] in SENSES:
        return  # the readers of these models check them
    senses = sorted({sense for name in modalities for sense in name.split("+")} & set(_SENSES))
    if senses:
        raise ModelLoadFailed(f"the model embeds {' and '.join(senses)} beside text, which is not served")
    for name, how in modalities.items():
        if not isinstance(how, dict):
            continue
        method, output = how.get("method", "forward"), how.get("method_output_name", "last_hidden_state")
        if method != "forward" or output not in _OUTPUTS:
            raise ModelLoadFailed(
                f"{_SETTINGS_FILE} takes {output!r} of {method} for {name}; only the last hidden state is served"
            )


def _saved(metadata: ModelMetadata) -> list[str]:
    """config_sentence_transformers.json: unknown keys, and prompts as sentence-transformers would refuse them."""
    saved = metadata.saved
    prompts = saved.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(text is None or isinstance(text, str) for text in prompts.values()):
        raise ModelLoadFailed(f"the prompts in {_SAVED_FILE} should be texts by name")
    named = saved.get("default_prompt_name")
    roles = () if saved.get("model_type") == "CrossEncoder" else ("query", "document")
    if named is not None and named not in (*prompts, *roles):
        known = ", ".join(repr(name) for name in prompts) or "none"
        raise ModelLoadFailed(
            f"{_SAVED_FILE} has the default prompt {named!r}, which is not among its prompts: {known}"
        )
    return SAVED.warnings(_SAVED_FILE, saved)


def _modules(metadata: ModelMetadata) -> Iterator[str]:
    rows = read_list(metadata.root / "modules.json")
    own = [module.name for module in metadata.chain.all if module.code is not None]
    for row in rows:
        name = str(row.get("type", ""))
        known_row = {key: row[key] for key in row if key != "kwargs" or name not in (*KNOWN_OWN, *own)}
        yield from MODULE_ROW.warnings("modules.json", known_row)
        if row.get("kwargs") and name in own:
            yield (
                f"modules.json has kwargs = {row['kwargs']!r} of {name}, arguments that no request here can "
                "set: the defaults apply"
            )
    for row in rows:
        if str(row.get("type", "")).rsplit(".", 1)[-1] in ROUTERS:
            file, router = router_file(metadata.root / str(row.get("path", "")))
            if router is not None:
                yield from ROUTER.warnings(file, router)
                yield from ROUTER_PARAMETERS.warnings(f"parameters of {file}", router.get("parameters") or {})
    version = str((metadata.saved.get("__version__") or {}).get("sentence_transformers") or "0")
    major = int(version.partition(".")[0]) if version.partition(".")[0].isdecimal() else 0
    for module in metadata.chain.all:
        if (known := MODULES.get(module.name)) is None:
            continue
        file = f"{module.path.name}/config.json"
        config = module.config()
        if module.name in _SAVED_SINCE and major >= _SAVES_ALL and not (module.path / "config.json").is_file():
            raise ModelLoadFailed(f"modules.json names a {module.name} module, and its {file} is missing")
        yield from known.warnings(file, config)
