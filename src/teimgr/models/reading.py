"""Reads a model directory into a `Layout`: chooses the reader by kind, and refuses what is not served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.directory import may_lack_modules
from teimgr.models.dual_encoders import (
    is_dual_encoder,
    is_image_encoder,
    is_sound_encoder,
    read_dual_encoder,
    read_image_encoder,
    read_sound_encoder,
    text_config,
)
from teimgr.models.json_files import ENDLESS, TokenFiles, checked_length, max_length, position_offset
from teimgr.models.kinds import check_files, choose_kind, is_causal
from teimgr.models.known_keys import setting
from teimgr.models.late_interaction import read_late, with_role_lengths
from teimgr.models.layout import M3, Backbone, Dense, Layout, QueryRoute, QueryTable, ScoringConfig, Splade
from teimgr.models.metadata import MODEL2VEC, SENSES, ModelMetadata, read_metadata
from teimgr.models.modules import (
    IDENTITY,
    INT8_TANH,
    SCORES,
    TEXT,
    Chain,
    Module,
    check_pooling,
    read_poolings,
    read_projections,
)
from teimgr.models.pages import is_page_encoder, read_page_encoder
from teimgr.models.scoring import (
    SEQ2SEQ,
    TEMPLATE_TOKENS,
    is_listwise,
    is_nemotron,
    prompt_warnings,
    read_activation,
    read_causal_rerank,
    read_labels,
    read_listwise,
    read_nemotron,
    read_pair_template,
    read_scoring,
    score_modules,
    written_activations,
)
from teimgr.models.source import file_problem
from teimgr.models.vision_chats import is_vision_chat, read_embedding_gemma2, read_vision_chat
from teimgr.spec import Kind

_SPARSE, _MULTI_VECTOR = "sparse_linear.pt", "colbert_linear.pt"
_UNUSED = ("cls_token", "eos_token", "pad_token", "unk_token", "bos_token", "sep_token")


def read_m3(metadata: ModelMetadata) -> M3 | None:
    """Return BGE-M3's two additional layers, if both files exist.

    Raises:
        ModelLoadFailed: something else than a file is in the place of one.
    """
    sparse, multi_vector = metadata.root / _SPARSE, metadata.root / _MULTI_VECTOR
    for file in (sparse, multi_vector):
        if problem := file_problem(file):
            raise ModelLoadFailed(f"{file.name} {problem}")
    if not sparse.is_file() or not multi_vector.is_file():
        return None
    ids = {metadata.tokens.special(role) for role in _UNUSED}
    return M3(sparse, multi_vector, tuple(sorted(id for id in ids if id is not None)))


def read_splade(metadata: ModelMetadata) -> Splade:
    """The options of the SpladePooling module, or SPLADE's defaults where there is no such module.

    Raises:
        ModelLoadFailed: its options are unsupported, or further modules follow it.
    """
    if not metadata.chain.has("SpladePooling"):
        if not metadata.has_head("ForMaskedLM"):
            raise ModelLoadFailed(f"a sparse model needs a masked-LM head, and there is: {metadata.chain}")
        return Splade(most=_positive(metadata, "max_active_dims"))
    before, module, behind = metadata.chain.split_at("SpladePooling")
    if len(before) != 1 or behind:
        raise ModelLoadFailed(f"a sparse model should be a transformer and its SpladePooling, and is: {metadata.chain}")
    config = module.config()
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelLoadFailed(f"SpladePooling with {strategy!r} and {activation!r} is not served")
    return Splade(strategy, activation, _positive(metadata, "max_active_dims"))


def read_query_table(metadata: ModelMetadata) -> QueryTable | None:
    """Return the table of queries of a model with routes; None if queries are computed as documents are.

    Raises:
        ModelLoadFailed: the length of its tokenizer is not a number above 0.
    """
    if (module := metadata.chain.table) is None:
        return None
    given = TokenFiles(module.path).config.get("model_max_length")
    longest = ENDLESS if given is None else checked_length(given, f"{module.path.name}/tokenizer_config.json")
    return QueryTable(module.path, longest, metadata.chain.queries_by_default)


def _positive(metadata: ModelMetadata, key: str) -> int | None:
    """Return a number of config_sentence_transformers.json; None if it is not set."""
    given = metadata.saved.get(key)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ModelLoadFailed(f"config_sentence_transformers.json has {key} = {given!r}, which should be above 0")
    return given


def _dimensions(metadata: ModelMetadata) -> int | None:
    """Return `truncate_dim` of a dense model: the dimensions of its vectors if a request does not set any."""
    return None if metadata.saved.get("model_type") == "SparseEncoder" else _positive(metadata, "truncate_dim")


def _longest(metadata: ModelMetadata, texts: dict[str, Any]) -> int:
    """Return the maximum tokens of an input."""
    if metadata.static:
        return _longest_of_table(metadata)
    if is_image_encoder(metadata):
        return ENDLESS  # replaced when the image processor is read
    return max_length(texts, metadata.settings, metadata.tokens.config)


def _longest_of_table(metadata: ModelMetadata) -> int:
    """The tokens of a text in a table: by tokenizer.json, or without modules.json by Model2Vec's config.json."""
    if metadata.chain.modules:
        return metadata.tokens.cuts_at or ENDLESS
    given = metadata.config.get("max_length", 512)
    return ENDLESS if given is None else checked_length(given, "config.json")


