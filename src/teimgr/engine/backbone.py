"""The transformer itself: loaded through transformers, run without padding."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from teimgr.engine.attention import PACKED, Packing
from teimgr.engine.batch import PackedBatch, Run
from teimgr.engine.heads import moved
from teimgr.engine.linears import convert
from teimgr.errors import ModelLoadFailed
from teimgr.model_files import Backbone, Layout

log = logging.getLogger(__name__)

# Of these only the encoder is wanted; AutoModel would bring the decoder.
_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
_AUTO_CLASSES = {
    Backbone.ENCODER: "AutoModel",
    Backbone.MASKED_LM: "AutoModelForMaskedLM",
    Backbone.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Backbone.CAUSAL_LM: "AutoModelForCausalLM",
}


class Batching(Enum):
    """How a batch goes through the model.

    VARLEN: one row, one attention kernel. BY_RUN: one row, attention per run of equal lengths. EQUAL_LENGTH: one
    forward per run of equal lengths, through the library's own attention; right for every architecture.
    """

    VARLEN = "varlen"
    BY_RUN = "by-run"
    EQUAL_LENGTH = "equal-length"


class Transformer:
    """A loaded transformer on a device; `dtype` and `batching` are changed only while it is loaded.

    `module` makes hidden states. Where it is the backbone of a model with a head, `owner` is that model, so that both
    change type together.
    """

    def __init__(self, module: Any, position_offset: int, device: torch.device, owner: Any = None) -> None:
        parameters = inspect.signature(module.forward).parameters
        self._module = module
        self._owner = module if owner is None else owner
        self._offset = position_offset
        self._own_attention = module.config._attn_implementation
        self._options = {"use_cache": False} if "use_cache" in parameters else {}
        self._takes_type_ids = "token_type_ids" in parameters
        self.config: Any = module.config
        self.device = device
        self.dtype = torch.float32
        self.batching = Batching.EQUAL_LENGTH

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return int(self.config.get_text_config().hidden_size)

    def use(self, batching: Batching) -> None:
        """Choose the way of batching.

        Raises:
            ValueError: the architecture takes no attention function from outside.
        """
        self._module.set_attn_implementation(self._own_attention if batching is Batching.EQUAL_LENGTH else PACKED)
        self.batching = batching

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in `dtype` from now on, the library's head included; see `linears.convert`."""
        convert(self._owner, dtype, self.device)
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        """One vector per token, [T, H], in the model's dtype."""
        if self.batching is Batching.EQUAL_LENGTH:
            parts = [self._hidden_of(run, batch) for run in batch.runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        row = batch.filled() if self.device.type == "cpu" else batch
        cu_seqlens = self._moved(batch.cu_seqlens) if self.batching is Batching.VARLEN else None
        hidden = self._forward(
            input_ids=self._moved(row.ids).unsqueeze(0),
            position_ids=self._moved(row.position_ids + self._offset).unsqueeze(0),
            packing=Packing.of(row, cu_seqlens),
            **self._typed(None if row.type_ids is None else row.type_ids[None]),
        )
        return hidden[: batch.tokens]

    def hidden_equal_length(
        self, ids: NDArray[Any], type_ids: NDArray[Any] | None = None, keys: NDArray[np.int32] | None = None
    ) -> Tensor:
        """[texts, length] ids of equal length → [texts × length, H], as the library itself would do it.

        `type_ids` has the shape of `ids`; tokens of text i see the first `keys[i]` of its tokens, all where None.
        """
        inputs = {"input_ids": self._moved(ids.astype(np.int64, copy=False)), **self._typed(type_ids)}
        if keys is not None:
            inputs["attention_mask"] = self._moved((np.arange(ids.shape[1]) < keys[:, None]).astype(np.int64))
        return self._forward(**inputs)

    def _hidden_of(self, run: Run, batch: PackedBatch) -> Tensor:
        tokens, shape = slice(run.start, run.stop), (run.texts, run.length)
        type_ids = None if batch.type_ids is None else batch.type_ids[tokens].reshape(shape)
        return self.hidden_equal_length(batch.ids[tokens].reshape(shape), type_ids, batch.keys_of(run))

    def _typed(self, type_ids: NDArray[Any] | None) -> dict[str, Tensor]:
        if type_ids is None or not self._takes_type_ids:
            return {}
        return {"token_type_ids": self._moved(type_ids.astype(np.int64, copy=False))}

    def _forward(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self._module(**inputs, **self._options).last_hidden_state
        return hidden.flatten(0, 1)

    def _moved(self, values: Any) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class WholeModel(Transformer):
    """A model of the library together with its head: what it calls hidden are logits.

    [T, vocabulary] where the head judges tokens, [N, labels] where it judges texts. This is the truth that a head run
    by itself is measured by, and what serves where such a head cannot be: run by run, through the library alone.
    """

    def use(self, batching: Batching) -> None:
        """See that nothing is asked for that the library does not do itself.

        Raises:
            ValueError: `batching` is another than EQUAL_LENGTH.
        """
        if batching is not Batching.EQUAL_LENGTH:
            raise ValueError("the head of this model cannot be run by itself")

    def _forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self._module(**inputs, **self._options).logits
        return logits if logits.dim() == 2 else logits.flatten(0, 1)


def load_module(layout: Layout, device: torch.device) -> Any:
    """The model of the library in float32, as it is in the files, on `device`; with the head that the layout names.

    Raises:
        ModelLoadFailed: transformers does not know the architecture, or weights are missing or of another shape.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    trust = layout.trust_remote_code  # never None: transformers would ask at the terminal
    try:
        config = AutoConfig.from_pretrained(layout.transformer_dir, local_files_only=True, trust_remote_code=trust)
        kind = _model_class(layout, config)
        module, report = kind.from_pretrained(
            layout.transformer_dir,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa" if getattr(kind, "_supports_sdpa", False) else "eager",
            local_files_only=True,
            output_loading_info=True,
            **(_without_pooler(kind) if layout.backbone is Backbone.ENCODER else {}),
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelLoadFailed(f"transformers cannot load this model: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadFailed(f"{len(missing)} weights are missing from the files, first {missing[0]}")
    module.eval().requires_grad_(False)
    return module.to(device)


def _model_class(layout: Layout, config: Any) -> Any:
    """The class with the weights: the model's own code where that is trusted, else the library's."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = _AUTO_CLASSES[layout.backbone]
    own = (getattr(config, "auto_map", None) or {}).get(name)
    if layout.trust_remote_code and own is not None:
        return get_class_from_dynamic_module(own, str(layout.transformer_dir), local_files_only=True)
    if layout.backbone is Backbone.ENCODER and config.model_type in _ENCODERS:
        return getattr(transformers, _ENCODERS[config.model_type])
    mapping = getattr(transformers, name)._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"a {config.model_type} model has no {layout.backbone.value} form")
    kind = mapping[type(config)]
    return kind[0] if isinstance(kind, (tuple, list)) else kind


def _without_pooler(kind: Any) -> dict[str, bool]:
    """BERT's own pooler is no part of an embedding, and many checkpoints lack its weights."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


@dataclass(frozen=True, slots=True)
class TableConfig:
    """What is asked of a transformer's config; both are the size of a vector."""

    hidden_size: int
    intermediate_size: int


class StaticTable:
    """In the place of a `Transformer`: vectors by token id, of sentence-transformers' StaticEmbedding or of Model2Vec.

    In a Model2Vec table with a small vocabulary `mapping` (int64 [ids]) gives an id's row; `weights` ([ids]) multiply
    it. Rows of eight bits have no scale, there as here.
    """

    def __init__(self, table: Tensor, mapping: Tensor | None = None, weights: Tensor | None = None) -> None:
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self.config: Any = TableConfig(table.shape[1], table.shape[1])
        self.device = table.device
        self.dtype = torch.float32
        self.batching = Batching.BY_RUN

    @property
    def width(self) -> int:
        """The size of a vector."""
        return self._table.shape[1]

    def use(self, batching: Batching) -> None:
        """Any way of batching is right, and all are the same."""
        self.batching = batching

    def convert(self, dtype: torch.dtype) -> None:
        """Give vectors of `dtype`; the table stays as it is in the file, mapped and shared between workers."""
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The vector of every token, [T, H]."""
        return self.hidden_equal_length(batch.ids)

    def hidden_equal_length(
        self, ids: NDArray[Any], type_ids: NDArray[Any] | None = None, keys: NDArray[np.int32] | None = None
    ) -> Tensor:
        """Ids of any shape → [ids, H]. Neither halves nor neighbours mean anything here."""
        places = moved(ids.reshape(-1).astype(np.int64, copy=False), self.device)
        rows = functional.embedding(places if self._mapping is None else self._mapping[places], self._table)
        if self._weights is not None:
            rows = rows.float() * self._weights[places].unsqueeze(1)
        return rows.to(self.dtype)


def load_table(layout: Layout, device: torch.device) -> StaticTable:
    """The table as it is in the file, on `device`.

    Raises:
        ModelLoadFailed: the file has no table, or its parts do not belong together.
    """
    tensors = _tensors(layout)
    table = tensors.get("embedding.weight", tensors.get("embeddings"))
    if table is None or table.dim() != 2 or not (table.is_floating_point() or table.dtype is torch.int8):
        raise ModelLoadFailed(f"no table of vectors among {', '.join(sorted(tensors)) or 'no tensors'}")
    mapping, weights = tensors.get("mapping"), tensors.get("weights")
    if mapping is not None and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
        raise ModelLoadFailed("the mapping of ids to rows points outside the table")
    if weights is not None and weights.shape != (len(table if mapping is None else mapping),):
        raise ModelLoadFailed("there are not as many weights as ids")
    return StaticTable(
        table.to(device),
        None if mapping is None else mapping.long().to(device),
        None if weights is None else weights.float().to(device),
    )


def _tensors(layout: Layout) -> dict[str, Tensor]:
    file = layout.transformer_dir / "model.safetensors"
    try:
        if file.is_file():
            return load_file(file)
        return torch.load(layout.transformer_dir / "pytorch_model.bin", map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelLoadFailed(f"the table of vectors cannot be read: {error}") from error
