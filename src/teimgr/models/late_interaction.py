"""Late interaction (ColBERT) models, in the formats of sentence-transformers 6, PyLate and Stanford's ColBERT."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.bounded_json import read_object
from teimgr.models.json_files import position_rows
from teimgr.models.layout import Dense, LateInteraction, Layout
from teimgr.models.metadata import ModelMetadata
from teimgr.models.modules import TOKENS, Module, read_projections

ROLES = ("query", "document")
_COLBERT_LENGTH = 32  # default length of queries in PyLate and Stanford's ColBERT
_PUNCTUATION = list(string.punctuation)
# Keys of config_sentence_transformers.json that only PyLate writes; one of them turns query expansion on by default.
_PYLATE_KEYS = {
    *("query_length", "document_length", "query_expansion", "do_query_expansion", "query_prefix", "document_prefix"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words"),
}


def read_late(metadata: ModelMetadata) -> tuple[LateInteraction, dict[str, str]]:
    """The late-interaction settings, and the prompts, with an entry for both roles.

    Raises:
        ModelLoadFailed: the files describe another or an unsupported kind of model.
    """
    if not metadata.chain.modules:
        return _stanford(metadata)
    prompts, prefix_ids = _prefixes(
        metadata, {role: metadata.saved.get(f"{role}_prefix") for role in ROLES}, metadata.prompts
    )
    late = replace(
        _with_mask(metadata) if metadata.chain.has("MultiVectorMask") else _without_mask(metadata),
        query_prefix_ids=prefix_ids["query"],
        document_prefix_ids=prefix_ids["document"],
    )
    return _with_lengths(metadata, late, {**_pylate_lengths(metadata.saved), **metadata.settings}), prompts


def with_role_lengths(layout: Layout, late: LateInteraction, texts: dict[str, Any]) -> Layout:
    """`layout` with `late` and the longest input of both roles; `texts` is the configuration of the text model.

    A role's own length counts in place of `max_seq_length`, in which PyLate leaves whatever it was set to last, but for
    the positions that there are.
    """
    own = [given for given in (late.query_length, late.document_length) if given is not None]
    longest = min(max(own, default=0), position_rows(texts))
    if longest <= layout.max_length:
        return replace(layout, late=late)
    late = replace(
        late,
        query_length=late.query_length or layout.max_length,
        document_length=late.document_length or layout.max_length,
    )
    return replace(layout, late=late, max_length=longest)


def is_pylate(metadata: ModelMetadata) -> bool:
    """True if PyLate saved a model: by its keys, as `model_type` is missing before sentence-transformers 5."""
    ours = _PYLATE_KEYS & metadata.saved.keys()
    return bool(ours) and bool(metadata.chain.modules) and not metadata.chain.has("Pooling")


def _with_mask(metadata: ModelMetadata) -> LateInteraction:
    """sentence-transformers: projections and a mask in any order, optionally a Normalize at the end."""
    before, mask, behind = metadata.chain.split_at("MultiVectorMask")
    config = mask.config()
    tasks = ["document"] if (given := config.get("skiplist_tasks")) is None else given
    if config.get("keep_only_token_ids") or (tasks and "document" not in tasks):
        raise ModelLoadFailed("a MultiVectorMask that keeps documents whole, or keeps chosen tokens, is not served")
    skip_ids = metadata.tokens.words(config.get("skiplist_words") or []) if tasks else ()
    return replace(_projected((*before[1:], *behind)), skip_ids=skip_ids, skip_in_queries="query" in tasks)


def _without_mask(metadata: ModelMetadata) -> LateInteraction:
    """PyLate: normalising and skipping punctuation are implicit."""
    if metadata.saved.get("model_type") != "ColBERT" and not is_pylate(metadata):
        raise ModelLoadFailed(f"a multi-vector model needs a MultiVectorMask, and has: {metadata.chain}")
    words = metadata.saved.get("skiplist_words")
    skip_ids = metadata.tokens.words(_PUNCTUATION if words is None else words)
    return replace(_projected(metadata.chain.behind), skip_ids=skip_ids, normalize=True)


def _projected(modules: tuple[Module, ...]) -> LateInteraction:
    normalize = bool(modules) and modules[-1].name == "Normalize"
    projections = read_projections(modules[:-1] if normalize else modules, TOKENS)
    return LateInteraction(projections, None, None, normalize=normalize)


def _pylate_lengths(saved: dict[str, Any]) -> dict[str, Any]:
    """PyLate's keys translated to those of sentence-transformers 6."""
    if not _PYLATE_KEYS & saved.keys():
        return {}
    lengths = {key: saved[key] for key in ("query_length", "document_length") if saved.get(key) is not None}
    if "query_expansion" in saved:
        return lengths | {"query_expansion": saved["query_expansion"]}
    if saved.get("do_query_expansion") is False:
        return lengths | {"query_expansion": None}
    attend = saved.get("attend_to_expansion_tokens", saved.get("attend_to_mask_tokens"))
    expansion = {"strategy": "fixed", "attend": bool(attend), "length": lengths.get("query_length") or _COLBERT_LENGTH}
    return lengths | {"query_expansion": expansion}


