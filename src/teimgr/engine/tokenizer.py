"""The tokenizer of a model: prompts, limits and truncation; inputs become `Encoded`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.batch import Encoded
from teimgr.engine.job import InferOptions, Input, Pair
from teimgr.engine.templates import DOCUMENT, QUERY, CausalTemplate, late_interaction_roles
from teimgr.engine.tokenizer_library import (
    Shortener,
    Text,
    TokenizerLibrary,
    Truncation,
    breaks_at_spaces,
    load_tokenizer,
    unknown_id,
)
from teimgr.errors import EmptyInput, InvalidConfig, InvalidInput, TeimgrError, TokenizerFailed
from teimgr.model_files import Backbone, Layout

# No language has this many characters per token, so a longer text is cut (or refused) before it costs time.
_CHARS_PER_TOKEN = 250


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token as /tokenize shows it; offsets are UTF-8 bytes of prompt + text, None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How to tokenize inputs.

    Too long ones are truncated at their end, or at their beginning where `left`, or refused where not `truncate`.
    `prompt` goes before a text, and before the first of a pair. `query` is the role on late-interaction models.
    """

    truncate: bool = True
    left: bool = False
    prompt: str = ""
    query: bool = False


class Prompts:
    """The prompts of a model by name, and the default one: named at start, given as text at start, or the model's own.

    On late-interaction models their names are the two roles, with or without a text. `default_name` is None where the
    default is no prompt, or was given as text.
    """

    def __init__(self, layout: Layout, default_name: str | None = None, default_text: str | None = None) -> None:
        """Raises InvalidConfig where the model has no prompt called `default_name`."""
        self._roles = layout.late is not None
        self._texts = dict(layout.prompts)
        if self._roles:
            self._texts = {name: layout.prompts.get(name, "") for name in (QUERY, DOCUMENT)}
        if default_name is not None and default_name not in self._texts:
            raise InvalidConfig(self._missing(default_name))
        if default_name is None and default_text is not None:
            self._default = default_text
            self.default_name: str | None = None
        else:
            own = DOCUMENT if self._roles else layout.default_prompt_name or ""
            self._default = self._texts.get(default_name or own, "")
            name = default_name or layout.default_prompt_name
            self.default_name = name if name in self._texts else None
        self._default_query = default_name == QUERY

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def tokenize_options(self, options: InferOptions) -> TokenizeOptions:
        """The tokenize options of a job with these options.

        Raises:
            InvalidInput: the model has no prompt of that name.
        """
        query = self._default_query if options.prompt_name is None else options.prompt_name == QUERY
        text = self.text(options.prompt_name)
        return TokenizeOptions(options.truncate, options.truncation_left, text, self._roles and query)

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

    def _missing(self, name: str) -> str:
        if not self._texts:
            return (
                f"`default-prompt-name` is set to `{name}` but no prompts were found in the "
                "Sentence Transformers configuration"
            )
        known = ", ".join(f'"{known}"' for known in self._texts)
        return (
            f"`default-prompt-name` is set to `{name}` but it was not found in the Sentence Transformers prompts. "
            f"Available prompts: [{known}]"
        )


