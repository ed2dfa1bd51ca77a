"""tokenizer_config.json against tokenizer.json, which counts: what they say differently is a warning of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from teimgr.engine.text.boundaries import flattened
from teimgr.engine.text.declared_tokens import tokens_without_vectors
from teimgr.models.json_files import TokenFiles
from teimgr.models.layout import Backbone, Layout

# Tokenizer classes of which `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` are settings. transformers
# makes their normalizer of these alone, and where the file has none of the first or the last, that is true.
_CASED = ("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "Funnel", "MPNet", "SqueezeBert", "LayoutLM")
# By tokenizer class, the model that transformers makes of a tokenizer.json's vocabulary. Left out are classes of which
# well-known models declare another, as of LlamaTokenizer with Unigram.
_MODELS = {
    **dict.fromkeys(_CASED, "WordPiece"),
    **dict.fromkeys(("Roberta", "Longformer", "GPT2", "Bart", "Qwen2", "Deberta", "GPTNeoX"), "BPE"),
    **dict.fromkeys(("XLMRoberta", "T5", "Albert", "DebertaV2", "MBart"), "Unigram"),
}
# Model types of which transformers takes tokenizer.json as it is, whatever the class, or chooses the class itself.
_CLASS_IS_IGNORED = ("modernbert", "modernbert-decoder", "mistral", "phi3", "qwen2")

_FRAME = (("cls_token", "[CLS]"), ("sep_token", "[SEP]"))


def contradictions(layout: Layout, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A sentence for each setting of tokenizer_config.json that `tokenizer` does not follow."""
    if layout.backbone is Backbone.STATIC or not (layout.transformer_dir / "tokenizer.json").is_file():
        return ()  # converted from tokenizer_config.json, or without special tokens
    config = TokenFiles(layout.transformer_dir).config
    left = (*tokens_without_vectors(tokenizer, layout), *_other_models(layout, config, tokenizer))
    left += tuple(_other_steps(layout, config, tokenizer)) + tuple(_other_texts(layout, config, tokenizer))
    return left + tuple(
        f"tokenizer_config.json has {key} = {str(given).lower()}{'' if key in config else ' by default'}, and "
        "tokenizer.json does otherwise: the latter counts"
        for key, given, used in _compared(layout, config, tokenizer)
        if isinstance(given, bool) and used is not None and given is not used
    )


def _class_of(layout: Layout, config: dict[str, Any]) -> tuple[str, str]:
    """The tokenizer class that transformers takes, and the words for where it is from: the files, or its default for
    the model type. Both are "" where the model has its own code, which may choose another.
    """
    for file, content in (("tokenizer_config.json", config), ("config.json", layout.config)):
        if (declared := content.get("tokenizer_class")) is not None:
            return str(declared), f"{file} has tokenizer_class = {declared}"
    if "auto_map" in config or layout.config_is_changed or layout.config.get("auto_map"):
        return "", ""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    model_type = str(layout.config.get("model_type"))
    default = TOKENIZER_MAPPING_NAMES.get(model_type) or ""
    return default, f"no file has a tokenizer_class, the library's for {model_type} is {default}"


def _own(layout: Layout, config: dict[str, Any]) -> str:
    return _class_of(layout, config)[0].removesuffix("Fast").removesuffix("Tokenizer")


def _other_models(layout: Layout, config: dict[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    """A sentence where the declared class cuts words by another kind of model than tokenizer.json has."""
    declared, used = _MODELS.get(_own(layout, config)), type(tokenizer.model).__name__
    ignored = "auto_map" in config or layout.config.get("model_type") in _CLASS_IS_IGNORED
    if declared is not None and used in _MODELS.values() and used != declared and not ignored:
        yield (f"{_class_of(layout, config)[1]}, which is {declared}, and tokenizer.json has {used}: the latter counts")


def _other_steps(layout: Layout, config: dict[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    """A sentence for each step that transformers' BertTokenizer makes itself and tokenizer.json has otherwise."""
    ignored = "auto_map" in config or layout.config_is_changed or layout.config.get("model_type") in _CLASS_IS_IGNORED
    if ignored or _own(layout, config) != "Bert" or type(tokenizer.model).__name__ != "WordPiece":
        return
    text = TokenFiles(layout.transformer_dir).text
    frame = [tokenizer.token_to_id(text(role) or usual) for role, usual in _FRAME]
    framed = tokenizer.encode("a").ids
    kinds = {
        "post_processor": [framed[0], framed[-1]] == frame,
        "pre_tokenizer": type(tokenizer.pre_tokenizer).__name__ == "BertPreTokenizer",
        "normalizer": layout.lower_case or type(tokenizer.normalizer).__name__ == "BertNormalizer",
        "unk_token": tokenizer.model.unk_token == (text("unk_token") or "[UNK]"),
        "max_input_chars_per_word": tokenizer.model.max_input_chars_per_word == 100,
    }
    for kind, same in kinds.items():
        if not same:
            yield f"tokenizer.json has another {kind} than {_class_of(layout, config)[0]} makes: the former counts"


def _other_texts(layout: Layout, config: dict[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    """A sentence where tokenizer.json lacks what SiglipTokenizer does to a text first, as one made of its pieces."""
    if _own(layout, config) != "Siglip":
        return
    given = "A Photo, of it!" if config.get("do_lower_case", True) else "a photo, of it!"
    if tokenizer.encode(given).ids != tokenizer.encode("a photo of it").ids:
        yield (
            f"{_class_of(layout, config)[1]}, which lower-cases texts and drops their punctuation, and tokenizer.json "
            "does not: the latter counts, and vectors of such texts are others than in transformers"
        )


def _compared(
    layout: Layout, config: dict[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[str, object, bool | None]]:
    """Key, value in the file, and what the tokenizer does; None if it has no such step."""
    if _own(layout, config) in _CASED and tokenizer.normalizer is not None:
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
