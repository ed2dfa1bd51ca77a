"""The instances that the cases are for: tiny models of every kind, the real MiniLM, all under one daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conformance.words import API_KEY, ORIGIN, POISON
from tests.support import models
from tests.support.daemon_process import MINILM, DaemonProcess

STARTING_LIMIT_S = 100.0
PROMPTS = {"query": "query: "}


@dataclass(frozen=True)
class Model:
    """How a model is written, TEI's flags and the keys that it is served with; without `build` the real MiniLM."""

    build: Callable[[Path], Path] | None = None
    flags: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)


def _with(build: Callable[[Path], Path], **values: Callable[[torch.Tensor, Path], None]) -> Callable[[Path], Path]:
    """`build`, and then weights changed in place by functions of the tensor and the folder."""

    def make(folder: Path) -> Path:
        build(folder)
        [file] = (path for path in folder.rglob("*.safetensors") if _has(path, values))
        weights = load_file(file)
        for name, change in values.items():
            [found] = (key for key in weights if key.endswith(name.replace("__", ".")))
            change(weights[found], folder)
        save_file(weights, file, metadata={"format": "pt"})
        return folder

    return make


def _has(path: Path, values: Mapping[str, Any]) -> bool:
    return all(any(key.endswith(name.replace("__", ".")) for key in load_file(path)) for name in values)


def _poison(weights: torch.Tensor, folder: Path) -> None:
    """The text POISON is one token of every tokenizer here; its row is no number."""
    import transformers

    weights[transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(POISON)] = torch.nan


def _set(*values: float) -> Callable[[torch.Tensor, Path], None]:
    return lambda weights, _: weights.copy_(torch.tensor(values))  # type: ignore[func-returns-value]


def _forget_the_unknown(weights: torch.Tensor, folder: Path) -> None:
    """The row of [UNK] becomes zero."""
    weights[1] = 0.0


def _embedding(folder: Path) -> Path:
    return models.build("bert", folder, prompts=PROMPTS)


def _classifier(folder: Path) -> Path:
    return models.build_classifier("bert", folder)


def _reranker(folder: Path) -> Path:
    return models.build_cross_encoder("bert", folder)


MODELS: Mapping[str, Model] = {
    "embedding": Model(_embedding, ("--served-model-name", "my-embedding", "--revision", "v7")),
    "strict": Model(
        _embedding,
        (
            *("--auto-truncate", "false", "--max-client-batch-size", "4", "--payload-limit", "20000"),
            *("--max-concurrent-requests", "1"),
        ),
        {"max_waiting": 4},
    ),
    "prompted": Model(_embedding, ("--default-prompt-name", "query")),
    "locked": Model(_embedding, ("--api-key", API_KEY, "--cors-allow-origin", ORIGIN)),
    "cls": Model(lambda folder: models.build("roberta", folder, pooling="cls")),
    "decoder": Model(lambda folder: models.build("qwen3", folder)),
    "static": Model(_with(models.build_static, embedding__weight=_forget_the_unknown)),
    "m3": Model(models.build_m3),
    "sparse": Model(lambda folder: models.build_splade("bert", folder)),
    "multi-vector": Model(lambda folder: models.build_multi_vector("bert", folder)),
    "reranker": Model(_reranker),
    "prompted-reranker": Model(_reranker, ("--default-prompt", "query: ")),
    "certain-reranker": Model(_with(_reranker, classifier__bias=_set(100.0))),
    "classifier": Model(_classifier),
    "steep-classifier": Model(_with(_classifier, classifier__bias=_set(-1e4, 1e4, -1e4))),
    "multi-label": Model(
        _with(
            lambda folder: models.build_classifier("bert", folder, multi_label=True),
            classifier__bias=_set(100.0, 100.0, 0.0),
        )
    ),
    "poisoned": Model(_with(_embedding, word_embeddings__weight=_poison)),
    "poisoned-classifier": Model(_with(_classifier, word_embeddings__weight=_poison)),
    "minilm": Model(),
    "minilm-cls": Model(flags=("--pooling", "cls")),
}


def create(daemon: DaemonProcess, folder: Path) -> None:
    """Make every instance and wait until all of them run."""
    with daemon.client() as client:
        for name, model in MODELS.items():
            path = MINILM if model.build is None else str(model.build(folder / name))
            client.create(name, path, dtype="float32", prometheus_port=0, extra_args=model.flags, **model.keys)
        for name in MODELS:
            client.wait_until_running(name, deadline_s=STARTING_LIMIT_S)
