"""Models for queries and page images, with a vector per token: their texts, and the library's forward for both.

A query and the tokens of an image are separate texts (`PageTexts`), and only queries are truncated. Texts are
queries; documents are images. Pages of one size are one batch, as in one forward of the library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from teimgr.engine import gpu
from teimgr.engine.backbone import Batching, WholeModel
from teimgr.engine.batching.batch import Encoded, PackedBatch, TokenizedTexts, to_device
from teimgr.engine.fidelity.fidelity_gate import MIN_REQUESTED_COSINE
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import offsets
from teimgr.engine.images.inputs import PicturedBatch, PictureTokenizer
from teimgr.engine.images.model import EXACT_COSINE, PicturedModel, known_pictures, least_cosine
from teimgr.engine.images.pixels import Pixels, PixelTable, grid_of, resized_shape, tokens_in
from teimgr.engine.images.waiting import PictureDecoder
from teimgr.engine.job import Input, Output, Pair, Picture
from teimgr.engine.library_model import load_module
from teimgr.engine.native_forward.image_layers import NativeHalves
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.text.templates import CausalTemplate
from teimgr.engine.text.tokenizer import TokenizeOptions
from teimgr.engine.text.tokenizer_library import TokenizerLibrary, load_tokenizer
from teimgr.engine.weights.own import HostWeights
from teimgr.errors import EmptyInput, InvalidInput, ModelLoadFailed, TeimgrError
from teimgr.models.layout import DualEncoder, Layout, PageTexts, PairTemplate, PatchSteps, TileSteps

_KNOWN = 2  # known pages; each is computed twice at load, in seconds by a large model on a CPU
_TOKENS_TOGETHER = 1024  # of pages in one forward on a CPU
_OF_A_PAGE = "this model reads documents as images of their pages: send an image, or the text as a query"


class PageTokenizer(PictureTokenizer):
    """The tokenizer of a model for queries and page images."""

    def __init__(self, layout: Layout, max_length: int) -> None:
        super().__init__(layout, max_length)
        assert layout.pages is not None
        self._image_token = layout.pages.image_token
        self._page_ids = PageIds(self._library, layout.pages, self._dual)
        before, behind = layout.pages.query
        whole = partial(self._library.encode, specials=False, offsets=True)
        self._template = CausalTemplate(
            PairTemplate(before, "{query}", behind), whole, self._shortener, self.max_length
        )
        self.special_tokens = self._template.template_tokens

    def picture(self, data: bytes) -> Picture:
        """Read an image file as an input of the model, by its header; raises as `read_picture`."""
        picture = super().picture(data)
        ids = self._page_ids.of(*resized_shape(self._dual.steps, picture.width, picture.height))
        return replace(picture, tokens=len(ids))

    def patches(self, item: Input) -> NDArray[np.int64] | None:
        """Return the places of a page's patches among its vectors, int64 [rows, columns]; None for a text."""
        if not isinstance(item, Picture):
            return None
        return self._page_ids.patches(*resized_shape(self._dual.steps, item.width, item.height))

    def _encode_texts(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        found = [self._refused(one, options) or self._without_tokenizer(one, options) for one in inputs]
        rows = [row for row, one in enumerate(found) if one is None]
        queries = [Pair(f"{options.prompt}{inputs[row]}", "") for row in rows]
        for row, ids in zip(rows, self._template.encode(queries, options.truncate, options.left), strict=True):
            found[row] = ids if isinstance(ids, TeimgrError) else self._check_ids(ids) or Encoded(ids, query=True)
        return TokenizedTexts.of([self._without_images(one or EmptyInput()) for one in found])

    def _without_images(self, found: Encoded | TeimgrError) -> Encoded | TeimgrError:
        if isinstance(found, TeimgrError) or self._page_ids.image_id not in found.ids:
            return found
        return InvalidInput(
            f"Input validation error: `inputs` has the token {self._image_token}, which stands for a part of an image, "
            "in a text"
        )

    def _refused(self, item: Input, options: TokenizeOptions) -> TeimgrError | None:
        if isinstance(item, Pair):
            return InvalidInput(f"Input validation error: `inputs` must not be pairs: {_OF_A_PAGE}")
        if not options.query and item is not None:
            return InvalidInput(f"Input validation error: `inputs` has a text as a document, and {_OF_A_PAGE}")
        return None


# Texts around the squares of an image, as in Idefics3's processor.
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class PageIds:
    """The token ids of a page, by the size to which its image is resized."""

    def __init__(self, library: TokenizerLibrary, pages: PageTexts, dual: DualEncoder) -> None:
        """Raise ModelLoadFailed if the tokenizer has no image token."""
        self._library = library
        self._pages = pages
        self._dual = dual
        self._made: dict[str, NDArray[np.int64]] = {}  # ids by text; one text for each grid of squares
        self.image_id = self._id(pages.image_token)
        if isinstance(dual.steps, TileSteps):
            most = range(1, -(-dual.steps.longest // dual.steps.tile) + 1)
            for token in (_AROUND, _WHOLE, *(f"<row_{row}_col_{column}>" for row in most for column in most)):
                self._id(token)

    def _id(self, token: str) -> int:
        (read,) = self._library.encode([token], specials=False)
        if read.tokens != [token]:
            raise ModelLoadFailed(f"the tokenizer has no token {token}, which stands for a part of an image")
        return int(read.ids[0])

    def of(self, across: int, down: int) -> NDArray[np.int64]:
        steps, token = self._dual.steps, self._pages.image_token
        each = tokens_in(self._dual, across, down)
        if isinstance(steps, TileSteps):
            token, each = _in_squares(token, *grid_of(steps, across, down)), self._dual.image_tokens
        text = f"{self._pages.image[0]}{token}{self._pages.image[1]}"
        if text not in self._made:
            self._made[text] = np.array(self._library.encode([text], specials=False)[0].ids, np.int64)
        ids = self._made[text]
        return np.repeat(ids, np.where(ids == self.image_id, each, 1))

    def patches(self, across: int, down: int) -> NDArray[np.int64]:
        """Return the places of a page's patches among its vectors: int64 [rows, columns]."""
        steps, found = self._dual.steps, np.flatnonzero(self.of(across, down) == self.image_id)
        if isinstance(steps, PatchSteps):
            return found.reshape(down // steps.unit, across // steps.unit)
        side = math.isqrt(self._dual.image_tokens)
        rows, columns = grid_of(steps, across, down) if isinstance(steps, TileSteps) else (1, 1)
        rows, columns = max(rows, 1), max(columns, 1)
        squares = found[: rows * columns * side * side].reshape(rows, columns, side, side)  # drops the whole page
        return squares.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)


def _in_squares(token: str, rows: int, columns: int) -> str:
    """Return the text of an image in `rows` x `columns` squares and of the whole image, each with one `token`."""
    lines = [
        "".join(f"{_AROUND}<row_{row}_col_{column}>{token}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    return "".join([*lines, "\n" if rows else "", _AROUND, _WHOLE, token, _AROUND])


class QueryHalf(nn.Module):
    """The library's forward for token ids alone; its `logits` are vectors of length 1."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.config = module.config

    def get_input_embeddings(self) -> Any:
        return self.module.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.module(**_of_ids(self.module, input_ids)).embeddings)


def _of_ids(module: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the further arguments of the library's processor: all tokens count, and ColPali's attend to all others."""
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"token_type_ids": torch.zeros_like(ids)} if module.config.model_type == "colpali" else {})


class PageBackbone(WholeModel):
    """The library's forward for queries and pages, with layers of our library if possible.

    `of_page` computes the vectors of a known page.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        super().__init__(QueryHalf(module), 0, device)
        self._whole = module
        self.of_page: Callable[[], Tensor]
        self._halves: NativeHalves | None = None  # attribute, so that `tensor_bytes` counts it

    def make_native(self, dtype: torch.dtype) -> None:
        """Compute the layers of both halves natively from now on; the library still computes the parts around them.

        Raises:
            CannotLowerError: as for other models, or the vectors of a known page deviate too much from the library's in
                float32; nothing is changed.
        """
        if gpu.is_gpu(self.device) or dtype is torch.int8:
            raise CannotLowerError("not on a CPU" if gpu.is_gpu(self.device) else "pages are not computed in int8")
        reference = self.of_page()
        halves = NativeHalves(self._whole.vlm, dtype)
        cosine = least_cosine(self.of_page(), reference)
        if cosine < (EXACT_COSINE if dtype is torch.float32 else MIN_REQUESTED_COSINE):
            halves.undo()
            raise CannotLowerError(f"a page in {dtype} has a cosine of {cosine:.6f} to that of the library")
        halves.keep()
        self.convert(dtype)
        self._halves, self.batching = halves, Batching.NATIVE

    def _hidden(self, batch: PackedBatch) -> Tensor:
        return torch.cat([self._hidden_of_run(run, batch) for run in batch.runs])


class OwnVectors:
    """The head of a model whose forward gives the vectors: each token of a query has one."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        return Rows(hidden.float(), to_device(offsets(None, batch), hidden.device))


class PageModel(PicturedModel):
    """A model for queries and page images on one device."""

    files = "pages"
    is_packed = False

    def __init__(self, module: Any, layout: Layout, device: torch.device, decoder: PictureDecoder) -> None:
        assert layout.dual is not None
        assert layout.pages is not None
        whole = PageBackbone(module, device)
        whole.of_page = lambda: self.vectors(self.known[:1])
        heads = {Output.MULTI_VECTOR: OwnVectors(int(module.embedding_dim))}
        super().__init__(whole, heads, decoder, known_pictures(layout.dual)[:_KNOWN])
        self._table = PixelTable(layout.dual.steps)
        self._module = module
        self._dual: DualEncoder = layout.dual
        self._ids = PageIds(TokenizerLibrary(load_tokenizer(layout)), layout.pages, layout.dual)

    @torch.inference_mode()
    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        """Return the vectors of the queries' tokens, followed by one vector per token of each page (MULTI_VECTOR)."""
        if not isinstance(batch, PicturedBatch):
            return super().run(batch, outputs)
        parts, lengths = [], []
        if batch.words is not None:
            parts.append(super().run(batch.words, (Output.MULTI_VECTOR,))[Output.MULTI_VECTOR].values)
            lengths += np.diff(batch.words.cu_seqlens).tolist()
        for group in self._groups(batch.pictures):
            pages = self.vectors(group)
            parts.append(pages.flatten(0, 1))
            lengths += [pages.shape[1]] * len(group)
        borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return {Output.MULTI_VECTOR: Rows(torch.cat(parts), to_device(borders, self.backbone.device))}

    def _groups(self, pictures: Sequence[Pixels]) -> list[list[Pixels]]:
        """Group neighbouring pages of one size; on a CPU, at most as many as queries may wait for between two layers. A
        page of many squares, each with as many patches as another model's page, is alone in its group.
        """
        if isinstance(self._dual.steps, TileSteps):
            return [[one] for one in pictures]
        found = []
        for (_, down, across), group in itertools.groupby(pictures, key=np.shape):
            alike, tokens = list(group), len(self._ids.of(across, down))
            step = len(alike) if gpu.is_gpu(self.backbone.device) else max(1, _TOKENS_TOGETHER // tokens)
            found += [alike[at : at + step] for at in range(0, len(alike), step)]
        return found

    @torch.inference_mode()
    def vectors(self, pictures: Sequence[Pixels]) -> Tensor:
        """Compute the vectors of pages of one size: float32 [N, tokens, width], on the device."""
        device, dtype = self.backbone.device, next(self._module.parameters()).dtype
        numbers = self._table.numbers(pictures, device)
        steps = self._dual.steps
        down, across = numbers.shape[2:]
        given = {"pixel_values": numbers}
        if isinstance(steps, PatchSteps):
            grid = torch.tensor([[1, down // steps.patch, across // steps.patch]] * len(pictures))
            given = {"pixel_values": patches(numbers, steps), "image_grid_thw": grid}
        elif isinstance(steps, TileSteps):
            given, down = {"pixel_values": squares(numbers, steps.tile)}, max(down - steps.tile, steps.tile)
        given["pixel_values"] = given["pixel_values"].to(dtype)
        ids = torch.from_numpy(np.tile(self._ids.of(across, down), (len(pictures), 1))).to(device)
        given = {name: value.to(device) for name, value in given.items()} | _of_ids(self._module, ids)
        found: Tensor = self._module(**given).embeddings
        return found.float()

    def place(self, weights: HostWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Move to `device`; raises DeviatesError if known pages deviate too much from those in float32."""
        if self._reference is None:
            self._reference = self.vectors(self.known)
        super().place(weights, dtype, device)
        self._check_closeness(dtype)


def patches(numbers: Tensor, steps: PatchSteps) -> Tensor:
    """[N, 3, height, width] → [N, patches, numbers of a patch]; each picture counts twice, as two equal frames of a
    film."""
    pages, colours, height, width = numbers.shape
    patch, merge = steps.patch, steps.unit // steps.patch
    down, across = height // patch, width // patch
    split = numbers.reshape(pages, colours, down // merge, merge, patch, across // merge, merge, patch)
    own = split.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    return own.expand(*own.shape[:6], 2, patch, patch).reshape(pages, down * across, -1)


def squares(numbers: Tensor, tile: int) -> Tensor:
    """[N, 3, height, width] → [N, squares, 3, tile, tile], row by row; only the first square of the last row is
    kept."""
    pages, colours, height, width = numbers.shape
    down, across = height // tile, width // tile
    split = numbers.reshape(pages, colours, down, tile, across, tile).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    return split[:, : (down - 1) * across + 1].contiguous()


def load_page_model(layout: Layout, device: torch.device, threads: int) -> PageModel:
    """Load a model for queries and page images in float32.

    Raises:
        ModelLoadFailed: weights are missing or have another shape.
    """
    assert layout.dual is not None
    return PageModel(load_module(layout, device), layout, device, PictureDecoder(layout.dual, threads))
