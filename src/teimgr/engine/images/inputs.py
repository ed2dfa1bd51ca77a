"""Pictures and texts as inputs of one model: its tokenizer, and batches with pictures.

A picture has one negative id per token, derived from the digest of its file, so that code that finds equal inputs also
finds equal pictures.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from teimgr.engine.batching.batch import Encoded, PackedBatch, TokenizedTexts, pack
from teimgr.engine.images.files import read_size
from teimgr.engine.images.pixels import tokens_of
from teimgr.engine.images.waiting import FileDecoder, WaitingPicture
from teimgr.engine.job import Input, MediaFile, Picture
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import InvalidConfig, InvalidInput, ModelLoadFailed, TeimgrError
from teimgr.models.layout import DualEncoder, Layout
from teimgr.wire.text_column import TextColumn

_BELOW_ZERO = np.int32(-(2**31))


@dataclass(slots=True, eq=False)  # not frozen, like `Encoded`
class EncodedPicture(Encoded):
    """An input with pictures, each with one `picture`. Its only ids are those of its pictures, unless the model reads
    texts and images in one input.
    """

    waiting: tuple[WaitingPicture, ...] = ()


def read_picture(data: bytes, dual: DualEncoder) -> Picture:
    """Read an image file as an input of the model, by its header.

    Raises:
        InvalidInput: its format is not allowed, it is broken at its beginning, or too large.
    """
    size = read_size(data)
    tokens = tokens_of(dual, size.width, size.height)
    return Picture(
        data=data,
        format=size.format,
        tokens=tokens,
        digest=hashlib.sha256(data).digest(),
        width=size.width,
        height=size.height,
    )


def known_file(dual: DualEncoder) -> bytes:
    """Return a file that is equal at every load and larger than what the model reads, for self-tests."""
    down, right = np.mgrid[0 : 2 * dual.height, 0 : 3 * dual.width]
    slope = np.stack([down % 256, right % 256, (down + right) // 5 % 256], axis=2).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(slope).save(written, "PNG")
    return written.getvalue()


def picture_ids(picture: MediaFile) -> NDArray[np.int32]:
    """Return negative ids that repeat the digest of the file for each of its tokens."""
    own = np.frombuffer(picture.digest, np.int32) | _BELOW_ZERO
    return np.resize(own, picture.tokens)


class FileTokenizer(TextTokenizer):
    """The tokenizer of a model for texts and files. The load sets the decoder of files by `use`."""

    _decoder: FileDecoder | None = None

    def use(self, decoder: FileDecoder) -> None:
        self._decoder = decoder

    def known_picture(self) -> Input:
        """Return a known input for self-tests."""
        raise NotImplementedError

    def encode_all(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        """Tokenize as for texts alone, and start to decode the pictures."""
        if isinstance(inputs, TextColumn) or not any(isinstance(one, MediaFile) for one in inputs):
            return self._encode_texts(inputs, options)
        rows = [row for row, one in enumerate(inputs) if isinstance(one, MediaFile)]
        pictures = [one for one in inputs if isinstance(one, MediaFile)]
        assert self._decoder is not None
        others: dict[int, Encoded | TeimgrError] = {
            row: EncodedPicture(picture_ids(waiting.picture), waiting=(waiting,))
            for row, waiting in zip(rows, self._decoder.expect(pictures), strict=True)
        }
        tokenized = TokenizedTexts.without_ids(len(inputs), others)
        if left := tokenized.missing():
            tokenized.replace(left, self._encode_texts([inputs[row] for row in left], options))
        return tokenized

    def _encode_texts(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        return super().encode_all(inputs, options)


class PictureTokenizer(FileTokenizer):
    """The tokenizer of a model for texts and images."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        super().__init__(layout, max_length)
        assert layout.dual is not None
        self._dual = layout.dual

    def picture(self, data: bytes) -> Picture:
        """An image file as an input of the model, by its header; raises as `read_picture`."""
        return read_picture(data, self._dual)

    def known_picture(self) -> Input:
        """For self-tests."""
        return self.picture(known_file(self._dual))


