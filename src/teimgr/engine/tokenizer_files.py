"""A model's tokenizer file, and what can be told from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Encoding, Tokenizer, normalizers

from teimgr.errors import ModelLoadFailed, TokenizerFailed
from teimgr.model_files import Layout

# One text, or two that are read together through the model's template for pairs.
Text = str | tuple[str, str]


class LibraryTokenizer:
    """Safe from any thread; the GIL is free while it works."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Text], specials: bool = True, offsets: bool = False) -> list[Encoding]:
        """Whole encodings of `texts`, with or without special tokens; with offsets only where they are asked for.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        with _refusals():
            if len(texts) == 1:  # the thread pool is spared
                whole, pair = (texts[0], None) if isinstance(texts[0], str) else texts[0]
                return [self._tokenizer.encode(whole, pair, add_special_tokens=specials)]
            work = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
            return work(list(texts), add_special_tokens=specials)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`.

        Raises:
            TokenizerFailed: an id is no token id.
        """
        with _refusals():
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocabulary(self) -> int:
        """The number of token ids, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the library raises, as TokenizerFailed: plain Exception, or a panic of Rust, which is a BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"tokenizer error {error}") from error


# How GPT-4's tokenizer and those after it (Qwen, Llama 3) find words: a space may begin one, and never lies within.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = [{"Regex": _WORDS % digits} for digits in ("", "{1,3}")]
_VOCABULARIES = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")


def load_tokenizer(layout: Layout) -> Tokenizer:
    """The model's fast tokenizer, rid of the padding and truncation its file may carry.

    Raises:
        ModelLoadFailed: there is none, or it cannot be read.
    """
    path = layout.transformer / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else _convert(layout)
    except Exception as error:
        raise ModelLoadFailed(f"the tokenizer cannot be loaded: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if layout.lower_case and not _lower_cases(tokenizer):
        own = tokenizer.normalizer
        steps = [normalizers.Lowercase()] if own is None else [normalizers.Lowercase(), own]
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _convert(layout: Layout) -> Tokenizer:
    """A fast tokenizer from an older model's vocabulary. Without one, transformers would make up an empty one."""
    from transformers import AutoTokenizer

    if not any((layout.transformer / name).is_file() for name in _VOCABULARIES):
        raise FileNotFoundError(f"there is neither tokenizer.json nor any of {', '.join(_VOCABULARIES)}")
    trust = layout.trust_remote_code  # never None: transformers would ask at the terminal
    slow = AutoTokenizer.from_pretrained(layout.transformer, local_files_only=True, trust_remote_code=trust)
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(slow).__name__} has no fast form, and there is no tokenizer.json")
    return backend


def _lower_cases(tokenizer: Tokenizer) -> bool:
    stated = json.loads(tokenizer.to_str())["normalizer"]
    return any(part["type"] == "Lowercase" or part.get("lowercase") is True for part in _parts(stated, "normalizers"))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of what is not in the vocabulary; None where everything can be written in it."""
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:  # Unigram
        return None if model["unk_id"] is None else int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)


def breaks_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether no token ever holds a letter or digit from both sides of a space. False where that is not certain."""
    stated = json.loads(tokenizer.to_str())
    if any(" " in token["content"].strip() for token in stated["added_tokens"]):
        return False
    return any(_splits(part) for part in _parts(stated["pre_tokenizer"], "pretokenizers"))


def _splits(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Split":
        return part["pattern"] in _WORD_PATTERNS and part["behavior"] == "Isolated" and not part["invert"]
    if kind == "Metaspace":
        return bool(part.get("split", True))
    return kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def _parts(stated: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    """A normalizer or pre-tokenizer of tokenizer.json, sequences flattened."""
    if stated is None:
        return []
    if stated["type"] == "Sequence":
        return [part for child in stated[children] for part in _parts(child, children)]
    return [stated]
