"""The prompts of a listwise reranker, and the scores of a list from the vectors at the marks of its prompts.

A long list is divided into several prompts, as by the model's authors. A document's vector comes from its prompt; the
query's is the mean over all prompts, weighted by the score of their best document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.job import Pair
from teimgr.engine.text.boundaries import Boundaries
from teimgr.engine.text.tokenizer_library import TokenizerLibrary
from teimgr.engine.text.truncation import Short, Shortener, Truncation, may_try, too_long, too_many_characters
from teimgr.errors import InputTooLong, InvalidInput, ModelLoadFailed
from teimgr.models.layout import Listwise

# From jina-reranker-v3's own code: https://huggingface.co/jinaai/jina-reranker-v3, modeling.py.
_BEFORE = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it "
    "answers the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
    "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
    "<|im_end|>\n<|im_start|>user\n"
)
_TASK = (
    "I will provide you with {count} passages, each indicated by a numerical identifier. "
    "Rank the passages based on their relevance to query: {query}\n"
)
_BEHIND = "\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Shortened(NamedTuple):
    """A text in the form of the prompt, and its tokens."""

    text: str
    tokens: int


class ListPrompt:
    """The prompts of a model. Safe from any thread; `limit` is the longest prompt, in tokens."""

    def __init__(self, listwise: Listwise, library: TokenizerLibrary, boundaries: Boundaries, limit: int) -> None:
        """Raise ModelLoadFailed if the tokenizer joins a text with the mark after it."""
        self.listwise = listwise
        self._library = library
        self._boundaries = boundaries
        self._limit = limit
        self._marks = (listwise.query_mark, listwise.document_mark)
        pieces = self._pieces("a", ("b ", " c"))
        (whole,) = library.encode(["".join(pieces)])
        if whole.ids != self._joined(pieces).tolist():
            raise ModelLoadFailed(
                "the tokenizer gives a listwise prompt other tokens than its parts, which is not served"
            )

    @property
    def template_tokens(self) -> int:
        return len(self._joined(self._pieces("", ("",))))

    def shortened(self, texts: Sequence[str], *, query: bool, truncate: bool, left: bool) -> list[Shortened]:
        """Each text within its limit of tokens: one that reaches it is that of its tokens, as its authors cut it.

        Raises:
            InputTooLong: one is too long to be truncated, or must not be; it names which where there are several.
            TokenizerFailed: the library refused one of them.
        """
        limit = self.listwise.longest_query if query else self.listwise.longest_document
        shortener, bound = Shortener(self._boundaries, limit), Truncation(limit, left)
        cuts = [shortener.cuts(text, left, shortener.first) for text in texts]
        shorts = [next(of_text, None) for of_text in cuts]
        encodings = self._library.encode(["" if short is None else str(short.text) for short in shorts])
        found = []
        for row, (text, short, encoding) in enumerate(zip(texts, shorts, encodings, strict=True)):
            try:
                decided, kept = self._decided(text, short, encoding, cuts[row], shortener, bound)
                found.append(self._within(text, decided, kept, bound, truncate))
            except InputTooLong as error:
                if len(texts) > 1:
                    error.name_input(row)
                raise
        return found

    def _decided(
        self,
        text: str,
        short: Short | None,
        encoding: Encoding,
        cuts: Iterator[Short],
        shortener: Shortener,
        bound: Truncation,
    ) -> tuple[Short, Encoding]:
        """The first cut of a text that decides about its tokens, from `short` on; like `TextTokenizer._decided`."""
        if short is None:
            raise too_many_characters(None, bound.limit, len(text))
        while not shortener.decides(encoding, short, text, bound):
            following = next(cuts, None)
            if not may_try(following, encoding, bound.limit):
                raise too_many_characters(encoding, bound.limit, len(text))
            short = following
            (encoding,) = self._library.encode([str(short.text)])
        return short, encoding

    def _within(self, text: str, short: Short, encoding: Encoding, bound: Truncation, truncate: bool) -> Shortened:
        count = len(encoding)
        if count > bound.limit and not truncate:
            raise too_long(bound.limit, count if short.text is text else f"at least {count}")
        if count < bound.limit:
            return Shortened(text, count)
        ids = encoding.ids[count - bound.limit :] if bound.left else encoding.ids[: bound.limit]
        return Shortened(self._library.decode(ids, skip_special_tokens=False), bound.limit)

    def divided(self, query_tokens: int, document_tokens: Sequence[int]) -> Iterator[range]:
        """Return the documents of each prompt of a list."""
        begin, room = 0, (whole := self.listwise.capacity - 2 * query_tokens)
        for place, tokens in enumerate(document_tokens):
            room -= tokens
            is_full = place + 1 - begin >= self.listwise.most_documents
            if is_full or room <= self.listwise.longest_document:
                yield range(begin, place + 1)
                begin, room = place + 1, whole
        if begin < len(document_tokens):
            yield range(begin, len(document_tokens))

    def ids(self, query: str, documents: Sequence[str]) -> NDArray[np.int32]:
        """Return the tokens of the prompt of a shortened query and shortened documents, int32.

        Raises:
            InputTooLong: they exceed the limit.
            TokenizerFailed: the library refused one of them.
        """
        found = self._joined(self._pieces(query, documents))
        if len(found) > self._limit:
            raise InputTooLong(
                f"Input validation error: the query and its {len(documents)} documents make one prompt of "
                f"{len(found)} tokens, and `max_batch_tokens` of the instance is {self._limit}: set it higher, or send "
                "fewer or shorter documents",
                self._limit,
                f"{len(found)} tokens",
            )
        return found

    def encode(self, pairs: Sequence[Pair], truncate: bool, left: bool) -> list[NDArray[np.int32] | InvalidInput]:
        """Return the ids of each pair as a list of one document, or its refusal; like `CausalTemplate.encode`."""
        return [self._alone(pair, truncate, left) for pair in pairs]

    def _alone(self, pair: Pair, truncate: bool, left: bool) -> NDArray[np.int32] | InvalidInput:
        try:
            (query,) = self.shortened([pair.first], query=True, truncate=truncate, left=left)
            (document,) = self.shortened([pair.second], query=False, truncate=truncate, left=left)
            return self.ids(query.text, [document.text])
        except InputTooLong as error:
            return error

    def _pieces(self, query: str, documents: Sequence[str]) -> list[str]:
        """Return the text of a prompt, split after each mark; the last piece follows all marks."""
        query = self._without_marks(query)
        before = _BEFORE + _TASK.format(count=len(documents), query=query)
        pieces = []
        for place, document in enumerate(documents):
            text = self._without_marks(document)
            pieces.append(f'{before}<passage id="{place}">\n{text}{self.listwise.document_mark}')
            before = "\n</passage>\n"
        return [*pieces, f"{before}<query>\n{query}{self.listwise.query_mark}", _BEHIND]

    def _without_marks(self, text: str) -> str:
        """Remove marks from a text, including marks that appear once others are removed."""
        while any(mark in text for mark in self._marks):
            for mark in self._marks:
                text = text.replace(mark, "")
        return text

    def _joined(self, pieces: Sequence[str]) -> NDArray[np.int32]:
        """The tokens of pieces that end in a mark, where no token reaches over their edges."""
        return np.concatenate([np.array(each.ids, dtype=np.int32) for each in self._library.encode(pieces)])


def list_scores(prompts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the score of each document of a list; each prompt has the vectors of its documents and, last, of the
    query."""
    documents = [_unit(each[:-1]) for each in prompts]
    queries = np.stack([each[-1] for each in prompts])
    best = [float((of_prompt @ _unit(query)).max()) for of_prompt, query in zip(documents, queries, strict=True)]
    weights = (1 + np.array(best)) / 2
    total = weights.sum()
    query = queries.mean(axis=0) if total <= 0 else (weights[:, None] * queries).sum(axis=0) / total
    return np.asarray(np.concatenate(documents) @ _unit(query), np.float32)


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    norms = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, np.finfo(np.float64).tiny), np.float64)
