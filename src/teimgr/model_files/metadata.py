"""The metadata files of a model directory, read once; refuses models that need untrusted code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed, ModelNotFound
from teimgr.model_files.json_files import TokenFiles, read_settings
from teimgr.model_files.modules import Chain, read_chain
from teimgr.model_files.own_code import added_end, served_config
from teimgr.model_json import check_size, read_object

MODEL2VEC = "model2vec"
# Files beside those that are read here, which the libraries of the engine parse.
_READ_BY_LIBRARIES = (
    *("tokenizer.json", "vocab.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.json", "processor_config.json"),
)
_STATIC = (MODEL2VEC, "static")


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata files of a model directory.

    `transformer_dir` is the directory of the first module: its config.json is `config`, as the library is to read it
    (`config_is_changed`: not as it is in the file), its sentence_bert_config.json `settings`. `saved` is
    config_sentence_transformers.json. `end_token` is what the model's own tokenizer puts behind every text. `notes` are
    for the log.
    """

    root: Path
    transformer_dir: Path
    config: dict[str, Any]
    config_is_changed: bool
    end_token: str | None
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
    served = served_config(config, trust_remote_code)
    settings = read_settings(transformer)
    _refuse_settings(settings)
    for name in _READ_BY_LIBRARIES:
        check_size(transformer / name)
    tokens = TokenFiles(transformer)
    return ModelMetadata(
        root=root,
        transformer_dir=transformer,
        config=served.config,
        config_is_changed=served.is_changed,
        end_token=added_end(tokens.config, trust_remote_code),
        notes=served.notes,
        saved=read_object(root / "config_sentence_transformers.json") or {},
        settings=settings,
        chain=chain,
        tokens=tokens,
        static=static,
    )


def _refuse_settings(settings: dict[str, Any]) -> None:
    """Refuse settings by which sentence-transformers would override config.json."""
    for key in ("config_args", "config_kwargs"):
        changed = {name for name in settings.get(key) or {} if name not in ("trust_remote_code", "revision")}
        if changed:
            raise ModelLoadFailed(
                f"sentence_bert_config.json changes {', '.join(sorted(changed))} of config.json ({key}): "
                "write it into config.json"
            )
