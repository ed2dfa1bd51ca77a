"""Scoring models: classifiers, causal rerankers with label tokens and chat template, listwise rerankers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models import chats
from teimgr.models.json_files import ENDLESS, checked_length
from teimgr.models.layout import CausalRerank, Dense, Listwise, PairTemplate, ScoringConfig
from teimgr.models.metadata import ModelMetadata
from teimgr.models.modules import IDENTITY, SCORES, Module
from teimgr.models.own_code import references

_SHORT = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "identity",
}


_MAX_LABELS = 1_000_000
_DEFAULT_LABELS = 2  # of the library, if config.json names none


def read_scoring(metadata: ModelMetadata) -> ScoringConfig:
    """Return the labels and the activation of a sequence classifier, or of a cross-encoder whose modules give the
    scores.

    Raises:
        ModelLoadFailed: there is no such head, or config.json does not number its labels.
    """
    if (modules := score_modules(metadata)) is not None:
        labels = tuple(f"LABEL_{index}" for index in range(modules[-1].config().get("out_features") or 0))
        if len(metadata.config.get("id2label") or {}) == len(labels):
            labels = _labels(metadata.config)
        return ScoringConfig(labels, read_activation(metadata, len(labels)))
    if not metadata.has_head("ForSequenceClassification"):
        raise ModelLoadFailed(
            f"{', '.join(metadata.architectures) or 'the model'} has no head that scores texts, "
            "and so no trained scores"
        )
    labels = _labels(metadata.config)
    return ScoringConfig(labels, read_activation(metadata, len(labels)))


def read_labels(metadata: ModelMetadata) -> tuple[str, ...]:
    """Return the labels of a classifier of tokens, by index.

    Raises:
        ModelLoadFailed: config.json does not number its labels.
    """
    return _labels(metadata.config)


def score_modules(metadata: ModelMetadata) -> tuple[Module, ...] | None:
    """The modules of a cross-encoder from its Pooling to the Dense that gives the scores; None for other models.

    Raises:
        ModelLoadFailed: a cross-encoder of several modules has none that gives scores at its end.
    """
    behind = metadata.chain.behind
    if metadata.saved.get("model_type") != "CrossEncoder" or not behind or metadata.chain.has("LogitScore"):
        return None
    last = behind[-1]
    if behind[0].name != "Pooling" or last.name != "Dense" or last.config().get("module_output_name") != SCORES:
        raise ModelLoadFailed(
            "a cross-encoder of several modules should be a transformer, its Pooling and, at the end, a Dense for "
            f"scores, and is: {metadata.chain}"
        )
    return behind


def label_count(metadata: ModelMetadata) -> int:
    """How many scores a model gives a text."""
    if (modules := score_modules(metadata)) is not None:
        return int(modules[-1].config().get("out_features") or 0)
    return len(_named_labels(metadata.config))


def written_activations(metadata: ModelMetadata) -> list[str]:
    """Return the names of activation classes in the files, the one that takes precedence first."""
    own = metadata.config.get("sentence_transformers")
    written = (
        metadata.saved.get("activation_fn"),
        own.get("activation_fn") if isinstance(own, dict) else None,
        metadata.config.get("sbert_ce_default_activation_function"),
    )
    return [name for name in written if isinstance(name, str)]


def read_activation(metadata: ModelMetadata, labels: int) -> str:
    """The activation in the files, else none for a regression, sigmoid for one label or multi-label models, and softmax
    for others. One that is code of the model's own is left out, as sentence-transformers does without trust.
    """
    for name in written_activations(metadata):
        if name.startswith("torch."):
            return _SHORT.get(name, name)
    if metadata.config.get("problem_type") == "regression":
        return "identity"
    several = metadata.config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if labels == 1 or several else "softmax"


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = _named_labels(config)
    by_index = {int(index): str(label) for index, label in named.items() if str(index).isdecimal()}
    if sorted(by_index) != list(range(len(named))):
        raise ModelLoadFailed(f"id2label of config.json should number the labels from 0, and has: {', '.join(named)}")
    return tuple(by_index[index] for index in range(len(named)))


def _named_labels(config: dict[str, Any]) -> dict[str, Any]:
    """`id2label`; the library's own names if there is none, or if `num_labels` is another number, which counts."""
    named, count = config.get("id2label"), config.get("num_labels")
    return named if named and count in (None, len(named)) else _default_labels(config)


