"""Models for texts and images, or for images only: the library's modules, the heads after them, their check at load."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.backbone import Batching, PackedLinear, Transformer
from teimgr.engine.batching.batch import Encoded, PackedBatch, TokenizedTexts
from teimgr.engine.fidelity.fidelity_gate import MIN_COSINE, MIN_REQUESTED_COSINE, Choice, Closeness
from teimgr.engine.gpu_choice import candidate_dtypes, has_bfloat16
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import DenseHead
from teimgr.engine.images.inputs import PicturedBatch, PictureTokenizer, pack_with_pictures
from teimgr.engine.images.pixels import Pixels, PixelTable
from teimgr.engine.images.waiting import FileDecoder, PictureDecoder
from teimgr.engine.job import Input, MediaFile, Output
from teimgr.engine.library_model import load_module
from teimgr.engine.model import DeviatesError, Heads, Model
from teimgr.engine.native_forward.image_layers import native_layers, put_native_patches
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.native_library import give_way
from teimgr.engine.text.tokenizer import TokenizeOptions, TokenSpan
from teimgr.engine.weights.own import HostWeights
from teimgr.errors import InvalidConfig, InvalidInput, ModelLoadFailed, TeimgrError
from teimgr.models.layout import DualEncoder, FlexibleSteps, Layout
from teimgr.wire.json_scan import Steps

log = logging.getLogger(__name__)

_AT_A_TIME = 4  # pictures per thread and forward
_LAYERS = (nn.Linear, PackedLinear, nn.Conv2d, nn.Conv3d)  # most of the time of a library's forward
EXACT_COSINE = 0.99999  # between a known picture in a batch and alone, in float32


class TextTables(nn.Module):
    """The text embeddings of the library, whose own module would refuse a packed row as a text that is too long."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.token_embedding = own.token_embedding
        self.position_embedding = own.position_embedding

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[-1], device=input_ids.device)[None]
        found: Tensor = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        return found


def at_a_time(pictures: int, vision: nn.Module) -> int:
    """Return how many pictures go through `vision` together: few on a CPU, so that queries run in between."""
    on_gpu = gpu.is_gpu(next(vision.parameters()).device)
    return pictures if on_gpu else _AT_A_TIME * torch.get_num_threads()


class PictureTower(nn.Module):
    """The image half: N pictures of one size → float32 [N, width of a vector]."""

    def __init__(self, vision: nn.Module, projection: nn.Module | None, table: PixelTable) -> None:
        super().__init__()
        self.vision = vision
        self.projection = projection
        self._table = table

    def forward(self, pictures: Sequence[Pixels]) -> Tensor:
        """Return the vectors, not normalised."""
        parameter = next(self.vision.parameters())
        step = at_a_time(len(pictures), self.vision)
        found = []
        for at in range(0, len(pictures), step):
            give_way()
            numbers = self._table.numbers(pictures[at : at + step], parameter.device).to(parameter.dtype)
            pooled: Tensor = self.vision(pixel_values=numbers).pooler_output
            found.append((pooled if self.projection is None else self.projection(pooled)).float())
        return torch.cat(found)


