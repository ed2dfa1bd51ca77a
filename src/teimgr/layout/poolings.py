"""The poolings, by the names of TEI's flag, of sentence-transformers 6 and of its older booleans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.layout.files import read_object
from teimgr.spec import POOLINGS

_BY_FLAG = {name: name.replace("-", "_") for name in POOLINGS if name != "splade"}
_BY_NAME = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
# In the order in which sentence-transformers concatenates them.
_BY_BOOLEAN = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
GUESSED_CLS = "no pooling configuration found; `cls` is used. Set the pooling to choose another"


def check_pooling(chosen: str | None) -> None:
    """Refuse what is no pooling at all.

    Raises:
        InvalidConfig: the message lists those there are.
    """
    if chosen is not None and chosen not in POOLINGS:
        raise InvalidConfig(f"pooling {chosen!r} is none of {', '.join(sorted(POOLINGS))}")


def read_poolings(
    folder: Path, config: dict[str, Any], chosen: str | None
) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """The poolings, whether prompts are pooled, and what the log should say of the choice.

    `folder` is the Pooling module's, `chosen` the user's own word.

    Raises:
        InvalidConfig: nothing says how to pool.
        ModelLoadFailed: the files name a pooling that there is not.
    """
    saved = read_object(folder / "config.json")
    include_prompt = (saved or {}).get("include_prompt", True) is not False
    if chosen is not None:
        return (_BY_FLAG[chosen],), include_prompt, ()
    if saved is not None:
        return _saved(saved), include_prompt, ()
    if "bert" in config["model_type"].lower():
        return ("cls",), True, (GUESSED_CLS,)
    raise InvalidConfig("the model has no pooling configuration (1_Pooling/config.json): set the pooling explicitly")


def _saved(saved: dict[str, Any]) -> tuple[str, ...]:
    named = saved.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named or [])
    poolings = tuple(_BY_NAME[name] for name in names if name in _BY_NAME)
    if len(poolings) != len(names):
        raise ModelLoadFailed(f"the pooling {named!r} of 1_Pooling/config.json is not served")
    poolings = poolings or tuple(name for key, name in _BY_BOOLEAN.items() if saved.get(key))
    if not poolings:
        raise ModelLoadFailed("1_Pooling/config.json switches no pooling on")
    return poolings
