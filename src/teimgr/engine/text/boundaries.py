"""Finds places where a text can be cut without changing the tokens on one side, for known tokenizers.

A cut is safe if no token spans it in any context. Three rules find such places; the first that finds one is used:

1. A space between two letters or digits, in a tokenizer that never joins words over a space.
2. Before a space, ASCII punctuation or a Chinese character, at which BERT's words end.
3. Within a word of BPE or Unigram: no entry of the vocabulary spells characters on both sides of the cut. A merge over
   it would make one, and so would a piece of a segmentation (https://arxiv.org/abs/1804.10959).

Rules 2 and 3 avoid characters that a normalizer may join with preceding ones, and added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer, pre_tokenizers

# The word pattern of GPT-4's tokenizer and its successors (Qwen, Llama 3): words have spaces only at their beginning.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = [{"Regex": _WORDS % digits} for digits in ("", "{1,3}")]
# CLIP's word pattern drops everything else, which is spaces. In transformers it includes the two special tokens.
_CLIP_WORDS = r"%s's|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLIP_PATTERNS = [{"Regex": _CLIP_WORDS % marks} for marks in ("", r"<\|startoftext\|>|<\|endoftext\|>|")]

_SPACE = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
_ASCII_PUNCTUATION = r"!-/:-@\[-`{-~"
_CHINESE = "\u4e00-\u9fff"
_BERT_PLACE = r"[ \t\n\r%s](?=[ -~\t\n\r\u4e00-\u9fff])"
# Characters that no normal form joins with their neighbours, and that the word patterns treat alike.
_LETTER = (
    "[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03c9\u0400-\u0481\u048a-\u0523"
    "\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\ufdf0-\ufdfb]"
)
# Includes joiners and modifiers of emoji.
_SYMBOL = r"[!-&(-/:-@\[-_{-~\u200d\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f6cf\U0001f900-\U0001f9ff]"
_WITHIN_WORD = re.compile(f"(?<={_LETTER}){_LETTER}(?={_LETTER})|(?<={_SYMBOL}){_SYMBOL}(?={_SYMBOL})")
# Normalizers that change single characters, or characters with the marks after them.
_LOCAL_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Precompiled", "Prepend", "Strip", "Nmt"}
)
_BERT_NORMALIZERS = frozenset({"BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"})
_WORD_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "WhitespaceSplit", "Split"})
# Steps before the word splitter that keep spaces and cut a word in the same way everywhere.
_LEAVE_SPACES = frozenset({"Digits", "Punctuation", "UnicodeScripts"})
_DROP_SPACES = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_SEARCHED = 1024  # characters per step backwards
_MAX_CANDIDATES = 24  # look-ups for each take up to milliseconds


class Place(NamedTuple):
    """A cut before character `at`; up to `slack` tokens after it may differ from those of the whole text."""

    at: int
    slack: int = 0


class Boundaries:
    """Finds the places of one tokenizer. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._at_spaces = breaks_at_spaces(tokenizer)
        self._keeps_first_space = _keeps_first_space(tokenizer)
        tokens = tokenizer.get_added_tokens_decoder().values()
        added = [token.content for token in tokens if token.content]
        self._takes_spaces = any(token.rstrip for token in tokens)
        self._added = re.compile("|".join(map(re.escape, added)), re.IGNORECASE) if added else None
        self._longest_added = max(map(len, added), default=0)
        self._normalizer = tokenizer.normalizer
        self._word_places = _bert_places(tokenizer) if self._at_spaces else None
        self._pieces = _Pieces.of(tokenizer)

    def last(self, text: str, begin: int, end: int) -> int | None:
        """Return the last place in [begin, end]: the tokens before it are the first ones of the whole text."""
        for pattern, is_certain in self._rules():
            for at in _backwards(pattern, text, begin, end):
                if is_certain(text, at):
                    return at
        if self._pieces is not None:
            for _, at in zip(range(_MAX_CANDIDATES), _backwards(_WITHIN_WORD, text, begin, end), strict=False):
                if self._is_apart(text, at):
                    return at
        return None

    def first(self, text: str, begin: int, end: int, slack: int) -> Place | None:
        """Return the first place in [begin, end]: the tokens after it, except `slack`, are the last of the text."""
        for pattern, is_certain in self._rules(left=True):
            for match in pattern.finditer(text, begin, end):
                if is_certain(text, match.start()):
                    return Place(match.start())
        if self._pieces is None or not self._pieces.is_bpe:
            return None  # after another beginning, equal sums of scores are rounded differently
        # The tokenizer may prepend a space to the rest, so its tokens are valid only from the next place on.
        earlier: int | None = None
        found = _WITHIN_WORD.finditer(text, begin, end)
        for _, at in zip(range(_MAX_CANDIDATES), (match.start() for match in found), strict=False):
            if not self._is_apart(text, at):
                continue
            if earlier is not None:
                needed = (at - earlier + 1) * _TOKENS_PER_CHARACTER
                return Place(earlier, needed) if needed <= slack else None
            earlier = at
        return None

    def seams(self, text: str, distance: int) -> Iterator[int]:
        """Return places at most `distance` apart with the whole text's tokens on both sides, until none follows."""
        begin = 0
        while len(text) - begin > distance:
            at = next(
                (
                    at
                    for pattern, is_certain in self._rules(left=True)
                    for at in _backwards(pattern, text, begin + distance // 2, begin + distance)
                    if is_certain(text, at)
                ),
                None,
            )
            if at is None:
                return
            yield at
            begin = at

    def _rules(self, *, left: bool = False) -> Iterator[tuple[re.Pattern[str], Callable[[str, int], bool]]]:
        """Return patterns of places, and whether one of them is certain; `left`: for the tokens after it too."""
        if self._at_spaces and (self._keeps_first_space or not left):
            # A cut would change the match of an added token that takes the spaces after it.
            yield _SPACE, self._is_not_added if self._takes_spaces else lambda text, at: True
        if self._word_places is not None:
            yield self._word_places, self._is_not_added

    def _is_apart(self, text: str, at: int) -> bool:
        assert self._pieces is not None
        return self._is_not_added(text, at) and self._pieces.are_apart(text, at)

    def _is_not_added(self, text: str, at: int) -> bool:
        """True if no added token can be around `at`, as given or in the tokenizer's normal form."""
        if self._added is None:
            return True
        window = text[max(0, at - self._longest_added) : at + self._longest_added]
        if self._added.search(window) is not None:
            return False
        return self._normalizer is None or self._added.search(self._normalizer.normalize_str(window)) is None


class _Pieces:
    """The vocabulary of BPE or Unigram, searched for entries that span a place."""

    def __init__(self, tokenizer: Tokenizer, is_bpe: bool, by_bytes: bool, space: str) -> None:
        self.is_bpe = is_bpe
        self._has = tokenizer.token_to_id
        self._normalizer = tokenizer.normalizer
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False) if by_bytes else None
        self._space = space
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=1)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Pieces | None:
        model = type(tokenizer.model).__name__
        parts = list(flattened(step_of(tokenizer.pre_tokenizer), "pretokenizers"))
        kinds = {part["type"] for part in parts}
        if model not in ("BPE", "Unigram") or not kinds <= _WORD_SPLITTERS:
            return None
        if any(part["type"] == "Split" and not _splits_isolated(part) for part in parts):
            return None
        normalizers = flattened(step_of(tokenizer.normalizer), "normalizers")
        if not all(part["type"] in _LOCAL_NORMALIZERS or _is_of_spaces(part) for part in normalizers):
            return None
        if model == "BPE" and any(getattr(tokenizer.model, name) for name in _WORD_ENDS):
            return None  # pieces have other spellings at the edges of words
        space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), " ")
        return cls(tokenizer, model == "BPE", "ByteLevel" in kinds, space)

    def are_apart(self, text: str, at: int) -> bool:
        """True if no entry of the vocabulary has characters on both sides of `at`."""
        if "'" in text[max(0, at - _CONTRACTION) : at]:
            return False  # a cut may change whether the word pattern matches "'re"
        before, both = (self._spelled(text[max(0, at - self._longest) : end]) for end in (at, at + self._longest))
        if not before or not both.startswith(before) or len(before) == len(both):
            return False
        edge = len(before)
        for begin in range(edge - 1, max(-1, edge - self._longest), -1):
            for end in range(edge + 1, min(len(both), begin + self._longest) + 1):
                if self._has(both[begin:end]) is not None:
                    return False
        return True

    def _spelled(self, text: str) -> str:
        """Return `text` as the model sees it."""
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        if self._bytes is None:
            return text.replace(" ", self._space)
        return "".join(word for word, _ in self._bytes.pre_tokenize_str(text))


