"""Compares tokenizer_config.json with tokenizer.json, which is decisive: tokens that only the former declares are
added, as by transformers; contradictions are a warning of the model (`contradictions`).

Declared tokens are in `added_tokens_decoder`, by role and in lists; older repositories have added_tokens.json and
special_tokens_map.json. A text is split at such a token, so without it the vector would differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from teimgr.engine.text.boundaries import flattened
from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.json_files import TokenFiles
from teimgr.models.layout import Backbone, Layout

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"


def add_declared_tokens(tokenizer: Tokenizer, layout: Layout) -> None:
    """Add what the files declare, but for tokens that the model has no vector of.

    Raises:
        ModelLoadFailed: a file declares something else than a token.
    """
    listed, named = _declared(layout.transformer_dir)
    known = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = [token for token in listed if known.get(token.content) != repr(token)]
    there = known.keys() | {token.content for token in wanted}
    wanted += [token for token in named if token.content not in there]
    for token in wanted:
        if _has_vector(tokenizer, token.content, layout.vocabulary):
            tokenizer.add_tokens([token])


def named_tokens(folder: Path) -> list[AddedToken]:
    """The special tokens with a role: transformers' all_special_tokens, not all that tokenizer.json flags so."""
    return _declared(folder)[1]


def tokens_without_vectors(tokenizer: Tokenizer, layout: Layout) -> Iterator[str]:
    """A sentence for each declared token that is left out."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed, named = _declared(layout.transformer_dir)
    for content in dict.fromkeys(token.content for token in (*listed, *named)):
        if content not in known:
            yield f"{_CONFIG} has the token {content!r}, and the model no vector of it: it is read as a word"


def _has_vector(tokenizer: Tokenizer, content: str, vocabulary: int | None) -> bool:
    """True if the id that the library gives a token, its own or the next one, is one of the model's."""
    if vocabulary is None:
        return True
    id = tokenizer.token_to_id(content)
    if id is None:
        own = tokenizer.get_vocab_size(with_added_tokens=False)
        id = max(own, 1 + max(tokenizer.get_added_tokens_decoder(), default=-1))
    return id < vocabulary


def _declared(folder: Path) -> tuple[list[AddedToken], list[AddedToken]]:
    """The tokens that files list with their flags, in the order of their ids, and those with a role."""
    config = read_object(folder / _CONFIG) or {}
    rows = config.get("added_tokens_decoder")
    if rows is not None:
        return [_token(row) for _, row in sorted(rows.items(), key=lambda row: int(row[0]))], _named(config)
    named = _named({**config, **(read_object(folder / "special_tokens_map.json") or {})})
    special = {token.content for token in named}
    older = sorted((read_object(folder / "added_tokens.json") or {}).items(), key=lambda row: int(row[1]))
    return [AddedToken(text, normalized=text not in special, special=text in special) for text, _ in older], named


def _named(config: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that have a role, in transformers' order: those of every tokenizer, then those of lists."""
    found = [config[role] for role in _ROLES if config.get(role)]
    for key in _LISTS:
        given = config.get(key) or []
        found += given.values() if isinstance(given, dict) else given
    return [_token({"content": one} if isinstance(one, str) else one, special=True) for one in found]


def _token(row: Any, **more: bool) -> AddedToken:
    content = row.get("content") if isinstance(row, dict) else None
    if not isinstance(content, str) or not content:
        raise ModelLoadFailed(f"{_CONFIG} has {str(row)[:80]!r} where a token should be")
    return AddedToken(content, **({flag: bool(row[flag]) for flag in _FLAGS if flag in row} | more))


# Tokenizer classes with the settings `do_lower_case`, `strip_accents` and `tokenize_chinese_chars`. transformers makes
# their normalizer only from these; the first and the last default to true.
_CASED = ("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "Funnel", "MPNet", "SqueezeBert", "LayoutLM")
# The model that transformers makes of a tokenizer.json's vocabulary, by tokenizer class. Excludes classes whose
# well-known models have another one, such as LlamaTokenizer with Unigram.
_MODELS = {
    **dict.fromkeys(_CASED, "WordPiece"),
    **dict.fromkeys(("Roberta", "Longformer", "GPT2", "Bart", "Qwen2", "Deberta", "GPTNeoX"), "BPE"),
    **dict.fromkeys(("XLMRoberta", "T5", "Albert", "DebertaV2", "MBart"), "Unigram"),
}
# Model types for which transformers ignores the class: it uses tokenizer.json unchanged, or chooses the class itself.
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
        # Only a missing token contradicts: with the setting off, many templates have another token there.
        if id is not None and config.get(key) is True:
            yield key, True, framed[at] == id
