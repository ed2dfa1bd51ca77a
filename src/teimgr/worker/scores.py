"""Scores in reply order, and checks of the model's kind with TEI's error texts, which differ between HTTP and gRPC.

A call of a listwise reranker (`ListSubmission`) turns pairs into prompts, one per list or part of it, and the vectors
at a prompt's marks into the scores of the pairs. Entities of token classifiers are spans of a text with a label, in
the form of transformers' pipeline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import InferOptions, Input, Job, Output, Pair
from teimgr.engine.text.listwise import ListPrompt, Shortened, list_scores
from teimgr.errors import EmptyInput, InputTooLong, InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import Kind, LoadedModel
from teimgr.worker.calls import Encode, Part, Submission, WorkerCall

if TYPE_CHECKING:
    from teimgr.engine.text.tokenizer import TextTokenizer


class ScoredLabel(NamedTuple):
    """A label and its score; the field names are keys of JSON replies."""

    score: np.float32
    label: str


class ScoredRow(NamedTuple):
    """A text's row in the request, and its score."""

    row: int
    score: np.float32


def predictions(scores: NDArray[np.float32], labels: Sequence[str]) -> list[ScoredLabel]:
    """Return all labels of one input, best first; `scores` is float32 [labels]."""
    return [ScoredLabel(scores[i], labels[i]) for i in _best_first(scores)]


def ranks(scores: NDArray[np.float32]) -> list[ScoredRow]:
    """Return all texts of one rerank, best first; `scores` is float32 [texts, 1]."""
    column = scores[:, 0]
    return [ScoredRow(i, column[i]) for i in _best_first(column)]


def _best_first(scores: NDArray[np.float32]) -> list[int]:
    order: list[int] = np.argsort(scores, kind="stable")[::-1].tolist()
    return order


def need_reranker_http(model: LoadedModel) -> None:
    """Raise WrongModelKind if the model is not a reranker, for a request over HTTP."""
    if model.kind != Kind.RERANKER:
        raise WrongModelKind("Backend error: model is not a re-ranker model")


def need_reranker_grpc(model: LoadedModel) -> None:
    """Raise WrongModelKind if the model is not a reranker, for a request over gRPC."""
    if model.kind != Kind.RERANKER:
        is_classifier = model.kind == Kind.CLASSIFIER
        raise WrongModelKind(f"model is not a {'re-ranker' if is_classifier else 'classifier'} model")


def output_per_token(model: LoadedModel) -> Output:
    """Return the output of "embed all": a late-interaction model's vectors, any other model's last hidden states.

    Raises:
        WrongModelKind: the model is a token classifier, whose tokens have labels.
    """
    if model.kind == Kind.TOKEN_CLASSIFIER:
        raise WrongModelKind("Backend error: Model is not an embedding model")
    return Output.MULTI_VECTOR if model.kind == Kind.MULTI_VECTOR else Output.TOKENS


# Documents tokenized in one call: some 10 ms.
_TOGETHER = 64
_TOGETHER_CHARACTERS = 50_000
VECTORS = InferOptions(frozenset({Output.MULTI_VECTOR}), truncate=False, listed=True)
"""Engine options of the prompts."""
_NUMBER_BYTES = 4


@dataclass(slots=True)
class DocumentList:
    """A query and its documents, and the row of each document in the call."""

    query: str
    options: InferOptions
    documents: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class Prompt(NamedTuple):
    """A prompt's tokens (int32), the rows of its documents, and whether it is the last one of its list."""

    ids: NDArray[np.int32]
    rows: Sequence[int]
    is_last: bool


OnThread = Callable[..., Awaitable[Any]]


