"""The tokenizers library: a model's tokenizer from its files, and the library's failures as our errors.

The tokenizer of a model without tokenizer.json is made from its vocabulary and compared with SentencePiece's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from teimgr.engine.text.boundaries import FINAL_SIGMA, PYTHON_SPACES, flattened, step_of
from teimgr.engine.text.tokenizer_config import add_declared_tokens
from teimgr.engine.text.truncation import Text
from teimgr.engine.weights.own import gguf_tokenizer
from teimgr.errors import ModelLoadFailed, TeimgrError, TokenizerFailed
from teimgr.models.bounded_json import parse, read_object
from teimgr.models.directory import weight_files
from teimgr.models.gguf_head import GGUF
from teimgr.models.layout import Backbone, Layout

_NOT_ARGUMENTS = ("auto_map", "tokenizer_class", "added_tokens_decoder", "backend", "is_local")
_SENTENCE_PIECE = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
VOCABULARIES = ("vocab.txt", "vocab.json", *_SENTENCE_PIECE)
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "Zürich, Łódź and São Paulo: 3.14159 km² — “quoted”, hyphen-ated; (nested [brackets]).",
    "  Ａｂｃ  ① ﬁne\u00a0space\ttab  ",
    "Καλημέρα κόσμε, привет мир, 東京は日本の首都です。 مرحبا नमस्ते 🙂",
    "don't I'll e\u0301te\u0301 x_y=z; #include <a.h>",
)
"""Texts for comparing two tokenizers: several scripts, and characters that Unicode's compatibility forms change."""


def convert(layout: Layout) -> Tokenizer:
    """Return the tokenizer that transformers makes of an older model's vocabulary, or by code of the model's own.

    Raises:
        ModelLoadFailed: it needs the package sentencepiece, or cuts texts in other places than SentencePiece or the
            model's own code do.
        FileNotFoundError: the vocabulary is missing; transformers would create an empty tokenizer.
    """
    from transformers import AutoTokenizer

    if layout.weight_names == GGUF:
        return gguf_tokenizer(*weight_files(layout.weights_dir))
    folder = layout.transformer_dir
    if not layout.own_tokenizer and not any((folder / name).is_file() for name in VOCABULARIES):
        raise FileNotFoundError(f"there is neither tokenizer.json nor any of {', '.join(VOCABULARIES)}")
    if layout.own_tokenizer:
        return _own(layout)
    pieces = next((folder / name for name in _SENTENCE_PIECE if (folder / name).is_file()), None)
    if pieces is not None and importlib.util.find_spec("sentencepiece") is None:
        raise ModelLoadFailed(
            f"the tokenizer is a SentencePiece model alone ({pieces.name}): install teimgr with the extra "
            "`sentencepiece`, or add a tokenizer.json"
        )
    trust = layout.trust_remote_code  # not None, by which transformers would prompt on the terminal
    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    if pieces is not None and type(slow).__name__ == _SIGLIP:
        return _siglip(slow, pieces)
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(slow).__name__} has no fast form, and tokenizer.json is missing")
    return backend if pieces is None else _checked(backend, pieces)