def _with_lengths(metadata: ModelMetadata, late: LateInteraction, lengths: dict[str, Any]) -> LateInteraction:
    late = replace(late, query_length=lengths.get("query_length"), document_length=lengths.get("document_length"))
    expansion = lengths.get("query_expansion")
    if expansion is None:
        return late
    if expansion.get("strategy") != "fixed" or not isinstance(expansion.get("length"), int):
        raise ModelLoadFailed(f"query expansion other than to a fixed length is not served: {expansion}")
    return replace(
        late,
        query_length=expansion["length"],
        expand_queries=True,
        expansion_token_id=_expansion_id(metadata, expansion.get("token")),
        attend_to_expansion=bool(expansion.get("attend")),
    )


def _expansion_id(metadata: ModelMetadata, token: str | None) -> int:
    tokens = metadata.tokens
    found = tokens.id(token) if token else tokens.special("mask_token")
    if found is None and token is None:
        found = tokens.special("eos_token")  # decoders lack a mask token
    if found is None:
        raise ModelLoadFailed(f"queries are filled with {token or 'a mask token'}, which the tokenizer does not have")
    return found


def _prefixes(
    metadata: ModelMetadata, prefixes: dict[str, Any], prompts: dict[str, str]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Prompts and prefix ids by role: a prefix that is a token becomes an id, any other goes before the prompt."""
    texts = {**prompts, **{role: prompts.get(role, "") for role in ROLES}}
    ids: dict[str, tuple[int, ...]] = dict.fromkeys(ROLES, ())
    for role in ROLES:
        prefix = prefixes[role] or ""
        rest = texts[role].removeprefix(prefix)
        id, left = _as_token(metadata, prefix)
        ids[role] = () if id is None else (id,)
        texts[role] = left + rest
    return texts, ids


def _as_token(metadata: ModelMetadata, prefix: str) -> tuple[int | None, str]:
    """Return the id of a prefix that is, or starts with, a token, and the rest of it as text."""
    if not prefix.strip():
        return None, prefix
    word = prefix.split(None, 1)[0]
    for token in (prefix, word):
        id = metadata.tokens.id(token) if prefix.startswith(token) else None
        if id is not None:
            left = prefix[len(token) :]
            return id, "" if left.isspace() and metadata.tokens.drops_spaces else left
    return None, prefix


def _stanford(metadata: ModelMetadata) -> tuple[LateInteraction, dict[str, str]]:
    """Stanford: weights of encoder and projection in one file, settings in artifact.metadata."""
    if "HF_ColBERT" not in metadata.architectures:
        raise ModelLoadFailed(
            "the model has neither the modules of a multi-vector model nor the HF_ColBERT architecture"
        )
    artifact = read_object(metadata.root / "artifact.metadata") or {}
    marks = {
        "query": f"{artifact.get('query_token_id') or '[unused0]'} ",
        "document": f"{artifact.get('doc_token_id') or '[unused1]'} ",
    }
    prompts, prefix_ids = _prefixes(metadata, marks, metadata.prompts)
    words = _PUNCTUATION if artifact.get("mask_punctuation", True) else []
    # `linear.weight` is in the encoder's file; its width is 128 if artifact.metadata lacks it.
    width, identity = int(artifact.get("dim") or 128), "torch.nn.modules.linear.Identity"
    projection = Dense(metadata.root, int(metadata.config["hidden_size"]), width, bias=False, activation=identity)
    late = LateInteraction(
        projections=(projection,),
        query_length=None,
        document_length=None,
        skip_ids=metadata.tokens.words(words),
        query_prefix_ids=prefix_ids["query"],
        document_prefix_ids=prefix_ids["document"],
    )
    expansion = {
        "strategy": "fixed",
        "attend": bool(artifact.get("attend_to_mask_tokens")),
        "length": artifact.get("query_maxlen") or _COLBERT_LENGTH,
    }
    lengths = {"document_length": artifact.get("doc_maxlen"), "query_expansion": expansion}
    return _with_lengths(metadata, late, lengths), prompts
