"""Backbones: hidden states from token ids, by a transformer run without padding or by a static table.

On the CPU the forward is one call of the C library (`forward_kernel`) if the fidelity gate allows it. Otherwise the
linear layers are prepacked for oneDNN if this machine's torch supports it: for the few tokens of a query a plain linear
takes twice as long. The two operators are private to torch (its compiler emits them), so they are tested before use,
with `F.linear` as the fallback.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.attention import (
    PACKED,
    CannotPackError,
    Packing,
    depends_on_batch,
    own_rotary,
    unproved_window,
)
from teimgr.engine.batching.batch import PackedBatch, Run, to_device
from teimgr.engine.gpu_kernels.forward_graphs import Capture, ForwardGraphs, RowInputs, most_tokens
from teimgr.engine.heads.pooling import TableMeanHead
from teimgr.engine.heads.projections import read_weights
from teimgr.engine.native_forward.kernel import ForwardKernel, Vectors, forward_kernel
from teimgr.engine.native_forward.program import CannotLowerError
from teimgr.engine.weights.adapters import Task, task_of
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Layout

log = logging.getLogger(__name__)

# Attribute names of a linear layer and the activation that follows it, by architecture.
_FUSABLE = (("dense", "intermediate_act_fn"), ("lin1", "activation"))
_TYPICAL_TOKENS = 256


class Batching(Enum):
    """How a batch is run.

    NATIVE: one row, one call of our C library for the whole forward. VARLEN: one row, one call of an attention kernel
    per layer. BY_RUN: one row, attention per run of equal lengths. EQUAL_LENGTH: one forward per run of equal lengths,
    with the library's own attention, correct for every architecture.
    """

    NATIVE = "native"
    VARLEN = "varlen"
    BY_RUN = "by-run"
    EQUAL_LENGTH = "equal-length"


class Transformer:
    """A loaded transformer on a device; `dtype` and `batching` change only at load. Texts have up to `longest` tokens.

    `module` computes hidden states. If it is part of a model with a head, `owner` is that model, so that both change
    dtype together.
    """

    def __init__(
        self, module: Any, position_offset: int, device: torch.device, owner: Any = None, longest: float = math.inf
    ) -> None:
        parameters = inspect.signature(module.forward).parameters
        self._module = module
        self._owner = module if owner is None else owner
        self._offset = position_offset
        self._own_attention = module.config._attn_implementation
        self._options = {"use_cache": False} if "use_cache" in parameters else {}
        self._takes_type_ids = "token_type_ids" in parameters
        self._takes_lengths = "lengths" in parameters  # XLM and Flaubert end a text at padding tokens without a mask
        self.config: Any = module.config
        self.device = device
        self.dtype = torch.float32
        self.batching = Batching.EQUAL_LENGTH
        self._kernel: ForwardKernel | None = None
        self._graphs: ForwardGraphs | None = None
        rotary = own_rotary(module)
        self._trained = None if rotary is None else rotary.trained  # positions of longer texts depend on their length
        self._alone = _why_alone(module, longest)
        self._task = task_of(module)

    def placed(self, device: torch.device, dtype: torch.dtype) -> None:
        """Note that the weights were moved to the device."""
        self.device, self.dtype = device, dtype

    @property
    def width(self) -> int:
        config = self.config.get_text_config()  # OPT-350M projects its hidden states to the width of its words
        return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)

    @property
    def has_tasks(self) -> bool:
        """True if its layers have weights by task."""
        return self._task is not None

    @property
    def owner(self) -> nn.Module:
        """The library's model, with its head if it has one."""
        return self._owner  # type: ignore[no-any-return]

    def make_native(self, dtype: torch.dtype) -> None:
        """Run as NATIVE in `dtype` from now on; linear layers that the kernel has are dropped from the module.

        Raises:
            CannotLowerError: the model, the CPU or the installation does not allow it; nothing is changed.
        """
        if gpu.is_gpu(self.device):
            raise CannotLowerError("not on a CPU")
        if self._task is not None:
            raise CannotLowerError("its layers have weights by task")
        if self._alone:
            raise CannotLowerError(self._alone)
        kernel, program = forward_kernel(self._module, self._options, dtype, self._trained)
        _drop_linears(self._module, program.linears)
        # The dtype of what torch still computes: rounding saves no time if layers are not multiplied in 16 bits.
        self.dtype = kernel.multiplies if dtype is torch.bfloat16 else torch.float32
        if self._owner is not self._module:
            convert(self._owner, self.dtype, self.device)
        self._kernel, self.batching = kernel, Batching.NATIVE

    def use(self, batching: Batching) -> None:
        """Set `batching` to any value except NATIVE.

        Raises:
            ValueError: the architecture does not support custom attention functions, or `_why_alone` has a reason.
        """
        if self._alone and batching is not Batching.EQUAL_LENGTH:
            raise ValueError(self._alone)
        self._module.set_attn_implementation(self._own_attention if batching is Batching.EQUAL_LENGTH else PACKED)
        self.batching = batching

    def use_graphs(self, capture: Capture, first: Iterable[PackedBatch] = ()) -> None:
        """Launch batches as graphs from now on, for VARLEN on a GPU; those of `first` as soon as they are captured. The
        dtype must not change afterwards."""
        most = most_tokens(self.width)
        self._graphs = ForwardGraphs(self._forward_row, self._offset, self.device, capture, most)
        if self._task is None:
            self._graphs.prepare(first)

    @property
    def graphs(self) -> int:
        """The graphs in use."""
        return 0 if self._graphs is None else len(self._graphs)

    def wait_for_graphs(self, timeout_s: float) -> bool:
        """Wait until no graph is being made; False if that takes longer than the timeout."""
        return self._graphs is None or self._graphs.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread that makes graphs; if it hangs in the device it is left behind after `timeout_s`."""
        if self._graphs is not None and not self._graphs.close(timeout_s):
            log.warning("the capture of a graph did not end in time")

    def convert(self, dtype: torch.dtype) -> None:
        convert(self._owner, dtype, self.device)
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Return hidden states [T, H] in the model's dtype; from NATIVE in float32 if the head is ours."""
        if batch.tasks is not None and self._task is not None:
            return self._hidden_by_task(batch, self._task)
        return self._hidden(batch)

    def vectors(self, batch: PackedBatch) -> Vectors | None:
        """Return `ForwardKernel.vectors` of `batch`, or None if one call cannot compute all of it."""
        if self._kernel is None or self._owner is not self._module or self._has_longer(batch):
            return None
        return self._kernel.vectors(batch, batch.positions(self._offset), torch.get_num_threads())

    def _has_longer(self, batch: PackedBatch) -> bool:
        """True if each length in `batch` needs its own call, since positions depend on the length."""
        return self._trained is not None and batch.max_seqlen > self._trained and len(batch.runs) > 1

    def _hidden_by_task(self, batch: PackedBatch, task: Task) -> Tensor:
        """Compute `hidden` with each text's weights by task; a batch of several tasks is computed run by run."""
        assert batch.tasks is not None
        if (batch.tasks == batch.tasks[0]).all():
            with task.set(int(batch.tasks[0])):
                return self._hidden(batch)
        return torch.cat([self._hidden_by_task(batch.part(run), task) for run in batch.runs])

    def _hidden(self, batch: PackedBatch) -> Tensor:
        if self._kernel is not None:
            if self._has_longer(batch):
                return torch.cat([self.hidden(batch.part(run)) for run in batch.runs])
            hidden = self._kernel(batch, batch.positions(self._offset), torch.get_num_threads())
            return hidden if self._owner is self._module else hidden.to(self.dtype)
        if self.batching is Batching.EQUAL_LENGTH:
            parts = [self._hidden_of_run(run, batch) for run in batch.runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._graphs is not None and self._task is None and not batch.has_padding(self._offset):
            by_graph = self._graphs.hidden(batch)
            if by_graph is not None:
                return by_graph
        row = batch if gpu.is_gpu(self.device) else batch.rounded_up()
        cu_seqlens = to_device(batch.cu_seqlens, self.device) if self.batching is Batching.VARLEN else None
        packing = Packing.of(row, cu_seqlens)
        hidden = self._forward(
            input_ids=to_device(row.ids, self.device).unsqueeze(0),
            position_ids=to_device(row.positions(self._offset), self.device).unsqueeze(0),
            packing=packing,
            **self._type_inputs(None if row.type_ids is None else row.type_ids[None]),
        )
        if not packing.callers:  # XLM and Flaubert take the keyword, and have attention of their own
            raise CannotPackError(f"{type(self._module).__name__} has attention of its own")
        return hidden[: batch.tokens]

    def hidden_equal_length(
        self, ids: NDArray[Any], type_ids: NDArray[Any] | None = None, keys: NDArray[Any] | None = None
    ) -> Tensor:
        """[texts, length] ids of equal length → [texts × length, H], through the library's own forward.

        `type_ids` has the shape of `ids`; tokens of text i attend to its first `keys[i]` tokens, to all if that is
        None.
        """
        inputs = {"input_ids": to_device(ids.astype(np.int64, copy=False), self.device), **self._type_inputs(type_ids)}
        if keys is None and self._takes_lengths:
            keys = np.full(len(ids), ids.shape[1])
        if keys is not None:
            inputs["attention_mask"] = to_device(
                (np.arange(ids.shape[1]) < keys[:, None]).astype(np.int64), self.device
            )
        return self._forward(**inputs)

    def _forward_row(self, row: RowInputs) -> Tensor:
        """Run one row as VARLEN, in which every text sees all of its tokens."""
        types = {} if row.types is None or not self._takes_type_ids else {"token_type_ids": row.types.unsqueeze(0)}
        packing = Packing((), (), row.longest, row.borders)
        return self._forward(
            input_ids=row.ids.unsqueeze(0), position_ids=row.positions.unsqueeze(0), packing=packing, **types
        )

    def _hidden_of_run(self, run: Run, batch: PackedBatch) -> Tensor:
        tokens, shape = slice(run.start, run.stop), (run.texts, run.length)
        type_ids = None if batch.type_ids is None else batch.type_ids[tokens].reshape(shape)
        return self.hidden_equal_length(batch.ids[tokens].reshape(shape), type_ids, batch.keys_of(run))

    def _type_inputs(self, type_ids: NDArray[Any] | None) -> dict[str, Tensor]:
        if type_ids is None or not self._takes_type_ids:
            return {}
        return {"token_type_ids": to_device(type_ids.astype(np.int64, copy=False), self.device)}

    def _forward(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self._module(**inputs, **self._options).last_hidden_state
        return hidden.flatten(0, 1)


class UnpackedTransformer(Transformer):
    """A transformer that only runs as EQUAL_LENGTH; `why_unpacked` is the reason for refusing other batchings."""

    why_unpacked: str

    def make_native(self, dtype: torch.dtype) -> None:
        """Raises CannotLowerError always."""
        raise CannotLowerError(self.why_unpacked)

    def use(self, batching: Batching) -> None:
        """Raises ValueError for any batching but EQUAL_LENGTH."""
        if batching is not Batching.EQUAL_LENGTH:
            raise ValueError(self.why_unpacked)


class WholeModel(UnpackedTransformer):
    """A library model with its head: `hidden` returns logits, [T, vocabulary] for tokens or [N, labels] for texts.

    This is the reference for a head that is run separately, and the fallback if that is not possible: one forward per
    run of equal lengths.
    """

    why_unpacked = "the head of this model cannot be run on its own"

    def _forward(self, **inputs: Any) -> Tensor:
        ids = inputs["input_ids"]
        if self._module.config.is_encoder_decoder and len(ids) > 1:
            # The library's heads of these models need equal numbers of end tokens in all texts; pairs have more.
            ends = (ids == self._module.config.eos_token_id).sum(dim=1)
            if not bool((ends == ends[0]).all()):
                rows = [{name: value[at : at + 1] for name, value in inputs.items()} for at in range(len(ids))]
                return torch.cat([self._forward(**row) for row in rows])
        logits: Tensor = self._module(**inputs, **self._options).logits
        return logits if logits.dim() == 2 else logits.flatten(0, 1)


def _why_alone(module: Any, longest: float) -> str:
    """Return why texts of several lengths cannot be computed together; "" if they can."""
    if depends_on_batch(module):
        return "its results depend on the other texts of a batch"
    if (width := unproved_window(module, longest)) is not None:
        return f"its window of {width} tokens is not compared with the library's"
    return ""


def _drop_linears(module: nn.Module, weights: frozenset[int]) -> None:
    """Remove the linear layers whose weights are at these addresses: their memory is freed, or their file unmapped."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.data_ptr() in weights:
                setattr(parent, name, nn.Identity())


class StaticTable:
    """A static embedding with the interface of `Transformer`: sentence-transformers' StaticEmbedding, or Model2Vec.

    In a Model2Vec table with a reduced vocabulary, `mapping` (int64 [ids]) has the row of an id, and `weights` ([ids])
    its factor. As in Model2Vec, int8 rows have no scale.
    """

    def __init__(self, table: Tensor, mapping: Tensor | None = None, weights: Tensor | None = None) -> None:
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self.config: Any = SimpleNamespace(hidden_size=table.shape[1], intermediate_size=table.shape[1])
        self.device = table.device
        self.dtype = torch.float32
        self.batching = Batching.BY_RUN

    @property
    def width(self) -> int:
        return self._table.shape[1]

    def make_native(self, dtype: torch.dtype) -> None:
        """Raises CannotLowerError always: a look-up has no layers."""
        raise CannotLowerError("an embedding table")

    @property
    def is_float32_on_cpu(self) -> bool:
        return self._table.dtype is torch.float32 and not gpu.is_gpu(self.device)

    def mean_head(self, projections: nn.Sequential, width: int) -> TableMeanHead:
        """Return the head that takes the mean of a text's rows, then applies `projections`, which give `width`; for
        float32 tables on the CPU."""
        return TableMeanHead(self._table, self._mapping, self._weights, projections, width)

    def use(self, batching: Batching) -> None:
        self.batching = batching

    def convert(self, dtype: torch.dtype) -> None:
        """Return vectors in `dtype` from now on; the table keeps the dtype of its file, memory-mapped and shared
        between workers."""
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        return self.hidden_equal_length(batch.ids)

    def hidden_equal_length(
        self, ids: NDArray[Any], type_ids: NDArray[Any] | None = None, keys: NDArray[Any] | None = None
    ) -> Tensor:
        """Ids of any shape → [ids, H]; `type_ids` and `keys` have no effect."""
        places = to_device(ids.reshape(-1).astype(np.int64, copy=False), self.device)
        rows = functional.embedding(places if self._mapping is None else self._mapping[places], self._table)
        if self._weights is not None:
            rows = rows.float() * self._weights[places].unsqueeze(1)
        return rows.to(self.dtype)


def load_table(layout: Layout, device: torch.device) -> StaticTable:
    """Load the table of a static model, in the dtype of its file.

    Raises:
        ModelLoadFailed: the file has no table, or its parts do not fit together.
    """
    tensors = read_weights(layout.weights_dir)
    table, is_whole = tensors.get("embedding.weight", tensors.get("embeddings")), "embedding.weight" in tensors
    if table is None or table.dim() != 2 or not (table.is_floating_point() or table.dtype is torch.int8):
        raise ModelLoadFailed(f"no table of vectors among {', '.join(sorted(tensors)) or 'no tensors'}")
    # A table of sentence-transformers has a row for each id, whatever other tensors are in the file.
    mapping, weights = (None, None) if is_whole else (tensors.get("mapping"), tensors.get("weights"))
    if mapping is not None and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
        raise ModelLoadFailed("the mapping of ids to rows points outside the table")
    if weights is not None and weights.shape != (len(table if mapping is None else mapping),):
        raise ModelLoadFailed("the table has another number of weights than of ids")
    return StaticTable(
        table.to(device),
        None if mapping is None else mapping.long().to(device),
        None if weights is None else weights.float().to(device),
    )


class PackedLinear(nn.Module):
    """y = activation(x Wᵀ + b) with a prepacked W; `activation` is "none" or "gelu", `form` is "none" or "tanh".

    For model code that reads them, `weight` has the dtype and shape, without storage; `bias` is the layer's own.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, activation: str = "none", form: str = "none") -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().to(dtype), _TYPICAL_TOKENS
        )
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype).clone()
        self._activation = activation
        self._form = form
        self.weight = torch.empty(linear.weight.shape, dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[…, in_features] → […, out_features], in the dtype of the weight."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, self._activation, [], self._form
        )
        return result