def _truncates_left(metadata: ModelMetadata) -> bool:
    """True if too long texts lose their beginning unless a request sets it."""
    if metadata.static:  # the library truncates by tokenizer.json alone
        return metadata.tokens.cuts_left and bool(metadata.chain.modules)
    kwargs = metadata.settings.get("processor_kwargs") or metadata.settings.get("tokenizer_args") or {}
    side = kwargs.get("truncation_side") or metadata.tokens.config.get("truncation_side")
    side = side or ("left" if metadata.tokens.cuts_left else "right")
    if side not in ("left", "right"):
        raise ModelLoadFailed(f"the truncation side {side!r} is neither left nor right")
    return bool(side == "left")


_FETCHED_IN_PART = (
    "the hub's cache has no modules.json of this model, and no note that its repository lacks one: if it is "
    "a model of sentence-transformers, prompts and modules are missing; then delete the copy and fetch it again"
)
_DEFAULT_TASK = "feature-extraction"
_TASKS = ("feature-extraction", "fill-mask", "sequence-classification", "text-generation")


def read_layout(
    root: Path,
    pooling: str | None = None,
    *,
    kind: str | None = None,
    trust_remote_code: bool = False,
    render: bool = True,
    strict: bool = False,
) -> Layout:
    """Read the model directory `root`; `pooling` and `kind` are the user's choice, over that of the files.

    Without `render` no chat template is run: enough to validate a model, not to serve a reranker that has one. With
    `strict` each warning about the files is a refusal.

    Raises:
        ModelNotFound: there is no such directory, or no config.json in it.
        InvalidConfig: `pooling` or `kind` contradicts the files, or the files name no pooling.
        ModelLoadFailed: the files describe an unsupported model.
    """
    check_pooling(pooling)
    try:
        layout = _read(root, pooling, kind, trust_remote_code, render)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # For instance a number in place of an object, or an infinite length.
        raise ModelLoadFailed(f"the model's files are malformed: {type(error).__name__} {error}") from error
    if strict:
        refuse_warnings(layout.warnings)
    return layout


def refuse_warnings(warnings: Sequence[str]) -> None:
    """Raise ModelLoadFailed with all of them, if there are any, as `strict_model_files` demands."""
    if warnings:
        raise ModelLoadFailed(f"{'; '.join(warnings)} (strict_model_files = true makes this a refusal)")


def _read(
    root: Path, pooling: str | None, kind: str | None, trust_remote_code: bool, render: bool, chain: Chain | None = None
) -> Layout:
    metadata = read_metadata(root, trust_remote_code, chain)
    if metadata.chain.first == "CLIPModel" and not is_dual_encoder(metadata):
        named = metadata.config["model_type"]
        raise ModelLoadFailed(f"modules.json has a CLIPModel module, and its config.json is that of a {named}")
    chosen = choose_kind(metadata, kind, pooling)
    metadata.tokens.check_types(metadata.config)
    layout = _of_every_kind(metadata, chosen, trust_remote_code)
    match chosen:
        case Kind.EMBEDDING:

            def route(queries: Chain) -> Layout:
                return _read(root, pooling, chosen.value, trust_remote_code, render, queries)

            layout = _embedding(metadata, layout, pooling, render, route)
        case Kind.SPARSE:
            splade, table = read_splade(metadata), read_query_table(metadata)
            layout = replace(layout, backbone=Backbone.MASKED_LM, splade=splade, query_table=table)
        case Kind.MULTI_VECTOR if is_page_encoder(metadata):
            layout = read_page_encoder(metadata, layout)
        case Kind.MULTI_VECTOR:
            late, prompts = read_late(metadata)
            named = layout.default_prompt_name if layout.default_prompt_name in prompts else "document"
            layout = replace(layout, prompts=prompts, default_prompt_name=named)
            layout = with_role_lengths(layout, late, text_config(metadata.config))
        case Kind.TOKEN_CLASSIFIER:
            scoring = ScoringConfig(read_labels(metadata), "softmax")
            layout = replace(layout, backbone=Backbone.TOKEN_CLASSIFICATION, scoring=scoring)
        case Kind.RERANKER | Kind.CLASSIFIER:
            layout = _scored(metadata, layout, render)
    role = "query" if layout.has_queries_by_default else "document"
    if layout.has_routes and layout.default_prompt_name is None and not layout.prompts.get(role):
        layout = replace(layout, default_prompt_name=role)  # only if it has no prompt, which the library would not add
    _check_task(metadata, layout)
    _check_attention(metadata.config, layout.max_length)
    return replace(layout, warnings=_all_warnings(metadata, layout, pooling))


