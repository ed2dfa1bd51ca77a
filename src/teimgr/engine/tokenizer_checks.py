"""tokenizer_config.json against tokenizer.json, which counts: what they say differently is a warning of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from teimgr.engine.boundaries import flattened
from teimgr.engine.declared_tokens import tokens_without_vectors
from teimgr.models.json_files import TokenFiles
from teimgr.models.layout import Backbone, Layout

# Tokenizer classes of which `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` are settings. transformers
# makes their normalizer of these alone, and where the file has none of the first or the last, that is true.
_CASED = ("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "Funnel", "MPNet", "SqueezeBert", "LayoutLM")


def contradictions(layout: Layout, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A sentence for each setting of tokenizer_config.json that `tokenizer` does not follow."""
    if layout.backbone is Backbone.STATIC or not (layout.transformer_dir / "tokenizer.json").is_file():
        return ()  # converted from tokenizer_config.json, or without special tokens
    config = TokenFiles(layout.transformer_dir).config
    left = tuple(tokens_without_vectors(tokenizer, layout))
    return left + tuple(
        f"tokenizer_config.json has {key} = {str(given).lower()}{'' if key in config else ' by default'}, and "
        "tokenizer.json does otherwise: the latter counts"
        for key, given, used in _compared(layout, config, tokenizer)
        if isinstance(given, bool) and used is not None and given is not used
    )


def _compared(
    layout: Layout, config: dict[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[str, object, bool | None]]:
    """Key, value in the file, and what the tokenizer does; None if it has no such step."""
    own = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if own in _CASED and tokenizer.normalizer is not None:
        normalized = tokenizer.normalizer.normalize_str
        if not layout.lower_case:
            yield "do_lower_case", config.get("do_lower_case", True), normalized("A") == "a"
        yield "strip_accents", config.get("strip_accents"), normalized("é") == "e"
        yield "tokenize_chinese_chars", config.get("tokenize_chinese_chars", True), normalized("東") == " 東 "
    if tokenizer.pre_tokenizer is not None:
        steps = flattened(json.loads(tokenizer.pre_tokenizer.__getstate__()), "pretokenizers")
        levels = [step for step in steps if step["type"] == "ByteLevel"]
        used = any(step.get("add_prefix_space") for step in levels) if levels else None
        yield "add_prefix_space", config.get("add_prefix_space"), used
    framed = tokenizer.encode("a").ids
    for key, role, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        id = tokenizer.token_to_id(text) if isinstance(text, str) else None
        # Switched off, many have another token there by their template: only what is missing contradicts.
        if id is not None and config.get(key) is True:
            yield key, True, framed[at] == id
