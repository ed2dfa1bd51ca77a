"""The metadata files of a model directory, read once; refuses models that need untrusted code."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed, ModelNotFound
from teimgr.model_files.json_files import TokenFiles, read_object, read_settings
from teimgr.model_files.modules import Chain, read_chain

MODEL2VEC = "model2vec"
_STATIC = (MODEL2VEC, "static")
# Name parts after the model type by which a class of a model's repository is the same as that of transformers.
_SAME_CLASS = ("model", "config", "for", "pretrainedmodel", "encodermodel")


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata files of a model directory.

    `transformer_dir` is the directory of the first module: its config.json is `config`, its sentence_bert_config.json
    `settings`. `saved` is config_sentence_transformers.json.
    """

    root: Path
    transformer_dir: Path
    config: dict[str, Any]
    saved: dict[str, Any]
    settings: dict[str, Any]
    chain: Chain
    tokens: TokenFiles
    static: bool

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(str(name) for name in self.config.get("architectures") or ())

    def has_head(self, ending: str) -> bool:
        """Whether an architecture has this suffix, such as "ForMaskedLM"."""
        return any(name.endswith(ending) for name in self.architectures)

    @property
    def prompts(self) -> dict[str, str]:
        return {name: text for name, text in (self.saved.get("prompts") or {}).items() if isinstance(text, str)}


def read_metadata(root: Path, trust_remote_code: bool) -> ModelMetadata:
    """Read the metadata files in `root`.

    Raises:
        ModelNotFound: there is no such directory, or no config.json in it.
        ModelLoadFailed: a file is broken, or the model needs code that the instance does not trust.
    """
    if not root.is_dir():
        raise ModelNotFound(f"No model directory at {root}")
    chain = read_chain(root)
    transformer = chain.modules[0].path if chain.modules else root
    config = read_object(transformer / "config.json")
    static = chain.first == "StaticEmbedding" or (config or {}).get("model_type") in _STATIC
    if config is None and not static:
        raise ModelNotFound(f"{transformer} has no config.json")
    config = config or {}
    if static:
        config.setdefault("model_type", "static")
    if not config.get("model_type"):
        raise ModelLoadFailed("config.json has no model_type, so its architecture is unknown")
    if not trust_remote_code:
        _refuse_remote_code(config)
    settings = read_settings(transformer)
    _refuse_settings(settings)
    return ModelMetadata(
        root=root,
        transformer_dir=transformer,
        config=config,
        saved=read_object(root / "config_sentence_transformers.json") or {},
        settings=settings,
        chain=chain,
        tokens=TokenFiles(transformer),
        static=static,
    )


def _refuse_remote_code(config: dict[str, Any]) -> None:
    """Refuse a model with its own code, unless transformers has code for its architecture too."""
    classes = [str(entry).rsplit(".", 1)[-1] for entry in (config.get("auto_map") or {}).values()]
    if not classes:
        return
    model_type = str(config["model_type"])
    if _transformers_has(model_type) and all(_is_same(name, model_type) for name in classes):
        return
    raise ModelLoadFailed(
        f"the model brings its own code ({', '.join(classes)}), and transformers has none for it: "
        "it is run only where the instance sets trust_remote_code = true"
    )


def _transformers_has(model_type: str) -> bool:
    """Whether transformers has a package of that name. Looks at its folders: the daemon never imports transformers."""
    spec = importlib.util.find_spec("transformers")
    folder = model_type.replace("-", "_")
    names = (folder, folder.removesuffix("_text"))  # gemma3_text is in gemma3
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / "models" / name).is_dir() for place in places or () for name in names)


def _is_same(name: str, model_type: str) -> bool:
    """Whether a class has the name of transformers' own: NomicBertModel has, JinaBertModel of type bert has not."""
    squashed = model_type.replace("-", "").replace("_", "")
    lowered = name.lower()
    return lowered.startswith(squashed) and lowered.removeprefix(squashed).startswith(_SAME_CLASS)


def _refuse_settings(settings: dict[str, Any]) -> None:
    """Refuse settings by which sentence-transformers would override config.json."""
    for key in ("config_args", "config_kwargs"):
        changed = {name for name in settings.get(key) or {} if name not in ("trust_remote_code", "revision")}
        if changed:
            raise ModelLoadFailed(
                f"sentence_bert_config.json changes {', '.join(sorted(changed))} of config.json ({key}): "
                "write it into config.json"
            )