class FlexibleTower(nn.Module):
    """The image half of a model for pictures of several sizes: N pictures → float32 [N, vector width].

    Pictures of one size are computed together without padding, so a vector equals that of the picture alone.
    """

    def __init__(self, vision: Any, steps: FlexibleSteps) -> None:
        super().__init__()
        self.vision = vision
        self._patch = steps.patch
        self._table = PixelTable(steps)

    def forward(self, pictures: Sequence[Pixels]) -> Tensor:
        """Return the vectors, not normalised."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for place, picture in enumerate(pictures):
            by_shape.setdefault(picture.shape, []).append(place)
        step = at_a_time(len(pictures), self.vision)
        found = [
            self._of_one_size([pictures[at] for at in places[first : first + step]])
            for places in by_shape.values()
            for first in range(0, len(places), step)
        ]
        order = torch.tensor([at for places in by_shape.values() for at in places], device=found[0].device)
        return torch.cat(found)[torch.argsort(order)]

    def _of_one_size(self, pictures: Sequence[Pixels]) -> Tensor:
        give_way()
        parameter = next(self.vision.parameters())
        numbers = self._table.numbers(pictures, parameter.device).to(parameter.dtype)
        count, colours, height, width = numbers.shape
        down, across = height // self._patch, width // self._patch
        split = numbers.reshape(count, colours, down, self._patch, across, self._patch)
        pooled: Tensor = self.vision(
            pixel_values=split.permute(0, 2, 4, 3, 5, 1).reshape(count, down * across, -1),
            pixel_attention_mask=torch.ones((count, down * across), dtype=torch.long, device=numbers.device),
            spatial_shapes=torch.tensor([[down, across]] * count, device=numbers.device),
        ).pooler_output
        return pooled.float()


class PicturedModel(Model):
    """A model for images and texts on one device. `decoder` prepares its pictures, such as the `known` ones."""

    files = "pictures"

    def __init__(self, backbone: Transformer, heads: Heads, decoder: FileDecoder, known: Sequence[Any]) -> None:
        super().__init__(backbone, heads)
        self.decoder = decoder
        self.known = known
        self._reference: Tensor | None = None
        self.native_layers: list[nn.Module] = []  # attribute, so that `tensor_bytes` counts it

    def pack(self, inputs: Sequence[Encoded]) -> PackedBatch:
        """Pack inputs whose pictures are decoded into a batch."""
        return pack_with_pictures(inputs)

    def _vectors(self, batch: PackedBatch) -> None:
        """Return None: a batch may have pictures."""

    def vectors(self, pictures: Sequence[Any]) -> Tensor:
        """Compute the vectors of pictures of one size: float32 [N, width] or [N, tokens, width], on the device."""
        raise NotImplementedError

    def _vision(self) -> Any:
        """Return the library's module of the image half; its layers are its `encoder`, if it has one."""
        return None

    def give_way_within(self) -> None:
        """On a CPU, let queries run before each layer that the library computes, in both halves, from now on."""
        if gpu.is_gpu(self.backbone.device):
            return
        halves = [one.owner for one in self._transformers()] + [one for one in (self._apart(),) if one is not None]
        for each in dict.fromkeys(each for half in halves for each in half.modules()):
            if isinstance(each, _LAYERS):
                each.register_forward_pre_hook(lambda *_: give_way())

    def use_native_layers(self, dtype: torch.dtype, *, is_requested: bool) -> Tensor:
        """Return the vectors of the known pictures. On a CPU, replace the layers of the image half by our library's: in
        `dtype` if the vectors stay close enough to those of the model's own layers, else in float32; if that is not
        exact, keep the model's own layers.
        """
        vision = self._vision()
        if vision is None or gpu.is_gpu(self.backbone.device):
            return self.vectors(self.known)
        reference, own = self.vectors(self.known), vision.encoder
        least = MIN_REQUESTED_COSINE if is_requested else MIN_COSINE
        for each in dict.fromkeys((torch.float32 if dtype is torch.int8 else dtype, torch.float32)):
            try:
                vision.encoder = native_layers(vision, each)
            except CannotLowerError as refusal:
                log.info("the layers of the image half in %s are not native: %s", each, refusal)
                continue
            found = self.vectors(self.known)
            limit = EXACT_COSINE if each is torch.float32 else least
            if (cosine := least_cosine(found, reference)) >= limit:
                self.native_layers = [vision.encoder]
                self._compute_first_rows_alone(vision.encoder, found)
                patched = self._use_native_patches(vision, each, reference, limit)
                return found if patched is None else patched
            vision.encoder = own
            log.warning("native layers of the image half in %s are refused: a cosine of %.6f", each, cosine)
        return reference

    def _compute_first_rows_alone(self, layers: Any, known: Tensor) -> None:
        """Let the last layer compute only the first row of a picture, if no bit of the `known` vectors changes."""
        layers.first_alone = True
        try:
            layers.first_alone = torch.equal(self.vectors(self.known), known)
        except (RuntimeError, IndexError, ValueError):  # the head reads all rows
            layers.first_alone = False

    def _use_native_patches(self, vision: Any, dtype: torch.dtype, reference: Tensor, limit: float) -> Tensor | None:
        """Return the known pictures' vectors with native patches; None, and no change, if they are too far from
        `reference`."""
        own = put_native_patches(vision, dtype)
        found = self.vectors(self.known)
        if least_cosine(found, reference) >= limit:
            self.native_layers += [getattr(parent, name) for parent, name, _ in own]
            return found
        for parent, name, patches in own:
            setattr(parent, name, patches)
        return None

    def _closeness(self) -> float:
        """Return the lowest cosine of the known pictures to the reference."""
        assert self._reference is not None
        return least_cosine(self.vectors(self.known).to(self._reference.device), self._reference)

    def check_pictures(self, together: Tensor) -> None:
        """Check that the vectors of the known pictures, computed together, are finite and equal to those computed one
        by one.

        Raises:
            ModelLoadFailed: they are not.
        """
        if not torch.isfinite(together).all():
            raise ModelLoadFailed(f"the model gives NaN or infinity for known {self.files}")
        alone = torch.cat([self.vectors([one]) for one in self.known])
        least = EXACT_COSINE if self._picture_dtype is torch.float32 else MIN_COSINE
        if least_cosine(together, alone) < least:
            raise ModelLoadFailed(f"the vector of one of the known {self.files} depends on the others of its batch")

    def _check_closeness(self, dtype: torch.dtype) -> None:
        """Raise DeviatesError if known pictures in `dtype` are too far from their reference."""
        if dtype is not torch.float32 and (cosine := self._closeness()) < MIN_COSINE:
            raise DeviatesError(dtype, f"known {self.files}", cosine)

    @property
    def _picture_dtype(self) -> torch.dtype:
        return self.backbone.dtype

    def close(self, timeout_s: float) -> None:
        """End the threads that decode pictures."""
        self.decoder.close()
        super().close(timeout_s)


