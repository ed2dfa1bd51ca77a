"""The layout of a servable model: everything needed to load and run it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from teimgr.spec import Kind


class Backbone(Enum):
    """The class of transformers that computes hidden states, and logits if its head is used.

    ENCODER is AutoModel, without a head. STATIC is a table of vectors by token id, without a transformer. The others
    are the Auto classes of that name with a head; TOKEN_CLASSIFICATION labels every token, SEQ2SEQ_LM has a decoder.
    """

    ENCODER = "encoder"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Dense:
    """A Dense module: the directory with its weights, and the dotted name of its activation class.

    `name` is the layer's name in the file. The results are divided by `divisor`.
    """

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    residual: bool = False
    name: str = "linear"
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A LayerNorm module: the directory with its weights."""

    path: Path
    dimension: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """A Normalize module between others. A final one is left out, because the request decides there."""


@dataclass(frozen=True, slots=True)
class OwnModule:
    """A module of modules.json that is the model's own code, trusted by the instance: its directory, and `file.Class`
    in the directory `root`, or `owner/name--file.Class` in another repository, at `revision`. `route` is that of a
    Router, if any.
    """

    path: Path
    code: str
    root: Path
    route: str | None = None
    revision: str | None = None


Projection = Dense | LayerNorm | Normalize | OwnModule


@dataclass(frozen=True, slots=True)
class Splade:
    """Turns masked-LM logits into a weight per vocabulary entry: strategy max or sum, activation relu or log1p_relu.

    The `most` largest weights of a text are kept; None keeps all.
    """

    strategy: str = "max"
    activation: str = "relu"
    most: int | None = None


@dataclass(frozen=True, slots=True)
class QueryTable:
    """Queries of a sparse model with routes by role: a weight for every token id, no forward (SparseStaticEmbedding).

    `folder` has weights and tokenizer. Texts are cut to `max_length` tokens, without special ones. If `is_default`,
    texts without a role are queries.
    """

    folder: Path
    max_length: int
    is_default: bool


