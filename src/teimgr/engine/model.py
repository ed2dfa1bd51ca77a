"""A model: a backbone and its heads, which turn a packed batch into results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.backbone import Batching, StaticTable, Transformer, WholeModel, load_table
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.heads import Head, Rows, TokensHead
from teimgr.engine.heads.pooling import (
    DenseHead,
    M3MultiVectorHead,
    M3SparseHead,
    MarkedVectorsHead,
    MultiVectorHead,
    OnlyDocumentHead,
    TableMeanHead,
    load_linear,
)
from teimgr.engine.heads.projections import load_projections, read_weights, width_behind
from teimgr.engine.heads.scoring import (
    CausalHead,
    FirstToken,
    HeadTrial,
    LibraryHead,
    SequenceHead,
    TokenLogitsHead,
    keep_two_tokens,
    sequence_head,
)
from teimgr.engine.heads.splade import RoutedWeights, SpladeHead, SpladeVectorHead, SpladeWeights
from teimgr.engine.job import Output
from teimgr.engine.library_model import load_module, load_plain_module
from teimgr.engine.native_forward.kernel import Vectors
from teimgr.engine.own_reader import load_own_reader
from teimgr.engine.weights.own import HostWeights
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import Backbone, Layout, QueryTable
from teimgr.spec import Kind

log = logging.getLogger(__name__)

Heads = Mapping[Output, Head]
_DENSE_ALONE = frozenset({Output.DENSE})
_ONE_TOKEN = (DenseHead, SequenceHead, CausalHead)  # heads that may read only the token of `token_of`


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in options and replies, such as `float32`."""
    return str(dtype).removeprefix("torch.")


class DeviatesError(ModelLoadFailed):
    """A part of the model that known texts do not use is too far from float32 in this dtype; `min_cosine` is the lowest
    cosine."""

    def __init__(self, dtype: torch.dtype, what: str, min_cosine: float) -> None:
        super().__init__(f"{name_of(dtype)} deviates too much from float32 on {what}: set dtype = float32")
        self.min_cosine = min_cosine


class VectorRows(Rows):
    """DENSE rows on the host: `vectors`, from one call of the native forward.

    `values` makes a tensor of them at each use. Making it directly after a forward, with cold caches, would cost a
    query about 30 µs.
    """

    __slots__ = ("vectors",)

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.offsets = self.indices = self.whole = None

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # only read
        return torch.from_numpy(self.vectors.values)


