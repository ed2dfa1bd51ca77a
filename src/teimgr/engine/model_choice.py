"""Chooses the model of a load: its weights on the device in a dtype that the gate allows, and the tokens of a batch
that fit its memory in a test; with a second model if queries have a separate route."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from teimgr.engine import gpu
from teimgr.engine.backbone import Batching, StaticTable, Transformer
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack, to_device
from teimgr.engine.batching.queue import MIN_TOKENS
from teimgr.engine.fidelity.fidelity_gate import Choice, choose, probe_inputs
from teimgr.engine.fidelity.reference_cache import ReferenceCache, reference_key
from teimgr.engine.gpu_choice import choose_on_gpu
from teimgr.engine.gpu_kernels import forward_graphs
from teimgr.engine.gpu_kernels.forward_graphs import graphs_are_wanted, queries
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model, name_of
from teimgr.engine.runner import MAX_RESULT_BYTES
from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.errors import ModelLoadFailed, OutOfDeviceMemory
from teimgr.models.layout import Backbone, Layout

log = logging.getLogger(__name__)

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
_HOST = torch.device("cpu")
_SHORT_TEXT = 16  # tokens
_BY_USE = (Output.DENSE, Output.SCORES, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKENS)
# Fields of a layout that determine the transformer and its token ids.
_OF_READING = (
    *("transformer_dir", "weights_dir", "adapters", "backbone", "config", "max_length"),
    *("reader", "pools_itself"),
)


class RoutedModel(Model):
    """A model for queries and one for documents, each of which has passed the gate; the role of a text selects its
    model. Both may have the same transformer."""

    def __init__(self, documents: Model, queries: Model) -> None:
        """Raises ModelLoadFailed where their vectors have different sizes."""
        widths = [model.widths[Output.DENSE] for model in (queries, documents)]
        if widths[0] != widths[1]:
            raise ModelLoadFailed(
                f"the route of queries gives vectors of {widths[0]} numbers and the one of documents of {widths[1]}: "
                "they cannot be compared"
            )
        self._documents, self._queries = documents, queries
        super().__init__(_larger(documents, queries).backbone, {Output.DENSE: documents._heads[Output.DENSE]})

    @property
    def is_native(self) -> bool:
        parts = [part for part in (self._documents, self._queries) if not isinstance(part.backbone, StaticTable)]
        return all(part.is_native for part in parts)

    @property
    def is_packed(self) -> bool:
        return self._documents.is_packed and self._queries.is_packed

    def close(self, timeout_s: float) -> None:
        self._documents.close(timeout_s)
        if self._queries.backbone is not self._documents.backbone:
            self._queries.close(timeout_s)

    @torch.inference_mode()
    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        wanted = frozenset(outputs)
        queries = batch.queries
        if queries is None or not queries.any():
            return self._documents.run(batch, wanted)
        if queries.all():
            return self._queries.run(batch, wanted)
        values = torch.empty(batch.texts, self.widths[Output.DENSE], device=self.backbone.device)
        for model, texts in ((self._queries, queries), (self._documents, ~queries)):
            found = model.run(batch.only(texts), [Output.DENSE])[Output.DENSE].values
            values[to_device(np.flatnonzero(texts), values.device)] = found.float()
        return {Output.DENSE: Rows(values)} if wanted else {}

    def run_reference(self, encoded: Encoded) -> dict[Output, Rows]:
        return (self._queries if encoded.query else self._documents).run_reference(encoded)


def _larger(first: Model, second: Model) -> Model:
    """Return the model with the wider transformer, from which the limits of a batch are computed."""
    return max(first, second, key=lambda one: one.backbone.width if isinstance(one.backbone, Transformer) else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The model to load, and its device.

    `device` is "cpu" or "cuda" (the one visible GPU). `core_load` is the file of `core_load.CoreLoad`, `references` the
    folder of `reference_cache`, `spaces` that of `space`, if any. `lane_limit_tokens` bounds what waits in each lane (a
    guard: a worker limits its calls before, also by `max_queued_tokens` of `WorkerSpec`), `cache_bytes` is for
    `known_results`. `model_sha` is the requested revision, `commit` the resolved one; both are only reported in
    `LoadedModel`. `code` is reported too, and is part of the space. `cuts_texts`: whether texts may be cut to a
    `max_batch_tokens` below the model's length; None allows it down to `_FEW_TOKENS`. `code_revision` is the revision
    of other repositories with the code of a trusted model.
    """

    path: Path
    model_id: str
    model_sha: str | None = None
    commit: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    pooling: str | None = None
    kind: str | None = None
    trust_remote_code: bool = False
    code_revision: str | None = None
    code: tuple[str, ...] = ()
    strict_model_files: bool = False
    safetensors_only: bool = False
    threads: int = 1
    core_load: Path | None = None
    references: Path | None = None
    spaces: Path | None = None
    max_batch_tokens: int = 16384
    cuts_texts: bool | None = True
    max_batch_requests: int | None = None
    lane_limit_tokens: int = 2_000_000
    cache_bytes: int = 0
    default_prompt_name: str | None = None
    default_prompt: str | None = None


def choose_model(
    layout: Layout, device: torch.device, options: EngineOptions, inputs: Sequence[Encoded]
) -> tuple[Model, Choice]:
    """Load the model on its device, in the form that the gate allows."""
    dtype = DTYPES[options.dtype]
    if not layout.reads_texts:
        from teimgr.engine.images.model import load_image_model

        images = load_image_model(layout, options.threads)
        return images, images.choose(device, dtype)
    if gpu.is_gpu(device) and layout.backbone is not Backbone.STATIC:
        model = _load_model(layout, _HOST, options.threads)
        return model, choose_on_gpu(model, device, dtype, inputs)
    is_whole = layout.pages is not None or layout.chat is not None or layout.query_route is not None
    if is_whole and dtype is None:
        dtype = torch.float32  # images use the layers that the gate tests with texts; routes share one dtype
    load = partial(_load_model, layout, device, options.threads)
    return choose(load, dtype, inputs, _cache(layout, options, inputs))


