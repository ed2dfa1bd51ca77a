"""Inputs to what the model reads: truncation, limits, and the tokenizer as its users see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.batch import Encoded
from teimgr.engine.job import InferOptions, Input, Pair
from teimgr.engine.templates import DOCUMENT, QUERY, CausalText, roles_of
from teimgr.engine.tokenizer_library import (
    Cut,
    Shortener,
    Text,
    TokenizerLibrary,
    breaks_at_spaces,
    load_tokenizer,
    unknown_id,
)
from teimgr.errors import EmptyInput, InvalidConfig, InvalidInput, TeimgrError, TokenizerFailed
from teimgr.model_files import Backbone, Layout

# No language writes this many characters per token, so a longer text is cut (or refused) before it costs time.
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
    """How inputs are to be read.

    Too long ones are cut at their end, or at their beginning where `left`, or refused where not `truncate`. `prompt`
    goes before a text, and before the first of a pair. `query` is the role on late-interaction models.
    """

    truncate: bool = True
    left: bool = False
    prompt: str = ""
    query: bool = False


class TextTokenizer:
    """The tokenizer of one model. Safe from any thread.

    `max_length` counts tokens, `special_tokens` among them: those of the model's own template around a text.
    """

    def __init__(self, layout: Layout, max_length: int) -> None:
        tokenizer = load_tokenizer(layout)
        self._library = TokenizerLibrary(tokenizer)
        self._shortener = Shortener(max_length * _CHARS_PER_TOKEN, breaks_at_spaces(tokenizer))
        self._specials = layout.backbone is not Backbone.STATIC
        self._typed = layout.type_ids
        self._skipped = unknown_id(tokenizer) if layout.skips_unknown else None
        self._vocabulary = layout.vocabulary or self._library.vocabulary
        # Added tokens that no weights belong to: on a GPU a single one of them would end the process.
        self._knows_too_many = self._library.vocabulary > self._vocabulary
        self._pool_prompts = layout.include_prompt
        self._prompt_lens: dict[str, int] = {}
        self._roles = None if layout.late is None else roles_of(layout.late, max_length)
        causal = None if layout.scoring is None else layout.scoring.causal
        self._causal = None if causal is None else CausalText(causal, self._library, self._shortener, max_length)
        self._leading = self._leading_specials()
        self.max_length = max_length
        self.special_tokens: int = self._template_tokens(tokenizer.num_special_tokens_to_add(is_pair=False))

    def prompt_len(self, prompt: str) -> int:
        """How many leading tokens pooling leaves out for this prompt: 0 for nearly every model.

        Raises:
            TokenizerFailed: the library refused it.
        """
        if self._pool_prompts or not prompt:
            return 0
        if prompt not in self._prompt_lens:
            (encoding,) = self._library.encode([prompt], self._specials)
            self._prompt_lens[prompt] = min(len(encoding), self.max_length) - encoding.special_tokens_mask[-1]
        return self._prompt_lens[prompt]

    def check(self, item: Input, reading: TokenizeOptions) -> TeimgrError | None:
        """What is wrong with an input before anything is tokenized; None where nothing is."""
        if item is None:
            return InvalidInput("Input validation error: `inputs` cannot be null")
        if not any(map(len, item)) if isinstance(item, Pair) else not len(item):
            return EmptyInput()
        if self._causal is not None and isinstance(item, str):
            return InvalidInput("Input validation error: `inputs` must be pairs for this model")
        if isinstance(item, np.ndarray):
            return self._check_ids(item)
        limit = self.max_length * _CHARS_PER_TOKEN
        characters = len(item) if isinstance(item, str) else len(item.first) + len(item.second)
        if not reading.truncate and characters > limit:
            return InvalidInput(
                f"Input validation error: `inputs` must have less than {limit} characters. Given: {characters}"
            )
        return None

    def encode(self, inputs: Sequence[Input], reading: TokenizeOptions) -> list[Encoded | TeimgrError]:
        """What the model reads of each input, or why it reads nothing.

        Ids are taken as they are, unless a prompt goes before them: then before their text.
        """
        results: list[Encoded | TeimgrError | None] = [self._without_text(item, reading) for item in inputs]
        rows = [row for row, result in enumerate(results) if result is None]
        found = self._encode([inputs[row] for row in rows], reading) if rows else []
        for row, result in zip(rows, found, strict=True):
            results[row] = result
        return [result for result in results if result is not None]

    def tokenize(self, text: str, add_special_tokens: bool, prompt: str) -> list[TokenSpan]:
        """Every token of prompt + text, untruncated.

        Raises:
            EmptyInput, InvalidInput: the text is empty or longer than the character limit.
            TokenizerFailed: the library refused it.
        """
        limit = self.max_length * _CHARS_PER_TOKEN
        if not text:
            raise EmptyInput
        if len(text) > limit:
            raise InvalidInput(
                f"Input validation error: `inputs` must have less than {limit} characters. Given: {len(text)}"
            )
        whole = prompt + text
        (encoding,) = self._library.encode([whole], add_special_tokens, offsets=True)
        return list(_tokens(encoding, whole))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`.

        Raises:
            EmptyInput: there are none.
            TokenizerFailed: an id is no token id.
        """
        if not ids:
            raise EmptyInput("Input validation error: `input_ids` cannot be empty")
        return self._library.decode(ids, skip_special_tokens)

    def limit(self, reading: TokenizeOptions) -> int:
        """The most tokens of an input."""
        return self.max_length if self._roles is None else self._roles[reading.query].limit

    def _without_text(self, item: Input, reading: TokenizeOptions) -> Encoded | TeimgrError | None:
        """The result of an input that needs no tokenizer; None for one that does."""
        if (error := self.check(item, reading)) is not None:
            return error
        if not isinstance(item, np.ndarray) or (reading.prompt and self._causal is None):
            return None
        ids = item
        if len(ids) > (limit := self.limit(reading)):
            if not reading.truncate:
                return _too_long(limit, len(ids))
            ids = ids[len(ids) - limit :] if reading.left else ids[:limit]
        if self._roles is not None:
            return self._roles[reading.query].fill(ids, self._typed)
        if not len(ids := self._counted(ids)):
            return EmptyInput()
        return Encoded(ids, np.zeros(len(ids), dtype=np.uint8) if self._typed else None)

    def _check_ids(self, ids: NDArray[np.int32]) -> TeimgrError | None:
        strange = (ids < 0) | (ids >= self._vocabulary)
        if not strange.any():
            return None
        return InvalidInput(
            f"Input validation error: `inputs` has the token id {ids[strange][0]}, "
            f"which is not in the vocabulary of {self._vocabulary}"
        )

    def _encode(self, items: Sequence[Input], reading: TokenizeOptions) -> list[Encoded | TeimgrError]:
        """Texts, pairs, and ids that a prompt goes before."""
        try:
            if self._causal is not None:
                return self._encode_causal([item for item in items if isinstance(item, Pair)], reading)
            return self._encode_texts([self._text(item, reading.prompt) for item in items], reading)
        except TokenizerFailed as error:  # for all at once; each by itself, so that one cannot fail the others
            return [error] if len(items) == 1 else [self._encode([item], reading)[0] for item in items]

    def _encode_causal(self, pairs: Sequence[Pair], reading: TokenizeOptions) -> list[Encoded | TeimgrError]:
        assert self._causal is not None
        texts = self._causal.encode(pairs, reading.truncate, reading.left)
        return [Encoded(ids) if len(ids) <= self.max_length else _too_long(self.max_length, len(ids)) for ids in texts]

    def _encode_texts(self, texts: Sequence[Text], reading: TokenizeOptions) -> list[Encoded | TeimgrError]:
        cut = self._cut(reading)
        short = texts if cut is None else [self._shortener.short(text, cut.left) for text in texts]
        encodings = self._library.encode(short, self._specials)
        results: list[Encoded | TeimgrError] = []
        for encoding, kept, text in zip(encodings, short, texts, strict=True):
            whole = encoding
            if cut is not None and not self._shortener.holds(encoding, kept, text, cut):
                (whole,) = self._library.encode([text], self._specials)
            results.append(self._encoded(whole, reading, cut))
        return results

    def _encoded(self, encoding: Encoding, reading: TokenizeOptions, cut: Cut | None) -> Encoded | TeimgrError:
        kept = slice(None) if cut is None or (places := cut.kept(encoding)) is None else places
        ids = np.array(encoding.ids, dtype=np.int32)[kept]
        role = None if self._roles is None else self._roles[reading.query]
        length = len(ids) + (0 if role is None else len(role.prefix))
        if length > (limit := self.limit(reading)):
            return _too_long(limit, length)
        if not len(ids := self._counted(ids)):
            return EmptyInput()
        if self._knows_too_many and (error := self._check_ids(ids)) is not None:
            return error
        if role is not None:
            return role.dress(ids, self._leading, self._typed)
        type_ids = np.array(encoding.type_ids, dtype=np.uint8)[kept] if self._typed else None
        return Encoded(ids, type_ids, prompt_tokens=self.prompt_len(reading.prompt))

    def _cut(self, reading: TokenizeOptions) -> Cut | None:
        if not reading.truncate:
            return None
        prefix = 0 if self._roles is None else len(self._roles[reading.query].prefix)
        return Cut(self.limit(reading) - prefix, reading.left)

    def _text(self, item: Input, prompt: str) -> Text:
        if isinstance(item, np.ndarray):
            item = self._library.decode(item.tolist(), skip_special_tokens=True)
        if isinstance(item, Pair):
            return Pair(prompt + item.first, item.second) if prompt else item
        return f"{prompt}{item}"

    def _counted(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Without the tokens that count for nothing; what is too long was cut before, as Model2Vec does it."""
        return ids if self._skipped is None else ids[ids != self._skipped]

    def _leading_specials(self) -> int:
        """How many special tokens stand before a text."""
        mask = self._library.encode(["a"], self._specials)[0].special_tokens_mask
        return mask.index(0) if 0 in mask else 0

    def _template_tokens(self, specials: int) -> int:
        if self._causal is not None:
            return self._causal.template_tokens
        prefix = 0 if self._roles is None else max(len(role.prefix) for role in self._roles.values())
        return prefix + (specials if self._specials else 0)


def _too_long(limit: int, given: int) -> InvalidInput:
    return InvalidInput(f"Input validation error: `inputs` must have less than {limit} tokens. Given: {given}")


def _tokens(encoding: Encoding, text: str) -> Iterable[TokenSpan]:
    """The library counts characters; the contract counts bytes."""
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


class Prompts:
    """The prompts of one model.

    Where a request names none, the prompt named at start counts, else the text given there, else the model's default.
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
        else:
            own = DOCUMENT if self._roles else layout.default_prompt_name or ""
            self._default = self._texts.get(default_name or own, "")
        self._default_query = default_name == QUERY

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return tuple(self._texts)

    def reading(self, options: InferOptions) -> TokenizeOptions:
        """How a job with these options wants its inputs read.

        Raises:
            InvalidInput: the model has no prompt of that name.
        """
        query = self._default_query if options.prompt_name is None else options.prompt_name == QUERY
        text = self.text(options.prompt_name)
        return TokenizeOptions(options.truncate, options.truncation_left, text, self._roles and query)

    def text(self, name: str | None) -> str:
        """What goes before the input, "" for nothing.

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
