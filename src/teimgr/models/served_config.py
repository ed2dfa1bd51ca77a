"""A config.json as the library must read it, and checks of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teimgr.errors import ModelLoadFailed

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """A config.json as the library must read it. `is_changed` if it differs from the file. `notes` are for the log.

    `weight_names` is the naming scheme of the weights if it is not the library's (`engine/weights/own.py`). `tasks` has
    the number of the LoRA weights, from 1, by the name of a prompt; `prompts` are these prompts. Texts without a name
    use `default_task`, 0 for none. `adapters` are the folders of such weights if they are PEFT's. `pooling` is that of
    the model's own code. `instruction_end` ends an instruction, a prompt or the beginning of a text, whose tokens are
    not pooled. `chat_limits` of GME are the minimum and maximum tokens of an image, and the maximum of an input.
    """

    config: Config
    is_changed: bool = False
    notes: tuple[str, ...] = ()
    weight_names: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    task_scale: float = 1.0
    default_task: int = 0
    adapters: tuple[str, ...] = ()
    pooling: str | None = None
    instruction_end: str | None = None
    chat_limits: tuple[int, int, int] | None = None


def check_heads(config: Config) -> None:
    """Raise if the heads, by the library's names of sizes, do not divide the width."""
    heads, width = count(config, "num_attention_heads", 12), count(config, "hidden_size", 768)
    if width % heads:
        raise ModelLoadFailed(f"config.json has a width of {width}, which its {heads} heads of attention do not divide")


def flag(config: Config, key: str, default: bool) -> bool:
    found = config.get(key, default)
    if not isinstance(found, bool):
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be true or false")
    return found


def refuse_unless(config: Config, **expected: Any) -> None:
    for key, value in expected.items():
        if config.get(key, value) not in (value, None):
            raise ModelLoadFailed(f"config.json has {key} = {config[key]!r}; for this model only {value!r} is served")


def number(values: Config, key: str) -> float:
    found = values.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not (math.isfinite(found) and found > 0):
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be a positive number")
    return float(found)


def count(config: Config, key: str, default: int) -> int:
    found = config.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ModelLoadFailed(f"config.json has {key} = {found!r}, which should be a positive number")
    return found


def classes_of(configuration: str, modelling: str, prefix: str, *heads: str) -> frozenset[str]:
    """`file.Class` of a configuration, of the bare model, and of its heads."""
    return frozenset(
        {
            f"{configuration}.{prefix}Config",
            f"{modelling}.{prefix}Model",
            *(f"{modelling}.{prefix}{head}" for head in heads),
        }
    )


HEADS = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    *("ForMultipleChoice", "ForCausalLM"),
)
