"""What a model is for: as its files say it, or as the instance says it where the files leave room."""

from __future__ import annotations

from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.model_files.layout import Kind
from teimgr.model_files.metadata import ModelMetadata
from teimgr.spec import KINDS

_SCORING = (Kind.RERANKER, Kind.CLASSIFIER)


def choose_kind(facts: ModelMetadata, asked: str | None, pooling: str | None) -> Kind:
    """The kind to serve; `asked` and `pooling` are the instance's own words, over the files.

    Raises:
        InvalidConfig: what the instance asks for contradicts the files; the message says why.
        ModelLoadFailed: the files describe a kind that is not served.
    """
    if asked is not None and asked not in KINDS:
        raise InvalidConfig(f"kind {asked!r} is none of {', '.join(KINDS)}")
    own = _own_kind(facts)
    wanted = Kind(asked) if asked is not None else own
    if pooling == "splade":
        wanted = _splade(facts, own, asked)
    elif pooling is not None and wanted is Kind.SPARSE:
        raise InvalidConfig(
            f"pooling {pooling!r} contradicts the sparse (SPLADE) model; "
            'set kind = "embedding" as well to serve the vectors of its encoder'
        )
    if wanted is own:
        return own
    if reason := _obstacle(facts, own, wanted):
        raise InvalidConfig(f'kind = "{wanted.value}" contradicts the model\'s files: {reason}')
    return wanted


def _own_kind(facts: ModelMetadata) -> Kind:
    named = facts.saved.get("model_type")
    if facts.static:
        return Kind.EMBEDDING
    if named == "SparseEncoder" or facts.chain.has("SpladePooling"):
        return Kind.SPARSE
    if named in ("MultiVectorEncoder", "ColBERT") or facts.chain.has("MultiVectorMask"):
        return Kind.MULTI_VECTOR
    if named == "CrossEncoder" or facts.chain.has("LogitScore"):
        return _scoring(facts)
    return Kind.EMBEDDING if facts.chain.modules else _kind_of_bare(facts)


def _kind_of_bare(facts: ModelMetadata) -> Kind:
    """Of a directory without modules.json: by the head that its architecture has."""
    if "HF_ColBERT" in facts.architectures:
        return Kind.MULTI_VECTOR
    for name in facts.architectures:
        if name.endswith("ForSequenceClassification"):
            return _scoring(facts)
        if name.endswith("Classification") and "id2label" in facts.config:
            raise ModelLoadFailed(
                f"{name} labels the parts of an input, not the text as a whole; such a head is not served"
            )
    if facts.has_head("ForCausalLM") and _is_called_reranker(facts):
        return Kind.RERANKER
    return Kind.EMBEDDING


def _scoring(facts: ModelMetadata) -> Kind:
    return Kind.RERANKER if is_causal(facts) or len(facts.config.get("id2label") or {}) == 1 else Kind.CLASSIFIER


def is_causal(facts: ModelMetadata) -> bool:
    """Whether scores can only come from a language model's next word."""
    if facts.chain.has("LogitScore"):
        return True
    return facts.has_head("ForCausalLM") and not facts.has_head("ForSequenceClassification")


def _is_called_reranker(facts: ModelMetadata) -> bool:
    """Whether the authors call a Qwen3 a reranker, in the first lines of its card.

    Nothing else tells Qwen3-Reranker from any other language model: its files are those of Qwen3 itself.
    """
    card = facts.root / "README.md"
    if facts.config["model_type"] != "qwen3" or not card.is_file():
        return False
    with card.open(encoding="utf-8", errors="replace") as lines:
        head = [line.strip() for line, _ in zip(lines, range(100), strict=False)]
    front = head[1 : head.index("---", 1)] if head[:1] == ["---"] and "---" in head[1:] else []
    return "pipeline_tag: text-ranking" in front


def _splade(facts: ModelMetadata, own: Kind, asked: str | None) -> Kind:
    if asked not in (None, Kind.SPARSE.value):
        raise InvalidConfig(f'pooling "splade" makes a sparse model, and kind is "{asked}"')
    if own is not Kind.SPARSE and not facts.has_head("ForMaskedLM"):
        raise InvalidConfig(f'pooling "splade" needs a masked-LM head, and the model is {_architecture(facts)}')
    return Kind.SPARSE


def _obstacle(facts: ModelMetadata, own: Kind, wanted: Kind) -> str | None:
    """Why a model of one kind cannot be served as another; None where it can."""
    if wanted is Kind.EMBEDDING:
        return "they describe a vector per token and no pooling" if own is Kind.MULTI_VECTOR else None
    if wanted is Kind.SPARSE:
        return None if facts.has_head("ForMaskedLM") else f"there is no masked-LM head in {_architecture(facts)}"
    if wanted is Kind.MULTI_VECTOR:
        return "they hold no projection of token vectors"
    if own in _SCORING:
        return _other_scoring(facts, wanted)
    if wanted is Kind.RERANKER and facts.has_head("ForCausalLM") and not facts.chain.modules:
        return None
    return f"there is no head in {_architecture(facts)} that scores texts"


def _other_scoring(facts: ModelMetadata, wanted: Kind) -> str | None:
    if wanted is Kind.RERANKER:
        return f"they have {len(facts.config.get('id2label') or {})} labels, and a reranker has one"
    return "a language model answers yes or no to pairs, and has no labels" if is_causal(facts) else None


def _architecture(facts: ModelMetadata) -> str:
    return ", ".join(facts.architectures) or f"a {facts.config['model_type']} model"
