"""PEFT adapters: which of them are served, and the model that they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.files import expanded
from teimgr.models import hub
from teimgr.models.bounded_json import read_object
from teimgr.models.directory import adapter_base, adapter_weights, configuration_folder
from teimgr.models.known_keys import ADAPTER
from teimgr.models.layout import Adapter
from teimgr.models.source import names_a_path

FILE = "adapter_config.json"
# How an adapter was begun. Others change the weights of the base model as well.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
# The patterns of layers' names that are read: names, alternatives, `.*`. What an expression costs to compile or to
# match has no bound: 7 KB of character classes take 5 s, nested repetitions all time there is.
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
            raise ModelLoadFailed(f"more than {limit} adapters are on top of each other, the last in {folder}")
        found.insert(0, _adapter(folder, config))
        warnings += ADAPTER.warnings(FILE, config)
        folder = configuration_folder(_base_of(folder))
    return tuple(found), folder, tuple(warnings)


def read_task_adapters(root: Path, folders: Sequence[str]) -> tuple[Adapter, ...]:
    """The adapters in `folders` of a model, one for each task.

    Raises:
        ModelLoadFailed: one is missing, or of a kind that cannot be merged.
    """
    found = []
    for name in folders:
        config = read_object(root / name / FILE)
        if config is None:
            raise ModelLoadFailed(f"config.json names a task whose adapter is missing: {name}/{FILE}")
        ADAPTER.warnings(f"{name}/{FILE}", config)  # its refusals
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
    """The directory of the base model that an adapter names.

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