def least_cosine(here: Tensor, there: Tensor) -> float:
    """Return the lowest cosine of rows; for pictures with a vector per token, the lowest cosine of the means."""
    cosines = functional.cosine_similarity(here.double(), there.double(), dim=-1).nan_to_num(-1.0)
    return float(cosines.reshape(len(here), -1).mean(dim=1).min())


class DualModel(PicturedModel):
    """A model for texts and images, or sounds, in one space. `tower` computes the vectors of images or sounds."""

    def __init__(
        self, backbone: Transformer, heads: Heads, tower: nn.Module, decoder: FileDecoder, known: Sequence[Any]
    ) -> None:
        super().__init__(backbone, heads, decoder, known)
        self._tower = tower

    @torch.inference_mode()
    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        """Return the outputs of texts; pictures only have dense vectors."""
        if not isinstance(batch, PicturedBatch):
            return super().run(batch, outputs)
        pictures = self.vectors(batch.pictures)
        if batch.words is None:
            return {Output.DENSE: Rows(pictures)}
        texts = super().run(batch.words, (Output.DENSE,))[Output.DENSE].values
        return {Output.DENSE: Rows(torch.cat([texts.float(), pictures]))}

    @torch.inference_mode()
    def vectors(self, pictures: Sequence[Any]) -> Tensor:
        """Compute the vectors of pictures: float32 [N, vector width], on the device."""
        found: Tensor = self._tower(pictures)
        return found

    def _apart(self) -> nn.Module:
        return self._tower

    def _vision(self) -> Any:
        return getattr(self._tower, "vision", None)

    def place(self, weights: HostWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Move to `device`; the image half in `dtype` if that is close enough to float32 on known pictures."""
        if self._reference is None:
            self._reference = self.vectors(self.known)
        super().place(weights, dtype, device)
        assert weights.apart is not None
        weights.apart.place(dtype, device)
        if dtype is not torch.float32 and self._closeness() < MIN_COSINE:
            log.warning("the half of %s stays in float32: %s deviates too much", self.files, dtype)
            weights.apart.place(torch.float32, device)

    @property
    def _picture_dtype(self) -> torch.dtype:
        return next(self._tower.parameters()).dtype

    def broken_weight(self) -> str | None:
        """Return the name of the first weight with NaN or infinity."""
        broken = (name for name, weight in self._tower.named_parameters() if not torch.isfinite(weight).all())
        return super().broken_weight() or next(broken, None)


def known_pictures(dual: DualEncoder) -> list[Pixels]:
    """Make pictures that are equal at every load: a colour gradient, stripes, and noise."""
    down, right = np.mgrid[0 : dual.height, 0 : dual.width]
    slope = np.stack([down * 255 // dual.height, right * 255 // dual.width, (down + right) % 256])
    stripes = np.stack([(right // 7 % 2) * 255] * 3)
    noise = np.random.default_rng(0).integers(0, 256, (3, dual.height, dual.width))
    return [each.astype(np.uint8) for each in (slope, stripes, noise)]


def load_dual_model(layout: Layout, device: torch.device, threads: int) -> DualModel:
    """Load a model of texts and images in float32.

    Raises:
        ModelLoadFailed: weights are missing or have another shape, or vectors of known pictures are not finite.
    """
    dual = layout.dual
    assert dual is not None
    module: Any = load_module(layout, device)
    if layout.config["model_type"] == "clip":
        of_texts, of_images = module.text_projection, module.visual_projection
    else:  # SigLIP has a projection only for texts, in the text half
        of_texts, of_images = module.text_model.head, None
        module.text_model.head = nn.Identity()  # `DenseHead` computes it in float32, like all projections
        if not module.vision_model.use_head:
            raise ModelLoadFailed("the image half of the model has no head (vision_use_head), so no vector of an image")
    module.text_model.embeddings = TextTables(module.text_model.embeddings)
    tower: nn.Module = PictureTower(module.vision_model, of_images, PixelTable(dual.steps))
    known = known_pictures(dual)
    if isinstance(dual.steps, FlexibleSteps):
        tower = FlexibleTower(module.vision_model, dual.steps)
        known.append(np.ascontiguousarray(known[0][:, : dual.steps.patch]))  # of another shape
    transformer = Transformer(module.text_model, layout.position_offset, device)
    width = int(of_texts.out_features)
    head = DenseHead(layout.poolings, nn.Sequential(of_texts), width)
    decoder = PictureDecoder(dual, threads)
    model = DualModel(transformer, {Output.DENSE: head}, tower.eval(), decoder, known)
    if not gpu.is_gpu(device):
        given = int(model.vectors(model.known[:1]).shape[1])
        if given != width:
            raise ModelLoadFailed(f"the vectors of images have {given} numbers, and those of texts {width}")
    return model


def _refusal(what: str = "`inputs` has a text") -> InvalidInput:
    return InvalidInput(f"Input validation error: {what}, and this model embeds images alone: send an image")


class ImageTokenizer(PictureTokenizer):
    """The tokenizer of an image-only model, which has no text tokens."""

    def check(self, item: Input, options: TokenizeOptions) -> TeimgrError | None:
        return None if isinstance(item, MediaFile) else _refusal()

    def _encode_texts(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        return TokenizedTexts.of([_refusal() for _ in inputs])

    def tokenized(self, text: str, add_special_tokens: bool, prompt: str) -> Steps[list[TokenSpan]]:
        """Raises InvalidInput always."""
        raise _refusal("texts are to be tokenized")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Raises InvalidInput always."""
        raise _refusal("token ids are to be decoded")

    def cut(self, text: str, max_tokens: int, *, left: bool) -> str:
        """Raises InvalidInput always."""
        raise _refusal("a text is to be cut")


class ImageModel(PicturedModel):
    """An image-only model on one device."""

    def __init__(self, module: Any, layout: Layout, device: torch.device, decoder: PictureDecoder) -> None:
        assert layout.dual is not None
        transformer = Transformer(module, 0, device)
        head = DenseHead(layout.poolings, nn.Sequential(), transformer.width)
        super().__init__(transformer, {Output.DENSE: head}, decoder, known_pictures(layout.dual))
        self._tower = PictureTower(module, None, PixelTable(layout.dual.steps))

    @torch.inference_mode()
    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        """Return the vectors of pictures, the only output."""
        assert isinstance(batch, PicturedBatch)
        return {Output.DENSE: Rows(self.vectors(batch.pictures))}

    @torch.inference_mode()
    def vectors(self, pictures: Sequence[Any]) -> Tensor:
        """Compute the vectors of pictures: float32 [N, vector width], on the device."""
        found: Tensor = self._tower(pictures)
        return found

    def _vision(self) -> Any:
        return self._tower.vision

    def choose(self, device: torch.device, wanted: torch.dtype | None) -> Choice:
        """Move the model, loaded on the host in float32, to `device` in a dtype whose vectors of known pictures are
        close enough.

        `wanted` None means float32 on a CPU, and the fastest dtype that is close enough on a GPU.

        Raises:
            ModelLoadFailed: none is.
            InvalidConfig: int8 is requested.
        """
        if wanted is torch.int8:
            raise InvalidConfig("dtype int8 is not for models of images")
        reference = self.vectors(self.known)
        if not torch.isfinite(reference).all():
            broken = self.broken_weight()
            why = "" if broken is None else f": the weight {broken} in its files has NaN or infinity"
            raise ModelLoadFailed(f"the model gives NaN or infinity for known pictures in float32{why}")
        weights = self.host_weights()
        types = [torch.float32] if wanted is None else [wanted]
        if wanted is None and gpu.is_gpu(device):
            types = candidate_dtypes(str(self.backbone.config.model_type), has_bfloat16())
        for dtype in types:
            self.place(weights, dtype, device)
            here = self.vectors(self.known).to(reference.device)
            cosine = least_cosine(here, reference)
            least = MIN_COSINE if wanted is None else MIN_REQUESTED_COSINE
            if cosine >= (EXACT_COSINE if dtype is torch.float32 else least):
                off = float((nn.functional.normalize(here) - nn.functional.normalize(reference)).abs().max())
                return Choice(dtype, Batching.EQUAL_LENGTH, Closeness(cosine, cosine, off, 0.0))
            log.warning("%s deviates too much from float32 for this model: cosine %.6f", dtype, cosine)
        raise ModelLoadFailed(f"the model's results in {types[-1]} differ from those in float32 on known pictures")


def load_image_model(layout: Layout, threads: int) -> ImageModel:
    """Load an image-only model in float32, on the host.

    Raises:
        ModelLoadFailed: weights are missing, or of another shape.
    """
    assert layout.dual is not None
    host = torch.device("cpu")
    return ImageModel(load_module(layout, host), layout, host, PictureDecoder(layout.dual, threads))