def _default_labels(config: dict[str, Any]) -> dict[str, str]:
    """`id2label` as the library fills it in if config.json lacks it."""
    count = config.get("num_labels", _DEFAULT_LABELS)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= _MAX_LABELS:
        raise ModelLoadFailed(f"config.json has num_labels = {count!r}, which should be a number above 0")
    return {str(index): f"LABEL_{index}" for index in range(count)}


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to score pairs with a language model whose authors published a prompt but no files that define a score: the
    logit of the word `yes` minus that of `no`.

    The text is `prefix` + `body` + `suffix`, or `pieces` that are tokenized separately. `names` are the names of the
    model and its fine-tunes in model cards; `others` are those of models that score differently although their card has
    one of `names`. If `framed`, special tokens surround the text.
    """

    name: str
    names: tuple[str, ...]
    yes: str
    no: str | None = None
    prefix: str = ""
    body: str = ""
    suffix: str = ""
    pieces: tuple[str, ...] = ()
    begins_with_bos: bool = False
    others: tuple[str, ...] = ()
    framed: bool = False


_MONO = "Query: {query} Document: {document} Relevant:"  # castorini/pygaggle, model/tokenize.py and rerank/base.py
_RECIPES = {
    "qwen3": _Recipe(  # its model card, with its default instruction
        "Qwen3-Reranker",
        ("qwen3-reranker",),
        "yes",
        "no",
        prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        body="<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {query}\n<Document>: {document}",
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "qwen2": _Recipe(  # https://github.com/mixedbread-ai/mxbai-rerank, mxbai_rerank_v2.py
        "mxbai-rerank-v2",
        ("mxbai-rerank-base-v2", "mxbai-rerank-large-v2", "mxbai-rerank-v2"),
        "1",
        "0",
        pieces=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
            "query: {query}",
            "\n",
            "document: {document}",
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
    ),
    "gemma": _Recipe(  # https://github.com/FlagOpen/FlagEmbedding, inference/reranker/decoder_only/base.py
        "bge-reranker-v2-gemma",
        ("bge-reranker-v2-gemma",),
        "Yes",
        pieces=(
            "A: {query}",
            "\n",
            "B: {document}",
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        begins_with_bos=True,
    ),
    "t5": _Recipe(
        "monoT5",
        ("monot5", "inranker", *(f"t5-{size} reranker" for size in ("small", "base", "large", "3b"))),
        "▁true",
        "▁false",
        body=_MONO,
        others=("duot5", "pairwise"),
        framed=True,
    ),
    "mt5": _Recipe(
        "mT5 on mMARCO",
        ("mt5-base-mmarco", "mt5-base-en-msmarco", "mt5-base-en-pt-msmarco"),
        "▁yes",
        "▁no",
        body=_MONO,
        framed=True,
    ),
}
SEQ2SEQ = "ForConditionalGeneration"


def writes_text(metadata: ModelMetadata) -> bool:
    """True if the model is a language model, or an encoder-decoder whose scoring of pairs is known."""
    if metadata.has_head(SEQ2SEQ):
        return metadata.config["model_type"] in _RECIPES
    return metadata.has_head("ForCausalLM")


# Names, in model cards, of rerankers on the same architectures that score differently.
_OTHER_RERANKERS = ("duot5", "ctxl-rerank", "zerank", "jina-reranker", "lightweight", "layerwise")


def has_prompt_of_its_own(metadata: ModelMetadata) -> bool:
    """True if a language model is a reranker whose prompt is known, by its model card.

    Nothing else distinguishes Qwen3-Reranker from Qwen3 itself.
    """
    recipe = _RECIPES.get(metadata.config["model_type"])
    if recipe is None:
        return False
    tagged = not recipe.others and "pipeline_tag: text-ranking" in metadata.card_front
    return tagged or _is_named(recipe, metadata)


def prompt_warnings(metadata: ModelMetadata) -> list[str]:
    """Return a warning if a language model is scored by a prompt that its files do not name."""
    recipe = _RECIPES.get(metadata.config["model_type"])
    if recipe is None or metadata.chain.modules or _is_named(recipe, metadata):
        return []
    return [f"the files do not define how pairs are scored: the prompt of {recipe.name} is used"]


def _is_named(recipe: _Recipe, metadata: ModelMetadata) -> bool:
    card = metadata.card
    return any(name in card for name in recipe.names) and not any(name in card for name in recipe.others)


# Placeholders for query and document, of private-use characters.
_QUERY, _DOCUMENT = "\ue000query\ue001", "\ue000document\ue001"
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")


def read_causal_rerank(metadata: ModelMetadata, *, render: bool, left: bool) -> tuple[CausalRerank, PairTemplate]:
    """Return the ids of the two label tokens, and the template around query and document.

    Without `render` the chat template, which is a Jinja program of the model's authors, is not run, and the text is
    empty.

    Raises:
        ModelLoadFailed: the labels are not tokens, or the template has no place for query and document.
    """
    if not metadata.chain.modules:
        return _by_recipe(metadata)
    before, module, behind = metadata.chain.split_at("LogitScore")
    config = module.config()
    if len(before) != 1 or behind or config.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelLoadFailed(f"a language model as reranker should end in its LogitScore, and is: {metadata.chain}")
    if not isinstance(config.get("true_token_id"), int):
        raise ModelLoadFailed("the config.json of the LogitScore module has no true_token_id")
    if "message" not in (metadata.settings.get("modality_config") or {}):
        raise ModelLoadFailed("the reranker scores pairs without a chat template, which is not served")
    return CausalRerank(config["true_token_id"], config.get("false_token_id")), _chat_template(metadata, render, left)


_NEMOTRON = "LlamaBidirectionalForSequenceClassification"


def is_nemotron(metadata: ModelMetadata) -> bool:
    """True if scores are those of NVIDIA's bidirectional Llama: a linear layer behind the pooled hidden states."""
    return metadata.config["model_type"] == "llama" and _NEMOTRON in metadata.architectures