def _own(layout: Layout) -> Tokenizer:
    """Return the tokenizer of the model's own code, which the instance trusts, if it is one of the tokenizers library.

    Raises:
        ModelLoadFailed: it is not, or its code changes texts or ids outside of the library.
    """
    own = _instance(layout.transformer_dir, layout.code_revision)
    name, backend = type(own).__name__, getattr(own, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelLoadFailed(f"the tokenizer's own code, {name}, is not a fast tokenizer: not served")
    for text in PROBES:
        if own(text)["input_ids"] != backend.encode(text).ids:
            raise ModelLoadFailed(f"the tokenizer's own code, {name}, does more than its fast form with {text!r}")
    return backend


def _instance(folder: Path, code_revision: str | None) -> Any:
    """The tokenizer of the class that tokenizer_config.json names, on tokenizer.json where there is one.

    transformers 5 would rebuild it from its vocabulary alone, without normalizer and words, for any class but its own.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    file = folder / "tokenizer.json"
    config = read_object(folder / "tokenizer_config.json") or {}
    named = (config.get("auto_map") or {}).get("AutoTokenizer")
    fast = named[-1] if isinstance(named, list) and named else named
    if file.is_file() and isinstance(fast, str):
        kind = get_class_from_dynamic_module(fast, str(folder), local_files_only=True, code_revision=code_revision)
        if isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerFast):
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            kept = {key: value for key, value in config.items() if key not in _NOT_ARGUMENTS}
            return kind(tokenizer_object=tokenizer, **kept)
    return AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=True, code_revision=code_revision
    )


def _checked(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """`tokenizer` if it cuts texts as the SentencePiece model in `file` does, if need be by that model's normalization.

    Raises:
        ModelLoadFailed: it does not.
    """
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(file))
    if _difference(tokenizer, pieces) is None:
        return tokenizer
    _normalize_as(tokenizer, pieces)
    if (text := _difference(tokenizer, pieces)) is not None:
        raise ModelLoadFailed(
            f"the tokenizer that transformers makes of {file.name} cuts {text!r} in other places than SentencePiece "
            "does: add a tokenizer.json"
        )
    return tokenizer


def _difference(tokenizer: Tokenizer, pieces: Any) -> str | None:
    """Return the first probe that the two cut differently; unknown characters are equal by whatever name."""
    unknown = pieces.unk_id()
    for text in PROBES:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        theirs = [None if id == unknown else pieces.id_to_piece(id) for id in pieces.encode(text)]
        known = {piece for piece in theirs if piece is not None}
        ours = [token if token in known else None for token in map(tokenizer.id_to_token, encoding.ids)]
        if ours != theirs:
            return text
    return None


def _normalize_as(tokenizer: Tokenizer, pieces: Any) -> None:
    """Normalize texts by the specification in a SentencePiece model."""
    spec = _proto(pieces).normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if spec.add_dummy_prefix else "never")


def _proto(pieces: Any) -> Any:
    """Return the message in the file of a SentencePiece model."""
    protobuf: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # its types are incomplete
    return protobuf.ModelProto.FromString(pieces.serialized_model_proto())


_SIGLIP = "SiglipTokenizer"
_UNIGRAM = 1  # SentencePiece's number
_SIGLIP_PROBES = (*PROBES, *map(str.upper, PROBES), "ΟΔΥΣΣΕΥΣ' ΣΑΣ.", "▁a ▁ b", "!", " \x1c-\x85", "\r\n+x", "İstanbul")
# Characters normalized per step, with the GIL, and the overlap for marks at an edge.
_CHECKED, _OVERLAP = 1024, 32
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _siglip(slow: Any, file: Path) -> Tokenizer:
    """The fast form of SiglipTokenizer, which transformers has in Python alone.

    Raises:
        ModelLoadFailed: its ids differ on a probe.
    """
    pieces = slow.sp_model
    model = _proto(pieces)
    if model.trainer_spec.model_type != _UNIGRAM:
        raise ModelLoadFailed(f"{file.name} is not a model of kind Unigram, which SigLIP's are: add a tokenizer.json")
    entries = [(entry.piece, entry.score) for entry in model.pieces]
    byte_fallback = model.trainer_spec.byte_fallback
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=pieces.unk_id(), byte_fallback=byte_fallback))
    steps: list[Any] = []
    if slow.do_lower_case:
        steps += [normalizers.Replace(Regex(FINAL_SIGMA), "ς"), normalizers.Lowercase()]
    steps += [
        normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Replace(Regex(PYTHON_SPACES), " "),
        normalizers.Strip(),
    ]
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    steps += [normalizers.Replace("▁", " "), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens([AddedToken(str(token), normalized=False) for token in slow.added_tokens_decoder.values()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in slow.all_special_tokens])
    end = slow.eos_token
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, slow.eos_token_id)]
    )
    for text in _SIGLIP_PROBES:
        if slow(text, truncation=False)["input_ids"] != tokenizer.encode(text).ids:
            raise ModelLoadFailed(
                f"the fast tokenizer made of {file.name} cuts {text!r} in other places than {_SIGLIP} does: add a "
                "tokenizer.json"
            )
    return tokenizer


def check_of_texts(layout: Layout, tokenizer: Tokenizer) -> Callable[[str], None] | None:
    """What raises TokenizerFailed for a text that `tokenizer` may cut otherwise than the library's; None: no text is.

    Of a SiglipTokenizer made of its pieces. The tokenizers library normalizes a base character with its marks as one,
    and drops marks that SentencePiece keeps; and SiglipTokenizer begins no word behind a special token.
    """
    file = layout.transformer_dir / "spiece.model"
    if layout.dual is None or (file.parent / "tokenizer.json").is_file() or not file.is_file():
        return None
    config = read_object(file.parent / "tokenizer_config.json") or {}
    if (config.get("tokenizer_class") or _SIGLIP).removesuffix("Fast") != _SIGLIP:
        return None
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(file))
    unknown = pieces.id_to_piece(pieces.unk_id())
    before = pieces.normalize(unknown)
    lowers = config.get("do_lower_case", True)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    way_out = "add a tokenizer.json to the model"

    def check(text: str) -> None:
        if (token := next((each for each in added if each in text), None)) is not None:
            raise TokenizerFailed(f"the text has the token {token}, beside which {_SIGLIP} cuts otherwise: {way_out}")
        for begin in range(0, 0 if text.isascii() else len(text), _CHECKED):
            part = text[begin : begin + _CHECKED + _OVERLAP]
            given = (part.lower() if lowers else part).replace("▁", " ").translate(_NO_PUNCTUATION)
            theirs = pieces.normalize(f"{unknown}▁{' '.join(given.split())}").removeprefix(before)
            if theirs.strip("▁") != tokenizer.normalizer.normalize_str(part).replace(" ", "▁"):
                raise TokenizerFailed(f"the text has a character with marks that {_SIGLIP} reads otherwise: {way_out}")

    return check


# Some 0.4 ms of the library's time, too little for its threads, which start milliseconds later on busy cores.
_FEW_TEXTS = 16
_FEW_CHARACTERS = 2_000
# Ids per call of the library, which holds the GIL.
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
            if _is_little(texts):  # without the thread pool; holds the GIL
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
    for file in (path,) if is_file_enough else (path, path.parent / "vocab.json"):
        _check_ids(file, layout.vocabulary or 0)
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


_NUMBERED = re.compile(rb'"\s*+:\s*+[0-9]{7}')  # a key and a million or more
_TIMES_THE_TOKENS = 4


def _check_ids(file: Path, rows: int) -> None:
    """Refuse a vocabulary with an id far beyond its number of tokens and the model's `rows`, before the library has it.

    The library writes a vocabulary in a loop over all ids below the largest: 21 s for an id of 32 bits.
    """
    content = file.read_bytes() if file.is_file() else b""
    if _NUMBERED.search(content) is None:
        return
    given = parse(content, file.name)
    model = given.get("model") if file.name == "tokenizer.json" else given
    tokens = model.get("vocab") if file.name == "tokenizer.json" and isinstance(model, dict) else model
    ids = [id for id in tokens.values() if isinstance(id, int)] if isinstance(tokens, dict) else []
    most = max(_TIMES_THE_TOKENS * len(ids), rows, 1_000_000)
    if (largest := max(ids, default=0)) > most:
        raise ModelLoadFailed(
            f"{file.name} has the token id {largest}, with {len(ids)} tokens: ids up to {most} are read"
        )


# Repeated pieces and the text after them, on which a pattern may backtrack over every split of the text.
_REPEATED = (*"aA0 \n'_-.\u00e9\u6771", "ab", "a ", "aA", "a0", "0.", "a'", "\n ")
_FOLLOWING = ("", "!", "\n", "\0", "a", "0", " ")
_TIMES = 64
_TRIED_OF_PATTERN = 32  # first characters of a pattern


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
            # The pattern's own text includes what the library searches for before it matches.
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