def convert(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Convert a transformers model to `dtype` in place, with prepacked linears on the CPU.

    On the CPU the embedding table keeps the dtype of its file, memory-mapped and shared between workers; its outputs
    are converted. Buffers (rotary frequencies) keep their precision.
    """
    mapped = None
    if not gpu.is_gpu(device):
        mapped = _embedding_table(model)
        log.debug("prepacked %d linear layers in %s", convert_linears(model, dtype), dtype)
    if dtype is not torch.float32:
        for module in model.modules():
            if mapped is not None and module is mapped:
                module.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    gpu.free_cached_memory(device)  # of the wider weights


def _embedding_table(model: Any) -> nn.Module | None:
    try:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    except NotImplementedError:  # custom model code: its table is converted
        return None


def convert_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace every `nn.Linear` in `model`, on the CPU, by its prepacked form in `dtype`; fuse a GELU that follows.

    A decoder that shares its weight with the embedding table gets a copy: this is twice as fast, with 8 tokens or 192,
    and only the rows of the memory-mapped table that are in use stay resident. Returns the number of prepacked layers:
    0 if the operators do not work here; then only the dtype changes.
    """
    if not prepacking_works(dtype):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.to(dtype)
        return 0
    made: dict[nn.Module, PackedLinear] = {}  # keyed by layer, which may have two parents
    fused = 0
    for parent in list(model.modules()):
        fused += _fuse(parent, dtype)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                made[child] = made.get(child) or PackedLinear(child, dtype)
                setattr(parent, name, made[child])
    return len(made) + fused


@functools.cache
def prepacking_works(dtype: torch.dtype) -> bool:
    """True if the private operators exist and agree with `F.linear` in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(32, 48).requires_grad_(False)
    linear.weight.copy_(torch.randn(48, 32, generator=generator))
    x = torch.randn(5, 32, generator=generator)
    truth = functional.gelu(linear(x))
    try:
        result = PackedLinear(linear, dtype, "gelu")(x.to(dtype)).float()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((result - truth).abs().max() <= (1e-4 if dtype is torch.float32 else 0.25))


def _fuse(parent: nn.Module, dtype: torch.dtype) -> int:
    """Fuse a linear and its GELU into one operator, if `parent` has such a pair; returns the number of pairs."""
    for linear_name, activation_name in _FUSABLE:
        linear, activation = getattr(parent, linear_name, None), getattr(parent, activation_name, None)
        form = _gelu_form(activation)
        if type(linear) is nn.Linear and form is not None:
            setattr(parent, linear_name, PackedLinear(linear, dtype, "gelu", form))
            setattr(parent, activation_name, nn.Identity())
            return 1
    return 0


def _gelu_form(activation: Any) -> str | None:
    """ "none" for the exact GELU, "tanh" for its approximation, None for anything else."""
    if isinstance(activation, nn.GELU):
        return activation.approximate
    return {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}.get(type(activation).__name__)