def _of_every_kind(metadata: ModelMetadata, kind: Kind, trust_remote_code: bool) -> Layout:
    """What is read for each kind alike."""
    texts = text_config(metadata.config)
    reader = metadata.chain.reader
    if reader is not None:
        _check_reader(reader.name, metadata, kind)
        texts = {**texts, "model_type": reader.name}  # its positions differ from those of known models
    longest = _longest(metadata, texts)
    return Layout(
        root=metadata.root,
        transformer_dir=metadata.transformer_dir,
        weights_dir=metadata.weights_dir,
        adapters=metadata.adapters,
        config=metadata.config,
        poolings=(),
        include_prompt=True,
        projections=(),
        max_length=longest,
        position_offset=position_offset(texts),
        lower_case=bool(metadata.settings.get("do_lower_case")),
        kind=kind,
        type_ids=metadata.tokens.has_types(metadata.config),
        trust_remote_code=trust_remote_code,
        config_is_changed=metadata.config_is_changed,
        weight_names=metadata.weight_names,
        tasks=metadata.own.tasks,
        default_task=metadata.own.default_task,
        task_scale=metadata.own.task_scale,
        task_adapters=metadata.task_adapters,
        instruction_end=metadata.own.instruction_end,
        end_token=metadata.end_token,
        own_tokenizer=metadata.own_tokenizer,
        reader=None if reader is None else reader.code,
        prompts=metadata.prompts,
        dimensions=_dimensions(metadata),
        default_prompt_name=metadata.saved.get("default_prompt_name"),
        truncate_left=_truncates_left(metadata),
        notes=metadata.notes,
    )


def _check_reader(name: str, metadata: ModelMetadata, kind: Kind) -> None:
    """Refuse a first module that is code of the model's own, if the model is not one of dense vectors."""
    if kind is not Kind.EMBEDDING:
        raise ModelLoadFailed(
            f"{name}, the first module of modules.json, is code in the model's own repository, which is run "
            f"only for dense vectors: the model is of the kind {kind.value}"
        )
    if metadata.static or metadata.config["model_type"] in SENSES:
        raise ModelLoadFailed(
            f"{name}, the first module of modules.json, is code in the model's own repository, and "
            f"config.json is of a {metadata.config['model_type']} model: not served together"
        )


def _embedding(
    metadata: ModelMetadata, layout: Layout, pooling: str | None, render: bool, route: Callable[[Chain], Layout]
) -> Layout:
    """A model of dense vectors; `route` reads the modules of its queries, if it has a Router."""
    if is_dual_encoder(metadata):
        return read_dual_encoder(metadata, layout, pooling)
    if is_image_encoder(metadata):
        return read_image_encoder(metadata, layout, pooling)
    if is_vision_chat(metadata):
        pooled = _pooled(metadata, layout, None) if metadata.chain.modules else layout
        if metadata.config["model_type"] == "embedding_gemma2":
            return read_embedding_gemma2(metadata, pooled, pooling)
        return read_vision_chat(metadata, pooled, pooling, render=render)
    if is_sound_encoder(metadata):
        return read_sound_encoder(metadata, layout, pooling)
    layout = _pooled(metadata, layout, pooling)
    if metadata.chain.table is not None:
        raise InvalidConfig(
            'kind = "embedding" contradicts the files: queries have a weight for each token, and no vector'
        )
    if (queries := metadata.chain.queries) is not None:
        return _with_route(layout, QueryRoute(route(queries), metadata.chain.queries_by_default))
    return layout