def lists_of(parts: Sequence[Part]) -> list[DocumentList]:
    """Group the pairs of a call by query, in their order.

    Raises:
        InvalidInput: an input is not a pair, or the texts of one query have several options.
        EmptyInput: a pair has no text.
    """
    found: dict[str, DocumentList] = {}
    for part in parts:
        for row, pair in zip(part.rows, part.inputs, strict=True):
            if not isinstance(pair, Pair):
                raise InvalidInput("Input validation error: `inputs` must be pairs for this model")
            one = found.setdefault(pair.first, DocumentList(pair.first, part.options))
            error: TeimgrError | None = None
            if not pair.first and not pair.second:
                error = EmptyInput()
            elif one.options != part.options:
                error = InvalidInput("The texts of one query must be truncated alike: this model reads them together")
            if error is not None:
                error.name_input(row)
                raise error
            one.documents.append(pair.second)
            one.rows.append(row)
    return list(found.values())


async def prompts_of(
    lists: Sequence[DocumentList], prompt: ListPrompt, on_thread: OnThread, check: Callable[[], None]
) -> list[Prompt]:
    """Make the prompts of all lists with `on_thread`, in steps of some 10 ms; `check` may raise before each step.

    Raises:
        InputTooLong: a text must not be truncated, or a prompt has too many documents.
        TokenizerFailed: the library refused a text.
    """
    found: list[Prompt] = []
    several = sum(len(one.rows) for one in lists) > 1
    for one in lists:
        check()
        (query,) = await on_thread(_shortened, prompt, [one.query], one.options, True)
        documents: list[Shortened] = []
        for begin, end in _chunks(one.documents):
            check()
            try:
                documents += await on_thread(_shortened, prompt, one.documents[begin:end], one.options, False)
            except InputTooLong as error:
                if several:
                    error.name_input(one.rows[begin + (error.input_index or 0)])
                raise
        for places in prompt.divided(query.tokens, [each.tokens for each in documents]):
            check()
            texts = [documents[place].text for place in places]
            ids = await on_thread(prompt.ids, query.text, texts)
            rows = one.rows[places.start : places.stop]
            found.append(Prompt(ids, rows, is_last=places.stop == len(documents)))
    return found


def _shortened(prompt: ListPrompt, texts: Sequence[str], options: InferOptions, is_query: bool) -> list[Shortened]:
    return prompt.shortened(texts, query=is_query, truncate=options.truncate, left=options.truncation_left)


