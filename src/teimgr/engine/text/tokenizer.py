"""The tokenizer of a model, from its files to encoded inputs: prompts, limits, checks, and the tokenizers library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.batching.batch import Encoded, TokenizedTexts
from teimgr.engine.job import InferOptions, Input, Pair, ZeroVector, characters
from teimgr.engine.text.boundaries import Boundaries
from teimgr.engine.text.listwise import ListPrompt
from teimgr.engine.text.templates import DOCUMENT, QUERY, CausalTemplate, PiecedTemplate, late_interaction_roles
from teimgr.engine.text.tokenizer_config import named_tokens
from teimgr.engine.text.tokenizer_library import TokenizerLibrary, check_of_texts, load_tokenizer, unknown_id
from teimgr.engine.text.truncation import (
    COUNTED_CHARACTERS,
    FIRST_PER_TOKEN,
    MAX_CHARACTERS,
    Short,
    Shortener,
    Text,
    Truncation,
    longest_part,
    may_try,
    too_long,
    too_many_characters,
)
from teimgr.engine.text.wordpiece import WordPiece, wordpiece
from teimgr.errors import EmptyInput, InputTooLong, InvalidConfig, InvalidInput, TeimgrError, TokenizerFailed
from teimgr.models.layout import Backbone, Layout
from teimgr.wire.json_scan import Steps, completed
from teimgr.wire.text_column import TextColumn

# More characters per token than in any language: a longer text is cut (or refused) before it costs time.
_CHARS_PER_TOKEN = 250
# Limits of texts that are split by words: the most characters of one, whose arrays hold the GIL for a millisecond, and
# the fewest in total, below which the library is as fast.
_MAX_MIXED, _MIN_MIXED = 16_384, 1_500
_SPANS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token for /tokenize; offsets are UTF-8 bytes of prompt + text, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizeOptions(NamedTuple):
    """How to tokenize inputs.

    Inputs that are too long are truncated at their end, or with `left` at their beginning, or refused without
    `truncate`. `prompt` precedes a text, and the first text of a pair. `query` is the role on models with roles, `task`
    is as in `Encoded`.
    """

    truncate: bool = True
    left: bool = False
    prompt: str = ""
    query: bool = False
    task: int = 0


_PROMPTS_KEPT = 256
_MAX_KEPT_CHARACTERS = 16_384
_INSTRUCT = re.compile(r"(Instruct: ).*(\n ?Query: ?)", re.DOTALL)


class Prompts:
    """The prompts of a model by name, and the default one: named at start, given as text at start, or the model's own.

    On late-interaction models the names are the two roles, with or without a text; models with routes also have both.
    `default_name` is None if the default is no named prompt.
    """

    def __init__(self, layout: Layout, default_name: str | None = None, default_text: str | None = None) -> None:
        """Raise InvalidConfig if the model lacks a prompt called `default_name`."""
        self._roles = layout.late is not None or layout.has_routes
        self._left = layout.truncate_left
        self._tasks, self._default_task = layout.tasks, layout.default_task
        self._instruction_end = layout.instruction_end
        self._texts = dict(layout.prompts)
        if self._roles:
            self._texts = {name: layout.prompts.get(name, "") for name in (QUERY, DOCUMENT)}
        if layout.has_routes:
            self._texts |= layout.prompts
        if default_name is not None and default_name not in self._texts:
            raise InvalidConfig(self._missing(default_name))
        if default_name is None and default_text is not None:
            self._default = default_text
            self.default_name: str | None = None
        else:
            own = DOCUMENT if layout.late is not None else layout.default_prompt_name or ""
            self._default = self._texts.get(default_name or own, "")
            name = default_name or layout.default_prompt_name
            self.default_name = name if name in self._texts else None
        self._queries_by_default = layout.pages is not None or layout.has_queries_by_default
        self._default_query = self._is_query(default_name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def facts(self) -> dict[str, object]:
        """The texts by name, the default one, and whether it goes to the role of queries: a part of the space."""
        return {"texts": self._texts, "default": self._default, "query": self._default_query}

    def tokenize_options(self, options: InferOptions) -> TokenizeOptions:
        """Raises InvalidInput where the model has no prompt of that name."""
        query = self._default_query if options.prompt_name is None else self._is_query(options.prompt_name)
        text = self.text(options.prompt_name) if options.prompt is None else options.prompt
        left = options.truncation_left or (self._left and not options.names_side)
        task = self._tasks.get(options.prompt_name or self.default_name or "", self._default_task)
        return TokenizeOptions(options.truncate, left, text, self._roles and query, task)

    def _is_query(self, name: str | None) -> bool:
        """The role that goes with a prompt: that of its name, else the one of texts without a role."""
        return name == QUERY or (self._queries_by_default and name != DOCUMENT)

    def text(self, name: str | None) -> str:
        """The prompt called `name`, or the default one; "" for none.

        Raises:
            InvalidInput: the model has no prompt of that name.
        """
        if name is None:
            return self._default
        if name in self._texts:
            return self._texts[name]
        raise InvalidInput(f"Input validation error: {self._missing(name)}")

    def instructing(self, instruction: str) -> str:
        """The prompt with an instruction of the caller's: in the form of the model's own, else before the text."""
        for text in self._texts.values():
            if (form := _INSTRUCT.fullmatch(text)) is not None:
                return f"{form[1]}{instruction}{form[2]}"
        if self._instruction_end is not None:
            return f"<|user|>\n{instruction}\n{self._instruction_end}"
        return instruction if instruction[-1:].isspace() else f"{instruction} "

    def _missing(self, name: str) -> str:
        given = f"`default-prompt-name` is set to `{name}` but"
        if not self._texts:
            return f"{given} no prompts were found in the Sentence Transformers configuration"
        known = ", ".join(f'"{known}"' for known in self._texts)
        return f"{given} it was not found in the Sentence Transformers prompts. Available prompts: [{known}]"


class TextTokenizer:
    """The tokenizer of one model. Safe from any thread.

    `max_length` is in tokens, including the `special_tokens` of the model's template around a text. Queries of a model
    with routes have their own tokenizer, of at most `most_of_query` tokens.
    """

    pads_texts = False  # whether the model was trained to read the padding of texts

    def __init__(self, layout: Layout, max_length: int, most_of_query: int | None = None) -> None:
        self._queries = _query_tokenizer(layout, most_of_query or max_length)
        tokenizer = load_tokenizer(layout)
        self.library = tokenizer
        self._library = TokenizerLibrary(tokenizer, check_of_texts(layout, tokenizer))
        self._boundaries = Boundaries(tokenizer)
        self._shortener = Shortener(self._boundaries, max_length)
        self._add_specials = layout.backbone is not Backbone.STATIC
        template = None if layout.scoring is None else layout.scoring.template
        in_template = layout.late is not None or template is not None or layout.listwise is not None
        self._wordpiece = None if in_template else wordpiece(tokenizer, self._add_specials)
        # Without tokens the mean is zero in sentence-transformers and model2vec; a dense layer may change that.
        self._gives_zero = layout.backbone is Backbone.STATIC and not layout.projections
        self._type_ids = layout.type_ids
        self._skipped_id = unknown_id(tokenizer) if layout.skips_unknown else None
        self._vocabulary = layout.vocabulary or self._library.vocabulary
        # On a GPU, one id without weights (an added token, or a gap in the ids) would end the process. The tokenizer's
        # size does not show them, and finding its largest id takes 0.1 s.
        self._check_result_ids = layout.vocabulary is not None
        self._pool_prompts = layout.include_prompt
        named = () if layout.include_prompt else named_tokens(layout.transformer_dir)
        self._named_ids = {tokenizer.token_to_id(token.content) for token in named}
        self._prompt_lens: dict[str, int] = {}
        self._instruction_end = layout.instruction_end
        self._roles = None if layout.late is None else late_interaction_roles(layout.late, max_length)
        whole = partial(self._library.encode, specials=False, offsets=True)
        self._causal: CausalTemplate | PiecedTemplate | ListPrompt | None = None
        self.lists: ListPrompt | None = None  # set for a listwise reranker
        if layout.listwise is not None:
            self._causal = self.lists = ListPrompt(layout.listwise, self._library, self._boundaries, max_length)
        elif template is not None and template.pieces:
            self._causal = PiecedTemplate(template.pieces, whole, self._shortener, max_length)
        elif template is not None:
            self._causal = CausalTemplate(template, whole, self._shortener, max_length)
        mask = self._library.encode(["a"], self._add_specials)[0].special_tokens_mask
        self._leading_specials = mask.index(0) if 0 in mask else 0
        self.max_length = max_length
        if self._causal is not None:
            self.special_tokens: int = self._causal.template_tokens
        else:
            prefix = 0 if self._roles is None else max(len(role.prefix) for role in self._roles.values())
            specials = tokenizer.num_special_tokens_to_add(is_pair=False) if self._add_specials else 0
            self.special_tokens = prefix + specials

    @property
    def of_queries(self) -> TextTokenizer:
        """The tokenizer of queries: this one, unless they have another."""
        return self._queries or self

    def all(self) -> tuple[TextTokenizer, ...]:
        """This tokenizer, and that of queries where these have their own."""
        return (self,) if self._queries is None else (self, self._queries)

    def prompt_len(self, prompt: str) -> int:
        """Return how many leading tokens pooling leaves out for this prompt: 0 for nearly every model.

        Raises:
            InputTooLong: it has too many characters without a place to cut it.
            TokenizerFailed: the library refused it.
        """
        if self._pool_prompts or not prompt:
            return 0
        if (known := self._prompt_lens.get(prompt)) is not None:
            return known
        bound = Truncation(self.max_length, left=False)
        _, encoding = self._deciding_cut(prompt, bound, self._shortener.first, self._add_specials)
        # The last token is the template's or the prompt's; an empty prompt may have no token.
        last = encoding.ids[-1:]
        ends_special = encoding.special_tokens_mask[-1:] == [1] or not self._named_ids.isdisjoint(last)
        length = min(len(encoding), self.max_length) - ends_special
        if len(prompt) <= _MAX_KEPT_CHARACTERS:
            if len(self._prompt_lens) >= _PROMPTS_KEPT:  # callers may send any number of prompts
                self._prompt_lens.clear()
            self._prompt_lens[prompt] = length
        return length

    def check(self, item: Input, options: TokenizeOptions) -> TeimgrError | None:
        """Validate an input before tokenization; None if it is valid."""
        if options.query and self._queries is not None:
            return self._queries.check(item, options._replace(query=False))
        if item is None:
            return InvalidInput("Input validation error: `inputs` cannot be null")
        if not any(map(len, item)) if isinstance(item, Pair) else not len(item):
            return EmptyInput()
        if self._causal is not None and isinstance(item, str):
            return InvalidInput("Input validation error: `inputs` must be pairs for this model")
        if isinstance(item, np.ndarray):
            return self._check_ids(item)
        return None if options.truncate else self._check_characters(characters(item))

    def encode(self, inputs: Sequence[Input], options: TokenizeOptions) -> list[Encoded | TeimgrError]:
        """Like `encode_all`, one by one."""
        tokenized = self.encode_all(inputs, options)
        return [tokenized[row] for row in range(len(inputs))]

    def patches(self, item: Input) -> NDArray[np.int64] | None:
        """Return the index of the vector of each patch of a picture, [rows, columns]; None without patches."""
        return None

    def encode_all(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        """Return the model's input for each of `inputs`, or why it cannot be made.

        Ids are taken as they are, unless there is a prompt: then they are decoded and tokenized again behind it.
        """
        if options.query and self._queries is not None:
            encoded = self._queries.encode(inputs, options._replace(query=False))
            return TokenizedTexts.of([replace(one, query=True) if isinstance(one, Encoded) else one for one in encoded])
        if self._instruction_end is not None and any(self._instruction_end in one for one in _strings(inputs)):
            return TokenizedTexts.of([self._behind_instruction(one, options) for one in inputs])
        truncation = self._bound(options)
        native = self._by_wordpiece(inputs, options, truncation)
        if native is None:
            return self._one_by_one(inputs, options, truncation)
        if rows := native.missing():
            left = [inputs[row] for row in rows]
            native.replace(rows, self._one_by_one(left, options, truncation))
        return native

    def _behind_instruction(self, item: Input, options: TokenizeOptions) -> Encoded | TeimgrError:
        """The encoding of one input whose text may begin with an instruction: it is then part of the prompt."""
        end = self._instruction_end
        assert end is not None
        if not isinstance(item, str) or end not in item:
            return self._one_by_one([item], options, self._bound(options))[0]
        at = item.index(end) + len(end)
        own = options._replace(prompt=options.prompt + item[:at])
        try:
            self.prompt_len(own.prompt)
        except TeimgrError as error:
            return error
        return self._one_by_one([item[at:]], own, self._bound(own))[0]

    def _bound(self, options: TokenizeOptions) -> Truncation | None:
        return (
            Truncation(self._limit(options) - self._prefix_tokens(options), options.left) if options.truncate else None
        )

    def tokenize(self, text: str, add_special_tokens: bool, prompt: str) -> list[TokenSpan]:
        """Like `tokenized`, in one call."""
        return completed(self.tokenized(text, add_special_tokens, prompt))

    def tokenized(self, text: str, add_special_tokens: bool, prompt: str) -> Steps[list[TokenSpan]]:
        """Yield steps that tokenize prompt + text, untruncated, and hold the GIL for a few milliseconds each; return
        every token.

        Raises:
            EmptyInput, InvalidInput: the text is empty or longer than the character limit.
            TokenizerFailed: the library refused it.
        """
        if not text:
            raise EmptyInput
        if (error := self._check_characters(len(text))) is not None:
            raise error
        whole = prompt + text
        ends = self._ends_of_parts(whole)
        if len(ends) == 1:
            (encoding,) = self._library.encode([whole], add_special_tokens, offsets=True)
            return (yield from self._spans(encoding, whole))
        return (yield from self._tokenize_parts(whole, ends, add_special_tokens))

    def _ends_of_parts(self, text: str) -> list[int]:
        """Where the parts of a text end that are tokenized one by one; raises InvalidInput as `tokenized`."""
        ends = list(self._boundaries.seams(text, short := MAX_CHARACTERS // 8))
        begin = ends[-1] if ends else 0
        if len(text) - begin > short:  # the rest has no such places
            ends += [begin + at for at in self._boundaries.seams(text[begin:], MAX_CHARACTERS)]
        if (rest := len(text) - (ends[-1] if ends else 0)) > MAX_CHARACTERS:
            raise InvalidInput(
                f"Input validation error: `inputs` must have a space within {MAX_CHARACTERS} characters. "
                f"Given: {rest} without one"
            )
        return [*ends, len(text)]

    def _tokenize_parts(self, text: str, ends: Sequence[int], add_special_tokens: bool) -> Steps[list[TokenSpan]]:
        """Return the tokens of a text that is too long for one call of the library."""
        spans: list[TokenSpan] = []
        begin = bytes_before = 0
        for end in ends:
            part = text[begin:end]
            (encoding,) = self._library.encode([part], False, offsets=True)
            spans += yield from self._spans(encoding, part, bytes_before)
            begin, bytes_before = end, bytes_before + len(part.encode())
            yield
        if not add_special_tokens:
            return spans
        (around,) = self._library.encode(["a"], offsets=True)
        specials = [TokenSpan(id, token, True, None, None) for id, token in zip(around.ids, around.tokens, strict=True)]
        return [*specials[: self._leading_specials], *spans, *specials[self._leading_specials + 1 :]]

    def _spans(self, encoding: Encoding, text: str, bytes_before: int = 0) -> Steps[list[TokenSpan]]:
        """The library's offsets are in characters, the contract's in UTF-8 bytes, behind `bytes_before` others.

        Those of a long text are taken one by one, and its tokens only if they are special: each of these calls holds
        the GIL, for 37 and 26 ms of the longest text.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        starts = np.full(len(text) + 1, bytes_before, dtype=np.int64)
        starts[1:] += np.cumsum(1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF), dtype=np.int64)
        at = starts.tolist()
        is_short = len(encoding) <= _SPANS_AT_ONCE
        tokens, offsets = (encoding.tokens, encoding.offsets) if is_short else (None, None)
        ids, token = encoding.ids, self._library.token
        found: list[TokenSpan] = []
        for row, special in enumerate(encoding.special_tokens_mask):
            if special:
                found.append(TokenSpan(ids[row], tokens[row] if tokens else token(ids[row]), True, None, None))
                continue
            begin, end = offsets[row] if offsets is not None else encoding.token_to_chars(row) or (0, 0)
            found.append(TokenSpan(ids[row], text[begin:end], False, at[begin], at[end]))
            if not len(found) % _SPANS_AT_ONCE:
                yield
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Raises EmptyInput for no ids, InvalidInput for too many, TokenizerFailed if one is not a token id."""
        if not len(ids):
            raise EmptyInput("Input validation error: `input_ids` cannot be empty")
        if len(ids) > (limit := self.max_length * _CHARS_PER_TOKEN):
            raise InvalidInput(f"Input validation error: `input_ids` must have at most {limit} ids. Given: {len(ids)}")
        return self._library.decode(ids, skip_special_tokens)

    def cut(self, text: str, max_tokens: int, *, left: bool) -> str:
        """Return the first `max_tokens` tokens of `text`, or the last ones if `left`; special tokens do not count.

        The result is a substring, so a tokenizer that merges over words may make a token more or less of it.

        Raises:
            InvalidInput: the text has too many characters without a place to cut it.
            TokenizerFailed: the library refused it.
        """
        if len(text) <= max_tokens and len(text.encode()) <= max_tokens:  # a token has at least one byte
            return text
        longest = min(self.max_length, max_tokens) * _CHARS_PER_TOKEN
        text = text[-longest:] if left else text[:longest]
        bound, first = Truncation(max_tokens, left), max_tokens * FIRST_PER_TOKEN
        short, encoding = self._deciding_cut(text, bound, first, False, offsets=True)
        assert isinstance(short.text, str)
        rows = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
        if len(rows) <= max_tokens:
            return text
        # Single offsets: reading all of the longest text would hold the GIL for 37 ms.
        begin, end = encoding.token_to_chars(int(rows[-max_tokens if left else max_tokens - 1])) or (0, 0)
        return short.text[begin:] if left else short.text[:end]

    def _deciding_cut(
        self, text: str, bound: Truncation, first: int, specials: bool, *, offsets: bool = False
    ) -> tuple[Short, Encoding]:
        """Return the smallest cut of `text`, from `first` characters on, whose tokens decide about `bound`; and its
        encoding.

        Raises:
            InputTooLong: none does.
        """
        encoding: Encoding | None = None
        for short in self._shortener.cuts(text, bound.left, first):
            (encoding,) = self._library.encode([short.text], specials, offsets=offsets)
            if self._shortener.decides(encoding, short, text, bound):
                return short, encoding
        raise too_many_characters(encoding, bound.limit, len(text))

    def _limit(self, options: TokenizeOptions) -> int:
        return self.max_length if self._roles is None else self._roles[options.query].limit

    def _prefix_tokens(self, options: TokenizeOptions) -> int:
        """Return the number of prefix tokens of the role on a late-interaction model; else 0."""
        return 0 if self._roles is None else len(self._roles[options.query].prefix)

    def _check_characters(self, given: int) -> InvalidInput | None:
        if given <= (limit := self.max_length * _CHARS_PER_TOKEN):
            return None
        message = f"Input validation error: `inputs` must have less than {limit} characters. Given: {given}"
        return InputTooLong(message, self.max_length, f"{given} characters")

    def _check_ids(self, ids: NDArray[np.int32]) -> InvalidInput | None:
        unknown = (ids < 0) | (ids >= self._vocabulary)
        if not unknown.any():
            return None
        return InvalidInput(
            f"Input validation error: `inputs` has the token id {ids[unknown].view(np.uint32)[0]}, "
            f"which is not in the vocabulary of {self._vocabulary}; "
            "it may be of another tokenizer, such as OpenAI's: send texts"
        )

    def _without_tokenizer(self, item: Input, options: TokenizeOptions) -> Encoded | TeimgrError | None:
        """The result of an invalid input, or of ids; None if the item must be tokenized."""
        if (error := self.check(item, options)) is not None:
            return error
        if not isinstance(item, np.ndarray) or (options.prompt and self._causal is None):
            return None
        ids, limit = item, self._limit(options)
        if len(ids) > limit:
            if not options.truncate:
                return too_long(limit, len(ids))
            ids = ids[len(ids) - limit :] if options.left else ids[:limit]
        if self._roles is not None:
            return self._roles[options.query].expand(ids, self._type_ids)
        if not len(ids := self._without_skipped(ids)):
            return self._no_tokens()
        return Encoded(ids, np.zeros(len(ids), dtype=np.uint8) if self._type_ids else None, task=options.task)

    def _one_by_one(
        self, inputs: Sequence[Input], options: TokenizeOptions, truncation: Truncation | None
    ) -> TokenizedTexts:
        """Each input after its validation, texts and pairs by the library."""
        found = [self._without_tokenizer(item, options) for item in inputs]
        others = {row: result for row, result in enumerate(found) if result is not None}
        if not others:
            return self._encode(inputs, options, truncation)
        tokenized = TokenizedTexts.without_ids(len(inputs), others)
        if rows := tokenized.missing():
            tokenized.replace(rows, self._encode([inputs[row] for row in rows], options, truncation))
        return tokenized

    def _encode(
        self, items: Sequence[Input], options: TokenizeOptions, truncation: Truncation | None
    ) -> TokenizedTexts:
        try:
            if self._causal is None:
                texts = [self._with_prompt(item, options.prompt) for item in items]
                return self._by_library(texts, options, truncation)
            pairs = [item for item in items if isinstance(item, Pair)]
            return TokenizedTexts.of(
                [
                    ids if isinstance(ids, TeimgrError) else Encoded(ids)
                    for ids in self._causal.encode(pairs, options.truncate, options.left)
                ]
            )
        except TokenizerFailed as error:  # retried singly, so that only bad items fail
            if len(items) == 1:
                return TokenizedTexts.of([error])
            return TokenizedTexts.of([self._encode([item], options, truncation)[0] for item in items])

    def _with_prompt(self, item: Input, prompt: str) -> Text:
        if isinstance(item, np.ndarray):
            item = self._library.decode(item.tolist(), skip_special_tokens=True)
        if isinstance(item, Pair):
            return Pair(prompt + item.first, item.second) if prompt else item
        return f"{prompt}{item}"

    def _by_wordpiece(
        self, inputs: Sequence[Input], options: TokenizeOptions, truncation: Truncation | None
    ) -> TokenizedTexts | None:
        """The ids of `inputs` by the native WordPiece, without those it does not cover; None if it is not used."""
        prompt = options.prompt
        if (native := self._wordpiece) is None or not prompt.isascii():
            return None
        try:
            prompt_tokens = self.prompt_len(prompt)
        except TokenizerFailed:  # the library then fails each input
            return None
        longest = self.max_length * _CHARS_PER_TOKEN  # the library truncates longer ones first
        if len(inputs) == 1 and isinstance(inputs, list):
            return self._one_by_wordpiece(native, inputs[0], options, truncation, longest, prompt_tokens)
        given = inputs
        if not isinstance(inputs, TextColumn) or prompt:
            texts = [item if isinstance(item, str) and item.isascii() else "" for item in inputs]
            inputs = TextColumn.of([prompt + text if text else "" for text in texts] if prompt else texts)
        tokenized = self._of_native(*native.encode(inputs, truncation, longest), options, prompt_tokens)
        most = min(_MAX_MIXED, longest) - len(prompt)
        mixed = {
            row: prompt + item
            for row in tokenized.missing()
            if isinstance(item := given[row], str) and not item.isascii() and len(item) <= most
        }
        if sum(map(len, mixed.values())) >= _MIN_MIXED:
            with suppress(TokenizerFailed, UnicodeEncodeError):  # then each is tokenized alone
                found = native.encode_mixed(TextColumn.of([*mixed.values()]), truncation)
                tokenized.replace([*mixed], self._of_native(*found, options, prompt_tokens))
        return tokenized

    def _of_native(
        self, ids: NDArray[np.int32], ends: NDArray[np.int64], options: TokenizeOptions, prompt_tokens: int
    ) -> TokenizedTexts:
        """Return what the native WordPiece found; texts that it does not cover are missing."""
        begins = np.zeros(len(ends), np.int64)
        begins[1:] = ends[:-1]
        types = np.zeros(len(ids), np.uint8) if self._type_ids else None
        tokenized = TokenizedTexts(ids, begins, ends - begins, types, prompt_tokens, task=options.task)
        for row in self._unusual(tokenized, ends, options):
            own = slice(int(begins[row]), int(ends[row]))
            tokenized.put(row, self._input(ids[own], None if types is None else types[own], options))
        return tokenized

    def _one_by_wordpiece(
        self,
        native: WordPiece,
        item: Input,
        options: TokenizeOptions,
        truncation: Truncation | None,
        longest: int,
        prompt_tokens: int,
    ) -> TokenizedTexts | None:
        """Like `_by_wordpiece`, of one input; None if it is not covered."""
        if not (isinstance(item, str) and item and item.isascii()):
            return None
        if (ids := native.encode_one(options.prompt + item, truncation, longest)) is None:
            return None
        types = np.zeros(len(ids), np.uint8) if self._type_ids else None
        is_unknown = self._check_result_ids and ids.max(initial=0) >= self._vocabulary
        if len(ids) > self._limit(options) or self._skipped_id is not None or is_unknown:
            return TokenizedTexts.of([self._input(ids, types, options)])
        return TokenizedTexts(
            ids, np.zeros(1, np.int64), np.array((len(ids),)), types, prompt_tokens, task=options.task
        )

    def _by_library(
        self, texts: Sequence[Text], options: TokenizeOptions, truncation: Truncation | None
    ) -> TokenizedTexts:
        bound = truncation or Truncation(self._limit(options) - self._prefix_tokens(options), left=False)
        least = self._shortener.first if truncation else max(self._shortener.first, COUNTED_CHARACTERS)
        cuts = {
            row: self._shortener.cuts(text, bound.left, least)
            for row, text in enumerate(texts)
            if longest_part(text) > least
        }
        shorts = {row: next(of_text, None) for row, of_text in cuts.items()}
        parts = list(texts)
        for row, short in shorts.items():
            parts[row] = "" if short is None else short.text
        encodings = self._library.encode(parts, self._add_specials)
        refused: dict[int, TeimgrError] = {}
        for row, short in shorts.items():
            decided = self._decided(encodings[row], short, cuts[row], texts[row], bound, truncation is not None)
            if isinstance(decided, TeimgrError):
                refused[row] = decided
            else:
                encodings[row] = decided
        if len(texts) == 1 or self._roles is not None:
            return TokenizedTexts.of(
                [
                    refused[row] if row in refused else self._encoded(encoding, options, truncation)
                    for row, encoding in enumerate(encodings)
                ]
            )
        lists = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        ids, ends = _joined(lists, np.int32), np.cumsum(lengths)
        types = _joined([encoding.type_ids for encoding in encodings], np.uint8) if self._type_ids else None
        prompt_tokens = self.prompt_len(options.prompt)
        tokenized = TokenizedTexts(ids, ends - lengths, lengths, types, prompt_tokens, task=options.task)
        for row in [*self._unusual(tokenized, ends, options), *tokenized.missing()]:
            tokenized.put(row, self._encoded(encodings[row], options, truncation))
        for row, error in refused.items():
            tokenized.put(row, error)
        return tokenized

    def _decided(
        self,
        encoding: Encoding,
        short: Short | None,
        cuts: Iterator[Short],
        text: Text,
        bound: Truncation,
        truncates: bool,
    ) -> Encoding | TeimgrError:
        """Return an encoding with the tokens of `text` within `bound`, or its refusal.

        `encoding` is of `short`, the first of the text's cuts; the next ones are tokenized until one decides.
        """
        if short is None:
            return too_many_characters(None, bound.limit, longest_part(text))
        while not (self._shortener.decides(encoding, short, text, bound) if truncates else short.text is text):
            if not truncates and short.exact and len(encoding) > bound.limit:
                return too_long(bound.limit, f"at least {len(encoding)}")
            following = next(cuts, None)
            if not may_try(following, encoding, bound.limit):
                return too_many_characters(encoding, bound.limit, longest_part(text))
            short = following
            (encoding,) = self._library.encode([short.text], self._add_specials)
        return encoding

    def _unusual(self, tokenized: TokenizedTexts, ends: NDArray[np.int64], options: TokenizeOptions) -> list[int]:
        """The texts that may have to be cut, refused, or rid of tokens; ids of text i end at `ends[i]`."""
        unusual = tokenized.lengths > self._limit(options)
        if self._skipped_id is not None:
            unusual |= _any_within(tokenized.ids == self._skipped_id, ends)
        if self._check_result_ids:
            unusual |= _any_within(tokenized.ids >= self._vocabulary, ends)
        return np.flatnonzero(unusual).tolist()

    def _encoded(
        self, encoding: Encoding, options: TokenizeOptions, truncation: Truncation | None
    ) -> Encoded | TeimgrError:
        kept = slice(None) if truncation is None or (places := truncation.kept(encoding)) is None else places
        types = np.array(encoding.type_ids, dtype=np.uint8)[kept] if self._type_ids else None
        return self._input(np.array(encoding.ids, dtype=np.int32)[kept], types, options)

    def _input(
        self, ids: NDArray[np.int32], types: NDArray[np.uint8] | None, options: TokenizeOptions
    ) -> Encoded | TeimgrError:
        """The model's input of the ids of one text, or why it cannot be made."""
        role = None if self._roles is None else self._roles[options.query]
        length = len(ids) + (0 if role is None else len(role.prefix))
        if length > (limit := self._limit(options)):
            return too_long(limit, length)
        if not len(ids := self._without_skipped(ids)):
            return self._no_tokens()
        if self._check_result_ids and (error := self._check_ids(ids)) is not None:
            return error
        if role is not None:
            return role.add_prefix(ids, self._leading_specials, self._type_ids)
        return Encoded(ids, types, prompt_tokens=self.prompt_len(options.prompt), task=options.task)

    def _no_tokens(self) -> EmptyInput:
        """Return the result of a text without tokens."""
        return ZeroVector() if self._gives_zero else EmptyInput()

    def _without_skipped(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drop unknown tokens where the model does; after truncation, as in Model2Vec."""
        return ids if self._skipped_id is None else ids[ids != self._skipped_id]


def _query_tokenizer(layout: Layout, max_length: int) -> TextTokenizer | None:
    """The tokenizer of queries that go their own way; that of a table adds no special tokens."""
    if layout.query_route is not None:
        return TextTokenizer(layout.query_route.layout, min(layout.query_route.layout.max_length, max_length))
    if (table := layout.query_table) is None:
        return None
    own = replace(
        layout,
        transformer_dir=table.folder,
        backbone=Backbone.STATIC,
        query_table=None,
        type_ids=False,
        include_prompt=True,
        lower_case=False,
        end_token=None,
    )
    return TextTokenizer(own, min(table.max_length, max_length))


def _joined(lists: Sequence[list[int]], dtype: type[np.generic]) -> NDArray[Any]:
    """Return all numbers of the lists in one array."""
    return np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists)))


def _any_within(marks: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the consecutive parts that end at `ends` have a mark: bool of the shape of `ends`."""
    found = np.zeros(len(ends), np.bool_)
    found[np.searchsorted(ends, np.flatnonzero(marks), side="right")] = True
    return found


def _strings(inputs: Sequence[Input]) -> Iterator[str]:
    return (one for one in inputs if isinstance(one, str))