@dataclass(frozen=True, slots=True)
class QueryRoute:
    """Queries of a dense model with routes by role: the layout of their modules. The model's own layout is that of
    documents. If `is_default`, texts without a role are queries.
    """

    layout: Layout
    is_default: bool


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """ColBERT: `projections` are applied to every token's hidden state, which is then normalised.

    Lengths are in tokens. If `expand_queries`, a query is filled to `query_length` with `expansion_token_id`; its other
    tokens attend to the expansion only if `attend_to_expansion`. Tokens in `skip_ids` get no vector in documents, nor
    in queries if `skip_in_queries`. Text prefixes are the prompts "query" and "document"; prefix ids (Stanford's [Q]
    and [D]) follow the first special token instead.
    """

    projections: tuple[Projection, ...]
    query_length: int | None
    document_length: int | None
    expand_queries: bool = False
    expansion_token_id: int | None = None
    attend_to_expansion: bool = False
    skip_ids: tuple[int, ...] = ()
    skip_in_queries: bool = False
    normalize: bool = True
    query_prefix_ids: tuple[int, ...] = ()
    document_prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class M3:
    """BGE-M3: two linear layers in addition to the dense vector. `unused_ids` are never sparse entries."""

    sparse: Path
    multi_vector: Path
    unused_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Listwise:
    """A reranker that reads a query and its documents in one prompt, with a mark after each of them.

    As by its authors, a query is cut to `longest_query` tokens and a document to `longest_document`. A list is divided
    into prompts of at most `most_documents`; twice the query plus the documents fit into `capacity` tokens.
    """

    document_mark: str
    query_mark: str
    document_id: int
    query_id: int
    capacity: int
    longest_query: int = 512
    longest_document: int = 2048
    most_documents: int = 125


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSteps:
    """The steps of an image processor, in order: resize by Pillow's filter `resample`, either the shortest side to
    `shortest` pixels or to `size` (height, width); cut `crop` (height, width) from the middle, padded with black;
    multiply by `factor`; subtract `mean` and divide by `deviation`, each for red, green and blue. None skips a step.
    """

    shortest: int | None = None
    size: tuple[int, int] | None = None
    resample: int
    crop: tuple[int, int] | None = None
    factor: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSteps(PixelSteps):
    """Steps that resize to multiples of `unit` and `least` to `most` pixels in total, and keep the aspect ratio. Each
    square of `unit` x `unit` pixels is a token, of patches of `patch` pixels. `first` are the limits of pixels of an
    earlier bicubic resize.
    """

    unit: int
    patch: int
    least: int
    most: int
    first: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftSteps(PatchSteps):
    """Patch steps that resize like Gemma 4's image processor, to as many pixels as `most` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSteps(PixelSteps):
    """Steps that cut an image into squares of `tile` pixels (Idefics3). Before that, they resize the longest side to
    `longest` and then both sides to multiples of `tile`. If there are several squares, a further one has the whole
    image.
    """

    longest: int
    tile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexibleSteps(PixelSteps):
    """Steps that resize both sides to multiples of `patch`, roughly keeping their ratio (SigLIP2 NaFlex). Each square
    of `patch` x `patch` pixels is a token; there are at most `patches`.
    """

    patch: int
    patches: int


@dataclass(frozen=True, slots=True)
class PageTexts:
    """The texts around the inputs of a model of page images: `image` around the tokens of an image, which are all
    `image_token`, and `query` around a query.
    """

    image_token: str
    image: tuple[str, str]
    query: tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatTexts:
    """The chat in which a model reads texts and images: one content of both (Qwen3-VL-Embedding, GME), or a query and a
    document (Qwen3-VL-Reranker).

    It joins `pieces`: the instruction follows the first, a content each later one but the last. `image` surrounds the
    tokens of an image, which are all `image_token`. `instruction` is used if a request has none. Texts must not contain
    the tokens `reserved`. If `ends_instructions`, a full stop is added to instructions without punctuation. If
    `has_grid`, the tokens of an image have positions by row and column, otherwise those of a text. Unless it `fuses`,
    an input is either a text or an image (EmbeddingGemma 2), without an instruction.
    """

    pieces: tuple[str, ...]
    image: tuple[str, str]
    image_token: str
    instruction: str
    reserved: tuple[str, ...]
    ends_instructions: bool = True
    has_grid: bool = True
    fuses: bool = True


@dataclass(frozen=True, slots=True)
class DualEncoder:
    """The inputs of a model of texts and images in one space (CLIP, SigLIP), of queries and page images (ColPali), or
    of both in one input.

    With `PatchSteps`, `FlexibleSteps` or `TileSteps`, the size of an image determines its tokens (each square of
    `TileSteps` takes `image_tokens`), and known images, those of the check at load and of self-tests, are made by
    `height` and `width`. With plain `PixelSteps`, every image takes `image_tokens` and has `height` x `width` pixels
    after the steps. Ids after the first `end_id` of a text are ignored. With `padding_token`, each text is padded at
    its end to `max_length` tokens, and the model reads the padding.
    """

    image_tokens: int
    height: int
    width: int
    steps: PixelSteps
    end_id: int | None = None
    padding_token: str | None = None


@dataclass(frozen=True, slots=True)
class ImageEncoder(DualEncoder):
    """The inputs of a model that embeds only images (DINOv2)."""


@dataclass(frozen=True, slots=True)
class SoundSteps:
    """The steps of the feature extractor for a sound of `rate` samples a second: every `hop` samples, a transform of
    `fft` samples gives decibels of `mels` bands from `least_hz` to `most_hz`. A window has `window` samples; shorter
    sounds are padded by `padding`. If the model `fuses`, it reads four spectrograms of a longer sound together.
    """

    rate: int
    window: int
    hop: int
    fft: int
    mels: int
    least_hz: float
    most_hz: float
    padding: str
    fuses: bool


@dataclass(frozen=True, slots=True)
class SoundEncoder:
    """The sound inputs of a model of texts and sounds in one space (CLAP). Each begun window takes `window_tokens`."""

    window_tokens: int
    steps: SoundSteps


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text of a pair that is passed to a language model.

    It is `prefix` + `body` (with {query} and {document}) + `suffix`; only the body is truncated. If `pieces` are given,
    they replace these three and are tokenized separately; two of them end in {query} and {document}. If it `strips`,
    query and document lose white space at both ends. If it `cuts_prefix`, truncation on the left removes the prefix as
    well.
    """

    prefix: str = ""
    body: str = ""
    suffix: str = ""
    pieces: tuple[str, ...] = ()
    strips: bool = False
    cuts_prefix: bool = False