def _load_model(layout: Layout, device: torch.device, threads: int, is_known: bool = False) -> Model:
    if layout.sound is not None:
        from teimgr.engine.sounds.model import load_sound_model

        return load_sound_model(layout, device, threads)
    if layout.dual is None:
        return load_model(layout, device, is_known=is_known)
    if layout.pages is not None:
        from teimgr.engine.images.pages import load_page_model

        return load_page_model(layout, device, threads)
    if layout.chat is not None:
        from teimgr.engine.images.chats import load_chat_model

        return load_chat_model(layout, device, threads)
    from teimgr.engine.images.model import load_dual_model

    return load_dual_model(layout, device, threads)


def _cache(layout: Layout, options: EngineOptions, inputs: Sequence[Encoded]) -> ReferenceCache | None:
    if options.references is None or options.device != "cpu":
        return None
    key = reference_key(layout, options.dtype, inputs)
    return None if key is None else ReferenceCache(options.references, key)


def tokens_of_a_batch(
    model: Model, choice: Choice, device: torch.device, inputs: Sequence[Encoded], most: int, longest: int
) -> int:
    """Return the tokens of a batch that the device's memory holds; on a GPU graphs are enabled afterwards."""
    if not gpu.is_gpu(device) or not inputs:
        return most
    tokens = proven_tokens(model, inputs, most, longest)
    if isinstance(model.backbone, Transformer) and choice.batching is Batching.VARLEN and graphs_are_wanted():
        model.backbone.use_graphs(forward_graphs.CudaCapture(), queries(inputs, longest))
    return tokens


def proven_tokens(model: Model, known: Sequence[Encoded], most: int, longest: int) -> int:
    """Return the tokens of a batch: `most`, halved until a batch of longest texts and one of short texts fit.

    Torch's allocator keeps the memory that they took, so later batches of that size find it. The ids are those of
    `known`.

    Raises:
        OutOfDeviceMemory: not even `MIN_TOKENS` fit.
        RuntimeError: torch's own, for another failure.
    """
    ids = np.concatenate([text.ids for text in known])
    device, output = model.backbone.device, next(output for output in _BY_USE if output in model.outputs)
    tokens = most
    while True:
        why = _failure(model, device, output, [_batch(ids, tokens, length) for length in (longest, _SHORT_TEXT)])
        if why is None:
            if tokens < most:
                log.warning("batches of %d tokens exceed the device's memory: the limit is now %d", most, tokens)
            return tokens
        gpu.free_cached_memory(device)
        if tokens <= MIN_TOKENS:
            raise OutOfDeviceMemory(f"a batch of {tokens} tokens does not fit the device: {why}")
        tokens = max(MIN_TOKENS, tokens // 2)


def _failure(model: Model, device: torch.device, output: Output, batches: Sequence[PackedBatch]) -> str | None:
    """Return the message of running out of memory, as text, since an exception keeps the tensors of its frames."""
    try:
        for batch in batches:
            rows = batch.tokens if output in (Output.MULTI_VECTOR, Output.TOKENS) else batch.texts
            is_whole = 4 * rows * model.widths[output] <= MAX_RESULT_BYTES  # otherwise the runner splits it
            if is_whole:
                model.run(batch, [output])
            else:
                model.run_backbone(batch)
        if gpu.is_gpu(device):
            gpu.wait_for(device)
    except (RuntimeError, MemoryError) as error:
        if not gpu.is_out_of_memory(error):
            raise
        return str(error)
    return None


def _batch(ids: np.ndarray[tuple[int], np.dtype[np.int32]], tokens: int, length: int) -> PackedBatch:
    """Make texts of `length` tokens, at least one; each starts at another place in `ids`; their order is arbitrary."""
    length = min(length, tokens)
    return pack([Encoded(np.roll(ids, -text).take(range(length), mode="wrap")) for text in range(tokens // length)])


def with_queries(
    documents: Model,
    choice: Choice,
    layout: Layout,
    device: torch.device,
    options: EngineOptions,
    tokenizer: TextTokenizer,
    max_batch_tokens: int,
) -> tuple[Model, Choice, int]:
    """Add the route of queries to the model of documents, with the same transformer or its own in the same dtype, which
    must have passed the gate. Returns the model, the worse of both choices, and the tokens of a batch."""
    assert layout.query_route is not None
    route = layout.query_route.layout
    reads_alike = all(getattr(layout, key) == getattr(route, key) for key in _OF_READING)
    if reads_alike and isinstance(documents.backbone, Transformer):
        return RoutedModel(documents, documents.with_heads_of(route)), choice, max_batch_tokens
    inputs = probe_inputs(route, tokenizer)
    own = replace(options, dtype=name_of(choice.dtype))
    queries, other = choose_model(route, device, own, inputs)
    tokens = tokens_of_a_batch(queries, other, device, inputs, max_batch_tokens, tokenizer.max_length)
    worse = min(choice, other, key=lambda each: each.closeness.min_cosine)
    batching = next((each.batching for each in (choice, other) if each.batching is Batching.EQUAL_LENGTH), None)
    return RoutedModel(documents, queries), replace(worse, batching=batching or choice.batching), tokens
