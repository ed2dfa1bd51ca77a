"""Models that read texts and images in one input: one packed forward for all inputs of a batch.

The image half computes all pictures of a batch at once. Its vectors replace those of their tokens, and some models add
further vectors after the first layers. The tokens of an image have positions by row and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.attention import Packing
from teimgr.engine.backbone import Batching, Transformer
from teimgr.engine.batching.batch import Encoded, PackedBatch, Run, pack, to_device
from teimgr.engine.heads import Head
from teimgr.engine.heads.pooling import DenseHead
from teimgr.engine.heads.scoring import CausalHead
from teimgr.engine.images.chat_texts import ChatWriter
from teimgr.engine.images.inputs import EncodedPicture, pixels_of
from teimgr.engine.images.model import PicturedModel, known_pictures
from teimgr.engine.images.pages import patches
from teimgr.engine.images.pixels import Pixels, PixelTable
from teimgr.engine.images.waiting import PictureDecoder
from teimgr.engine.job import Content, Output, Picture
from teimgr.engine.library_model import load_module
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.text.boundaries import Boundaries
from teimgr.engine.text.tokenizer_library import TokenizerLibrary, load_tokenizer
from teimgr.engine.text.truncation import Shortener
from teimgr.engine.weights.own import HostWeights
from teimgr.errors import ModelLoadFailed, TeimgrError
from teimgr.models.layout import Layout, PatchSteps, SoftSteps

_KNOWN = 2  # known images; each is computed a few times at load, in seconds by a large model on a CPU
_NO_LIMIT = 1 << 30


@dataclass(slots=True)  # not frozen, like `PackedBatch`
class ChatBatch(PackedBatch):
    """A batch with pictures in its inputs: `is_image` marks their tokens (bool [T]), `places` has the positions of all
    tokens in time, rows and columns (int64 [3, T]).
    """

    pictures: tuple[Pixels, ...] = ()
    is_image: NDArray[np.bool_] | None = None
    places: NDArray[np.int64] | None = None


def pack_chats(inputs: Sequence[Encoded], image_id: int, unit: int, *, has_grid: bool = True) -> PackedBatch:
    """Like `pack`, with the pixels of decoded pictures. Squares of `unit` pixels are tokens, with positions in rows and
    columns if `has_grid`.
    """
    packed = pack(inputs)
    if not any(isinstance(each, EncodedPicture) for each in inputs):
        return packed
    owners = np.repeat(np.arange(len(inputs)), [each.texts for each in inputs])[packed.order]
    pictures = pixels_of([inputs[at] for at in owners.tolist()])
    is_image = packed.ids < 0
    sides = iter([(picture.shape[1] // unit, picture.shape[2] // unit) for picture in pictures])
    borders = packed.cu_seqlens
    if not has_grid:
        return _chats(packed, pictures, image_id, np.tile(packed.position_ids, (3, 1)))
    places = [
        image_places(is_image[begin:end], [next(sides) for _ in _pictures_in(inputs[at])])
        for begin, end, at in zip(borders[:-1].tolist(), borders[1:].tolist(), owners.tolist(), strict=True)
    ]
    return _chats(packed, pictures, image_id, np.concatenate(places, axis=1))


def _chats(packed: PackedBatch, pictures: Sequence[Pixels], image_id: int, places: NDArray[np.int64]) -> ChatBatch:
    """Make a batch whose negative ids stand for the tokens of `pictures`."""
    is_image = packed.ids < 0
    given = {item.name: getattr(packed, item.name) for item in fields(PackedBatch)}
    given["ids"] = np.where(is_image, image_id, packed.ids)
    return ChatBatch(**given, pictures=tuple(pictures), is_image=is_image, places=places)


def _pictures_in(encoded: Encoded) -> Sequence[object]:
    return encoded.waiting if isinstance(encoded, EncodedPicture) else ()


def image_places(is_image: NDArray[np.bool_], sides: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the positions of one input's tokens in time, rows and columns, [3, tokens]; its images have `sides` in
    tokens, height and width. The token after an image continues after the longer of its sides.
    """
    found = np.zeros((3, len(is_image)), np.int64)
    at = position = 0
    ends = [*np.flatnonzero(np.diff(is_image.astype(np.int8)) == 1) + 1, len(is_image)]
    for end, side in zip(ends, [*sides, None], strict=True):
        found[:, at:end] = np.arange(position, position + end - at)
        position, at = position + end - at, int(end)
        if side is None:
            break
        down, across = side
        rows, columns = np.divmod(np.arange(down * across), across)
        found[:, at : at + down * across] = position + np.stack([np.zeros_like(rows), rows, columns])
        position, at = position + max(side), at + down * across
    return found


