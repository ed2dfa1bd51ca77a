"""The token ids of texts and images in one input, by a model's chat.

As in the authors' code, the chat is tokenized as one text with one token per image, which is then repeated for each
token of the image. Only texts are truncated.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.batching.batch import Encoded, TokenizedTexts
from teimgr.engine.images.inputs import EncodedPicture, PictureTokenizer, known_file, picture_ids
from teimgr.engine.job import Content, ContentPair, Input, Pair, Picture
from teimgr.engine.text.templates import CausalTemplate
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.engine.text.tokenizer_library import TokenizerLibrary
from teimgr.engine.text.truncation import Shortener
from teimgr.errors import EmptyInput, InputTooLong, InvalidInput, ModelLoadFailed, TeimgrError, TokenizerFailed
from teimgr.models.layout import ChatTexts, Layout, PairTemplate
from teimgr.spec import Kind

Contents = tuple[Content, ...]
"""The contents between the pieces of the chat: one content, or a query and a document."""
_MAX_INSTRUCTION = 16_384  # characters
_IS_FUSED = "Input validation error: `inputs` has one of several parts, and this model reads a text or an image alone"
_NEEDS_PAIRS = "Input validation error: `inputs` must be pairs for this model"


def repeated(contents: Contents) -> int:
    """Return the number of image tokens beyond one per image."""
    return sum(one.tokens - 1 for content in contents for one in content.pictures)


class ChatWriter:
    """Writes the chat of a model; `limit` is the maximum of all tokens."""

    def __init__(self, chat: ChatTexts, library: TokenizerLibrary, shortener: Shortener, limit: int) -> None:
        """Raise ModelLoadFailed if the tokenizer has no image token."""
        self.chat = chat
        self._library = library
        self._shortener = shortener
        self._limit = limit
        self._reserved = {token: self._id(token) for token in chat.reserved}
        self.image_id = self._id(chat.image_token)
        self._block = f"{chat.image[0]}{chat.image_token}{chat.image[1]}"

    def _id(self, token: str) -> int:
        (read,) = self._library.encode([token], specials=False)
        if read.tokens != [token]:
            raise ModelLoadFailed(f"the tokenizer has no token {token}, which stands for a part of an image or a video")
        return int(read.ids[0])

    def ids(
        self, instruction: str, inputs: Sequence[Contents], *, truncate: bool, left: bool
    ) -> list[NDArray[np.int32] | TeimgrError]:
        """Return the ids of inputs with equal numbers of images and image tokens, with one token per image; or their
        refusals.

        Raises:
            TokenizerFailed: the library refused one of them.
        """
        try:
            instruction = self._complete(instruction)
        except InvalidInput as error:
            return [error for _ in inputs]
        template = self._template(instruction, [len(content.pictures) for content in inputs[0]])
        whole = partial(self._library.encode, specials=False, offsets=True)
        beyond = repeated(inputs[0])
        limit = max(self._limit - beyond, 0)
        pairs = [Pair(one[0].text, one[1].text if len(one) > 1 else "") for one in inputs]
        causal = CausalTemplate(template, whole, self._shortener, limit, beyond)
        made = causal.encode(pairs, truncate or not limit, left)  # without room, the images are refused
        return [self._checked(ids, contents, limit) for ids, contents in zip(made, inputs, strict=True)]

    def _complete(self, instruction: str) -> str:
        """Return the instruction, or the model's default; most models need a full stop or other punctuation at its
        end."""
        if self.chat.ends_instructions or not instruction.strip():
            instruction = instruction.strip() or self.chat.instruction
        if len(instruction) > _MAX_INSTRUCTION:
            raise InvalidInput(
                f"Input validation error: the instruction has {len(instruction):,} characters, and "
                f"{_MAX_INSTRUCTION:,} are allowed"
            )
        is_complete = not self.chat.ends_instructions or unicodedata.category(instruction[-1]).startswith("P")
        return instruction if is_complete else f"{instruction}."

    def _template(self, instruction: str, images: Sequence[int]) -> PairTemplate:
        pieces = self.chat.pieces
        blocks = [self._block * count for count in images]
        prefix = f"{pieces[0]}{instruction}{pieces[1]}{blocks[0]}"
        body = "{query}" if len(images) == 1 else f"{{query}}{pieces[2]}{blocks[1]}{{document}}"
        return PairTemplate(prefix, body, pieces[-1])

    def _checked(
        self, ids: NDArray[np.int32] | InvalidInput, contents: Contents, limit: int
    ) -> NDArray[np.int32] | TeimgrError:
        if isinstance(ids, InvalidInput):
            return ids
        pictures = [one for content in contents for one in content.pictures]
        found = int((ids == self.image_id).sum())
        for token, id in self._reserved.items():
            if (found > len(pictures)) if id == self.image_id else bool((ids == id).any()):
                return InvalidInput(
                    f"Input validation error: `inputs` has the token {token} in a text or an instruction, which stands "
                    "for a part of an image or of a video"
                )
        if len(ids) > limit or found < len(pictures):
            tokens = sum(one.tokens for one in pictures)
            return InputTooLong(
                f"Input validation error: the images of an input take {tokens} tokens, and with the words around them "
                f"there is no room in the {self._limit} tokens of an input: images are not truncated, send them "
                "smaller, or fewer",
                self._limit,
                f"at least {len(ids) + tokens - found} tokens",
            )
        return ids

    def with_pictures(self, ids: NDArray[np.int32], pictures: Iterable[Picture]) -> NDArray[np.int32]:
        """Return the ids with each picture's token replaced by the picture's ids."""
        parts, begin = [], 0
        for at, picture in zip(np.flatnonzero(ids == self.image_id).tolist(), pictures, strict=True):
            parts += [ids[begin:at], picture_ids(picture)]
            begin = at + 1
        return np.concatenate([*parts, ids[begin:]])


class ChatTokenizer(PictureTokenizer):
    """The tokenizer of a model that reads texts and images in one input."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        super().__init__(layout, max_length)
        assert layout.chat is not None
        self._takes_pairs = layout.kind is Kind.RERANKER
        self.writer = ChatWriter(layout.chat, self._library, self._shortener, max_length)
        empty = Content("")
        (alone,) = self.writer.ids("", [(empty, empty) if self._takes_pairs else (empty,)], truncate=False, left=False)
        self.special_tokens = 0 if isinstance(alone, TeimgrError) else len(alone)

    def known_picture(self) -> Input:
        """Return an image, with a query for a reranker; for self-tests."""
        picture = self.picture(known_file(self._dual))
        return ContentPair(Content("a slope"), Content("", (picture,))) if self._takes_pairs else picture

    def encode_all(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        """Tokenize as for texts alone, and start to decode the pictures."""
        found: list[Encoded | TeimgrError | None] = [None] * len(inputs)
        groups: dict[tuple[str, tuple[int, ...], int], list[tuple[int, Contents]]] = {}
        for row, item in enumerate(inputs):
            contents = self._contents(item, options)
            if not isinstance(contents, tuple):
                found[row] = contents
                continue
            instruction = contents[0].instruction
            instruction = options.prompt if instruction is None else instruction
            if not self.writer.chat.fuses and contents[0].pictures:
                instruction = ""  # like sentence-transformers
            key = instruction, tuple(len(one.pictures) for one in contents), repeated(contents)
            groups.setdefault(key, []).append((row, contents))
        for (instruction, *_), rows in groups.items():
            written = self._written(instruction, [contents for _, contents in rows], options)
            for (row, contents), ids in zip(rows, written, strict=True):
                found[row] = ids if isinstance(ids, TeimgrError) else self._with_pictures(ids, contents)
        return TokenizedTexts.of([one or EmptyInput() for one in found])

    def _contents(self, item: Input, options: TokenizeOptions) -> Contents | Encoded | TeimgrError:
        """Return the contents for the chat; or the encoding of ids, or a refusal."""
        match item:
            case Content():
                found: Contents = (item,)
            case ContentPair():
                found = (item.first, item.second)
            case Picture():
                found = (Content("", (item,)),)
            case Pair():
                found = (Content(item.first), Content(item.second))
            case np.ndarray():
                return self._of_ids(item, options)
            case _:
                if (error := self.check(item, options)) is not None:
                    return error
                found = (Content(str(item)),)
        if self._takes_pairs != (len(found) == 2):
            is_pair = "Input validation error: `inputs` must not be pairs for this model"
            return InvalidInput(_NEEDS_PAIRS if self._takes_pairs else is_pair)
        if not any(one.text or one.pictures for one in found):
            return EmptyInput()
        if not self.writer.chat.fuses and any(one.pictures and (one.text or one.pictures[1:]) for one in found):
            return InvalidInput(_IS_FUSED)
        if not options.truncate and (error := self._check_characters(sum(map(len, found)))) is not None:
            return error
        return found

    def _of_ids(self, ids: NDArray[np.int32], options: TokenizeOptions) -> Encoded | TeimgrError:
        if self._takes_pairs:
            return InvalidInput(_NEEDS_PAIRS)
        found = self._without_tokenizer(ids, options._replace(prompt=""))
        assert found is not None
        if isinstance(found, Encoded) and self.writer.image_id in found.ids:
            return InvalidInput(
                f"Input validation error: `inputs` has the id {self.writer.image_id}, which stands for a part of an "
                "image"
            )
        return found

    def _written(
        self, instruction: str, inputs: Sequence[Contents], options: TokenizeOptions
    ) -> list[NDArray[np.int32] | TeimgrError]:
        try:
            return self.writer.ids(instruction, inputs, truncate=options.truncate, left=options.left)
        except TokenizerFailed as error:  # retried singly, so that only bad inputs fail
            if len(inputs) == 1:
                return [error]
            return [self._written(instruction, [one], options)[0] for one in inputs]

    def _with_pictures(self, ids: NDArray[np.int32], contents: Contents) -> Encoded | TeimgrError:
        if (error := self._check_ids(ids)) is not None:
            return error
        pictures = [one for content in contents for one in content.pictures]
        if not pictures:
            return Encoded(ids)
        assert self._decoder is not None
        waiting = tuple(self._decoder.expect(pictures))
        return EncodedPicture(self.writer.with_pictures(ids, pictures), waiting=waiting)
