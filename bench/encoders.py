"""What runs in a child process: each turns texts into vectors in its own way."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Task:
    """What a child is to measure. `kind` is a name in `KINDS`; `grpc` and `instance` are for the one that calls us."""

    kind: str
    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 32
    grpc: str = ""
    instance: str = ""


class Encoder(Protocol):
    """Loaded by its constructor. `dtype` is what it really computes in."""

    dtype: str

    def encode(self, texts: list[str]) -> Any:
        """Unit vectors, float32 [n, dim], on the host."""


class SentenceTransformers:
    """`SentenceTransformer.encode` as its users call it."""

    def __init__(self, task: Task) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.dtype = task.dtype
        kinds = {"torch_dtype": getattr(torch, task.dtype)}
        self._model = SentenceTransformer(task.model, device=task.device, model_kwargs=kinds)
        self._batch_size = task.batch_size

    def encode(self, texts: list[str]) -> Any:
        """By its defaults, apart from the batch size and the progress bar."""
        vectors = self._model.encode(
            texts, batch_size=self._batch_size, normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(vectors, np.float32)


class Padded:
    """The same method by hand, for machines without sentence-transformers: sorted by length, padded, mean pooling."""

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.dtype = task.dtype
        self._torch, self._task = torch, task
        self._tokenizer = AutoTokenizer.from_pretrained(task.model)
        model = AutoModel.from_pretrained(task.model, dtype=getattr(torch, task.dtype))
        self._model = model.to(task.device).eval()

    def encode(self, texts: list[str]) -> Any:
        """Longest first, `batch_size` at a time."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        size = self._task.batch_size
        with self._torch.inference_mode():
            parts = [
                self._batch([texts[index] for index in order[start : start + size]])
                for start in range(0, len(order), size)
            ]
        vectors = np.concatenate([part.float().cpu().numpy() for part in parts])
        return vectors[np.argsort(order)]

    def _batch(self, texts: list[str]) -> Any:
        longest = {"truncation": True, "max_length": _longest(Path(self._task.model))}
        inputs = self._tokenizer(texts, padding=True, return_tensors="pt", **longest).to(self._task.device)
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return self._torch.nn.functional.normalize(pooled, dim=1)


class Bare:
    """teimgr's engine in this process, without any server."""

    def __init__(self, task: Task) -> None:
        from teimgr.engine.engine import Engine, EngineOptions

        options = EngineOptions(
            path=Path(task.model),
            model_id=Path(task.model).name,
            device=task.device,
            dtype=task.dtype,
            threads=len(os.sched_getaffinity(0)),
            max_queued_tokens=100_000_000,
        )
        self._delivered = threading.Event()
        self._engine = Engine.load(options, lambda jobs: self._delivered.set())
        self.dtype = self._engine.info.dtype

    def encode(self, texts: list[str]) -> Any:
        """All texts as one bulk job."""
        from teimgr.engine.job import InferOptions, Job, Lane

        self._delivered.clear()
        job = Job(texts, InferOptions(), Lane.BULK)
        self._engine.submit(job)
        self._delivered.wait()
        if job.errors:
            raise next(iter(job.errors.values()))
        return job.vectors


class Served:
    """teimgr's daemon through `EmbedArrow`, by teimgr's own client."""

    def __init__(self, task: Task) -> None:
        from teimgr.client import Client

        self._client = Client(grpc=task.grpc, timeout_s=600).__enter__()
        self._instance = task.instance
        self.dtype = self._client.info(instance=task.instance).dtype

    def encode(self, texts: list[str]) -> Any:
        """As many batches as the client makes of it, two in flight."""
        return self._client.embed_arrow(texts, instance=self._instance).checked()


KINDS: dict[str, type[Any]] = {
    "sentence-transformers": SentenceTransformers,
    "padded": Padded,
    "engine": Bare,
    "served": Served,
}


def _longest(model: Path) -> int:
    longest: int = json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"]
    return longest
