"""Check every file of a model against the tables of known keys.

A key that cannot be served correctly is refused by name; an unknown key is a warning of the model.
`engine/text/tokenizer_config.py`, which has the tokenizer, checks tokenizer_config.json against tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from teimgr.errors import ModelLoadFailed
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
from teimgr.models.metadata import SENSES, ModelMetadata
from teimgr.models.modules import KNOWN_OWN

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
