"""Chooses the kind of a model by its files, or by the instance's configuration if the files allow it."""

from __future__ import annotations

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.late_interaction import is_pylate
from teimgr.models.metadata import IMAGE_ENCODERS, PAGE_ENCODERS, ModelMetadata
from teimgr.models.scoring import has_prompt_of_its_own, is_listwise, label_count, writes_text
from teimgr.models.vision_chats import is_vision_chat, kind_of_vision_chat
from teimgr.spec import KINDS, Kind

_SCORING = (Kind.RERANKER, Kind.CLASSIFIER, Kind.TOKEN_CLASSIFIER)


def choose_kind(metadata: ModelMetadata, configured: str | None, pooling: str | None) -> Kind:
    """Return the kind to serve; `configured` and `pooling` of the instance take precedence over the files.

    Raises:
        InvalidConfig: `configured` or `pooling` contradicts the files; the message has the reason.
        ModelLoadFailed: the files describe an unsupported kind.
    """
    if configured is not None and configured not in KINDS:
        raise InvalidConfig(f"kind {configured!r} is not one of {', '.join(KINDS)}")
    own = _own_kind(metadata)
    wanted = Kind(configured) if configured is not None else own
    if pooling == "splade" and wanted not in _SCORING:  # TEI ignores the pooling of scoring models
        wanted = _splade(metadata, own, configured)
    elif pooling is not None and wanted is Kind.SPARSE:
        raise InvalidConfig(
            f"pooling {pooling!r} contradicts the sparse (SPLADE) model; "
            'set kind = "embedding" as well to serve the vectors of its encoder'
        )
    if wanted is own:
        return own
    if reason := _obstacle(metadata, own, wanted):
        raise InvalidConfig(f'kind = "{wanted.value}" contradicts the model\'s files: {reason}')
    return wanted


def _own_kind(metadata: ModelMetadata) -> Kind:
    named = metadata.saved.get("model_type")
    if metadata.config["model_type"] in PAGE_ENCODERS:
        return Kind.MULTI_VECTOR
    if metadata.config["model_type"] in IMAGE_ENCODERS:
        return Kind.EMBEDDING
    if is_vision_chat(metadata):
        return kind_of_vision_chat(metadata)
    if metadata.static:
        return Kind.EMBEDDING
    if named == "SparseEncoder" or metadata.chain.has("SpladePooling"):
        return Kind.SPARSE
    if named in ("MultiVectorEncoder", "ColBERT") or metadata.chain.has("MultiVectorMask") or is_pylate(metadata):
        return Kind.MULTI_VECTOR
    if named == "CrossEncoder" or metadata.chain.has("LogitScore"):
        return _scoring(metadata)
    return Kind.EMBEDDING if metadata.chain.modules else _kind_of_bare(metadata)


def _kind_of_bare(metadata: ModelMetadata) -> Kind:
    """Return the kind of a directory without modules.json, by the head of its architecture."""
    if "HF_ColBERT" in metadata.architectures:
        return Kind.MULTI_VECTOR
    if is_listwise(metadata):
        return Kind.RERANKER
    for name in metadata.architectures:
        if name.endswith("ForSequenceClassification"):
            return _scoring(metadata)
        if name.endswith("ForTokenClassification") and "id2label" in metadata.config:
            return Kind.TOKEN_CLASSIFIER
        if name.endswith("Classification") and "id2label" in metadata.config:
            raise ModelLoadFailed(
                f"{name} labels the parts of an input, not the text as a whole; such a head is not served"
            )
    if writes_text(metadata) and has_prompt_of_its_own(metadata):
        return Kind.RERANKER
    return Kind.EMBEDDING


def _scoring(metadata: ModelMetadata) -> Kind:
    return Kind.RERANKER if is_causal(metadata) or label_count(metadata) == 1 else Kind.CLASSIFIER


def is_causal(metadata: ModelMetadata) -> bool:
    """True if scores come from a causal language model's next token."""
    if metadata.chain.has("LogitScore"):
        return True
    if metadata.chain.behind:  # modules give the scores
        return False
    return writes_text(metadata) and not metadata.has_head("ForSequenceClassification")


def _splade(metadata: ModelMetadata, own: Kind, configured: str | None) -> Kind:
    if configured not in (None, Kind.SPARSE.value):
        raise InvalidConfig(f'pooling "splade" makes a sparse model, and kind is "{configured}"')
    if own is not Kind.SPARSE and not metadata.has_head("ForMaskedLM"):
        raise InvalidConfig(f'pooling "splade" needs a masked-LM head, and the model is {_architecture(metadata)}')
    return Kind.SPARSE


def _obstacle(metadata: ModelMetadata, own: Kind, wanted: Kind) -> str | None:
    """Why a model of kind `own` cannot be served as `wanted`; None if it can."""
    if is_listwise(metadata):
        return "they are those of a reranker that compares the documents of a list"
    if is_vision_chat(metadata):
        return f"they are those of a model of the kind {own.value}"
    if wanted is Kind.EMBEDDING:
        return "they describe a vector per token and no pooling" if own is Kind.MULTI_VECTOR else None
    if wanted is Kind.SPARSE:
        return None if metadata.has_head("ForMaskedLM") else f"{_architecture(metadata)} has no masked-LM head"
    if wanted is Kind.TOKEN_CLASSIFIER:
        is_one = metadata.has_head("ForTokenClassification")
        return None if is_one else f"{_architecture(metadata)} has no head that labels tokens"
    if wanted is Kind.MULTI_VECTOR:
        return "they hold no projection of token vectors"
    if own in (Kind.RERANKER, Kind.CLASSIFIER):
        if wanted is Kind.RERANKER:
            return f"they have {label_count(metadata)} labels, and a reranker has one"
        return "a language model answers yes or no to pairs, and has no labels" if is_causal(metadata) else None
    if wanted is Kind.RERANKER and writes_text(metadata) and not metadata.chain.modules:
        return None
    return f"{_architecture(metadata)} has no head that scores texts"


def _architecture(metadata: ModelMetadata) -> str:
    return ", ".join(metadata.architectures) or f"a {metadata.config['model_type']} model"
