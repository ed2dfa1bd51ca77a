"""The tokenizer's files: ids by token, the special ones, and whether pairs carry token types."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.layout.files import read_object

# Tokenizer classes that give token types where tokenizer_config.json does not say what they give. Others do not.
_TYPED_CLASSES = {"Bert", "Electra", "MobileBert", "ConvBert", "Deberta", "DebertaV2", "Canine", "FNet", "Funnel"}
_TYPED_MODELS = {"bert", "electra", "mobilebert", "convbert", "nomic_bert", "deberta", "deberta-v2"}


class TokenFiles:
    """What tokenizer.json and tokenizer_config.json of a directory say; the first is read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_object(folder / "tokenizer_config.json") or {}

    def id(self, token: str) -> int | None:
        """The id of a token, None where the vocabulary has no such entry."""
        return self._vocabulary.get(token)

    def special(self, role: str) -> int | None:
        """The id of a special token by its role, such as "mask_token"."""
        token = self.config.get(role) or self._special_map.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        return self.id(text) if isinstance(text, str) else None

    def words(self, words: list[str]) -> tuple[int, ...]:
        """The ids of those words that are one token; the others, and the unknown token, are left out."""
        unknown = self.special("unk_token")
        found = (self.id(word) for word in words)
        return tuple(sorted({id for id in found if id is not None and id != unknown}))

    def has_types(self, model: dict[str, Any]) -> bool:
        """Whether a pair's second text has token type 1: both the tokenizer and the `model`'s config.json say so."""
        if int(model.get("type_vocab_size") or 0) < 2:
            return False
        names = self.config.get("model_input_names")
        if names is not None:
            return "token_type_ids" in names
        own = str(self.config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
        return own in _TYPED_CLASSES if own else model["model_type"] in _TYPED_MODELS

    @property
    def drops_spaces(self) -> bool:
        """Whether a space before a text makes no difference, as in BERT's vocabulary."""
        return (self._file.get("model") or {}).get("type") == "WordPiece"

    @cached_property
    def _file(self) -> dict[str, Any]:
        content = read_object(self._folder / "tokenizer.json")
        if content is None:
            raise ModelLoadFailed("the model has no tokenizer.json")
        return content

    @cached_property
    def _special_map(self) -> dict[str, Any]:
        return read_object(self._folder / "special_tokens_map.json") or {}

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        entries = (self._file.get("model") or {}).get("vocab") or {}
        if isinstance(entries, list):  # Unigram: [token, score], whose place is the id
            entries = {entry[0]: index for index, entry in enumerate(entries)}
        added = {str(token["content"]): int(token["id"]) for token in self._file.get("added_tokens") or ()}
        return {**entries, **added}