def _scored(metadata: ModelMetadata, layout: Layout, render: bool) -> Layout:
    """A reranker or a classifier."""
    if layout.kind is Kind.RERANKER and is_vision_chat(metadata):
        return read_vision_chat(metadata, replace(layout, backbone=Backbone.CAUSAL_LM), None, render=render)
    without_prompts = replace(layout, prompts={}, default_prompt_name=None)
    if layout.kind is Kind.RERANKER and is_listwise(metadata):
        listwise, layers = read_listwise(metadata)
        scoring, longest = ScoringConfig(("LABEL_0",), "identity"), layout.max_length + TEMPLATE_TOKENS
        return replace(without_prompts, scoring=scoring, listwise=listwise, projections=layers, max_length=longest)
    if is_causal(metadata):
        scoring = ScoringConfig(
            ("LABEL_0",),
            read_activation(metadata, 1),
            *read_causal_rerank(metadata, render=render, left=layout.truncate_left),
        )
        # No prompt precedes the query: prompts are part of the template.
        backbone = Backbone.SEQ2SEQ_LM if metadata.has_head(SEQ2SEQ) else Backbone.CAUSAL_LM
        warnings = tuple(prompt_warnings(metadata))
        return replace(without_prompts, backbone=backbone, scoring=scoring, warnings=warnings)
    if (modules := score_modules(metadata)) is not None:
        return _scored_by_modules(metadata, replace(layout, scoring=read_scoring(metadata)), modules)
    if is_nemotron(metadata):
        scoring, layer = read_nemotron(metadata)
        pooled = {"pooling": "avg", **metadata.config}
        poolings, _, _ = read_poolings(None, metadata.root / "1_Pooling", pooled, None)
        return replace(without_prompts, scoring=scoring, poolings=poolings, projections=(layer,))
    template = read_pair_template(metadata, render=render, left=layout.truncate_left)
    layout = layout if template is None else without_prompts  # the prompts are part of it
    scoring = replace(read_scoring(metadata), template=template)
    return replace(layout, backbone=Backbone.SEQUENCE_CLASSIFICATION, scoring=scoring)