def read_nemotron(metadata: ModelMetadata) -> tuple[ScoringConfig, Dense]:
    """The prompt and the layer `score` of llama-nemotron-rerank, whose results are divided by a temperature.

    Raises:
        ModelLoadFailed: its labels are not numbered, or a number is not above 0.
    """
    labels = _labels(metadata.config)
    prefix, suffix = metadata.tokens.frame()
    template = PairTemplate(f"{prefix}question:", "{query} \n \n passage:{document}", suffix)
    temperature = metadata.config.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ModelLoadFailed(f"config.json has temperature = {temperature!r}, which should be a positive number")
    layer = Dense(
        path=metadata.transformer_dir,
        in_features=int(metadata.config["hidden_size"]),
        out_features=len(labels),
        bias=False,
        activation=IDENTITY,
        name="score",
        divisor=float(temperature),
    )
    return ScoringConfig(labels, read_activation(metadata, len(labels)), template=template), layer


def read_pair_template(metadata: ModelMetadata, *, render: bool, left: bool) -> PairTemplate | None:
    """The chat template of a sequence classifier that sentence-transformers gives pairs as messages; None for others.

    Raises:
        ModelLoadFailed: as `read_causal_rerank`.
    """
    is_chat = "message" in (metadata.settings.get("modality_config") or {})
    return _chat_template(metadata, render, left) if is_chat else None


def _chat_template(metadata: ModelMetadata, render: bool, left: bool) -> PairTemplate:
    if not render:
        return PairTemplate(body="{query}{document}")
    template, options = chats.read_template(metadata)

    def shown(texts: Sequence[str]) -> str:
        messages = _messages(metadata, template, texts)
        return chats.rendered(metadata, template, messages, {"add_generation_prompt": False} | options)

    prefix, between, suffix = around = _around(shown((_QUERY, _DOCUMENT)))
    strips = chats.strips_texts(shown, around, (*chats.PROBES, ""))
    return PairTemplate(prefix, f"{{query}}{between}{{document}}", suffix, strips=strips, cuts_prefix=left)


def _by_recipe(metadata: ModelMetadata) -> tuple[CausalRerank, PairTemplate]:
    recipe = _RECIPES.get(metadata.config["model_type"])
    if recipe is None:
        known = ", ".join(known.name for known in _RECIPES.values())
        raise ModelLoadFailed(
            f"a {metadata.config['model_type']} language model has no files that define a score; "
            f"of those without sentence-transformers' files {known} are served"
        )
    if not _is_named(recipe, metadata) and (other := next((o for o in _OTHER_RERANKERS if o in metadata.card), None)):
        raise ModelLoadFailed(f"the model card names {other}, which scores pairs differently and is not served")
    yes, no = metadata.tokens.id(recipe.yes), None if recipe.no is None else metadata.tokens.id(recipe.no)
    if yes is None or (no is None and recipe.no is not None):
        words = " and ".join(f'"{word}"' for word in (recipe.yes, recipe.no) if word is not None)
        raise ModelLoadFailed(f"{words} of {recipe.name}'s prompt are not tokens of this model, so it has no score")
    pieces = recipe.pieces
    if recipe.begins_with_bos and metadata.tokens.special("bos_token") != metadata.tokens.special("pad_token"):
        pieces = (metadata.tokens.text("bos_token"), *pieces)
    before, behind = metadata.tokens.frame() if recipe.framed else ("", "")
    pieces = tuple(piece for piece in pieces if piece)
    template = PairTemplate(before + recipe.prefix, recipe.body, recipe.suffix + behind, pieces)
    return CausalRerank(yes, no), template


