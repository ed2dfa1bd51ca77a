"""Native layers of image models on a CPU: one call of the C library for the layers of one half of a model, as for texts
(`forward_kernel`).

They replace the layers between embeddings and last hidden states, in a model's image half, and in the text half of
models of pages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from teimgr.engine.attention import depends_on_batch, own_rotary
from teimgr.engine.native_forward.kernel import ForwardKernel, forward_kernel
from teimgr.engine.native_forward.program import CannotLowerError, Columns, ForwardProgram, Step
from teimgr.engine.native_forward.trace import TRACED_TOKENS

log = logging.getLogger(__name__)

_COLUMNS = 16  # rows of the library are multiples of this many numbers
# Names of the halves of a library's model of pages.
_VISION, _TEXTS = ("vision_tower", "vision_model"), ("language_model", "text_model")


class NativeLayers(nn.Module):
    """Replaces the layers of an image half: embedded pictures [N, T, width] → hidden states of the same shape.

    With `first_alone` the result is [N, 1, width], the state of the first token, for models that read no other.
    """

    def __init__(self, kernel: ForwardKernel) -> None:
        super().__init__()
        self._kernel = kernel
        self.first_alone = False

    def forward(self, inputs_embeds: Tensor, *_: Any, **__: Any) -> Any:
        states = _states(self._kernel, inputs_embeds, first=self.first_alone)
        return BaseModelOutput(last_hidden_state=states)


class NativePatches(nn.Module):
    """Replaces a convolution of non-overlapping patches by one linear layer of their numbers."""

    def __init__(self, own: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        self._size, self.weight = own.kernel_size, torch.empty(own.weight.shape, dtype=own.weight.dtype, device="meta")
        rows = functional.pad(own.weight.detach().float().flatten(1), (0, -own.weight[0].numel() % _COLUMNS))
        width, table = rows.shape[1], torch.zeros(1, rows.shape[1])
        linear = Step("linear", 1, len(rows), x=Columns(0, 0, width), weights=rows, bias=own.bias)
        steps = Step("embed", 0, width, tables=((table, "ids"),)), linear
        self._kernel = ForwardKernel(ForwardProgram(steps, len(rows)), dtype)

    def forward(self, numbers: Tensor) -> Tensor:
        """[N, colours, height, width] → [N, columns, rows of patches, patches of a row], of the same dtype."""
        count, colours, height, width = numbers.shape
        (tall, wide), columns = self._size, self.weight[0].numel()
        down, across = height // tall, width // wide
        split = numbers[..., : down * tall, : across * wide].reshape(count, colours, down, tall, across, wide)
        rows = split.permute(0, 2, 4, 1, 3, 5).float().reshape(count, down * across, columns)
        found = _states(self._kernel, functional.pad(rows, (0, -columns % _COLUMNS)))
        return found.view(count, down, across, -1).permute(0, 3, 1, 2).to(numbers.dtype)


def put_native_patches(vision: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Conv2d]]:
    """Replace the convolutions of patches in an image half; returns them with their places.

    Raises:
        CannotLowerError: as `native_layers`.
    """
    found = []
    for parent in list(vision.modules()):
        for name, own in list(parent.named_children()):
            if not isinstance(own, nn.Conv2d) or (own.groups, own.dilation) != (1, (1, 1)):
                continue
            if own.stride == own.kernel_size and own.padding in ("valid", (0, 0)):
                setattr(parent, name, NativePatches(own, dtype))
                found.append((parent, name, own))
    return found


class NativeTexts(nn.Module):
    """Replaces a text half: embedded tokens [N, T, width] without padding → hidden states of the same shape."""

    def __init__(self, own: Any, kernel: ForwardKernel) -> None:
        super().__init__()
        self.config = own.config
        self.embed_tokens = own.get_input_embeddings()
        self._kernel = kernel

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor | None = None, **_: Any) -> BaseModelOutputWithPast:
        """`position_ids` int64 [N, T], all rows alike, or that several times; from 0 on where None.

        Raises:
            ValueError: they are not alike.
        """
        count, length = inputs_embeds.shape[:2]
        rows = torch.arange(length)[None] if position_ids is None else position_ids.reshape(-1, length)
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise ValueError("native texts: positions that differ between inputs, or in rows and columns of an image")
        states = _states(self._kernel, inputs_embeds, rows[0].repeat(count))
        return BaseModelOutputWithPast(last_hidden_state=states)


def _states(kernel: ForwardKernel, embedded: Tensor, positions: Tensor | None = None, *, first: bool = False) -> Tensor:
    """[N, T, width of a row] → [N, T, width], or [N, 1, width] of the `first` row of each, in the same dtype."""
    rows = embedded.float().flatten(0, 1)
    at = None if positions is None else positions.numpy()
    found = kernel.of_rows(rows, embedded.shape[1], torch.get_num_threads(), at, first=first)
    return found.view(len(embedded), -1, found.shape[1]).to(embedded.dtype)


class _BehindRows(nn.Module):
    """Layers that read a table of rows, so that the forward can be traced from token ids. The attention implementation
    is set on `own`."""

    def __init__(self, own: Any, run: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self._own, self._run = own, run
        self._table = torch.zeros(TRACED_TOKENS, int(own.config.hidden_size))
        self.config = _Config(own.config)

    def set_attn_implementation(self, name: str) -> None:
        self._own.set_attn_implementation(name)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self._run(functional.embedding(input_ids, self._table), position_ids)


class _Config:
    """The part of a configuration that a trace reads."""

    vocab_size = TRACED_TOKENS

    def __init__(self, own: Any) -> None:
        self._attn_implementation = own._attn_implementation

    def get_text_config(self) -> _Config:
        return self


def native_layers(vision: Any, dtype: torch.dtype) -> NativeLayers:
    """Make a native replacement for `vision.encoder`, the library's layers in float32.

    Raises:
        CannotLowerError: the layers, the CPU or the installation do not allow it.
    """
    own = vision.encoder  # called by position: the name of its argument differs between families
    kernel, _ = forward_kernel(_BehindRows(vision, lambda rows, _: own(rows, attention_mask=None)), {}, dtype)
    return NativeLayers(kernel)


def native_texts(texts: Any, dtype: torch.dtype, *, sees_all: bool) -> NativeTexts:
    """Make a native replacement for `texts`, the library's text half in float32. With `sees_all` each token attends to
    its whole input, although the half on its own is causal.

    Raises:
        CannotLowerError: as `native_layers`.
    """
    if depends_on_batch(texts) or own_rotary(texts) is not None:
        raise CannotLowerError("its positions depend on the length of an input")
    options = {"use_cache": False} if "use_cache" in inspect.signature(texts.forward).parameters else {}

    def run(rows: Tensor, positions: Tensor) -> Any:
        return texts(inputs_embeds=rows, position_ids=positions, **options)

    causal = [each for each in texts.modules() if getattr(each, "is_causal", False)] if sees_all else []
    try:
        for each in causal:
            each.is_causal = False
        kernel, _ = forward_kernel(_BehindRows(texts, run), {}, dtype)
    finally:
        for each in causal:
            each.is_causal = True
    return NativeTexts(texts, kernel)


class NativeHalves:
    """The native layers of a library's model of pages, in place of the library's; `undo` restores those."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        """Raises CannotLowerError: neither half can be computed by our library."""
        self._own: list[tuple[Any, str, Any]] = []
        self._native: list[nn.Module] = []  # attribute, so that `tensor_bytes` counts them
        sees_all = whole.config.model_type == "paligemma"  # its whole input here is the prefix
        refusals = []
        for name in (name for name in (*_VISION, *_TEXTS) if hasattr(whole, name)):
            half = getattr(whole, name)
            try:
                if name in _TEXTS:
                    self._put(whole, name, native_texts(half, dtype, sees_all=sees_all))
                else:
                    self._put(half, "encoder", native_layers(half, dtype))
            except (CannotLowerError, AttributeError) as refusal:
                log.info("the layers of %s are not native: %s", name, refusal)
                refusals.append(f"{name}: {refusal}")
        if not self._own:
            raise CannotLowerError("; ".join(refusals) or "its halves have unknown names")

    def _put(self, owner: Any, name: str, native: nn.Module) -> None:
        self._own.append((owner, name, getattr(owner, name)))
        self._native.append(native)
        setattr(owner, name, native)

    def undo(self) -> None:
        for owner, name, own in self._own:
            setattr(owner, name, own)

    def keep(self) -> None:
        """Drop the library's own layers: their memory is freed, or their file unmapped."""
        self._own.clear()
