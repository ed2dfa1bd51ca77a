"""The tokenizers library, which is never told to truncate: so nothing of it ever changes, and threads may share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Encoding, Tokenizer

from teimgr.errors import TokenizerFailed

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
