"""What runs in a child process: each turns texts into vectors in its own way."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Task:
    """What a child is to measure. `kind` is a name in `KINDS`; `threads` are the engine's, 0 for those of all cores;
    `grpc` and `instance` are for the one that calls us."""

    kind: str
    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 32
    threads: int = 0
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


class Exported:
    """A BERT with mean pooling as one graph of another runtime: sorted by length, batches of a number of padded tokens.

    The graph is traced from transformers' own layers with an additive mask, so that lengths stay free in it.
    """

    padded_tokens = 2048

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(task.model)
        self._longest = _longest(Path(task.model))
        self._threads = len(os.sched_getaffinity(0))
        model = AutoModel.from_pretrained(task.model, dtype=torch.float32, attn_implementation="eager").eval()

        class Pooled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embeddings, self.layers = model.embeddings, model.encoder.layer

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                hidden = self.embeddings(input_ids=input_ids)
                mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
                for layer in self.layers:
                    result = layer(hidden, mask)
                    hidden = result[0] if isinstance(result, tuple) else result
                kept = attention_mask.unsqueeze(-1).float()
                return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)

        self._torch, self._module = torch, Pooled().eval()
        self._example = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)

    def encode(self, texts: list[str]) -> Any:
        """Shortest first."""
        encoded = self._tokenizer(texts, truncation=True, max_length=self._longest)["input_ids"]
        order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
        batches: list[list[int]] = [[]]
        for index in order:
            if len(encoded[index]) * (len(batches[-1]) + 1) > self.padded_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(index)
        vectors: Any = None
        for batch, found in zip(
            batches, self._run_all([self._padded(encoded, batch) for batch in batches]), strict=True
        ):
            vectors = np.empty((len(texts), found.shape[1]), np.float32) if vectors is None else vectors
            vectors[batch] = found
        return vectors

    def _run_all(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        raise NotImplementedError

    @staticmethod
    def _padded(encoded: list[list[int]], batch: list[int]) -> tuple[Any, Any]:
        longest = max(len(encoded[index]) for index in batch)
        ids, mask = np.zeros((2, len(batch), longest), np.int64)
        for row, index in enumerate(batch):
            ids[row, : len(encoded[index])] = encoded[index]
            mask[row, : len(encoded[index])] = 1
        return ids, mask


class OpenVino(Exported):
    """OpenVINO's CPU plugin with its throughput hint, in the precision of the task."""

    hint = "THROUGHPUT"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import openvino

        self.dtype = task.dtype
        shapes = [openvino.PartialShape([-1, -1])] * 2
        graph = openvino.convert_model(self._module, example_input=self._example, input=shapes)
        settings = {
            "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[task.dtype],
            "PERFORMANCE_HINT": self.hint,
            "INFERENCE_NUM_THREADS": self._threads,
        }
        self._queue = openvino.AsyncInferQueue(openvino.Core().compile_model(graph, "CPU", settings))

    def _run_all(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        found: list[Any] = [None] * len(batches)

        def keep(request: Any, at: int) -> None:
            found[at] = request.get_output_tensor().data.copy()

        self._queue.set_callback(keep)
        for at, batch in enumerate(batches):
            self._queue.start_async(list(batch), at)
        self._queue.wait_all()
        return found


class OpenVinoLatency(OpenVino):
    """As `OpenVino`, one batch at a time on all cores."""

    hint = "LATENCY"


class OnnxRuntime(Exported):
    """ONNX Runtime's CPU provider with all its graph optimisations: float32, or int8 by its dynamic quantisation."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import onnxruntime

        self.dtype = task.dtype
        free = {0: "texts", 1: "length"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["vectors"]}
            axes = {"input_ids": free, "attention_mask": free, "vectors": {0: "texts"}}
            self._torch.onnx.export(
                self._module, self._example, path, dynamo=False, opset_version=17, dynamic_axes=axes, **names
            )
            if task.dtype == "int8":
                from onnxruntime.quantization import QuantType, quantize_dynamic

                path, exported = Path(folder) / "int8.onnx", path
                quantize_dynamic(exported, path, per_channel=True, weight_type=QuantType.QInt8)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self._threads
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def _run_all(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        return [self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0] for ids, mask in batches]


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
            max_queued_tokens=100_000_000,
        )
        self._delivered = threading.Event()
        self._engine = Engine.load(options, lambda jobs: self._delivered.set())
        self.dtype = self._engine.info.dtype

    def encode(self, texts: list[str]) -> Any:
        """All texts as one bulk job."""
        return self._job(texts, is_bulk=True)

    def query(self, text: str) -> Any:
        """One text as an interactive job."""
        return self._job([text], is_bulk=False)

    def _job(self, texts: list[str], is_bulk: bool) -> Any:
        from teimgr.engine.job import InferOptions, Job, Lane

        self._delivered.clear()
        job = Job(texts, InferOptions(), Lane.BULK if is_bulk else Lane.INTERACTIVE)
        self._engine.submit(job)
        self._delivered.wait()
        if job.errors:
            raise next(iter(job.errors.values()))
        return job.vectors

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close(grace_s=5.0)


class Products:
    """The matrix products of a BERT's linear layers alone, by oneDNN, for as many tokens as the texts have.

    No forward that multiplies in this type with this library can be faster: it is what the others are a fraction of.
    Attention's own products are not in it. The vectors are zeros.
    """

    _TOKENS = 2048  # of a batch

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoConfig, AutoTokenizer

        from teimgr.engine.backbone import PackedLinear

        self.dtype = task.dtype
        self._torch, self._longest = torch, _longest(Path(task.model))
        self._tokenizer = AutoTokenizer.from_pretrained(task.model)
        config, dtype = AutoConfig.from_pretrained(task.model), getattr(torch, task.dtype)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        hidden, wide = config.hidden_size, config.intermediate_size
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden))
        self._layers = [PackedLinear(torch.nn.Linear(*shape), dtype) for shape in shapes] * config.num_hidden_layers
        self._rows = {size: torch.randn(self._TOKENS, size).to(dtype) for size in (hidden, wide)}

    def encode(self, texts: list[str]) -> Any:
        """Zeros [texts, 1]."""
        encoded = self._tokenizer(texts, truncation=True, max_length=self._longest)["input_ids"]
        left = sum(map(len, encoded))
        with self._torch.inference_mode():
            while left > 0:
                for layer in self._layers:
                    layer(self._rows[layer.in_features][:left])
                left -= self._TOKENS
        return np.zeros((len(texts), 1), np.float32)


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
        pairs = [(texts[0], text) for text in texts[1:]]
        scores = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        return np.asarray(scores, np.float32).reshape(-1, 1)


class Reranked(Served):
    """teimgr's daemon through `Rerank`: one call."""

    def encode(self, texts: list[str]) -> Any:
        """Scores [texts - 1, 1]."""
        ranks = self._client.rerank(texts[0], texts[1:], instance=self._instance)
        scores = {rank.index: rank.score for rank in ranks}
        return np.array([[scores[index]] for index in range(len(texts) - 1)], np.float32)


KINDS: dict[str, type[Any]] = {
    "sentence-transformers": SentenceTransformers,
    "padded": Padded,
    "openvino": OpenVino,
    "openvino-latency": OpenVinoLatency,
    "onnxruntime": OnnxRuntime,
    "engine": Bare,
    "products": Products,
    "served": Served,
    "streamed": Streamed,
    "cross-encoder": CrossEncoder,
    "reranked": Reranked,
}


def _longest(model: Path) -> int:
    longest: int = json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"]
    return longest
