"""What runs in a child process: each turns texts into vectors, scores or sparse weights in its own way."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench import weights


@dataclass(frozen=True)
class Task:
    """What a child is to measure. `kind` is a name in `child.KINDS`; `threads` are the engine's, 0 for those of all
    cores; `grpc` is an address of gRPC and `instance` the instance's name, `http` a host with its port, for those that
    call us. `cache` is a folder for what several tasks of a run make alike, `calibration_texts` how many texts a
    quantisation is calibrated with.
    """

    kind: str
    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 32
    threads: int = 0
    grpc: str = ""
    instance: str = ""
    http: str = ""
    cache: str = ""
    calibration_texts: int = 128


class Encoder(Protocol):
    """Loaded by its constructor. `dtype` is what it really computes in."""

    dtype: str

    def encode(self, texts: list[str]) -> Any:
        """Unit vectors, float32 [n, dim], or a reranker's scores [n - 1, 1], on the host; or what has `to_dense`."""


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


class SparseEncoder:
    """sentence-transformers' `SparseEncoder.encode` as its users call it."""

    def __init__(self, task: Task) -> None:
        import torch
        from sentence_transformers import SparseEncoder

        self.dtype = task.dtype
        kinds = {"torch_dtype": getattr(torch, task.dtype)}
        self._model = SparseEncoder(task.model, device=task.device, model_kwargs=kinds)
        self._batch_size = task.batch_size

    def encode(self, texts: list[str]) -> Any:
        """A sparse tensor [n, vocabulary], in float32: numpy has no bfloat16."""
        return self._model.encode(texts, batch_size=self._batch_size, show_progress_bar=False).float()


class Tokens:
    """The tokenizer of a model, for encoders that make batches themselves."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._longest = weights.longest_input(folder)
        self._is_reranker = weights.is_reranker(folder)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, of a reranker of each pair, cut at the longest input."""
        sides = ([texts[0]] * (len(texts) - 1), texts[1:]) if self._is_reranker else (texts,)
        found: list[list[int]] = self._tokenizer(*sides, truncation=True, max_length=self._longest)["input_ids"]
        return found


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
        longest = {"truncation": True, "max_length": weights.longest_input(Path(self._task.model))}
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
            threads=task.threads or len(os.sched_getaffinity(0)),
            lane_limit_tokens=100_000_000,
        )
        self._delivered = threading.Event()
        self._engine = Engine.load(options, lambda jobs: self._delivered.set())
        self.dtype = self._engine.info.dtype

    def encode(self, texts: list[Any]) -> Any:
        """All texts as one bulk job: vectors, of a reranker scores [texts - 1, 1], of a sparse model `SparseRows`."""
        return self._job(texts, is_bulk=True)

    def query(self, text: str) -> Any:
        """One text as an interactive job."""
        return self._job([text], is_bulk=False)

    def _job(self, texts: list[Any], is_bulk: bool) -> Any:
        from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair
        from teimgr.spec import Kind

        kind = Kind(self._engine.info.kind)
        known = {Kind.RERANKER: Output.SCORES, Kind.SPARSE: Output.SPARSE, Kind.MULTI_VECTOR: Output.MULTI_VECTOR}
        output = known.get(kind, Output.DENSE)
        inputs: list[Any] = [Pair(*pair) for pair in weights.pairs(texts)] if kind is Kind.RERANKER else texts
        self._delivered.clear()
        job = Job(inputs, InferOptions(frozenset({output})), Lane.BULK if is_bulk else Lane.INTERACTIVE)
        self._engine.submit(job)
        self._delivered.wait()
        if job.errors:
            raise next(iter(job.errors.values()))
        if output is Output.SPARSE:
            return SparseRows(job.sparse, self._engine.info.dimension)
        if output is Output.MULTI_VECTOR:
            return np.stack([rows.reshape(-1) for rows in job.multi_vectors if rows is not None])
        return job.scores if output is Output.SCORES else job.vectors

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close(grace_s=5.0)


@dataclass(frozen=True)
class SparseRows:
    """Sparse results of the engine, of `width` numbers each with their zeros."""

    rows: list[Any]
    width: int

    def to_dense(self) -> Any:
        """float32 [n, width]."""
        dense = np.zeros((len(self.rows), self.width), np.float32)
        for at, row in enumerate(self.rows):
            dense[at, row.indices] = row.values
        return dense


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


class Streamed(Served):
    """teimgr's daemon through `EmbedStream`, by teimgr's own client."""

    def encode(self, texts: list[str]) -> Any:
        """A message for each text."""
        return np.stack(list(self._client.embed_stream(texts, instance=self._instance)))


class CrossEncoder:
    """sentence-transformers' `CrossEncoder`: how well each text answers the first one."""

    def __init__(self, task: Task) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        self.dtype = task.dtype
        kinds = {"torch_dtype": getattr(torch, task.dtype)}
        self._model = CrossEncoder(task.model, device=task.device, max_length=512, model_kwargs=kinds)
        self._batch_size = task.batch_size

    def encode(self, texts: list[str]) -> Any:
        """Scores [texts - 1, 1]."""
        scores = self._model.predict(weights.pairs(texts), batch_size=self._batch_size, show_progress_bar=False)
        return np.asarray(scores, np.float32).reshape(-1, 1)


class Reranked(Served):
    """teimgr's daemon through `Rerank`: one call."""

    def encode(self, texts: list[str]) -> Any:
        """Scores [texts - 1, 1]."""
        ranks = self._client.rerank(texts[0], texts[1:], instance=self._instance)
        scores = {rank.index: rank.score for rank in ranks}
        return np.array([[scores[index]] for index in range(len(texts) - 1)], np.float32)