class TextTokenizer:
    """The tokenizer of one model. Safe from any thread.

    `max_length` is in tokens, including the `special_tokens` of the model's template around a text.
    """

    def __init__(self, layout: Layout, max_length: int) -> None:
        tokenizer = load_tokenizer(layout)
        self._library = TokenizerLibrary(tokenizer)
        self._shortener = Shortener(max_length * _CHARS_PER_TOKEN, breaks_at_spaces(tokenizer))
        self._add_specials = layout.backbone is not Backbone.STATIC
        self._type_ids = layout.type_ids
        self._skipped_id = unknown_id(tokenizer) if layout.skips_unknown else None
        self._vocabulary = layout.vocabulary or self._library.vocabulary
        # Added tokens that no weights belong to: on a GPU a single one of them would end the process.
        self._check_result_ids = self._library.vocabulary > self._vocabulary
        self._pool_prompts = layout.include_prompt
        self._prompt_lens: dict[str, int] = {}
        self._roles = None if layout.late is None else late_interaction_roles(layout.late, max_length)
        causal = None if layout.scoring is None else layout.scoring.causal
        self._causal = None if causal is None else CausalTemplate(causal, self._library, self._shortener, max_length)
        mask = self._library.encode(["a"], self._add_specials)[0].special_tokens_mask
        self._leading_specials = mask.index(0) if 0 in mask else 0
        self.max_length = max_length
        if self._causal is not None:
            self.special_tokens: int = self._causal.template_tokens
        else:
            prefix = 0 if self._roles is None else max(len(role.prefix) for role in self._roles.values())
            specials = tokenizer.num_special_tokens_to_add(is_pair=False) if self._add_specials else 0
            self.special_tokens = prefix + specials

    def prompt_len(self, prompt: str) -> int:
        """How many leading tokens pooling leaves out for this prompt: 0 for nearly every model.

        Raises:
            TokenizerFailed: the library refused it.
        """
        if self._pool_prompts or not prompt:
            return 0
        if prompt not in self._prompt_lens:
            (encoding,) = self._library.encode([prompt], self._add_specials)
            self._prompt_lens[prompt] = min(len(encoding), self.max_length) - encoding.special_tokens_mask[-1]
        return self._prompt_lens[prompt]

    def check(self, item: Input, options: TokenizeOptions) -> TeimgrError | None:
        """Validate an input before tokenization; None where it is valid."""
        if item is None:
            return InvalidInput("Input validation error: `inputs` cannot be null")
        if not any(map(len, item)) if isinstance(item, Pair) else not len(item):
            return EmptyInput()
        if self._causal is not None and isinstance(item, str):
            return InvalidInput("Input validation error: `inputs` must be pairs for this model")
        if isinstance(item, np.ndarray):
            return self._check_ids(item)
        characters = len(item) if isinstance(item, str) else len(item.first) + len(item.second)
        return None if options.truncate else self._check_characters(characters)

    def encode(self, inputs: Sequence[Input], options: TokenizeOptions) -> list[Encoded | TeimgrError]:
        """The model's input for each of `inputs`, or why there is none.

        Ids are taken as they are, unless there is a prompt: then they are decoded and tokenized again behind it.
        """
        results: list[Encoded | TeimgrError | None] = [self._without_tokenizer(item, options) for item in inputs]
        rows = [row for row, result in enumerate(results) if result is None]
        found = self._encode([inputs[row] for row in rows], options) if rows else []
        for row, result in zip(rows, found, strict=True):
            results[row] = result
        return [result for result in results if result is not None]

    def tokenize(self, text: str, add_special_tokens: bool, prompt: str) -> list[TokenSpan]:
        """Every token of prompt + text, untruncated.

        Raises:
            EmptyInput, InvalidInput: the text is empty or longer than the character limit.
            TokenizerFailed: the library refused it.
        """
        if not text:
            raise EmptyInput
        if (error := self._check_characters(len(text))) is not None:
            raise error
        whole = prompt + text
        (encoding,) = self._library.encode([whole], add_special_tokens, offsets=True)
        return list(_token_spans(encoding, whole))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`.

        Raises:
            EmptyInput: there are none.
            TokenizerFailed: an id is no token id.
        """
        if not ids:
            raise EmptyInput("Input validation error: `input_ids` cannot be empty")
        return self._library.decode(ids, skip_special_tokens)

    def cut(self, text: str, max_tokens: int, *, left: bool) -> str:
        """The first `max_tokens` tokens of `text`, or the last ones where `left`; special tokens do not count.

        The result is a substring, so a tokenizer that merges over words may make a token more or less of it.

        Raises:
            TokenizerFailed: the library refused it.
        """
        if len(text.encode()) <= max_tokens:  # no token is shorter than a byte
            return text
        longest = min(self.max_length, max_tokens) * _CHARS_PER_TOKEN
        text = text[-longest:] if left else text[:longest]
        spans = self.tokenize(text, add_special_tokens=False, prompt="")
        places = [(span.start, span.stop) for span in spans if span.start is not None and span.stop is not None]
        if len(places) <= max_tokens:
            return text
        begin, end = (places[-max_tokens][0], None) if left else (0, places[max_tokens - 1][1])
        return text.encode()[begin:end].decode(errors="ignore")

    def _limit(self, options: TokenizeOptions) -> int:
        return self.max_length if self._roles is None else self._roles[options.query].limit

    def _check_characters(self, characters: int) -> InvalidInput | None:
        if characters <= (limit := self.max_length * _CHARS_PER_TOKEN):
            return None
        return InvalidInput(
            f"Input validation error: `inputs` must have less than {limit} characters. Given: {characters}"
        )

    def _check_ids(self, ids: NDArray[np.int32]) -> InvalidInput | None:
        unknown = (ids < 0) | (ids >= self._vocabulary)
        if not unknown.any():
            return None
        return InvalidInput(
            f"Input validation error: `inputs` has the token id {ids[unknown][0]}, "
            f"which is not in the vocabulary of {self._vocabulary}"
        )

    def _without_tokenizer(self, item: Input, options: TokenizeOptions) -> Encoded | TeimgrError | None:
        """The result of an invalid input, or of ids; None where the item must be tokenized."""
        if (error := self.check(item, options)) is not None:
            return error
        if not isinstance(item, np.ndarray) or (options.prompt and self._causal is None):
            return None
        ids = item
        if len(ids) > (limit := self._limit(options)):
            if not options.truncate:
                return _too_long(limit, len(ids))
            ids = ids[len(ids) - limit :] if options.left else ids[:limit]
        if self._roles is not None:
            return self._roles[options.query].expand(ids, self._type_ids)
        if not len(ids := self._without_skipped(ids)):
            return EmptyInput()
        return Encoded(ids, np.zeros(len(ids), dtype=np.uint8) if self._type_ids else None)

    def _encode(self, items: Sequence[Input], options: TokenizeOptions) -> list[Encoded | TeimgrError]:
        try:
            if self._causal is None:
                return self._encode_texts([self._with_prompt(item, options.prompt) for item in items], options)
            pairs = [item for item in items if isinstance(item, Pair)]
            return [
                Encoded(ids) if len(ids) <= self.max_length else _too_long(self.max_length, len(ids))
                for ids in self._causal.encode(pairs, options.truncate, options.left)
            ]
        except TokenizerFailed as error:  # of the whole batch: retried one by one, so that only bad items fail
            return [error] if len(items) == 1 else [self._encode([item], options)[0] for item in items]

    def _with_prompt(self, item: Input, prompt: str) -> Text:
        if isinstance(item, np.ndarray):
            item = self._library.decode(item.tolist(), skip_special_tokens=True)
        if isinstance(item, Pair):
            return Pair(prompt + item.first, item.second) if prompt else item
        return f"{prompt}{item}"

    def _encode_texts(self, texts: Sequence[Text], options: TokenizeOptions) -> list[Encoded | TeimgrError]:
        truncation = None
        if options.truncate:
            prefix = 0 if self._roles is None else len(self._roles[options.query].prefix)
            truncation = Truncation(self._limit(options) - prefix, options.left)
        short = texts if truncation is None else [self._shortener.short(text, truncation.left) for text in texts]
        encodings = self._library.encode(short, self._add_specials)
        results: list[Encoded | TeimgrError] = []
        for encoding, shortened, text in zip(encodings, short, texts, strict=True):
            whole = encoding
            if truncation is not None and not self._shortener.holds(encoding, shortened, text, truncation):
                (whole,) = self._library.encode([text], self._add_specials)
            results.append(self._encoded(whole, options, truncation))
        return results

    def _encoded(
        self, encoding: Encoding, options: TokenizeOptions, truncation: Truncation | None
    ) -> Encoded | TeimgrError:
        kept = slice(None) if truncation is None or (places := truncation.kept(encoding)) is None else places
        ids = np.array(encoding.ids, dtype=np.int32)[kept]
        role = None if self._roles is None else self._roles[options.query]
        length = len(ids) + (0 if role is None else len(role.prefix))
        if length > (limit := self._limit(options)):
            return _too_long(limit, length)
        if not len(ids := self._without_skipped(ids)):
            return EmptyInput()
        if self._check_result_ids and (error := self._check_ids(ids)) is not None:
            return error
        if role is not None:
            return role.add_prefix(ids, self._leading_specials, self._type_ids)
        type_ids = np.array(encoding.type_ids, dtype=np.uint8)[kept] if self._type_ids else None
        return Encoded(ids, type_ids, prompt_tokens=self.prompt_len(options.prompt))

    def _without_skipped(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drop unknown tokens where the model does; after truncation, as in Model2Vec."""
        return ids if self._skipped_id is None else ids[ids != self._skipped_id]


def _too_long(limit: int, given: int) -> InvalidInput:
    return InvalidInput(f"Input validation error: `inputs` must have less than {limit} tokens. Given: {given}")


def _token_spans(encoding: Encoding, text: str) -> Iterable[TokenSpan]:
    """The library's offsets are in characters, the contract's in UTF-8 bytes."""
    raw = text.encode()
    starts = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum([len(character.encode()) for character in text], out=starts[1:])
    rows = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    for id, token, special, (begin, end) in rows:
        if special:
            yield TokenSpan(id, token, True, None, None)
        else:
            start, stop = int(starts[begin]), int(starts[end])
            yield TokenSpan(id, raw[start:stop].decode(errors="replace"), False, start, stop)