@dataclass(frozen=True, slots=True)
class CausalRerank:
    """A causal LM as reranker: the score is logit[true] - logit[false], or only logit[true]."""

    true_token_id: int
    false_token_id: int | None


@dataclass(frozen=True, slots=True)
class ScoringConfig:
    """A classifier or reranker: labels by index, and sigmoid, softmax, identity or a dotted class name. With a
    `template` it scores only pairs.
    """

    labels: tuple[str, ...]
    activation: str
    causal: CausalRerank | None = None
    template: PairTemplate | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of PEFT: its file of weights, its alpha and rank, and the layers with other values of these.

    If `by_root`, alpha is divided by the root of the rank (rsLoRA) instead of the rank. If `transposed`, weights of the
    base are [in, out]. If it `has_magnitudes`, each layer also has the lengths of its rows (DoRA).
    """

    weights: Path
    alpha: float
    alphas: Mapping[str, float]
    by_root: bool
    transposed: bool
    has_magnitudes: bool
    rank: float
    ranks: Mapping[str, float]

    def alpha_of(self, layer: str) -> float:
        return _of_layer(self.alphas, layer, self.alpha)

    def rank_of(self, layer: str) -> float:
        return _of_layer(self.ranks, layer, self.rank)


def _of_layer(values: Mapping[str, float], layer: str, default: float) -> float:
    """Return the value of a layer by its name, as PEFT finds it: by the first pattern that matches the name's end."""
    return next((value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", layer)), default)


@dataclass(frozen=True, slots=True)
class Layout:
    """A servable model.

    Attributes:
        transformer_dir: Directory of config and tokenizer.
        weights_dir: Directory of the weights, into which `adapters` are merged.
        config: config.json as the library must read it; `config_is_changed` if it differs from the file.
        poolings: Several are concatenated; `projections` follow them.
        max_length: In tokens, with special ones.
        position_offset: A text's first position id.
        kind: Determines which of `splade`, `late`, `m3` and `scoring` are set; an embedding model may have `m3`, a
            reranker may be `listwise`.
        type_ids: Whether pairs have token types.
        skips_unknown: Whether unknown tokens are dropped.
        weight_names: Naming scheme of the weights in the files (`engine/weights/own.py`); None for the library's.
        end_token: Follows every text, even if tokenizer.json lacks it.
        own_tokenizer: Whether the model's own code makes the tokenizer, regardless of tokenizer.json.
        reader: First module if it is the model's own code (`engine/own_reader.py`): it computes hidden states in place
            of the library's model, or, without `poolings`, the vector of a text.
        tasks: Number of the LoRA weights, from 1, by the name of a prompt; `default_task` is for texts without a name,
            0 for none. Their changes are multiplied by `task_scale`; or they are `task_adapters`, in order.
        instruction_end: Ends an instruction, before or within a text, whose tokens are not pooled.
        dual: Set for a model of texts and images. With `pages` it has a vector for each token of a page's image, with
            `chat` it reads texts and images in one input.
        sound: Set for a model of texts and sounds.
        dimensions: Default number of dimensions of dense vectors; None for all.
        truncate_left: Whether long texts lose their beginning by default.
        is_rounded: Whether dense vectors are round(127 · tanh(x)).
        notes: For the log.
        warnings: About the files; for the log, `/info` and the page.
    """

    root: Path
    transformer_dir: Path
    weights_dir: Path
    config: dict[str, Any]
    poolings: tuple[str, ...]
    include_prompt: bool
    projections: tuple[Projection, ...]
    max_length: int
    position_offset: int
    lower_case: bool
    kind: Kind = Kind.EMBEDDING
    backbone: Backbone = Backbone.ENCODER
    splade: Splade | None = None
    query_table: QueryTable | None = None
    query_route: QueryRoute | None = None
    late: LateInteraction | None = None
    m3: M3 | None = None
    scoring: ScoringConfig | None = None
    listwise: Listwise | None = None
    type_ids: bool = False
    skips_unknown: bool = False
    adapters: tuple[Adapter, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    default_task: int = 0
    task_scale: float = 1.0
    task_adapters: tuple[Adapter, ...] = ()
    trust_remote_code: bool = False
    code_revision: str | None = None
    safetensors_only: bool = False
    config_is_changed: bool = False
    weight_names: str | None = None
    end_token: str | None = None
    own_tokenizer: bool = False
    reader: OwnModule | None = None
    instruction_end: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dimensions: int | None = None
    truncate_left: bool = False
    is_rounded: bool = False
    dual: DualEncoder | None = None
    pages: PageTexts | None = None
    chat: ChatTexts | None = None
    sound: SoundEncoder | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def at_code_revision(self, revision: str | None) -> Layout:
        """With the code of other repositories at `revision`."""
        modules = [replace(one, revision=revision) if isinstance(one, OwnModule) else one for one in self.projections]
        route = self.query_route
        if route is not None:
            route = replace(route, layout=route.layout.at_code_revision(revision))
        return replace(self, code_revision=revision, projections=tuple(modules), query_route=route)

    @property
    def pools_itself(self) -> bool:
        """True if its first module, code of the model's own, gives one vector for each text."""
        return self.reader is not None and not self.poolings

    @property
    def reads_files(self) -> bool:
        """True if it is a model of images or sounds beside texts."""
        return self.dual is not None or self.sound is not None

    @property
    def reads_texts(self) -> bool:
        """True if it is anything but a model that embeds only images."""
        return not isinstance(self.dual, ImageEncoder)

    @property
    def modalities(self) -> tuple[str, ...]:
        senses = {"text": self.reads_texts, "image": self.dual, "audio": self.sound}
        return tuple(name for name, has in senses.items() if has)

    @property
    def weights(self) -> tuple[Path, ...]:
        """The directories and files that weights are loaded from."""
        projections = (*self.projections, *(() if self.late is None else self.late.projections))
        folders = [one.path for one in projections if isinstance(one, (Dense, LayerNorm))]
        named = self.config.get("transformers_weights")  # the library prefers it to all others
        files = [] if named is None else [self.weights_dir / str(named)]
        files += [adapter.weights for adapter in (*self.adapters, *self.task_adapters)]
        if self.query_table is not None:
            folders.append(self.query_table.folder)
        if self.query_route is not None:
            files += self.query_route.layout.weights
        if self.m3 is not None:
            files += [self.m3.sparse, self.m3.multi_vector]
        return (self.weights_dir, *folders, *files)

    @property
    def has_routes(self) -> bool:
        """True if queries go another way than documents."""
        return self.query_table is not None or self.query_route is not None

    @property
    def has_queries_by_default(self) -> bool:
        """True if a text without a role goes the way of queries, on a model with routes."""
        return any(way is not None and way.is_default for way in (self.query_table, self.query_route))

    @property
    def vocabulary(self) -> int | None:
        """The number of token ids with weights; None if config.json has none."""
        nested = (self.config.get("vlm_config") or self.config).get("text_config") or {}
        return self.config.get("vocab_size") or nested.get("vocab_size")

    @property
    def pooling(self) -> str:
        """The pooling as in TEI's /info, "own" where the model's own code pools."""
        if self.pools_itself:
            return "own"
        return "splade" if self.splade is not None else "+".join(self.poolings)
