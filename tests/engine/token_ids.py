"""Token ids of one text, for tests of the tokenizer."""

from __future__ import annotations

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Input
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions


def ids(tokenizer: TextTokenizer, text: Input, reading: TokenizeOptions | None = None) -> list[int]:
    """The ids as `reading` has them cut, by default from the right."""
    (result,) = tokenizer.encode([text], reading or TokenizeOptions())
    assert isinstance(result, Encoded), result
    return result.ids.tolist()
