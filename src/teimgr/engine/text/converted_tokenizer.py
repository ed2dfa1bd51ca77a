"""Tokenizers of models without tokenizer.json: converted by transformers, and compared with SentencePiece's own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from teimgr.engine.weights.gguf import gguf_tokenizer
from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.directory import weight_files
from teimgr.models.gguf_head import GGUF
from teimgr.models.layout import Layout

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
"""Texts on which two tokenizers are compared: several scripts, and characters that Unicode's compatibility forms
change."""


def convert(layout: Layout) -> Tokenizer:
    """The tokenizer that transformers makes of an older model's vocabulary, or by code of the model's own.

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
    trust = layout.trust_remote_code  # never None: transformers would prompt on the terminal
    slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TypeError(f"{type(slow).__name__} has no fast form, and there is no tokenizer.json")
    return backend if pieces is None else _checked(backend, pieces)


def _own(layout: Layout) -> Tokenizer:
    """The tokenizer of the model's own code, which the instance trusts, if it is one of the tokenizers library.

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
    """The first probe that the two cut differently; unknown characters are alike by whatever name."""
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
    protobuf: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")  # its types are incomplete
    model = protobuf.ModelProto.FromString(pieces.serialized_model_proto())
    spec = model.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if spec.add_dummy_prefix else "never")
