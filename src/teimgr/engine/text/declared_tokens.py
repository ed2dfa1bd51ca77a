"""Tokens that the other files of a tokenizer declare and its tokenizer.json lacks, added as transformers adds them.

tokenizer_config.json has them in `added_tokens_decoder`, by their roles and in lists; older repositories have
added_tokens.json and special_tokens_map.json. A text is cut at such a token, so its vector is another without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.layout import Layout

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