def _messages(metadata: ModelMetadata, template: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Query and document as sentence-transformers passes them, after the default prompt as system message."""
    how = metadata.settings["modality_config"]["message"].get("format", "auto")
    structured = how == "structured" or (how == "auto" and any(part in template for part in _STRUCTURED))
    prompt = metadata.prompts.get(str(metadata.saved.get("default_prompt_name")), "")
    roles = [("system", prompt)] if prompt else []
    roles += zip(("query", "document"), texts, strict=True)
    return [{"role": role, "content": [{"type": "text", "text": text}] if structured else text} for role, text in roles]


def _around(text: str) -> tuple[str, str, str]:
    """Return the text before the query, between it and the document, and after the document."""
    if text.count(_QUERY) != 1 or text.count(_DOCUMENT) != 1 or text.index(_QUERY) > text.index(_DOCUMENT):
        raise ModelLoadFailed("the chat template does not show the query once and then the document once")
    prefix, rest = text.split(_QUERY)
    between, suffix = rest.split(_DOCUMENT)
    return prefix, between, suffix


ARCHITECTURE = "JinaForRanking"
_RELU = "torch.nn.modules.activation.ReLU"
TEMPLATE_TOKENS = 8192
"""The most tokens that the words around texts add to a prompt; the authors' capacity counts only the texts."""
_WIDTH = 512  # of the compared vectors
_DOCUMENT_MARK, _QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"


def is_listwise(metadata: ModelMetadata) -> bool:
    """True if scores depend on all documents of a request."""
    return ARCHITECTURE in metadata.architectures


def read_listwise(metadata: ModelMetadata) -> tuple[Listwise, tuple[Dense, ...]]:
    """How jina-reranker-v3 reads a list, and the two layers behind the hidden states at its marks.

    Raises:
        ModelLoadFailed: it is jina-reranker-v3.5, whose prompt is another, its tokenizer lacks a mark, or its code is
            not known.
    """
    config = metadata.config
    if code := references(config):
        names = ", ".join(sorted({name for _, name in code}))
        raise ModelLoadFailed(f"the model is a {ARCHITECTURE} with code that is not known ({names}): it is not served")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelLoadFailed(
            f"the model is a {ARCHITECTURE} with a sliding window, like jina-reranker-v3.5, whose prompt differs and "
            "is not served; jina-reranker-v3 is"
        )
    if metadata.tokens.config.get("clean_up_tokenization_spaces"):
        raise ModelLoadFailed(
            f"tokenizer_config.json has clean_up_tokenization_spaces = true, which is not served for {ARCHITECTURE}"
        )
    ids = [metadata.tokens.id(mark) for mark in (_DOCUMENT_MARK, _QUERY_MARK)]
    if ids[0] is None or ids[1] is None:
        raise ModelLoadFailed(
            f"a {ARCHITECTURE} needs the tokens {_DOCUMENT_MARK} and {_QUERY_MARK}, and the tokenizer lacks one"
        )
    hidden = int(config["hidden_size"])
    layer: dict[str, Any] = {"path": metadata.weights_dir, "bias": False}
    given = metadata.tokens.config.get("model_max_length")
    return (
        Listwise(
            document_mark=_DOCUMENT_MARK,
            query_mark=_QUERY_MARK,
            document_id=ids[0],
            query_id=ids[1],
            capacity=ENDLESS if given is None else checked_length(given, "tokenizer_config.json"),
        ),
        (
            Dense(in_features=hidden, out_features=hidden // 2, activation=_RELU, name="projector.0", **layer),
            Dense(in_features=hidden // 2, out_features=_WIDTH, activation=IDENTITY, name="projector.2", **layer),
        ),
    )
