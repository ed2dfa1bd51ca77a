"""The transformer itself: loaded through transformers, run without padding."""

from __future__ import annotations

import inspect
import logging
from enum import Enum
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from teimgr.engine.attention import PACKED, Packing
from teimgr.engine.batch import PackedBatch
from teimgr.engine.linears import convert_linears
from teimgr.errors import ModelLoadFailed
from teimgr.layout import Layout

log = logging.getLogger(__name__)

# Of these only the encoder is wanted; AutoModel would bring the decoder.
_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


class Batching(Enum):
    """How a batch goes through the model.

    VARLEN: one row, one attention kernel. BY_RUN: one row, attention per run of equal lengths. EQUAL_LENGTH: one
    forward per run of equal lengths, through the library's own attention; right for every architecture.
    """

    VARLEN = "varlen"
    BY_RUN = "by-run"
    EQUAL_LENGTH = "equal-length"


class Transformer:
    """A loaded transformer on a device; `dtype` and `batching` are changed only while it is loaded."""

    def __init__(self, module: Any, layout: Layout, device: torch.device) -> None:
        self._module = module
        self._offset = layout.position_offset
        self._own_attention = module.config._attn_implementation
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
        self.config: Any = module.config
        self.device = device
        self.dtype = torch.float32
        self.batching = Batching.EQUAL_LENGTH

    def use(self, batching: Batching) -> None:
        """Choose the way of batching.

        Raises:
            ValueError: the architecture takes no attention function from outside.
        """
        self._module.set_attn_implementation(self._own_attention if batching is Batching.EQUAL_LENGTH else PACKED)
        self.batching = batching

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in `dtype` from now on, with prepacked linears on the CPU.

        Embedding tables stay as they are in the file, mapped and shared between workers; what is looked up in them is
        converted. Buffers (rotary frequencies) keep their precision.
        """
        if self.device.type == "cpu":
            packed = convert_linears(self._module, dtype)
            log.debug("prepacked %d linear layers in %s", packed, dtype)
        if dtype is not torch.float32:
            for module in self._module.modules():
                _lower(module, dtype)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the wider weights, which no batch could use otherwise
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        """One vector per token, [T, H], in the model's dtype."""
        if self.batching is Batching.EQUAL_LENGTH:
            parts = [self.hidden_plain(batch.ids[run.start : run.stop].reshape(run.texts, -1)) for run in batch.runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        row = batch.filled() if self.device.type == "cpu" else batch
        cu_seqlens = self._moved(batch.cu_seqlens) if self.batching is Batching.VARLEN else None
        hidden = self._forward(
            input_ids=self._moved(row.ids).unsqueeze(0),
            position_ids=self._moved(row.position_ids + self._offset).unsqueeze(0),
            packing=Packing.of(row, cu_seqlens),
        )
        return hidden[: batch.tokens]

    def hidden_plain(self, ids: Any) -> Tensor:
        """[texts, length] ids of equal length → [texts × length, H], as the library itself would do it."""
        return self._forward(input_ids=self._moved(ids))

    def _forward(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self._module(**inputs, **self._options).last_hidden_state
        return hidden.flatten(0, 1)

    def _moved(self, values: Any) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def load_transformer(layout: Layout, device: torch.device) -> Transformer:
    """The model in float32, as it is in the files, on `device`.

    Raises:
        ModelLoadFailed: transformers does not know the architecture, or weights are missing or of another shape.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(layout.transformer, local_files_only=True)
        kind = _model_class(config)
        module, report = kind.from_pretrained(
            layout.transformer,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa" if getattr(kind, "_supports_sdpa", False) else "eager",
            local_files_only=True,
            output_loading_info=True,
            **_without_pooler(kind),
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelLoadFailed(f"transformers cannot load this model: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadFailed(f"{len(missing)} weights are missing from the files, first {missing[0]}")
    module.eval().requires_grad_(False)
    return Transformer(module.to(device), layout, device)


def _model_class(config: Any) -> Any:
    import transformers

    if config.model_type in _ENCODERS:
        return getattr(transformers, _ENCODERS[config.model_type])
    kind = transformers.AutoModel._model_mapping[type(config)]
    return kind[0] if isinstance(kind, (tuple, list)) else kind


def _without_pooler(kind: Any) -> dict[str, bool]:
    """BERT's own pooler is no part of an embedding, and many checkpoints lack its weights."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


def _lower(module: nn.Module, dtype: torch.dtype) -> None:
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)
