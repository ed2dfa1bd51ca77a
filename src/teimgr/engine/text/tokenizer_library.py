"""The tokenizers library: a model's tokenizer from its files, and the library's failures as our errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from teimgr.engine.text.boundaries import flattened, step_of
from teimgr.engine.text.converted_tokenizer import VOCABULARIES, convert
from teimgr.engine.text.tokenizer_config import add_declared_tokens
from teimgr.engine.text.truncation import Text
from teimgr.errors import ModelLoadFailed, TeimgrError, TokenizerFailed
from teimgr.models.layout import Backbone, Layout

# Some 0.4 ms of the library's time: where cores are busy its threads begin milliseconds later.
_FEW_TEXTS = 16
_FEW_CHARACTERS = 2_000
# Ids in one call of the library that holds the GIL.
_FEW_IDS = 1_000
_MAX_MESSAGE_CHARS = 1_000


def is_panic(error: BaseException) -> bool:
    """True if an exception is a panic of a library in Rust, which is a BaseException of no public class."""
    return type(error).__name__ == "PanicException"


class TokenizerLibrary:
    """A tokenizer of the library with its errors as `TokenizerFailed`. Safe from any thread; releases the GIL."""

    def __init__(self, tokenizer: Tokenizer, check: Callable[[str], None] | None = None) -> None:
        """`check` raises TokenizerFailed for a text that the tokenizer would cut wrongly."""
        self._tokenizer = tokenizer
        self._check = check

    def encode(self, texts: Sequence[Text], specials: bool = True, offsets: bool = False) -> list[Encoding]:
        """Return untruncated encodings of `texts`, with or without special tokens and offsets.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        if self._check is not None:
            for text in texts:
                for part in (text,) if isinstance(text, str) else text:
                    self._check(part)
        with library_errors():
            if _is_little(texts):  # without the thread pool, and with the GIL
                pairs = ((text, None) if isinstance(text, str) else text for text in texts)
                return [self._tokenizer.encode(first, second, add_special_tokens=specials) for first, second in pairs]
            encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
            return encode(list(texts), add_special_tokens=specials)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode token ids. Raises TokenizerFailed if an id is not a token id."""
        with library_errors():
            if len(ids) <= _FEW_IDS:
                return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token(self, id: int) -> str:
        """Return the text of a token of an encoding."""
        return self._tokenizer.id_to_token(id) or ""

    @property
    def vocabulary(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def _is_little(texts: Sequence[Text]) -> bool:
    """True if `texts` are tokenized sooner than the threads of the library's pool are awake."""
    if len(texts) > _FEW_TEXTS:
        return False
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts) <= _FEW_CHARACTERS


