"""Templates around inputs: late-interaction role prefixes, and chat templates of causal rerankers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Pair
from teimgr.engine.text.truncation import (
    COUNTED_CHARACTERS,
    Short,
    Shortener,
    Text,
    Truncation,
    may_try,
    too_long,
    too_many_characters,
)
from teimgr.errors import InvalidInput
from teimgr.models.layout import LateInteraction, PairTemplate

QUERY, DOCUMENT = "query", "document"


@dataclass(frozen=True, slots=True)
class Role:
    """Query or document: `limit` is the maximum of all tokens; `prefix` ids (int32) follow the leading special tokens.

    If `expansion_id` is set, an input is filled with that id up to the limit (ColBERT's query augmentation). Unless
    `attend`, no token attends to the expansion tokens, which still have their own vectors.
    """

    query: bool
    limit: int
    prefix: NDArray[np.int32]
    expansion_id: int | None = None
    attend: bool = False

    def add_prefix(self, ids: NDArray[np.int32], leading: int, typed: bool) -> Encoded:
        """Encode a text's `ids`, of which the first `leading` are special; `typed` adds token types."""
        return self.expand(np.concatenate([ids[:leading], self.prefix, ids[leading:]]), typed)

    def expand(self, ids: NDArray[np.int32], typed: bool) -> Encoded:
        real = len(ids)
        if self.expansion_id is not None and real < self.limit:
            ids = np.concatenate([ids, np.full(self.limit - real, self.expansion_id, dtype=np.int32)])
        type_ids = np.zeros(len(ids), dtype=np.uint8) if typed else None
        keys = None if self.attend or real == len(ids) else real
        return Encoded(ids, type_ids, keys, query=self.query)


def late_interaction_roles(late: LateInteraction, max_length: int) -> dict[bool, Role]:
    """The document's role under False, the query's under True; `max_length` is the model's own."""
    expanded = late.expand_queries and late.query_length is not None
    return {
        True: Role(
            query=True,
            limit=min(late.query_length or max_length, max_length),
            prefix=np.array(late.query_prefix_ids, dtype=np.int32),
            expansion_id=late.expansion_token_id if expanded else None,
            attend=late.attend_to_expansion,
        ),
        False: Role(
            query=False,
            limit=min(late.document_length or max_length, max_length),
            prefix=np.array(late.document_prefix_ids, dtype=np.int32),
        ),
    }


_PLACES = re.compile(r"(\{query\}|\{document\})")


class CausalTemplate:
    """A language model's template around pairs; only the body is truncated. `limit` includes the template's tokens.
    Refusals count `beyond` more tokens: those of images, without the one per image in the text.

    `tokenize` adds no special tokens, and its encodings have offsets.
    """

    def __init__(
        self,
        config: PairTemplate,
        tokenize: Callable[[Sequence[str]], list[Encoding]],
        shortener: Shortener,
        limit: int,
        beyond: int = 0,
    ) -> None:
        self._config = config
        self._body = _PLACES.split(config.body)
        self._tokenize = tokenize
        self._shortener = shortener
        self._limit = limit
        self._beyond = beyond

    def encode(self, pairs: Sequence[Pair], truncate: bool, left: bool) -> list[NDArray[np.int32] | InvalidInput]:
        """The ids of each pair, int32, or its refusal: it is too long to be truncated, or must not be.

        Template and body are tokenized as one text, as for chats: a token may reach over the edge of the body.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        bodies = [self._body_of(pair) for pair in pairs]
        first = self._shortener.first if truncate else max(self._shortener.first, COUNTED_CHARACTERS)
        cuts = [self._shortener.cuts(body, left, first) for body in bodies]
        shorts = [next(of_body, None) for of_body in cuts]
        encodings = self._encode(["" if short is None else short.text for short in shorts])
        rows = zip(encodings, shorts, cuts, bodies, strict=True)
        return [self._decided(*row, truncate=truncate, left=left) for row in rows]

    def _decided(
        self, encoding: Encoding, short: Short | None, cuts: Iterator[Short], body: str, *, truncate: bool, left: bool
    ) -> NDArray[np.int32] | InvalidInput:
        """The ids of a body; like `TextTokenizer._decided`."""
        if short is None:
            return too_many_characters(None, self._limit, len(body), self._beyond)
        while short.text is not body and not (
            short.exact and len(encoding) - self._lost(encoding, left) > self._limit + short.slack
        ):
            following = next(cuts, None)
            if not may_try(following, encoding, self._limit):
                return too_many_characters(encoding, self._limit, len(body), self._beyond)
            short = following
            (encoding,) = self._encode([short.text])
        if not truncate and len(encoding) > self._limit:
            count = len(encoding) + self._beyond
            return too_long(self._limit + self._beyond, count if short.text is body else f"at least {count}")
        assert isinstance(short.text, str)
        return self._ids(encoding, short.text, left)

    def _lost(self, encoding: Encoding, left: bool) -> int:
        """The number of tokens before those of the body, where what is too long loses them first."""
        if not (left and self._config.cuts_prefix):
            return 0
        return sum(begin < len(self._config.prefix) for begin, _ in encoding.offsets)

    def _body_of(self, pair: Pair) -> str:
        """The middle of a pair's text. A literal {query} or {document} in a text stays as it is."""
        first, second = (text.strip() for text in pair) if self._config.strips else pair
        texts = {"{query}": first, "{document}": second}
        return "".join(texts.get(part, part) for part in self._body)

    @property
    def template_tokens(self) -> int:
        return len(self._encode([self._body_of(Pair("", ""))])[0].ids)

    def _encode(self, bodies: Sequence[Text]) -> list[Encoding]:
        return self._tokenize([f"{self._config.prefix}{body}{self._config.suffix}" for body in bodies])

    def _ids(self, encoding: Encoding, kept: str, left: bool) -> NDArray[np.int32]:
        ids = np.array(encoding.ids, dtype=np.int32)
        if len(ids) <= self._limit:
            return ids
        if left and self._config.cuts_prefix:
            return ids[len(ids) - self._limit :]
        offsets = np.array(encoding.offsets)
        before = int((offsets[:, 1] <= len(self._config.prefix)).sum())
        after = int((offsets[:, 0] >= len(self._config.prefix) + len(kept)).sum())
        middle = ids[before : len(ids) - after]
        room = max(self._limit - before - after, 0)
        middle = middle[len(middle) - room :] if left else middle[:room]
        return np.concatenate([ids[:before], middle, ids[len(ids) - after :]])


_MARKS = ("{query}", "{document}")


class PiecedTemplate:
    """A causal reranker's template of separately tokenized pieces; `limit` includes the template's tokens.

    As by the models' authors, a query may take three quarters of the room that the fixed pieces leave, and its document
    the rest.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        tokenize: Callable[[Sequence[str]], list[Encoding]],
        shortener: Shortener,
        limit: int,
    ) -> None:
        self._tokenize = tokenize
        self._shortener = shortener
        self._limit = limit
        self._heads = [next(piece for piece in pieces if piece.endswith(mark)).removesuffix(mark) for mark in _MARKS]
        fixed = [piece for piece in pieces if not piece.endswith(_MARKS)]
        ids = {piece: encoding.ids for piece, encoding in zip(fixed, tokenize(fixed), strict=True)}
        # Ids, or the half of the pair: 0 or 1.
        self._parts = [ids.get(piece, int(piece.endswith(_MARKS[1]))) for piece in pieces]
        self._room = max(limit - sum(len(ids[piece]) for piece in fixed), 0)

    @property
    def template_tokens(self) -> int:
        return self._limit - self._room + sum(len(encoding.ids) for encoding in self._tokenize(self._heads))

    def encode(self, pairs: Sequence[Pair], truncate: bool, left: bool) -> list[NDArray[np.int32] | InvalidInput]:
        """Like `CausalTemplate.encode`.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        texts = [(self._heads[0] + pair.first, self._heads[1] + pair.second) for pair in pairs]
        whole = list(dict.fromkeys(chain.from_iterable(texts)))  # each document repeats the query
        shorts = [next(self._cuts(text, left, truncate), None) for text in whole]
        encodings = self._tokenize(["" if short is None else str(short.text) for short in shorts])
        known = {text: (text, short, encoding) for text, short, encoding in zip(whole, shorts, encodings, strict=True)}
        return [self._ids(both, known, truncate, left) for both in texts]

    def _ids(
        self, texts: tuple[str, str], known: dict[str, tuple[str, Short | None, Encoding]], truncate: bool, left: bool
    ) -> NDArray[np.int32] | InvalidInput:
        halves: list[list[int]] = []
        room = self._room * 3 // 4 if truncate else self._room
        for text in texts:
            kept = self._kept(*known[text], Truncation(room, left), truncate)
            if isinstance(kept, InvalidInput):
                return kept
            halves.append(kept)
            room = self._room - len(kept)
        parts = [halves[part] if isinstance(part, int) else part for part in self._parts]
        return np.fromiter(chain.from_iterable(parts), np.int32)

    def _cuts(self, text: str, left: bool, truncate: bool) -> Iterator[Short]:
        first = self._shortener.first if truncate else max(self._shortener.first, COUNTED_CHARACTERS)
        return self._shortener.cuts(text, left, first)

    def _kept(
        self, text: str, short: Short | None, encoding: Encoding, bound: Truncation, truncate: bool
    ) -> list[int] | InvalidInput:
        """The ids of a text within `bound`, from the encoding of its first cut on; like `TextTokenizer._decided`."""
        if short is None:
            return too_many_characters(None, bound.limit, len(text))
        cuts = islice(self._cuts(text, bound.left, truncate), 1, None)
        while not (self._shortener.decides(encoding, short, text, bound) if truncate else short.text is text):
            if not truncate and short.exact and len(encoding) > bound.limit:
                break
            following = next(cuts, None)
            if not may_try(following, encoding, bound.limit):
                return too_many_characters(encoding, bound.limit, len(text))
            short = following
            (encoding,) = self._tokenize([str(short.text)])
        ids: list[int] = encoding.ids
        if len(ids) <= bound.limit:
            return ids
        if not truncate:
            count = self._limit - bound.limit + len(ids)
            return too_long(self._limit, count if short.text is text else f"at least {count}")
        return ids[len(ids) - bound.limit :] if bound.left else ids[: bound.limit]
