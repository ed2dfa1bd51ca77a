"""From the files of a model directory to its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed, ModelNotFound
from teimgr.layout.parts import Dense, Layout
from teimgr.spec import POOLINGS

# How a pooling is called by TEI's flag, by sentence-transformers 6 (`pooling_mode`) and by its older booleans.
_FLAG_POOLINGS = {name: name.replace("-", "_") for name in POOLINGS}
_NAMED_POOLINGS = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
_BOOLEAN_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Positions of these model types start behind the padding token's id.
_OFFSET_TYPES = {
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "xmod",
    "data2vec-text",
}
_ENDLESS_POSITIONS = 1_000_000


def read_layout(root: Path, pooling: str | None = None) -> Layout:
    """Read the model directory `root`; `pooling` is the user's own choice, over that of the files.

    Raises:
        ModelNotFound: there is no such directory, or no config.json in it.
        InvalidConfig: `pooling` is no pooling, or none is given and none can be read.
        ModelLoadFailed: the files describe something that is not served.
    """
    if not root.is_dir():
        raise ModelNotFound(f"No model directory at {root}")
    modules = _read_modules(root)
    transformer = root / modules["Transformer"][0] if modules["Transformer"] else root
    config = _read(transformer / "config.json")
    if config is None:
        raise ModelNotFound(f"{transformer} has no config.json")
    saved = _read(root / "config_sentence_transformers.json") or {}
    _refuse_other_kinds(config, saved, pooling)
    poolings, include_prompt, notes = _poolings(root, modules["Pooling"], config, pooling)
    offset = _position_offset(config)
    lengths = _first(transformer, _LENGTH_FILES)
    return Layout(
        root=root,
        transformer=transformer,
        config=config,
        poolings=poolings,
        include_prompt=include_prompt,
        projections=tuple(_dense(root / path) for path in modules["Dense"]),
        max_length=_max_length(transformer, config, lengths, offset),
        position_offset=offset,
        lower_case=bool(lengths.get("do_lower_case")),
        prompts={name: text for name, text in (saved.get("prompts") or {}).items() if isinstance(text, str)},
        default_prompt_name=saved.get("default_prompt_name"),
        notes=notes,
    )


def _read_modules(root: Path) -> dict[str, list[str]]:
    """Paths of the modules by kind, in order; a directory without modules.json is a bare transformer."""
    found: dict[str, list[str]] = {"Transformer": [], "Pooling": [], "Dense": []}
    listed = _read_list(root / "modules.json")
    for module in listed:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind in ("Normalize", "Dropout"):  # the request decides on normalisation; dropout does nothing here
            continue
        if kind not in found:
            raise ModelLoadFailed(f"modules.json of {root.name} has a {kind} module, which teimgr does not serve")
        if kind == "Dense" and not found["Pooling"]:
            raise ModelLoadFailed(
                f"{root.name} projects every token before pooling (ColBERT style); teimgr does not serve token vectors"
            )
        found[kind].append(str(module.get("path", "")))
    if listed and len(found["Transformer"]) != 1:
        raise ModelLoadFailed(f"modules.json of {root.name} names {len(found['Transformer'])} transformers, not one")
    if len(found["Pooling"]) > 1:
        raise ModelLoadFailed(f"modules.json of {root.name} names more than one pooling")
    return found


def _refuse_other_kinds(config: dict[str, Any], saved: dict[str, Any], pooling: str | None) -> None:
    if not config.get("model_type"):
        raise ModelLoadFailed("config.json has no model_type, so there is no telling which architecture this is")
    if pooling == "splade" or saved.get("model_type") == "SparseEncoder":
        raise ModelLoadFailed("sparse (SPLADE) models are not served yet")
    if saved.get("model_type") == "MultiVectorEncoder" or "HF_ColBERT" in (config.get("architectures") or []):
        raise ModelLoadFailed("models with one vector per token (ColBERT) are not served yet")
    classifiers = [name for name in config.get("architectures") or [] if name.endswith("Classification")]
    if classifiers or saved.get("model_type") == "CrossEncoder":
        one_label = len(config.get("id2label") or {}) == 1
        kind = "reranker" if one_label or not classifiers else "classifier"
        raise ModelLoadFailed(
            f"this is a {kind} ({', '.join(classifiers) or 'CrossEncoder'}); only embedding models are served yet"
        )


def _poolings(
    root: Path, paths: list[str], config: dict[str, Any], chosen: str | None
) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """The poolings, whether prompts are pooled, and what the log should say of the choice."""
    saved = _read(root / (paths[0] if paths else "1_Pooling") / "config.json")
    include_prompt = (saved or {}).get("include_prompt", True) is not False
    if chosen is not None:
        if chosen not in _FLAG_POOLINGS:
            raise InvalidConfig(f"pooling {chosen!r} is none of {', '.join(sorted(_FLAG_POOLINGS))}")
        return (_FLAG_POOLINGS[chosen],), include_prompt, ()
    if saved is not None:
        return _saved_poolings(saved), include_prompt, ()
    if "bert" in config["model_type"].lower():
        return ("cls",), True, ("no pooling configuration found; `cls` is used. Set the pooling to choose another",)
    raise InvalidConfig("the model has no pooling configuration (1_Pooling/config.json): set the pooling explicitly")


def _saved_poolings(saved: dict[str, Any]) -> tuple[str, ...]:
    named = saved.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named or [])
    poolings = tuple(_NAMED_POOLINGS[name] for name in names if name in _NAMED_POOLINGS)
    if len(poolings) != len(names):
        raise ModelLoadFailed(f"the pooling {named!r} of 1_Pooling/config.json is not served")
    poolings = poolings or tuple(name for key, name in _BOOLEAN_POOLINGS.items() if saved.get(key))
    if not poolings:
        raise ModelLoadFailed("1_Pooling/config.json switches no pooling on")
    return poolings


def _dense(path: Path) -> Dense:
    config = _read(path / "config.json")
    if config is None:
        raise ModelLoadFailed(f"the Dense module {path.name} has no config.json")
    reads = config.get("module_input_name", "sentence_embedding")
    if reads != "sentence_embedding" or config.get("module_output_name") not in (None, "sentence_embedding"):
        raise ModelLoadFailed(f"the Dense module {path.name} works on {reads}; only pooled vectors are served")
    return Dense(
        path=path,
        in_features=int(config["in_features"]),
        out_features=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=str(config.get("activation_function") or "torch.nn.modules.linear.Identity"),
        residual=bool(config.get("use_residual")),
    )


def _position_offset(config: dict[str, Any]) -> int:
    if config["model_type"] not in _OFFSET_TYPES:
        return 0
    return int(config.get("pad_token_id") or 0) + 1


def _max_length(transformer: Path, config: dict[str, Any], lengths: dict[str, Any], offset: int) -> int:
    """What sentence-transformers' file says, else the tokenizer's own limit; never more than there are positions."""
    positions = config.get("max_position_embeddings") or config.get("max_trained_positions")
    room = int(positions) - offset if positions and positions > 0 else _ENDLESS_POSITIONS
    if lengths.get("max_seq_length"):
        return min(int(lengths["max_seq_length"]), room)
    tokenizer = _read(transformer / "tokenizer_config.json") or {}
    own = tokenizer.get("model_max_length") or _ENDLESS_POSITIONS
    limit = min(room, int(own))
    if limit >= _ENDLESS_POSITIONS:
        raise ModelLoadFailed(
            "neither sentence_bert_config.json nor config.json nor the tokenizer tells a length limit"
        )
    return limit


def _first(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return next((content for name in names if (content := _read(folder / name)) is not None), {})


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file."""
    content = _parse(path)
    if content is not None and not isinstance(content, dict):
        raise ModelLoadFailed(f"{path.name} should hold a JSON object")
    return content


def _read_list(path: Path) -> list[dict[str, Any]]:
    content = _parse(path)
    if content is not None and not isinstance(content, list):
        raise ModelLoadFailed(f"{path.name} should hold a JSON list")
    return content or []


def _parse(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadFailed(f"{path.name} is not valid JSON: {error}") from error
