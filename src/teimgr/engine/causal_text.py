"""Rerankers that are language models: a pair becomes one text, of which only the body is ever cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.job import Pair
from teimgr.engine.shortening import Shortener
from teimgr.engine.tokenizer_library import LibraryTokenizer
from teimgr.layout import CausalScore

_PLACES = re.compile(r"(\{query\}|\{document\})")


class CausalText:
    """The template of one model around its pairs; `limit` is tokens, the template's included."""

    def __init__(self, form: CausalScore, library: LibraryTokenizer, shortener: Shortener, limit: int) -> None:
        self._form = form
        self._body = _PLACES.split(form.body)
        self._library = library
        self._shortener = shortener
        self._limit = limit

    def encode(self, pairs: Sequence[Pair], truncate: bool, left: bool) -> list[NDArray[np.int32]]:
        """The ids of each pair, int32, longer than the limit only where not `truncate`.

        The text is tokenized as one, as chat templates are: a token may reach over the edge of the body.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        bodies = [self.body(pair) for pair in pairs]
        short = [self._shortener.short_text(body, left) if truncate else body for body in bodies]
        encodings = self._encode(short)
        return [
            self._ids(encoding, kept, body, truncate, left)
            for encoding, kept, body in zip(encodings, short, bodies, strict=True)
        ]

    def body(self, pair: Pair) -> str:
        """The middle of a pair's text. What a text says of {query} or {document} itself stays as it is."""
        texts = {"{query}": pair.first, "{document}": pair.second}
        return "".join(texts.get(part, part) for part in self._body)

    @property
    def template_tokens(self) -> int:
        """The tokens around an empty pair."""
        return len(self._encode([self.body(Pair("", ""))])[0].ids)

    def _encode(self, bodies: Sequence[str]) -> list[Encoding]:
        texts = [f"{self._form.prefix}{body}{self._form.suffix}" for body in bodies]
        return self._library.encode(texts, specials=False, offsets=True)

    def _ids(self, encoding: Encoding, kept: str, body: str, truncate: bool, left: bool) -> NDArray[np.int32]:
        ids = np.array(encoding.ids, dtype=np.int32)
        if kept is not body and len(ids) <= self._limit:  # all of the body counts
            return self._ids(self._encode([body])[0], body, body, truncate, left)
        if not truncate or len(ids) <= self._limit:
            return ids
        offsets = np.array(encoding.offsets)
        before = int((offsets[:, 1] <= len(self._form.prefix)).sum())
        after = int((offsets[:, 0] >= len(self._form.prefix) + len(kept)).sum())
        middle = ids[before : len(ids) - after]
        room = max(self._limit - before - after, 0)
        middle = middle[len(middle) - room :] if left else middle[:room]
        return np.concatenate([ids[:before], middle, ids[len(ids) - after :]])
