"""What classifiers and rerankers answer: their labels, and what is made of the logits."""

from __future__ import annotations

from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.layout.facts import Facts
from teimgr.layout.parts import Scoring

_SHORT = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "identity",
}


def read_scoring(facts: Facts) -> Scoring:
    """The labels and the activation of a sequence classifier.

    Raises:
        ModelLoadFailed: there is no such head, or config.json does not name its labels.
    """
    if not facts.has_head("ForSequenceClassification"):
        raise ModelLoadFailed(
            f"{', '.join(facts.architectures) or 'the model'} has no head that scores texts, and so no trained scores"
        )
    if facts.chain.behind:
        raise ModelLoadFailed(f"a cross-encoder of several modules is not served: {facts.chain}")
    labels = _labels(facts.config)
    return Scoring(labels, read_activation(facts, len(labels)))


def read_activation(facts: Facts, labels: int) -> str:
    """The activation that the authors chose, else sigmoid for one label or several at once, and softmax for others."""
    own = facts.config.get("sentence_transformers")
    written = (
        facts.saved.get("activation_fn"),
        own.get("activation_fn") if isinstance(own, dict) else None,
        facts.config.get("sbert_ce_default_activation_function"),
    )
    for name in written:
        if isinstance(name, str) and name.startswith("torch."):  # others are code of the model's own
            return _SHORT.get(name, name)
    several = facts.config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if labels == 1 or several else "softmax"


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not named:
        raise ModelLoadFailed("config.json has no id2label, so there is no telling what the scores mean")
    by_index = {int(index): str(label) for index, label in named.items() if str(index).isdecimal()}
    if sorted(by_index) != list(range(len(named))):
        raise ModelLoadFailed(f"id2label of config.json should number the labels from 0, and has: {', '.join(named)}")
    return tuple(by_index[index] for index in range(len(named)))
