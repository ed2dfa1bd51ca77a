"""Listwise rerankers: one prompt holds a query and all its documents, and the hidden states at a mark behind each of
them are compared. jina-reranker-v3 is the one that is known.
"""

from __future__ import annotations

from typing import Any

from teimgr.errors import ModelLoadFailed
from teimgr.models.json_files import ENDLESS, checked_length
from teimgr.models.layout import Dense, Listwise
from teimgr.models.metadata import ModelMetadata
from teimgr.models.modules import IDENTITY
from teimgr.models.own_code import references

ARCHITECTURE = "JinaForRanking"
_RELU = "torch.nn.modules.activation.ReLU"
TEMPLATE_TOKENS = 8192
"""The most that the words around texts add to a prompt, beyond the capacity that its authors count texts by."""
_WIDTH = 512  # of what is compared, whatever the width of the hidden states
_DOCUMENT_MARK, _QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"


def is_listwise(metadata: ModelMetadata) -> bool:
    """Whether scores depend on all documents of a request."""
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
            f"the model is a {ARCHITECTURE} with a sliding window, as jina-reranker-v3.5, whose prompt is another one "
            "and is not served; jina-reranker-v3 is"
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
