"""The tokenizers library behind a lock: a second copy would cost a vocabulary, switching its truncation little."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from teimgr.errors import TokenizerFailed

# One text, or two that are read together through the model's template for pairs.
Text = str | tuple[str, str]


class Cut(NamedTuple):
    """Keep `limit` tokens, special ones included; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool


class LibraryTokenizer:
    """Safe from any thread; the GIL is free while it works."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._cut: Cut | None = None  # a new tokenizer does not truncate; see load_tokenizer

    def encode(
        self, texts: Sequence[Text], cut: Cut | None, specials: bool = True, offsets: bool = False
    ) -> list[Encoding]:
        """Encodings of `texts`, with or without special tokens; with offsets only where they are asked for.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        with self._lock, _refusals():
            self._switch(cut)
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

    def _switch(self, cut: Cut | None) -> None:
        if cut == self._cut:
            return
        if cut is None:
            self._tokenizer.no_truncation()
        else:
            direction = "left" if cut.left else "right"
            self._tokenizer.enable_truncation(cut.limit, strategy="longest_first", direction=direction)
        self._cut = cut


@contextmanager
def _refusals() -> Iterator[None]:
    """What the library raises, as TokenizerFailed: plain Exception, or a panic of Rust, which is a BaseException."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed(f"tokenizer error {error}") from error
