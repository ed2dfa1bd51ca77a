"""The tokenizers library: loading, encoding, and truncation that costs no more than the tokens it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, normalizers

from teimgr.errors import ModelLoadFailed, TokenizerFailed
from teimgr.model_files import Layout

# A text, or a pair for the model's pair template.
Text = str | tuple[str, str]


class TokenizerLibrary:
    """A tokenizer of the library with its errors as `TokenizerFailed`. Safe from any thread; releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Text], specials: bool = True, offsets: bool = False) -> list[Encoding]:
        """Untruncated encodings of `texts`, with or without special tokens and offsets.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        with _library_errors():
            if len(texts) == 1:  # without the thread pool
                whole, pair = (texts[0], None) if isinstance(texts[0], str) else texts[0]
                return [self._tokenizer.encode(whole, pair, add_special_tokens=specials)]
            encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
            return encode(list(texts), add_special_tokens=specials)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`.

        Raises:
            TokenizerFailed: an id is no token id.
        """
        with _library_errors():
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocabulary(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn the library's errors into TokenizerFailed: plain Exceptions, or Rust panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"tokenizer error {error}") from error


# The word pattern of GPT-4's tokenizer and its successors (Qwen, Llama 3): a space may begin a word, never lie within.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = [{"Regex": _WORDS % digits} for digits in ("", "{1,3}")]
_VOCABULARIES = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")


def load_tokenizer(layout: Layout) -> Tokenizer:
    """The model's fast tokenizer, without the padding and truncation that its file may configure.

    Raises:
        ModelLoadFailed: there is none, or it cannot be read.
    """
    path = layout.transformer_dir / "tokenizer.json"
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
    """Convert an older model's vocabulary. Where there is none, transformers would create an empty tokenizer."""
    from transformers import AutoTokenizer

    if not any((layout.transformer_dir / name).is_file() for name in _VOCABULARIES):
        raise FileNotFoundError(f"there is neither tokenizer.json nor any of {', '.join(_VOCABULARIES)}")
    trust = layout.trust_remote_code  # never None: transformers would ask at the terminal
    slow = AutoTokenizer.from_pretrained(layout.transformer_dir, local_files_only=True, trust_remote_code=trust)
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(slow).__name__} has no fast form, and there is no tokenizer.json")
    return backend


def _lower_cases(tokenizer: Tokenizer) -> bool:
    spec = json.loads(tokenizer.to_str())["normalizer"]
    return any(part["type"] == "Lowercase" or part.get("lowercase") is True for part in _parts(spec, "normalizers"))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of the unknown token; None where the vocabulary covers all text."""
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:  # Unigram
        return None if model["unk_id"] is None else int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)


def breaks_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether no token can span letters or digits on both sides of a space; False where that is not certain."""
    spec = json.loads(tokenizer.to_str())
    if any(" " in token["content"].strip() for token in spec["added_tokens"]):
        return False
    return any(_splits(part) for part in _parts(spec["pre_tokenizer"], "pretokenizers"))


def _splits(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Split":
        return part["pattern"] in _WORD_PATTERNS and part["behavior"] == "Isolated" and not part["invert"]
    if kind == "Metaspace":
        return bool(part.get("split", True))
    return kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def _parts(spec: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer of tokenizer.json, sequences flattened."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for child in spec[children] for part in _parts(child, children)]
    return [spec]


class Truncation(NamedTuple):
    """Keep `limit` tokens, special ones included; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool

    def kept(self, encoding: Encoding) -> NDArray[np.intp] | None:
        """The positions of the tokens that stay, special ones always; None where all do."""
        if len(encoding) <= self.limit:
            return None
        half_of = _halves(encoding)
        stays = half_of < 0
        for half, count in enumerate(self.counts(half_of)):
            tokens = np.flatnonzero(half_of == half)
            stays[tokens[len(tokens) - count :] if self.left else tokens[:count]] = True
        return np.flatnonzero(stays)

    def counts(self, half_of: NDArray[np.int8]) -> tuple[int, int]:
        """How many tokens of the first and of the second half stay; a single text is a first half."""
        first, second = (int((half_of == half).sum()) for half in (0, 1))
        room = self.room(half_of)
        if first + second <= room:
            return first, second
        if min(first, second) * 2 <= room:  # the shorter one stays whole
            return (first, room - first) if first <= second else (room - second, second)
        less = room // 2
        return (less, room - less) if first <= second else (room - less, less)

    def room(self, half_of: NDArray[np.int8]) -> int:
        return max(0, self.limit - int((half_of < 0).sum()))


def _halves(encoding: Encoding) -> NDArray[np.int8]:
    """Which half each token belongs to, 0 or 1; -1 for special ones."""
    return np.array([-1 if half is None else half for half in encoding.sequence_ids], dtype=np.int8)


class Shortener:
    """Cuts very long texts to `characters` before tokenization, only where that cannot change the result.

    A text is cut at a space between two letters or digits, in a tokenizer that never joins characters over a space
    (`safe`): then the tokens of what is kept are those of the whole text. If they exceed the limit, truncation would
    have dropped everything beyond; if they do not, the whole text must be tokenized after all. `holds` decides.
    """

    def __init__(self, characters: int, safe: bool) -> None:
        self._characters = characters
        self._safe = safe

    def short(self, text: Text, left: bool) -> Text:
        """`text` itself, or a shorter one; of a pair each half by itself."""
        if isinstance(text, str):
            return self.short_text(text, left)
        first, second = (self.short_text(half, left) for half in text)
        return text if first is text[0] and second is text[1] else (first, second)

    def short_text(self, text: str, left: bool) -> str:
        if not self._safe or len(text) <= self._characters:
            return text
        at = _space_after(text, len(text) - self._characters) if left else _space_before(text, self._characters)
        if at is None:
            return text
        return text[at:] if left else text[:at]

    def holds(self, encoding: Encoding, short: Text, text: Text, truncation: Truncation) -> bool:
        """Whether truncating `encoding`, that of `short`, keeps the same tokens as truncating that of `text`."""
        if short is text:
            return True
        if isinstance(short, str) or isinstance(text, str):
            return len(encoding) > truncation.limit
        half_of = _halves(encoding)
        room, kept = truncation.room(half_of), truncation.counts(half_of)
        if sum(kept) < room:
            return False
        # The shorter half is untouched and the longer one fills the rest, or both have half: the text beyond a cut
        # could only make a half longer that is long enough.
        shorter = kept.index(min(kept))
        if kept[shorter] < room // 2:
            return short[shorter] is text[shorter]
        return kept[0] == kept[1]


def _space_before(text: str, at: int) -> int | None:
    """The last space at or before `at` between two letters or digits."""
    while (at := text.rfind(" ", 1, at)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
    return None


def _space_after(text: str, at: int) -> int | None:
    at -= 1
    while (at := text.find(" ", at + 1)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
    return None
