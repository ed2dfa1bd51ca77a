"""Text to token ids: truncation, limits, and the tokenizer as its users see it.

One `tokenizers.Tokenizer` behind a lock: a second copy would cost a vocabulary, and switching its truncation is cheap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.tokenizer_file import breaks_at_spaces, load_tokenizer
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, TokenizerFailed
from teimgr.layout import Layout

# No language writes this many characters per token, so a longer text is cut (or refused) before it costs time.
_CHARS_PER_TOKEN = 250


@dataclass(frozen=True, slots=True)
class Token:
    """A token as /tokenize shows it; offsets are UTF-8 bytes of prompt + text, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class Truncation:
    """What happens to a text that is too long: refused, or cut at one end."""

    on: bool = True
    left: bool = False


class TextTokenizer:
    """The tokenizer of one model. Safe from any thread; `max_length` counts tokens, `special_tokens` among them."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        self._tokenizer = load_tokenizer(layout)
        self._lock = threading.Lock()
        self._truncation: Truncation | None = None
        self._breaks_at_spaces = breaks_at_spaces(self._tokenizer)
        self._pool_prompts = layout.include_prompt
        self._prompt_lens: dict[str, int] = {}
        self.max_length = max_length
        self.special_tokens: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)

    def prompt_len(self, prompt: str) -> int:
        """How many leading tokens pooling leaves out for this prompt: 0 for nearly every model.

        Raises:
            TokenizerFailed: the library refused it.
        """
        if self._pool_prompts or not prompt:
            return 0
        if prompt not in self._prompt_lens:
            encoding = self._encode([prompt], Truncation())[0]
            self._prompt_lens[prompt] = len(encoding.ids) - encoding.special_tokens_mask[-1]
        return self._prompt_lens[prompt]

    def check(self, text: str | None, truncation: Truncation) -> TeimgrError | None:
        """What is wrong with a text before anything is tokenized; None where nothing is."""
        if text is None:
            return InvalidInput("Input validation error: `inputs` cannot be null")
        if not text:
            return EmptyInput()
        limit = self.max_length * _CHARS_PER_TOKEN
        if not truncation.on and len(text) > limit:
            return InvalidInput(
                f"Input validation error: `inputs` must have less than {limit} characters. Given: {len(text)}"
            )
        return None

    def encode(self, texts: Sequence[str], truncation: Truncation) -> list[NDArray[np.int32] | TeimgrError]:
        """The ids of each text (prompt already before it), or why there are none. The GIL is free meanwhile."""
        try:
            encodings = self._encode([self._shortened(text, truncation) for text in texts], truncation)
            return [self._ids(e, text, truncation) for e, text in zip(encodings, texts, strict=True)]
        except TokenizerFailed as error:  # for all texts at once
            return self._encode_singly(texts, truncation, error)

    def tokenize(self, text: str, add_special_tokens: bool, prompt: str) -> list[Token]:
        """Every token of prompt + text, untruncated.

        Raises:
            EmptyInput, InvalidInput: the text is empty or longer than the character limit.
            TokenizerFailed: the library refused it.
        """
        if error := self.check(text, Truncation(on=False)):
            raise error
        whole = prompt + text
        encoding = self._encode([whole], Truncation(on=False), add_special_tokens)[0]
        return list(_tokens(encoding, whole))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`.

        Raises:
            EmptyInput: there are none.
            TokenizerFailed: an id is no token id.
        """
        if not ids:
            raise EmptyInput("Input validation error: `input_ids` cannot be empty")
        with _refusals():
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _encode(self, texts: Sequence[str], truncation: Truncation, specials: bool = True) -> list[Encoding]:
        with self._lock, _refusals():
            self._switch(truncation)
            if len(texts) == 1:  # offsets are kept, and the thread pool is spared
                return [self._tokenizer.encode(texts[0], add_special_tokens=specials)]
            return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=specials)

    def _switch(self, truncation: Truncation) -> None:
        if truncation == self._truncation:
            return
        if truncation.on:
            self._tokenizer.enable_truncation(self.max_length, direction="left" if truncation.left else "right")
        else:
            self._tokenizer.no_truncation()
        self._truncation = truncation

    def _encode_singly(
        self, texts: Sequence[str], truncation: Truncation, error: TokenizerFailed
    ) -> list[NDArray[np.int32] | TeimgrError]:
        """After the library refused a batch: each text by itself, so that one cannot fail the others."""
        if len(texts) == 1:
            return [error]
        return [self.encode([text], truncation)[0] for text in texts]

    def _ids(self, encoding: Encoding, text: str, truncation: Truncation) -> NDArray[np.int32] | TeimgrError:
        ids = encoding.ids
        if truncation.on and not encoding.overflowing and self._shortened(text, truncation) is not text:
            ids = self._encode([text], truncation)[0].ids  # what was kept did not fill the limit, so all of it counts
        if len(ids) > self.max_length:
            return InvalidInput(
                f"Input validation error: `inputs` must have less than {self.max_length} tokens. Given: {len(ids)}"
            )
        if not ids:
            return EmptyInput()
        return np.array(ids, dtype=np.int32)

    def _shortened(self, text: str, truncation: Truncation) -> str:
        """A very long text cut to what can matter.

        Only where the tokenizer never joins characters over a space, and only at a space between two letters or
        digits: then the tokens of what is kept are those of the whole text. If they exceed the limit, truncation
        would have dropped everything beyond; if they do not, `_ids` takes the whole text.
        """
        limit = self.max_length * _CHARS_PER_TOKEN
        if not truncation.on or not self._breaks_at_spaces or len(text) <= limit:
            return text
        at = _space_after(text, len(text) - limit) if truncation.left else _space_before(text, limit)
        if at is None:
            return text
        return text[at:] if truncation.left else text[:at]


@contextmanager
def _refusals() -> Iterator[None]:
    """What the library raises, as TokenizerFailed: plain Exception, or a panic of Rust, which is a BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"tokenizer error {error}") from error


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


def _tokens(encoding: Encoding, text: str) -> Iterable[Token]:
    """The library counts characters; the contract counts bytes."""
    raw = text.encode()
    starts = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum([len(character.encode()) for character in text], out=starts[1:])
    rows = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    for id, token, special, (begin, end) in rows:
        if special:
            yield Token(id, token, True, None, None)
        else:
            start, stop = int(starts[begin]), int(starts[end])
            yield Token(id, raw[start:stop].decode(errors="replace"), False, start, stop)