_CONTRACTION = 3
_WORD_ENDS = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
# Bytes of a character after the longest compatibility decomposition.
_TOKENS_PER_CHARACTER = 18 * 4


def _backwards(pattern: re.Pattern[str], text: str, begin: int, end: int) -> Iterator[int]:
    """Yield where matches of one character begin in [begin, end], the last first."""
    while end > begin:
        start = max(begin, end - _SEARCHED)
        yield from [match.start() for match in pattern.finditer(text, start, end + 2)][::-1]
        end = start - 1


def _bert_places(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern of BERT's words and of their beginnings; None for other tokenizers."""
    words = list(flattened(step_of(tokenizer.pre_tokenizer), "pretokenizers"))
    normalizers = list(flattened(step_of(tokenizer.normalizer), "normalizers"))
    if type(tokenizer.model).__name__ != "WordPiece" or [part["type"] for part in words] != ["BertPreTokenizer"]:
        return None
    if any(part["type"] not in _BERT_NORMALIZERS for part in normalizers):
        return None
    is_chinese = any(part.get("handle_chinese_chars", False) for part in normalizers)
    return re.compile(_BERT_PLACE % (_ASCII_PUNCTUATION + (_CHINESE if is_chinese else "")))


def _is_of_spaces(part: dict[str, Any]) -> bool:
    """True if a normalizer replaces only spaces, by one character."""
    if part["type"] != "Replace" or len(part["content"]) != 1:
        return False
    return part["pattern"] in ({"String": " "}, {"Regex": " {2,}"})


def step_of(part: Any) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer as in tokenizer.json; writing and parsing the vocabulary too would take 10
    ms."""
    return None if part is None else json.loads(part.__getstate__())


def breaks_at_spaces(tokenizer: Tokenizer) -> bool:
    """True if no token can span letters or digits on both sides of a space; False if that is not certain."""
    if any(" " in token.content.lstrip() for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    splitter = _splitter(tokenizer)
    normalizers = flattened(step_of(tokenizer.normalizer), "normalizers")
    return splitter is not None and all(_leaves_spaces(part, splitter) for part in normalizers)


def _splitter(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the step that splits words at spaces, unless an earlier step may change or join the text around them."""
    for part in flattened(step_of(tokenizer.pre_tokenizer), "pretokenizers"):
        if _splits(part):
            return part
        if part["type"] not in _LEAVE_SPACES:
            return None
    return None


def _leaves_spaces(part: dict[str, Any], splitter: dict[str, Any]) -> bool:
    """True if a space between two letters or digits is one for `splitter` too, behind a normalizer of texts."""
    kind = part["type"]
    if kind != "Replace":
        return kind in _LOCAL_NORMALIZERS or kind in _BERT_NORMALIZERS
    found, content = part["pattern"], part["content"]
    if found in _SPACE_RUNS:
        return bool(content == " " or _marks_spaces(splitter, content))
    if found == {"String": " "}:
        return _marks_spaces(splitter, content)
    if found == {"Regex": FINAL_SIGMA}:
        return True
    if "String" in found:
        return not any(map(str.isspace, found["String"]))
    return _PUNCTUATION_CLASS.fullmatch(found["Regex"]) is not None


def _marks_spaces(splitter: dict[str, Any], content: str) -> bool:
    return bool(splitter["type"] == "Metaspace" and content == splitter["replacement"])


# A class of ASCII punctuation only, like SigLIP's, without range, inner class, complement or intersection.
_PUNCTUATION_CLASS = re.compile(r"\[(?!\^)(?:\\[!-/:-@\[-`{-~]|(?!&&)[!-,./:-@^_`{-~])+\]")
PYTHON_SPACES = r"[\x1c-\x1f\s]+"  # separators of `str.split`
_SPACE_RUNS = [{"Regex": regex} for regex in (" {2,}", r"\s+", r"\s{2,}", " +", PYTHON_SPACES)]
# A capital sigma that `str.lower` turns into a final one, before a space or the end of the text.
_CASED = r"[\p{Cased}&&[^\p{Case_Ignorable}]]"
FINAL_SIGMA = rf"{_CASED}\p{{Case_Ignorable}}*+\KΣ(?!\p{{Case_Ignorable}}*+{_CASED})"


def _keeps_first_space(tokenizer: Tokenizer) -> bool:
    """True if the words of a text that begins with a space are those it has within a longer one."""
    normalizers = flattened(step_of(tokenizer.normalizer), "normalizers")
    if not any(part["type"] == "Strip" and part["strip_left"] for part in normalizers):
        return True
    if (splitter := _splitter(tokenizer)) is None:
        return False
    kind = splitter["type"]
    # "first" marks the first word of the given text, not one after a stripped space.
    always = splitter.get("add_prefix_space") or splitter.get("prepend_scheme") == "always"
    return kind in _DROP_SPACES or (kind in ("ByteLevel", "Metaspace") and bool(always))


def _splits(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Split":
        return _splits_isolated(part) or (
            part["pattern"] in _CLIP_PATTERNS and part["behavior"] == "Removed" and part["invert"]
        )
    if kind == "Metaspace":
        return bool(part.get("split", True))
    return kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def _splits_isolated(part: dict[str, Any]) -> bool:
    """True if a Split keeps all characters, in words that rule 3 knows."""
    return part["pattern"] in _WORD_PATTERNS and part["behavior"] == "Isolated" and not part["invert"]


def flattened(spec: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer of tokenizer.json, sequences flattened."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for child in spec[children] for part in flattened(child, children)]
    return [spec]
