"""Models that only embed images: a tokenizer that refuses texts, the library's module, and its check on known
pictures."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from teimgr.engine import gpu
from teimgr.engine.backbone import Batching, Transformer
from teimgr.engine.batching.batch import PackedBatch, TokenizedTexts
from teimgr.engine.fidelity.fidelity_gate import MIN_COSINE, MIN_REQUESTED_COSINE, Choice, Closeness
from teimgr.engine.gpu_choice import candidate_dtypes, has_bfloat16
from teimgr.engine.heads import Rows
from teimgr.engine.heads.pooling import DenseHead
from teimgr.engine.images.inputs import PicturedBatch, PictureTokenizer
from teimgr.engine.images.model import EXACT_COSINE, PicturedModel, PictureTower, known_pictures, least_cosine
from teimgr.engine.images.pixels import PixelTable
from teimgr.engine.images.waiting import PictureDecoder
from teimgr.engine.job import Input, MediaFile, Output
from teimgr.engine.library_model import load_module
from teimgr.engine.text.tokenizer import TokenizeOptions, TokenSpan
from teimgr.errors import InvalidConfig, InvalidInput, ModelLoadFailed, TeimgrError
from teimgr.models.layout import Layout
from teimgr.wire.json_scan import Steps

log = logging.getLogger(__name__)


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