@contextmanager
def library_errors() -> Iterator[None]:
    """Turn the library's errors into TokenizerFailed: plain Exceptions, or Rust panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise TokenizerFailed(f"tokenizer error {error}") from error


def load_tokenizer(layout: Layout) -> Tokenizer:
    """Load the model's fast tokenizer, without the padding and truncation that its file may configure.

    Raises:
        ModelLoadFailed: it is missing or cannot be read.
    """
    with tokenizer_faults(layout):
        return _loaded(layout)


@contextmanager
def tokenizer_faults(layout: Layout) -> Iterator[None]:
    """Turn the library's failures, when the model's tokenizer is read or first used, into ModelLoadFailed.

    Its files come with the model: a panic of Rust is its way to refuse some of them. Failures of the host pass.
    """
    try:
        yield
    except BaseException as error:
        is_host = isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError)
        is_ours = isinstance(error, TeimgrError) and not isinstance(error, TokenizerFailed)
        if is_host or is_ours or not (isinstance(error, Exception) or is_panic(error)):
            raise
        message = error.message if isinstance(error, TokenizerFailed) else f"{error}"
        path = layout.transformer_dir / "tokenizer.json"
        if not path.is_file():
            path = next((path.parent / name for name in VOCABULARIES if (path.parent / name).is_file()), path)
        shown = message[:_MAX_MESSAGE_CHARS] or type(error).__name__
        raise ModelLoadFailed(f"the tokenizer cannot be loaded: {path}: {shown}") from error


def _loaded(layout: Layout) -> Tokenizer:
    if not layout.reads_texts:
        return Tokenizer(models.BPE())  # without tokens
    path = layout.transformer_dir / "tokenizer.json"
    is_file_enough = path.is_file() and not layout.own_tokenizer
    tokenizer = Tokenizer.from_file(str(path)) if is_file_enough else convert(layout)
    check_patterns(tokenizer)
    if is_file_enough and layout.backbone is not Backbone.STATIC:
        add_declared_tokens(tokenizer, layout)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if layout.lower_case and not _lower_cases(tokenizer):
        own = tokenizer.normalizer
        steps = [normalizers.Lowercase()] if own is None else [normalizers.Lowercase(), own]
        tokenizer.normalizer = normalizers.Sequence(steps)
    if layout.end_token is not None:
        _append(tokenizer, layout.end_token)
    return tokenizer


# Texts of one piece again and again, and what follows it, on which a pattern may try every way to cut the text.
_REPEATED = (*"aA0 \n'_-.\u00e9\u6771", "ab", "a ", "aA", "a0", "0.", "a'", "\n ")
_FOLLOWING = ("", "!", "\n", "\0", "a", "0", " ")
_TIMES = 64
_TRIED_OF_PATTERN = 32  # its first characters


def check_patterns(tokenizer: Tokenizer) -> None:
    """Try the regular expressions of a tokenizer, which come with the model, on texts of a repeated piece.

    The library gives one up after ten million steps back, a tenth of a second; texts that take each of many
    words nearly as long would hold a worker for minutes.

    Raises:
        ModelLoadFailed: one takes exponential time.
    """
    for part, steps in ((tokenizer.normalizer, "normalizers"), (tokenizer.pre_tokenizer, "pretokenizers")):
        for step in flattened(step_of(part), steps):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and "Regex" in pattern and not _is_quick(pattern["Regex"]):
                raise ModelLoadFailed(
                    f"the tokenizer cannot be loaded: the pattern {pattern['Regex'][:_SHOWN_OF_PATTERN]!r} of its "
                    f"{step['type']} takes exponential time on some repeated texts"
                )


_SHOWN_OF_PATTERN = 200


def _is_quick(pattern: str) -> bool:
    """True if the library decides within its limit where a pattern matches in each of the texts."""
    own = list(dict.fromkeys(filter(str.isprintable, pattern)))[:_TRIED_OF_PATTERN]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    try:
        for piece in (*_REPEATED, *own):
            # The pattern itself has what the library looks for in a text before it begins.
            for end in (*_FOLLOWING, f"\0{pattern}", f" {pattern}"):
                split.pre_tokenize_str(piece * _TIMES + end)
    except BaseException as error:
        if not is_panic(error):
            raise
        return False
    return True


def _append(tokenizer: Tokenizer, token: str) -> None:
    """Put `token` behind every text, and behind each half of a pair, unless the tokenizer does so on its own.

    Raises:
        ModelLoadFailed: it is not one of its tokens.
    """
    id = tokenizer.token_to_id(token)
    if id is None:
        raise ModelLoadFailed(f"the end token {token} is not a token of the tokenizer")
    if tokenizer.encode("a").ids[-1:] == [id]:
        return
    own = tokenizer.post_processor
    end = processors.TemplateProcessing(
        single=f"$A {token}", pair=f"$A {token} $B:1 {token}:1", special_tokens=[(token, id)]
    )
    tokenizer.post_processor = end if own is None else processors.Sequence([own, end])


def _lower_cases(tokenizer: Tokenizer) -> bool:
    spec = json.loads(tokenizer.to_str())["normalizer"]
    return any(part["type"] == "Lowercase" or part.get("lowercase") is True for part in flattened(spec, "normalizers"))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the unknown token; None if the vocabulary covers all text."""
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:  # Unigram
        return None if model["unk_id"] is None else int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)