def _all_warnings(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> tuple[str, ...]:
    """Those of the layout and of the files, each once."""
    found = [*layout.warnings, *metadata.warnings, *check_files(metadata), *_own_activations(metadata, layout)]
    if layout.kind is Kind.EMBEDDING and not metadata.static and may_lack_modules(metadata.root):
        found.append(_FETCHED_IN_PART)
    if pooling is not None and layout.pooling != pooling.replace("-", "_"):
        found.append(f"pooling = {pooling!r} is ignored: models of the kind {layout.kind.value} have their own pooling")
    return tuple(dict.fromkeys(found))


def _with_route(layout: Layout, route: QueryRoute) -> Layout:
    """The layout of documents with the way of queries.

    Raises:
        ModelLoadFailed: the two cannot be served as one model.
    """
    own = route.layout
    if layout.backbone is own.backbone is Backbone.STATIC:
        raise ModelLoadFailed(
            "modules.json has a Router of two embedding tables: one of its routes needs a transformer"
        )
    for key in ("truncate_left", "is_rounded"):
        if getattr(layout, key) != getattr(own, key):
            raise ModelLoadFailed(f"the routes of modules.json differ in {key}, which is not served")
    for one in (layout, own):
        if one.tasks or one.m3 is not None or one.instruction_end is not None:
            raise ModelLoadFailed("a Router with a model that has tasks, instructions or further outputs is not served")
    return replace(layout, query_route=route, warnings=(*layout.warnings, *own.warnings))


def _check_attention(config: dict[str, Any], longest: int) -> None:
    """Refuse BigBird's sparse attention where a text may be long enough for it: the library gives it up for good after
    the first short text, so that vectors would depend on the texts before.
    """
    if config["model_type"] != "big_bird" or setting(config, "attention_type") != "block_sparse":
        return
    dense = (5 + 2 * int(setting(config, "num_random_blocks"))) * int(setting(config, "block_size"))
    if longest > dense:
        raise ModelLoadFailed(
            f"config.json has attention_type = 'block_sparse' (its default), which is served up to {dense} tokens: set "
            f"max_seq_length to at most {dense}, or attention_type to 'original_full'"
        )


def _own_activations(metadata: ModelMetadata, layout: Layout) -> list[str]:
    """Warnings of a scoring model about activations that are not torch's."""
    if layout.scoring is None:
        return []
    own = [name for name in written_activations(metadata) if not name.startswith("torch.")]
    return [f"the activation {name} is code of the model's own: {layout.scoring.activation} is used" for name in own]


def _pooled(metadata: ModelMetadata, layout: Layout, pooling: str | None) -> Layout:
    if metadata.static:
        return replace(
            layout,
            backbone=Backbone.STATIC,
            poolings=("mean",),
            projections=read_projections(_without_final_normalize(metadata.chain.behind)),
            skips_unknown=metadata.config["model_type"] == MODEL2VEC,
        )
    if metadata.chain.reader is not None and not metadata.chain.has("Pooling"):  # it returns one vector per text
        return replace(layout, projections=read_projections(_without_final_normalize(metadata.chain.behind)))
    before, module, behind = _around_pooling(metadata)
    if before:
        raise ModelLoadFailed(f"modules between transformer and Pooling are not served: {metadata.chain}")
    named = pooling or (metadata.own.pooling if module is None else None)
    poolings, include_prompt, guessed = read_poolings(module, metadata.root / "1_Pooling", metadata.config, named)
    behind = _without_final_normalize(behind)
    is_rounded = bool(behind) and behind[-1].name == INT8_TANH
    return replace(
        layout,
        poolings=poolings,
        include_prompt=include_prompt and layout.instruction_end is None,
        projections=(*_own_projection(metadata), *read_projections(behind[:-1] if is_rounded else behind)),
        is_rounded=is_rounded,
        m3=None if metadata.chain.reader is not None else read_m3(metadata),
        warnings=(*layout.warnings, *guessed),
    )


def _own_projection(metadata: ModelMetadata) -> tuple[Dense, ...]:
    """The linear layer of a Qwen3 whose tokens attend to all others and that has labels, as voyage-4-nano: behind its
    hidden states, whose mean gives the same behind it.
    """
    config = metadata.config
    width = config.get("num_labels")
    if (
        metadata.chain.reader is not None
        or config["model_type"] != "qwen3"
        or config.get("is_causal") is not False
        or width is None
    ):
        return ()
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ModelLoadFailed(f"config.json has num_labels = {width!r}, which should be a positive number")
    return (Dense(metadata.transformer_dir, int(config["hidden_size"]), width, bias=False, activation=IDENTITY),)


def _scored_by_modules(metadata: ModelMetadata, layout: Layout, modules: tuple[Module, ...]) -> Layout:
    """A cross-encoder of modules: scores from the pooled vector of a pair."""
    poolings, include_prompt, _ = read_poolings(modules[0], metadata.root, metadata.config, None)
    projections = read_projections(modules[1:], TEXT, SCORES)
    return replace(layout, poolings=poolings, include_prompt=include_prompt, projections=projections)


def _around_pooling(metadata: ModelMetadata) -> tuple[tuple[Module, ...], Module | None, tuple[Module, ...]]:
    """Return the modules before the Pooling (without the first), the Pooling, and the modules after it."""
    # Only the encoder of a sparse model or a cross-encoder is used.
    other = any(metadata.chain.has(name) for name in ("SpladePooling", "LogitScore"))
    other |= metadata.saved.get("model_type") == "CrossEncoder"
    has_none = metadata.own.pooling is not None and not metadata.chain.behind  # its own code pools
    if not metadata.chain.modules or other or has_none:
        return (), None, ()
    before, module, behind = metadata.chain.split_at("Pooling")
    return before[1:], module, behind


def _without_final_normalize(modules: tuple[Module, ...]) -> tuple[Module, ...]:
    return modules[:-1] if modules and modules[-1].name == "Normalize" else modules


def _check_task(metadata: ModelMetadata, layout: Layout) -> None:
    """Check that sentence-transformers would use the same output of the transformer."""
    if layout.chat is not None:
        return
    named = metadata.settings.get("transformer_task")
    if named not in (None, *_TASKS):
        raise ModelLoadFailed(f"the transformer's task is {named}, which is not served")
    task = named or ("fill-mask" if metadata.chain.first == "MLMTransformer" else _DEFAULT_TASK)
    reads = None
    if metadata.chain.has("SpladePooling"):
        reads = "fill-mask"
    elif task == "fill-mask" and layout.kind in (Kind.EMBEDDING, Kind.MULTI_VECTOR):
        reads = _DEFAULT_TASK
    if reads not in (None, task):
        raise ModelLoadFailed(f"the transformer's task is {task}, and modules after it are served only for {reads}")
    in_template = layout.scoring is not None and layout.scoring.template is not None
    if not in_template and "message" in (metadata.settings.get("modality_config") or {}):
        raise ModelLoadFailed("the model puts every text into a chat template, which is served only for rerankers")