class Model:
    """A model on one device. One thread uses it at a time, or any number with a native backbone.

    If `heads` are not those of the reference, `whole` is the same model with the reference's heads, such as the
    library's own.
    """

    def __init__(
        self,
        backbone: Transformer | StaticTable,
        heads: Heads,
        whole: tuple[WholeModel | StaticTable, Heads] | None = None,
    ) -> None:
        self.backbone = backbone
        self._heads = dict(heads)
        self._whole = whole or (backbone, heads)

    @property
    def outputs(self) -> frozenset[Output]:
        return frozenset(self._heads)

    @property
    def widths(self) -> dict[Output, int]:
        """The size of a vector or of the vocabulary, or the number of labels, by output."""
        return {output: head.width for output, head in self._heads.items()}

    @property
    def device_bytes_per_text(self) -> dict[Output, int]:
        """The bytes per text, by output, that a GPU keeps until a batch's results are on the host."""
        return {output: getattr(head, "device_bytes_per_text", 0) for output, head in self._heads.items()}

    @property
    def is_native(self) -> bool:
        """True if several threads may call it at a time."""
        return self.backbone.batching is Batching.NATIVE

    @property
    def is_packed(self) -> bool:
        """True if texts of all lengths share a row."""
        return self.backbone.batching is not Batching.EQUAL_LENGTH

    def with_heads_of(self, layout: Layout) -> Model:
        """Return the same transformer, in its dtype and with its batching, with the heads of another layout."""
        assert isinstance(self.backbone, Transformer)
        return Model(self.backbone, _heads_of(layout, self.backbone.width, self.backbone.device))

    def host_weights(self) -> HostWeights:
        """Return the weights of a transformer that was loaded on the host, for `place`."""
        heads = {id(head): head for head in (*self._heads.values(), *self._whole[1].values())}
        modules = [part for head in heads.values() for part in vars(head).values() if isinstance(part, nn.Module)]
        return HostWeights(self._transformers()[0].owner, modules, self._apart())

    def _apart(self) -> nn.Module | None:
        """Return a module beside the transformer, which may have another dtype."""
        return None

    def place(self, weights: HostWeights, dtype: torch.dtype, device: torch.device) -> None:
        """Move to `device`, in `dtype`; raises RuntimeError as `HostWeights.place` does."""
        weights.place(dtype, device)
        for transformer in self._transformers():
            transformer.placed(device, dtype)

    def broken_weight(self) -> str | None:
        """The name of the first weight with NaN or infinity, of the modules behind the transformer last."""
        modules = [transformer.owner for transformer in self._transformers()]
        modules += [
            part for head in self._heads.values() for part in vars(head).values() if isinstance(part, nn.Module)
        ]
        for module in modules:
            for name, weight in module.named_parameters():
                if not torch.isfinite(weight).all():
                    return name
        return None

    def _transformers(self) -> list[Transformer]:
        return [part for part in (self.backbone, self._whole[0]) if isinstance(part, Transformer)]

    def close(self, timeout_s: float) -> None:
        """End what the model runs in the background, within `timeout_s`."""
        if isinstance(self.backbone, Transformer):
            self.backbone.close(timeout_s)

    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        """Compute each of `outputs` for every text, in the batch's order, from one forward, independent of request
        options.

        Raises:
            KeyError: the model has no such output.
        """
        if outputs == _DENSE_ALONE and (vectors := self._vectors(batch)) is not None:
            return {Output.DENSE: VectorRows(vectors)}
        return self._run(batch, outputs)

    def _vectors(self, batch: PackedBatch) -> Vectors | None:
        """Return the DENSE rows of `_run`, bit for bit, if one call of the native forward computes them; else None."""
        head = self._heads.get(Output.DENSE)
        if not isinstance(head, DenseHead) or not isinstance(self.backbone, Transformer) or not self.is_native:
            return None
        if head.is_token:
            return self.backbone.vectors(replace(batch, kept=head.token_of(batch)))
        return self.backbone.vectors(batch) if head.is_mean and batch.prompt_lens is None else None

    @torch.inference_mode()
    def _run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        heads = {output: self._heads[output] for output in outputs}
        alone = next(iter(heads.values())) if len(heads) == 1 and self.is_native else None
        if isinstance(alone, _ONE_TOKEN) and (kept := alone.token_of(batch)) is not None:
            batch = replace(batch, kept=kept)
        needs_hidden = any(_reads_hidden(head, batch) for head in heads.values())
        hidden = self.backbone.hidden(batch) if needs_hidden else _nothing(self.backbone.device)
        return {output: head(hidden, batch) for output, head in heads.items()}

    @torch.inference_mode()
    def run_backbone(self, batch: PackedBatch) -> None:
        """Run one forward, without heads."""
        self.backbone.hidden(batch)

    @torch.inference_mode()
    def run_reference(self, encoded: Encoded) -> dict[Output, Rows]:
        """Compute every output for one input by the library's own forward: the reference for all other ways."""
        model, heads = self._whole
        batch = pack([encoded])
        hidden = model.hidden_equal_length(
            batch.ids[None, :], None if batch.type_ids is None else batch.type_ids[None, :], batch.keys
        )
        return {output: head(hidden, batch) for output, head in heads.items()}


@cache
def _nothing(device: torch.device) -> Tensor:
    """Return empty hidden states, for heads that read none. Making a tensor for each batch would take some
    microseconds."""
    return torch.empty(0, device=device)


def _reads_hidden(head: Head, batch: PackedBatch) -> bool:
    """True if a head needs the forward of `batch`."""
    if isinstance(head, (SpladeHead, SpladeVectorHead)):
        return head.reads_hidden(batch)
    return not isinstance(head, TableMeanHead)