def _chunks(documents: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents to tokenize together."""
    begin = characters = 0
    for place, document in enumerate(documents):
        characters += len(document)
        if characters >= _TOGETHER_CHARACTERS or place + 1 - begin >= _TOGETHER:
            yield begin, place + 1
            begin, characters = place + 1, 0
    if begin < len(documents):
        yield begin, len(documents)


class ListSubmission(Submission):
    """The prompts of one call as one job; its vectors of `width` numbers give the scores of the call's `pairs`."""

    __slots__ = ("_pairs", "_prompts")

    def __init__(self, call: WorkerCall, pairs: Job, encode: Encode, prompts: Sequence[Prompt], width: int) -> None:
        rows = range(len(prompts))
        super().__init__(call, [Part(rows, [each.ids for each in prompts], VECTORS)], encode, has_waited=True)
        self._pairs = pairs
        self._prompts = prompts
        self.result_bytes = sum(len(each.rows) + 1 for each in prompts) * width * _NUMBER_BYTES

    def complete(self) -> Job | None:
        """Return a job with the pairs of the call and their scores."""
        if (found := super().complete()) is None:
            return None
        whole, begin = self._pairs, 0
        whole.scores = np.zeros((len(whole.inputs), 1), np.float32)
        for end, prompt in enumerate(self._prompts, 1):
            if prompt.is_last:
                self._score(whole, found, range(begin, end))
                begin = end
        whole.take_costs(found)
        return whole

    def _score(self, whole: Job, found: Job, prompts: range) -> None:
        """Write the scores of a list, or, if one of its prompts failed, that error for all its rows."""
        rows = [row for place in prompts for row in self._prompts[place].rows]
        error = next((found.errors[place] for place in prompts if place in found.errors), None)
        vectors = [found.multi_vectors[place] for place in prompts]
        if error is not None:
            whole.errors.update(dict.fromkeys(rows, error))
        else:
            whole.scores[rows, 0] = list_scores([each for each in vectors if each is not None])


Aggregation = Literal["none", "simple"]
OUTSIDE = "O"
_ONE_TOKEN_CHARS = 10_000


class Entity(TypedDict, total=False):
    """A token with its `entity`, or a group of tokens with its `entity_group`; `word` is the text from `start` to
    `end`, in characters.
    """

    entity: str
    entity_group: str
    score: float
    index: int
    word: str
    start: int
    end: int


class _Token(NamedTuple):
    row: int
    label: str
    score: np.float32
    start: int
    end: int


def entities(
    text: Input,
    logits: NDArray[np.float32],
    labels: Sequence[str],
    tokenizer: TextTokenizer,
    how: Aggregation,
    left: bool,
) -> list[Entity]:
    """Return the entities of a text from the logits [tokens, labels] of its tokens, including special ones; tokens
    outside of any entity ("O") are left out. `left`: the text was truncated on the left, so the logits are those of its
    end.

    "none" gives each token; "simple" groups neighbours of one kind, with the mean of their scores, as transformers
    does: "B-X" begins a group, "I-X" or "X" continues one of X. A group is called by what is behind the first "-" of
    its first label, so "L-X" and "U-X" of other schemes are each a group of X.
    """
    if not isinstance(text, str):
        return []  # token ids have no character positions
    found = list(_tokens(text, probabilities(logits), labels, tokenizer, left))
    if how == "none":
        return [
            Entity(
                entity=token.label,
                score=float(token.score),
                index=token.row,
                word=text[token.start : token.end],
                start=token.start,
                end=token.end,
            )
            for token in found
            if token.label != OUTSIDE
        ]
    return [_group(text, group) for group in _groups(found) if _name(group[0].label) != OUTSIDE]


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probability of each label, [tokens, labels], from logits."""
    from teimgr.engine.heads.scoring import activate  # imports torch

    return activate(logits, "softmax")


def _tokens(
    text: str, scores: NDArray[np.float32], labels: Sequence[str], tokenizer: TextTokenizer, left: bool
) -> Iterator[_Token]:
    """Yield the classified tokens of the text, without special ones."""
    kept = tokenizer.cut(text, max(len(scores) - tokenizer.special_tokens, 1), left=left)
    spans = tokenizer.tokenize(kept, True, "")
    if 0 < len(text) - len(kept) <= _ONE_TOKEN_CHARS and len(whole := tokenizer.tokenize(text, True, "")) == len(
        scores
    ):
        kept, spans = text, whole  # a word of unknown pieces is one token of any length
    rows = range(len(spans)) if len(spans) <= len(scores) or not left else range(len(scores) - len(spans), len(scores))
    before = len(text) - len(kept) if left else 0
    characters = _character_places(kept)
    for row, span in zip(rows, spans, strict=True):
        if span.special or not 0 <= row < len(scores) or span.start is None or span.stop is None:
            continue
        best = int(scores[row].argmax())
        start, end = before + characters[span.start], before + characters[span.stop]
        yield _Token(row, labels[best], scores[row, best], start, end)


def _character_places(text: str) -> NDArray[np.int64]:
    """Return the character at each byte of a text in UTF-8, and the end: int64 [bytes + 1]."""
    sizes = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
    return np.append(np.repeat(np.arange(len(text)), sizes), len(text))


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the kind of entity."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label


def _name(label: str) -> str:
    return label.split("-", 1)[-1]


def _groups(tokens: Sequence[_Token]) -> list[list[_Token]]:
    groups: list[list[_Token]] = []
    for token in tokens:
        begins, kind = _kind(token.label)
        if groups and not begins and _kind(groups[-1][-1].label)[1] == kind:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _group(text: str, tokens: list[_Token]) -> Entity:
    start, end = tokens[0].start, tokens[-1].end
    return Entity(
        entity_group=_name(tokens[0].label),
        score=float(np.mean([token.score for token in tokens])),
        word=text[start:end],
        start=start,
        end=end,
    )