class DualTokenizer(PictureTokenizer):
    """The tokenizer of a model with texts and images in one space."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        """Raises InvalidConfig: a padded text exceeds `max_length`. ModelLoadFailed: its padding is not a token."""
        super().__init__(layout, max_length)
        assert layout.dual is not None
        self._end_id = layout.dual.end_id
        self._padding_id: int | None = None
        if (token := layout.dual.padding_token) is not None:
            self.pads_texts = True
            self._padding_id = self.library.token_to_id(token)
            if self._padding_id is None:
                raise ModelLoadFailed(f"the padding token {token} is not a token of the tokenizer")
            if max_length < layout.max_length:
                raise InvalidConfig(
                    f"max_batch_tokens is {max_length}, too little for a text: the model reads {layout.max_length} "
                    "tokens of each, with padding"
                )

    def _encode_texts(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        return self._as_trained(super()._encode_texts(inputs, options))

    def _as_trained(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        others = {row: self._one_as_trained(other) for row, other in tokenized.others.items()}
        if not tokenized.lengths.any():
            return TokenizedTexts.without_ids(len(tokenized), others)
        kept = replace(tokenized, others=others)
        return self._padded(kept) if self._padding_id is not None else self._ended(kept)

    def _one_as_trained(self, one: Encoded | TeimgrError) -> Encoded | TeimgrError:
        if not isinstance(one, Encoded):
            return one
        alone = TokenizedTexts(one.ids, np.zeros(1, np.int64), np.array((one.length,)), task=one.task)
        return (self._padded(alone) if self._padding_id is not None else self._ended(alone))[0]

    def _padded(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        """Pad all texts to `max_length` tokens."""
        assert self._padding_id is not None
        columns = np.arange(self.max_length)
        is_own = columns < tokenized.lengths[:, None]
        ids = np.full(is_own.shape, self._padding_id, np.int32)
        ids[is_own] = tokenized.ids[(tokenized.begins[:, None] + columns)[is_own]]
        begins = np.arange(len(tokenized), dtype=np.int64) * self.max_length
        lengths = np.where(tokenized.lengths > 0, self.max_length, 0)
        return replace(tokenized, ids=ids.reshape(-1), begins=begins, lengths=lengths)

    def _ended(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        """Cut each text after its first end token, whose state the model takes for the text."""
        ends = np.flatnonzero(tokenized.ids == self._end_id)
        behind = np.append(ends, len(tokenized.ids))
        first = behind[np.searchsorted(ends, tokenized.begins)]
        has_end = first < tokenized.begins + tokenized.lengths
        found = replace(tokenized, lengths=np.where(has_end, first - tokenized.begins + 1, tokenized.lengths))
        for row in np.flatnonzero(~has_end & (tokenized.lengths > 0)).tolist():
            found.put(
                row,
                InvalidInput(
                    f"Input validation error: `inputs` has token ids without the end token {self._end_id}, whose state "
                    "is the vector of a text: send texts, or ids with it"
                ),
            )
        return found


@dataclass(slots=True)  # not frozen, like `PackedBatch`
class PicturedBatch(PackedBatch):
    """A batch with pictures: first its texts as one packed batch, then the pictures."""

    words: PackedBatch | None = None
    pictures: tuple[Any, ...] = ()


def pack_with_pictures(inputs: Sequence[Encoded]) -> PackedBatch:
    """Like `pack`, with the pixels of decoded pictures."""
    pictures = [each for each in inputs if isinstance(each, EncodedPicture)]
    if not pictures:
        return pack(inputs)
    texts = [each for each in inputs if not isinstance(each, EncodedPicture)]
    places = np.cumsum([0, *(each.texts for each in inputs)])
    own = [range(places[at], places[at + 1]) for at, each in enumerate(inputs) if not isinstance(each, EncodedPicture)]
    of_texts = np.array([place for each in own for place in each], np.intp)
    of_pictures = [int(places[at]) for at, each in enumerate(inputs) if isinstance(each, EncodedPicture)]
    words = pack(texts) if texts else None
    order = np.concatenate([of_texts if words is None else of_texts[words.order], np.array(of_pictures, np.intp)])
    whole = pack([Encoded(each.ids) for each in pictures]) if words is None else words
    given = {item.name: getattr(whole, item.name) for item in fields(PackedBatch)}
    return PicturedBatch(**given | {"order": order}, words=words, pictures=pixels_of(pictures))


def pixels_of(inputs: Iterable[Encoded]) -> tuple[Any, ...]:
    """Return the pixels of all pictures of the inputs, in order."""
    waiting = [one for each in inputs if isinstance(each, EncodedPicture) for one in each.waiting]
    return tuple(map(_pixels_of, waiting))


def _pixels_of(waiting: WaitingPicture) -> Any:
    pixels = waiting.take()
    if isinstance(pixels, TeimgrError):  # the runner fails these before the forward
        raise pixels
    return pixels
