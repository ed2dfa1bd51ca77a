"""`/info`: what is served and on what terms."""

from __future__ import annotations

from typing import Any

from teimgr import __version__
from teimgr.spec import ModelInfo
from teimgr.worker.tei.inference import Served


def info(served: Served) -> dict[str, Any]:
    """What TEI says, in its order, and teimgr's own facts after it."""
    spec, model = served.spec, served.model
    return {
        "model_id": model.model_id,
        "model_sha": model.model_sha,
        "model_dtype": model.dtype,
        "served_model_name": served.name,
        "model_type": _model_type(model),
        "max_concurrent_requests": spec.max_concurrent_requests,
        "max_input_length": model.max_input_length,
        "max_batch_tokens": model.max_batch_tokens,
        "max_batch_requests": spec.max_batch_requests,
        "max_client_batch_size": spec.max_client_batch_size,
        "auto_truncate": spec.auto_truncate,
        "tokenization_workers": model.tokenization_workers,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "kind": model.kind,
        "outputs": list(model.outputs),
        "dimension": model.dimension,
        "multi_vector_dimension": model.multi_vector_dimension,
        "token_dimension": model.token_dimension,
        "activation": model.activation,
        "commit": model.commit,
        "device": model.device,
        "batching": model.batching,
        "prompts": list(model.prompts),
        "default_prompt_name": model.default_prompt_name,
    }


def _model_type(model: ModelInfo) -> dict[str, Any]:
    """TEI knows three kinds; everything that gives vectors is an embedding model to it."""
    if model.kind not in ("classifier", "reranker"):
        return {"embedding": {"pooling": model.pooling}}
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    return {model.kind: labels}
