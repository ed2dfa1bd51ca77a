"""SPLADE: how masked-LM logits become weights of words."""

from __future__ import annotations

from teimgr.errors import ModelLoadFailed
from teimgr.layout.facts import Facts
from teimgr.layout.parts import Splade


def read_splade(facts: Facts) -> Splade:
    """The SpladePooling module's choices, or SPLADE's own where there is no such module.

    Raises:
        ModelLoadFailed: the module asks for something that is not SPLADE, or more follows it.
    """
    if not facts.chain.has("SpladePooling"):
        if not facts.has_head("ForMaskedLM"):
            raise ModelLoadFailed(f"a sparse model needs a masked-LM head, and there is: {facts.chain}")
        return Splade()
    before, module, behind = facts.chain.split_at("SpladePooling")
    if len(before) != 1 or behind:
        raise ModelLoadFailed(f"a sparse model should be a transformer and its SpladePooling, and is: {facts.chain}")
    config = module.config()
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelLoadFailed(f"SpladePooling with {strategy!r} and {activation!r} is not served")
    return Splade(strategy, activation)