class ChatBackbone(Transformer):
    """The text half of a library model; the vectors of images replace those of their tokens."""

    def __init__(self, whole: Any, steps: PatchSteps, device: torch.device) -> None:
        super().__init__(whole.language_model, 0, device, owner=whole)
        self._whole = whole
        self._steps = steps
        self._table = PixelTable(steps)

    def make_native(self, dtype: torch.dtype) -> None:
        """Always raise CannotLowerError: inputs with images need the layers that the kernel would replace."""
        raise CannotLowerError("it reads images too")

    def hidden(self, batch: PackedBatch) -> Tensor:
        if not isinstance(batch, ChatBatch):
            return super().hidden(batch)
        seen, added = self._seen(batch.pictures)
        if self.batching is Batching.EQUAL_LENGTH:
            return torch.cat([self._hidden_of_run_with(run, batch, seen, added) for run in batch.runs])
        row = batch if gpu.is_gpu(self.device) else batch.rounded_up()
        idle = len(row.ids) - batch.tokens
        assert batch.is_image is not None
        assert batch.places is not None
        is_image, places = np.pad(batch.is_image, (0, idle)), np.pad(batch.places, ((0, 0), (0, idle)))
        cu_seqlens = to_device(batch.cu_seqlens, self.device) if self.batching is Batching.VARLEN else None
        inputs = self._inputs(row.ids[None], is_image[None], places[:, None], seen, added)
        return self._forward(**inputs, packing=Packing.of(row, cu_seqlens))[: batch.tokens]

    def _hidden_of_run_with(self, run: Run, batch: ChatBatch, seen: Tensor, added: Sequence[Tensor]) -> Tensor:
        assert batch.is_image is not None
        assert batch.places is not None
        tokens, shape = slice(run.start, run.stop), (run.texts, run.length)
        first = int(batch.is_image[: run.start].sum())
        own = slice(first, first + int(batch.is_image[tokens].sum()))
        places = batch.places[:, tokens].reshape(3, *shape)
        is_image = batch.is_image[tokens].reshape(shape)
        return self._forward(
            **self._inputs(batch.ids[tokens].reshape(shape), is_image, places, seen[own], [each[own] for each in added])
        )

    def _inputs(
        self,
        ids: NDArray[np.int64],
        is_image: NDArray[np.bool_],
        places: NDArray[np.int64],
        seen: Tensor,
        added: Sequence[Tensor],
    ) -> dict[str, Any]:
        """Return the arguments of the library's forward: [rows, tokens], and `places` as [3, rows, tokens]."""
        embedded = self._module.get_input_embeddings()(to_device(ids, self.device))
        given = {"position_ids": to_device(places, self.device)}
        if not is_image.any():
            return given | {"inputs_embeds": embedded}
        mask = to_device(is_image, self.device)
        embedded = embedded.masked_scatter(mask[..., None], seen.to(embedded.dtype))
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(added)} if added else {}
        return given | {"inputs_embeds": embedded} | more

    def _seen(self, pictures: Sequence[Pixels]) -> tuple[Tensor, list[Tensor]]:
        """Return the vectors of all picture tokens, and those that are added after the first layers."""
        patch = self._steps.patch
        grids = [[1, picture.shape[1] // patch, picture.shape[2] // patch] for picture in pictures]
        numbers = (self._table.numbers([picture], self.device) for picture in pictures)
        vision = self._whole.visual
        given = torch.cat([patches(each, self._steps)[0] for each in numbers]).to(next(vision.parameters()).dtype)
        found = vision(given, grid_thw=torch.tensor(grids, device=self.device), return_dict=True)
        return found.pooler_output, list(getattr(found, "deepstack_features", None) or ())  # Qwen2-VL lacks them


class SoftBackbone(ChatBackbone):
    """The text half of EmbeddingGemma 2, whose image half reads each picture separately."""

    def _inputs(self, *given: Any, **named: Any) -> dict[str, Any]:
        found = super()._inputs(*given, **named)
        return found | {"position_ids": found["position_ids"][0]}

    def _seen(self, pictures: Sequence[Pixels]) -> tuple[Tensor, list[Tensor]]:
        found: list[Tensor] = []
        patch = self._steps.patch
        for picture in pictures:
            down, across = picture.shape[1] // patch, picture.shape[2] // patch
            split = (
                self._table.numbers([picture], self.device)
                .reshape(3, down, patch, across, patch)
                .permute(1, 3, 2, 4, 0)
            )
            places = torch.stack(torch.meshgrid(torch.arange(across), torch.arange(down), indexing="xy"), dim=-1)
            given = split.reshape(1, down * across, -1), places.reshape(1, -1, 2)
            seen = self._whole.get_image_features(*(one.to(self.device) for one in given), return_dict=True)
            found += seen.pooler_output
        return torch.cat(found), []


class TwoTokens(nn.Module):
    """The logits of two tokens, in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().clone(), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows.float(), self.weight)


class ChatModel(PicturedModel):
    """A model that reads texts and images in one input, on one device."""

    files = "images"

    def __init__(
        self,
        backbone: ChatBackbone,
        heads: dict[Output, Head],
        layout: Layout,
        decoder: PictureDecoder,
        writer: ChatWriter,
    ) -> None:
        assert layout.dual is not None
        super().__init__(backbone, heads, decoder, known_pictures(layout.dual)[:_KNOWN])
        assert isinstance(layout.dual.steps, PatchSteps)
        self._unit = layout.dual.steps.unit
        self._writer = writer
        self._alone = self._of_one_image(layout)
        self._reference = self.vectors(self.known)

    def pack(self, inputs: Sequence[Encoded]) -> PackedBatch:
        return pack_chats(inputs, self._writer.image_id, self._unit, has_grid=self._writer.chat.has_grid)

    def _of_one_image(self, layout: Layout) -> NDArray[np.int32]:
        """Return the ids of a single image, as one token; for a reranker, as a document."""
        assert layout.chat is not None
        picture = Content("", (Picture(data=b"", format="", tokens=1, digest=b"", width=0, height=0),))
        contents = (picture,) if len(layout.chat.pieces) == 3 else (Content("a slope"), picture)
        (ids,) = self._writer.ids("", [contents], truncate=False, left=False)
        if isinstance(ids, TeimgrError):
            raise ModelLoadFailed(f"the chat of an image cannot be tokenized: {ids.message}")
        return ids

    @torch.inference_mode()
    def vectors(self, pictures: Sequence[Pixels]) -> Tensor:
        """Return the last hidden states of pictures of one size, each alone in its input: float32 [N, width]."""
        at = int(np.flatnonzero(self._alone == self._writer.image_id)[0])
        side = pictures[0].shape[1] // self._unit, pictures[0].shape[2] // self._unit
        own = np.full(side[0] * side[1], -1, np.int32)
        ids = np.concatenate([self._alone[:at], own, self._alone[at + 1 :]])
        packed = pack([Encoded(np.tile(ids, (len(pictures), 1)))])
        own_places = np.tile(np.arange(len(ids)), (3, 1))
        if self._writer.chat.has_grid:
            own_places = image_places(ids < 0, [side])
        places = np.tile(own_places, len(pictures))
        batch = _chats(packed, pictures, self._writer.image_id, places)
        hidden = self.backbone.hidden(batch)
        return hidden[to_device(batch.ends - 1, hidden.device)].float()

    def check_pictures(self, together: Tensor) -> None:
        """Also check that the vectors equal those in float32; raises ModelLoadFailed if they do not."""
        super().check_pictures(together)
        self._check_closeness(self._picture_dtype)

    def place(self, weights: HostWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Move to `device`; raises DeviatesError if known images deviate too much from those in float32."""
        super().place(weights, dtype, device)
        self._check_closeness(dtype)


def load_chat_model(layout: Layout, device: torch.device, threads: int) -> ChatModel:
    """Load a model that reads texts and images in one input, in float32.

    Raises:
        ModelLoadFailed: weights are missing, or of another shape.
    """
    assert layout.dual is not None
    assert layout.chat is not None
    assert isinstance(layout.dual.steps, PatchSteps)
    module: Any = load_module(layout, device)
    heads: dict[Output, Head]
    if layout.scoring is None:
        whole, texts = module, module.config.text_config
        width = int(getattr(texts, "embedding_dim", texts.hidden_size))
        heads = {Output.DENSE: DenseHead(layout.poolings, nn.Sequential(), width)}
    else:
        causal = layout.scoring.causal
        assert causal is not None
        whole, output = module.model, module.get_output_embeddings().weight
        tokens = [causal.true_token_id, causal.false_token_id]
        if max(one or 0 for one in tokens) >= len(output):
            raise ModelLoadFailed(f"the model has no output for the tokens {tokens}")
        heads = {Output.SCORES: CausalHead(TwoTokens(output[tokens]))}
    _check_patches(whole.config.vision_config, layout.dual.steps)
    backbone: ChatBackbone
    if isinstance(layout.dual.steps, SoftSteps):
        whole.audio_tower = whole.embed_audio = None  # sounds are not served
        backbone = SoftBackbone(whole, layout.dual.steps, device)
    else:
        backbone = ChatBackbone(whole, layout.dual.steps, device)
    tokenizer = load_tokenizer(layout)
    writer = ChatWriter(
        layout.chat, TokenizerLibrary(tokenizer), Shortener(Boundaries(tokenizer), layout.max_length), _NO_LIMIT
    )
    return ChatModel(backbone, heads, layout, PictureDecoder(layout.dual, threads), writer)


def _check_patches(vision: Any, steps: PatchSteps) -> None:
    """Check that the model reads the patches that the image processor makes."""
    merge = vision.pooling_kernel_size if isinstance(steps, SoftSteps) else vision.spatial_merge_size
    wanted = int(vision.patch_size), int(vision.patch_size) * int(merge)
    if (steps.patch, steps.unit) != wanted or int(getattr(vision, "temporal_patch_size", 2)) != 2:
        raise ModelLoadFailed(
            f"preprocessor_config.json has patches of {steps.patch} pixels in squares of {steps.unit}, and "
            f"vision_config of config.json {wanted[0]} in {wanted[1]}"
        )