def load_model(layout: Layout, device: torch.device, *, is_known: bool = False) -> Model:
    """Load a model in float32.

    A model that `is_known` is compared with results of an earlier load, and loaded in a quicker way if it has one.

    Raises:
        ModelLoadFailed: weights are missing, of another shape, or of an unknown architecture.
    """
    if layout.backbone is Backbone.STATIC:
        table = load_table(layout, device)
        heads = _heads_of(layout, table.width, device)
        fast = dict(heads)
        if Output.DENSE in heads and layout.poolings == ("mean",) and layout.include_prompt and table.is_float32_on_cpu:
            projections = load_projections(layout.projections, device)
            fast[Output.DENSE] = table.mean_head(projections, heads[Output.DENSE].width)
        return Model(table, fast, (table, heads))
    if layout.reader is not None:
        reader = load_own_reader(layout, device)
        return Model(reader, _heads_of(layout, reader.width, device))
    module = (load_plain_module(layout, device) if is_known else None) or load_module(layout, device)
    if layout.backbone is Backbone.ENCODER:
        transformer = Transformer(module, layout.position_offset, device, longest=layout.max_length)
        return Model(transformer, _heads_of(layout, transformer.width, device))
    if layout.backbone is Backbone.SEQ2SEQ_LM:
        assert layout.scoring is not None
        assert layout.scoring.causal is not None
        first = WholeModel(FirstToken(module, layout.scoring.causal), layout.position_offset, device)
        return Model(first, {Output.SCORES: SequenceHead(lambda logits, _batch: logits.float(), 1)})
    return _with_library_head(layout, module, device)


def _heads_of(layout: Layout, width: int, device: torch.device) -> dict[Output, Head]:
    """Make this package's own heads, for hidden states of size `width`."""
    if layout.late is not None:
        late = layout.late
        kept = MultiVectorHead(load_projections(late.projections, device), late, width_behind(late.projections, width))
        return {Output.MULTI_VECTOR: kept, Output.TOKENS: TokensHead(width)}
    if layout.listwise is not None:
        layers, projected = load_projections(layout.projections, device), width_behind(layout.projections, width)
        marked = MarkedVectorsHead(layers, layout.listwise, projected)
        return {Output.MULTI_VECTOR: marked, Output.SCORES: OnlyDocumentHead(marked)}
    pooled = width * (1 if layout.pools_itself else len(layout.poolings))
    dense = DenseHead(
        layout.poolings, load_projections(layout.projections, device), width_behind(layout.projections, pooled)
    )
    if layout.kind in (Kind.RERANKER, Kind.CLASSIFIER):
        return {Output.SCORES: dense}
    if layout.pools_itself:
        return {Output.DENSE: dense}
    heads: dict[Output, Head] = {Output.DENSE: dense, Output.TOKENS: TokensHead(width)}
    if layout.m3 is not None:
        sparse = load_linear(layout.m3.sparse, device)
        heads[Output.SPARSE] = M3SparseHead(sparse, layout.m3.unused_ids, int(layout.config["vocab_size"]))
        heads[Output.MULTI_VECTOR] = M3MultiVectorHead(load_linear(layout.m3.multi_vector, device))
    return heads


def _with_library_head(layout: Layout, module: Any, device: torch.device) -> Model:
    """Make a model with the library's head: run separately if that gives the same logits, else as part of the whole."""
    if layout.scoring is not None and layout.scoring.causal is not None:
        keep_two_tokens(module, layout.scoring.causal)
    whole = WholeModel(module, layout.position_offset, device)
    over_logits = _heads_over_logits(layout, module)
    try:
        library = LibraryHead(module)
        heads = _library_heads(layout, library)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as refusal:
        log.info("the head cannot be run separately: %s", refusal)
        heads = None
    if heads is None:
        log.warning("the head cannot be run separately: the whole model runs for every run of equal lengths")
        return Model(whole, over_logits)
    backbone = Transformer(library.backbone, layout.position_offset, device, module, layout.max_length)
    return Model(backbone, heads, (whole, over_logits))


