"""How long a text may be, and where its positions start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.layout.files import first_object

ENDLESS = 1_000_000
# Positions of these model types start behind the padding token's id.
OFFSET_TYPES = {
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "xmod",
    "data2vec-text",
    "mpnet",
}
_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def read_settings(folder: Path) -> dict[str, Any]:
    """sentence_bert_config.json or an older file of its kind, {} where there is none."""
    return first_object(folder, *_SETTINGS)


def position_offset(config: dict[str, Any]) -> int:
    """The first position id of a text."""
    if config["model_type"] not in OFFSET_TYPES:
        return 0
    return int(config.get("pad_token_id") or 0) + 1


def max_length(config: dict[str, Any], settings: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    """What sentence-transformers' file says, else the tokenizer's own limit; never more than there are positions.

    Raises:
        ModelLoadFailed: no file tells a limit.
    """
    positions = config.get("max_position_embeddings") or config.get("max_trained_positions")
    room = int(positions) - position_offset(config) if positions and positions > 0 else ENDLESS
    if settings.get("max_seq_length"):
        return min(int(settings["max_seq_length"]), room)
    given = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    limit = min(room, int(given.get("model_max_length") or tokenizer.get("model_max_length") or ENDLESS))
    if limit >= ENDLESS:
        raise ModelLoadFailed(
            "neither sentence_bert_config.json nor config.json nor the tokenizer tells a length limit"
        )
    return limit
