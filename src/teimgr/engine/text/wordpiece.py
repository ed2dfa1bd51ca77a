"""WordPiece tokenization by the C library of `native/`, for tokenizers like BERT's.

The ids are those of the tokenizers library in a tenth of its time. Words that are not ASCII are tokenized by the
tokenizers library, since no rule of BERT's spans white space. That library also tokenizes everything else: pairs, texts
with added tokens like "[MASK]", and other kinds of tokenizers.
"""

from __future__ import annotations

import ctypes
import json
import sys
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from teimgr.engine.native_library import NativeLibrary, address, native_forward_allowed, native_library
from teimgr.engine.text.boundaries import flattened
from teimgr.engine.text.tokenizer_library import library_errors
from teimgr.engine.text.truncation import Truncation
from teimgr.wire.text_column import TextColumn

_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
_DROPPED, _SPACE, _ISOLATED, _LETTER = range(4)  # of wordpiece.c
_LONGEST_WORD = 256
_MIN_SLOTS_PER_PIECE = 2
_LAST_ASCII = 127
_MAX_BEYOND = 0.25  # part of a text's bytes in words that are not ASCII
_TOGETHER_CHARS = 1_000  # of words per call of the tokenizers library
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
    """The native form of one tokenizer, with or without special tokens around a text. Safe from any thread."""

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
        self._tokenizer = tokenizer
        self._added = tuple(token["content"] for token in spec["added_tokens"])
        self._is_space = np.zeros(256, np.bool_)
        self._is_space[:128] = kinds == _SPACE
        self._splits = all(token.isascii() and not token.split()[1:] for token in self._added)
        self._encode = library.wordpiece_encode
        self._special_tokens = len(leading) + len(trailing)
        added = [token["content"] for token in spec["added_tokens"] if token["content"].isascii()]
        begins_added = np.zeros(128, np.uint8)
        begins_added[[ord(content[0]) for content in added]] = 1
        # Kept alive: the structure has only their addresses.
        self._arrays = (leading, trailing, ids, pieces, table, kinds, mapped, begins_added)
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
        self._plain = _Vocabulary.from_buffer_copy(self._vocabulary)
        self._plain.leading_count = self._plain.trailing_count = 0
        if library.wordpiece_fill(ctypes.byref(self._vocabulary)):
            raise ValueError("native library: a vocabulary that is not what its sizes say")
        self._plain.longest_piece = self._vocabulary.longest_piece

    def encode(
        self, texts: TextColumn, truncation: Truncation | None, longest: int = sys.maxsize
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all `texts`, one after another, and where the ids of each end: int32 [T], int64 [N].

        Texts that are not covered, empty, or of more than `longest` bytes have none.
        """
        bounds = (0, False) if truncation is None else (truncation.limit, truncation.left)
        return self._encoded(self._at, self._special_tokens, texts, bounds, longest)

    def _encoded(
        self, vocabulary: int, specials: int, texts: TextColumn, bounds: tuple[int, bool], longest: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        room = int(texts.offsets[-1] - texts.offsets[0]) + len(texts) * specials
        ids = np.empty(room, np.int32)
        ends = np.empty(len(texts), np.int64)
        column = texts.data.ctypes.data, len(texts.data), address(texts.offsets)
        total = self._encode(vocabulary, *column, len(texts), longest, *bounds, address(ids), room, address(ends))
        if total < 0:
            raise ValueError("native library: the borders of the texts are outside of their bytes")
        return ids[:total].copy(), ends  # a copy, since some four fifths of the array are unused

    def encode_mixed(
        self, texts: TextColumn, truncation: Truncation | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Like `encode`, for texts of which some words are not ASCII: the library tokenizes these words. Texts that are
        mostly of such words have no ids.

        Raises:
            TokenizerFailed: the library refused a word.
        """
        data, borders = texts.data, texts.offsets
        if not self._splits:
            return np.zeros(0, np.int32), np.zeros(len(texts), np.int64)
        begins, stops = self._words_beyond_ascii(data, borders)
        # Rows of a column: the texts between these words; the rows of the words have no ids.
        cuts = np.unique(np.concatenate([borders, begins, stops]))
        bounds = (0, False)
        ids, ends = self._encoded(ctypes.addressof(self._plain), 0, TextColumn(data, cuts), bounds, sys.maxsize)
        words = [data[begin:stop].tobytes().decode() for begin, stop in zip(begins, stops, strict=True)]
        word_ids, counts = self._by_library(words)
        of_words = np.searchsorted(cuts, begins)
        at = ends[of_words]  # an empty row ends where the previous one ends
        whole = np.insert(ids, np.repeat(at, counts), word_ids)
        row_ends = ends + np.cumsum(np.bincount(of_words, counts, len(ends)).astype(np.int64))
        refused = self._refused(data, cuts, ends, of_words, words)
        return self._around(whole, row_ends, np.searchsorted(cuts, borders), refused, truncation)

    def _words_beyond_ascii(
        self, data: NDArray[np.uint8], borders: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where words that are not ASCII begin and stop, between white space or the borders of a text; but not those of
        texts with many."""
        here = data[borders[0] : borders[-1]]
        places = np.flatnonzero(here > _LAST_ASCII) + borders[0]
        spaces = np.flatnonzero(self._is_space[here]) + borders[0]
        # A word begins after a space or at a border, and ends before a space or at a border.
        begin_at, stop_at = (np.sort(np.concatenate([borders, each]), kind="stable") for each in (spaces + 1, spaces))
        begins = begin_at[np.searchsorted(begin_at, places, side="right") - 1]
        stops = stop_at[np.searchsorted(stop_at, places, side="right")]
        words = np.flatnonzero(np.diff(begins, prepend=-1))
        begins, stops = begins[words], stops[words]
        of_text = np.searchsorted(borders, begins, side="right") - 1
        shares = np.bincount(of_text, stops - begins, len(borders) - 1) / np.maximum(np.diff(borders), 1)
        kept = (shares <= _MAX_BEYOND)[of_text]
        return begins[kept], stops[kept]

    def _by_library(self, words: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of all words, without special tokens, and how many each has."""
        ids, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        begin, chars = 0, 0
        for stop, word in enumerate(words, 1):
            chars += len(word)
            if chars >= _TOGETHER_CHARS or stop == len(words):
                with library_errors():
                    encoding = self._tokenizer.encode(words[begin:stop], is_pretokenized=True, add_special_tokens=False)
                ids.append(np.array(encoding.ids, np.int32))
                counts.append(np.bincount(np.array(encoding.word_ids, np.int64), minlength=stop - begin))
                begin, chars = stop, 0
        return np.concatenate(ids), np.concatenate(counts)

    def _refused(
        self,
        data: NDArray[np.uint8],
        cuts: NDArray[np.int64],
        ends: NDArray[np.int64],
        of_words: NDArray[np.int64],
        words: list[str],
    ) -> list[int]:
        """Return the rows whose text the library must tokenize: with an added token, or with only characters that are
        dropped."""
        refused = [
            row for row, word in zip(of_words.tolist(), words, strict=True) if any(each in word for each in self._added)
        ]
        empty = np.setdiff1d(np.flatnonzero(np.diff(ends, prepend=0) == 0), of_words)
        return refused + [row for row in empty.tolist() if not self._is_space[data[cuts[row] : cuts[row + 1]]].all()]

    def _around(
        self,
        ids: NDArray[np.int32],
        ends: NDArray[np.int64],
        borders: NDArray[np.int64],
        refused: list[int],
        truncation: Truncation | None,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The texts with their special tokens, cut; text i are the rows from `borders[i]` to `borders[i + 1]`."""
        leading, trailing = self._arrays[:2]
        room = sys.maxsize if truncation is None else max(0, truncation.limit - self._special_tokens)
        keeps_end = truncation is not None and truncation.left
        places = np.concatenate([[0], ends])[borders].tolist()
        without = set((np.searchsorted(borders, refused, side="right") - 1).tolist())
        pieces: list[NDArray[np.int32]] = [leading[:0]]
        counts = np.zeros(len(borders) - 1, np.int64)
        for text, (begin, stop) in enumerate(pairwise(places)):
            if begin == stop or text in without:
                continue
            own = ids[max(begin, stop - room) : stop] if keeps_end else ids[begin : min(stop, begin + room)]
            pieces += (leading, own, trailing)
            counts[text] = len(own) + self._special_tokens
        return np.concatenate(pieces), np.cumsum(counts)

    def encode_one(self, text: str, truncation: Truncation | None, longest: int) -> NDArray[np.int32] | None:
        """Return the ids of an ASCII text, int32 [T]; None if `encode` has none. Without the arrays of a column."""
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
    """Return the native form of `tokenizer`, with its special tokens if `specials`; None if it is not covered."""
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
    # One letter must be one token, and all of the template's tokens must have the same type.
    letter = tokenizer.encode("a", add_special_tokens=specials)
    return letter.special_tokens_mask.count(0) == 1 and not any(letter.type_ids)


def _byte_kinds(tokenizer: Tokenizer) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return what the tokenizer makes of each ASCII character between two letters, and its replacement."""
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
