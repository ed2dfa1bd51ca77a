"""WordPiece tokenization of ASCII texts by the C library of `native/`, for tokenizers of BERT's kind.

The ids are those of the tokenizers library at a tenth of its time. What it does not cover, the library tokenizes: other
characters, pairs, texts with added tokens like "[MASK]" in them, and every other kind of tokenizer.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from teimgr.engine.boundaries import flattened
from teimgr.engine.native_library import NativeLibrary, address, native_forward_allowed, native_library
from teimgr.engine.truncation import Truncation
from teimgr.wire.text_column import TextColumn

_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
_DROPPED, _SPACE, _ISOLATED, _LETTER = range(4)  # of wordpiece.c
_LONGEST_WORD = 256
_MIN_SLOTS_PER_PIECE = 2
_Offsets = ctypes.c_int64 * 2


class _Piece(ctypes.Structure):
    """`struct piece` of wordpiece.c."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("begin", "length", "id", "within"))


class _Vocabulary(ctypes.Structure):
    """`struct wordpiece` of wordpiece.c."""

    _fields_ = (
        ("bytes", ctypes.c_char_p),
        ("prefix", ctypes.c_char_p),
        ("ids", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("kinds", ctypes.c_void_p),
        ("mapped", ctypes.c_void_p),
        ("leading", ctypes.c_void_p),
        ("trailing", ctypes.c_void_p),
        ("added", ctypes.c_char_p),
        ("begins_added", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("mask", ctypes.c_int64),
        ("prefix_length", ctypes.c_int64),
        ("longest_piece", ctypes.c_int64),
        ("longest_word", ctypes.c_int64),
        ("bytes_size", ctypes.c_int64),
        ("added_size", ctypes.c_int64),
        ("leading_count", ctypes.c_int64),
        ("trailing_count", ctypes.c_int64),
        ("added_count", ctypes.c_int64),
        ("unknown", ctypes.c_int32),
    )


class WordPiece:
    """The native form of one tokenizer, with its special tokens around a text or without. Safe from any thread."""

    def __init__(self, library: NativeLibrary, tokenizer: Tokenizer, spec: dict[str, Any], specials: bool) -> None:
        model = spec["model"]
        vocabulary, prefix = model["vocab"], model["continuing_subword_prefix"].encode()
        ids = np.fromiter(vocabulary.values(), np.int32, len(vocabulary))
        pieces = (_Piece * len(vocabulary))()
        slots = 1 << (len(vocabulary) * _MIN_SLOTS_PER_PIECE).bit_length()
        table = np.empty(slots, np.int32)
        kinds, mapped = _byte_kinds(tokenizer)
        around = tokenizer.encode("a", add_special_tokens=specials)
        text = around.special_tokens_mask.index(0)
        leading, trailing = (np.array(ids, np.int32) for ids in (around.ids[:text], around.ids[text + 1 :]))
        self._encode = library.wordpiece_encode
        self._special_tokens = len(leading) + len(trailing)
        added = [token["content"] for token in spec["added_tokens"] if token["content"].isascii()]
        begins_added = np.zeros(128, np.uint8)
        begins_added[[ord(content[0]) for content in added]] = 1
        # The structure has their addresses alone.
        self._arrays = (ids, pieces, table, kinds, mapped, leading, trailing, begins_added)
        strings = "\0".join([*vocabulary, ""]).encode()
        added_strings = "".join(f"{content}\0" for content in added).encode()
        self._vocabulary = _Vocabulary(
            bytes=strings,
            bytes_size=len(strings),
            prefix=prefix,
            ids=ids.ctypes.data,
            pieces=ctypes.addressof(pieces),
            table=table.ctypes.data,
            kinds=kinds.ctypes.data,
            mapped=mapped.ctypes.data,
            leading=leading.ctypes.data,
            trailing=trailing.ctypes.data,
            added=added_strings,
            added_size=len(added_strings),
            begins_added=begins_added.ctypes.data,
            count=len(vocabulary),
            mask=slots - 1,
            prefix_length=len(prefix),
            longest_word=model["max_input_chars_per_word"],
            leading_count=len(leading),
            trailing_count=len(trailing),
            added_count=len(added),
            unknown=vocabulary[model["unk_token"]],
        )
        self._at = ctypes.addressof(self._vocabulary)
        if library.wordpiece_fill(ctypes.byref(self._vocabulary)):
            raise ValueError("native library: a vocabulary that is not what its sizes say")

    def encode(
        self, texts: TextColumn, truncation: Truncation | None, longest: int = sys.maxsize
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all `texts`, one after another, and where those of each end: int32 [T], int64 [N].

        Texts that are not covered, empty, or of more than `longest` bytes have none.
        """
        room = int(texts.offsets[-1] - texts.offsets[0]) + len(texts) * self._special_tokens
        ids = np.empty(room, np.int32)
        ends = np.empty(len(texts), np.int64)
        bounds = (0, False) if truncation is None else (truncation.limit, truncation.left)
        column = texts.data.ctypes.data, len(texts.data), address(texts.offsets)
        total = self._encode(self._at, *column, len(texts), longest, *bounds, address(ids), room, address(ends))
        if total < 0:
            raise ValueError("native library: the borders of the texts are outside of their bytes")
        return ids[:total].copy(), ends  # a copy: some four bytes of five are free

    def encode_one(self, text: str, truncation: Truncation | None, longest: int) -> NDArray[np.int32] | None:
        """The ids of an ASCII text, int32 [T]; None if `encode` has none. Without the arrays of a column."""
        data = text.encode()
        ids, end = np.empty(len(data) + self._special_tokens, np.int32), ctypes.c_int64()
        bounds = (0, False) if truncation is None else (truncation.limit, truncation.left)
        offsets = _Offsets(0, len(data))
        room, ends = len(ids), ctypes.addressof(end)
        total = self._encode(self._at, data, len(data), offsets, 1, longest, *bounds, address(ids), room, ends)
        if total < 0:
            raise ValueError("native library: a text that is outside of its bytes")
        return ids[:total] if total else None


def wordpiece(tokenizer: Tokenizer, specials: bool) -> WordPiece | None:
    """The native form of `tokenizer`, with its special tokens if `specials`; None if it is not covered."""
    library = native_library()
    if library is None or not library.knows(wordpiece=_Vocabulary) or not native_forward_allowed():
        return None
    spec = json.loads(tokenizer.to_str())
    return WordPiece(library, tokenizer, spec, specials) if _supported(tokenizer, spec, specials) else None


def _supported(tokenizer: Tokenizer, spec: dict[str, Any], specials: bool) -> bool:
    model, before = spec["model"], flattened(spec["normalizer"], "normalizers")
    words = list(flattened(spec["pre_tokenizer"], "pretokenizers"))
    if model["type"] != "WordPiece" or [part["type"] for part in words] != ["BertPreTokenizer"]:
        return False
    if any(part["type"] not in _NORMALIZERS for part in before):
        return False
    if any(token["normalized"] or not token["content"] or "\0" in token["content"] for token in spec["added_tokens"]):
        return False
    if model["max_input_chars_per_word"] > _LONGEST_WORD or model["unk_token"] not in model["vocab"]:
        return False
    if not model["continuing_subword_prefix"] or "\0" in "".join(model["vocab"]):
        return False
    # One letter is one token, and none of the template's tokens has another type.
    letter = tokenizer.encode("a", add_special_tokens=specials)
    return letter.special_tokens_mask.count(0) == 1 and not any(letter.type_ids)


def _byte_kinds(tokenizer: Tokenizer) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What the tokenizer makes of each ASCII character between two letters, and the character in its place."""
    kinds, mapped = np.zeros(128, np.uint8), np.arange(128, dtype=np.uint8)
    for code in range(128):
        text = f"a{chr(code)}a"
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        if words == ["aa"]:
            kinds[code] = _DROPPED
        elif words == ["a", "a"]:
            kinds[code] = _SPACE
        else:
            kinds[code] = _ISOLATED if len(words) == 3 else _LETTER
            mapped[code] = ord(text[1])
    return kinds, mapped
