"""A text cut to a number of tokens that its sender chose, which is less than the model takes."""

from __future__ import annotations

from teimgr.engine.tokenizer import TextTokenizer

_CHARS_PER_TOKEN = 250


def cut(tokenizer: TextTokenizer, text: str, max_tokens: int, *, left: bool) -> str:
    """The first `max_tokens` tokens of `text`, or the last ones where `left` is cut off; special ones do not count.

    It is a piece of the text itself, so a tokenizer that merges over words may make a token more or less of it.

    Raises:
        TokenizerFailed: the library refused it.
    """
    if len(text.encode()) <= max_tokens:  # no token is shorter than a byte
        return text
    most = min(tokenizer.max_length, max_tokens) * _CHARS_PER_TOKEN
    text = text[-most:] if left else text[:most]
    tokens = tokenizer.tokenize(text, add_special_tokens=False, prompt="")
    places = [(token.start, token.stop) for token in tokens if token.start is not None and token.stop is not None]
    if len(places) <= max_tokens:
        return text
    begin, end = (places[-max_tokens][0], None) if left else (0, places[max_tokens - 1][1])
    return text.encode()[begin:end].decode(errors="ignore")