def _heads_over_logits(layout: Layout, module: Any) -> dict[Output, Head]:
    if layout.splade is not None:
        return _splade_heads(lambda logits: logits, module, layout)
    if layout.backbone is Backbone.TOKEN_CLASSIFICATION:
        return {Output.TOKENS: TokensHead(int(module.config.num_labels))}
    if layout.backbone is Backbone.CAUSAL_LM:
        return {Output.SCORES: CausalHead(lambda logits: logits)}
    return {Output.SCORES: SequenceHead(lambda logits, _batch: logits.float(), int(module.config.num_labels))}


def _library_heads(layout: Layout, library: LibraryHead) -> dict[Output, Head] | None:
    """Return heads that give the whole model's logits; None if the head cannot be run separately."""
    if layout.backbone is Backbone.SEQUENCE_CLASSIFICATION:
        head = sequence_head(library)
        return None if head is None else {Output.SCORES: head}
    if not HeadTrial.of(library).is_token_wise(library):
        return None
    if layout.splade is not None:
        return _splade_heads(library.tokens, library.module, layout)
    if layout.backbone is Backbone.TOKEN_CLASSIFICATION:
        return {Output.TOKENS: TokenLogitsHead(library.tokens, int(library.module.config.num_labels))}
    return {Output.SCORES: CausalHead(library.tokens)}


def _splade_heads(decode: Callable[[Tensor], Tensor], module: Any, layout: Layout) -> dict[Output, Head]:
    assert layout.splade is not None
    decoder = module.get_output_embeddings()
    vocabulary = int(module.config.vocab_size if decoder is None else decoder.out_features)
    documents = SpladeWeights(decode, vocabulary, layout.splade)
    weights: SpladeWeights | RoutedWeights = documents
    if layout.query_table is not None:
        weights = RoutedWeights(documents, _query_weights(layout.query_table, vocabulary, module.device))
    return {Output.SPARSE: SpladeHead(weights), Output.DENSE: SpladeVectorHead(weights)}


def _query_weights(table: QueryTable, vocabulary: int, device: torch.device) -> Tensor:
    """Read the weight of every token id, float32 [vocabulary].

    Raises:
        ModelLoadFailed: the file has none, or more than the model has outputs.
    """
    tensors = read_weights(table.folder)
    weights = tensors.pop("weight", None)
    if weights is None or tensors or weights.dim() != 1 or not 0 < len(weights) <= vocabulary:
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in tensors.items()) or "nothing else"
        given = "no weight" if weights is None else f"a weight of {tuple(weights.shape)}"
        raise ModelLoadFailed(
            f"{table.folder.name} has {given} and {shapes}; queries need one weight for each entry of the vocabulary, "
            f"{vocabulary} at most"
        )
    if not torch.isfinite(weights).all():
        raise ModelLoadFailed(f"the weights of {table.folder.name} have NaN or infinity")
    return functional.pad(weights.float(), (0, vocabulary - len(weights))).to(device)


def tensor_bytes(root: object) -> int:
    """Return the bytes of all tensors that `root` holds; shared storages count once, prepacked weights separately."""
    storages: dict[int, int] = {}
    packed = 0
    for tensor in tensors_of(root):
        if tensor.layout is not torch.strided:
            packed += tensor.nbytes
        elif not tensor.is_meta:
            found = tensor.untyped_storage()
            storages[found.data_ptr()] = found.nbytes()
    return packed + sum(storages.values())


def tensors_of(root: object) -> Iterator[Tensor]:
    """All tensors that `root` holds, in our own objects, modules and containers."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, nn.Module):  # our own modules may have unregistered tensors
            waiting.extend([*item.parameters(), *item.buffers(), *_attributes(item)])
        elif isinstance(item, dict):
            waiting.extend(item.values())
        else:
            waiting.extend(item if isinstance(item, (list, tuple, set, frozenset)) else _attributes(item))


def _attributes(item: object) -> Iterable[object]:
    if not type(item).__module__.startswith("teimgr.engine"):
        return ()
    if is_dataclass(item):
        return [getattr(item, field.name) for field in fields(item)]
    return vars(item).values() if hasattr(item, "__dict__") else ()
