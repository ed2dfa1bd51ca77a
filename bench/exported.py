"""An encoder with its head as one graph for other runtimes, and OpenVINO (ONNX Runtime: `onnx_graph`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import corpus
from bench.encoders import Task, Tokens
from bench.weights import architecture


def _mean(model: Any, hidden: Any, mask: Any) -> Any:
    """Vectors of length 1."""
    from torch.nn import functional

    kept = mask.unsqueeze(-1).float()
    return functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)


def _score(model: Any, hidden: Any, mask: Any) -> Any:
    """Scores of XLM-RoBERTa's head, which reads the first token."""
    return model.classifier(hidden).sigmoid()


def _splade(model: Any, hidden: Any, mask: Any) -> Any:
    """Weights with their zeros. Padding repeats the first token, which changes no maximum."""
    tokens = hidden.where(mask.unsqueeze(-1).bool(), hidden[:, :1])
    return model.cls(tokens).amax(1).relu().log1p()


_HEADS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "BertModel": _mean,
    "XLMRobertaForSequenceClassification": _score,
    "BertForMaskedLM": _splade,
}
"""By the class of the model: results for each text from the model, its hidden states and its mask."""


def _attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attention as transformers' own, with scores divided in place of multiplied: the form in which ONNX Runtime's
    transformers tool looks for it."""
    scores = query @ key.transpose(2, 3) / (1.0 / scaling) + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def graph(folder: Path) -> Any:
    """The model in `folder` with its head, as a torch module of token ids and their mask.

    It calls transformers' own layers with an additive mask, so that lengths stay free when it is traced.
    """
    import torch
    import transformers

    transformers.AttentionInterface.register("divided", _attention)
    name = architecture(folder)
    head = _HEADS[name]

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = getattr(transformers, name)
            self.model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            self.model.config._attn_implementation = "divided"

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model.base_model.embeddings(input_ids=input_ids)
            mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e4
            for layer in self.model.base_model.encoder.layer:
                result = layer(hidden, mask)
                hidden = result[0] if isinstance(result, tuple) else result
            return head(self.model, hidden, attention_mask)

    return Graph().eval().requires_grad_(False)


_PADDED_TOKENS = 2048  # of a batch
_FEWEST_PADDED_TOKENS = 256  # of a batch that is smaller so that there are more of them


def batched(lengths: Sequence[int], at_once: int) -> list[list[int]]:
    """Indices of texts in batches of 2,048 padded tokens, shortest first.

    Where there are few texts the batches are smaller, so that a runtime that computes `at_once` of them side by side
    has two for each; with one batch at once they stay as they are.
    """
    budget = _PADDED_TOKENS
    if at_once > 1:
        budget = min(budget, max(_FEWEST_PADDED_TOKENS, sum(lengths) // (2 * at_once)))
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if lengths[index] * (len(batches[-1]) + 1) > budget and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    return batches


class Exported:
    """The graph of a model in another runtime: sorted by length, batches of a number of padded tokens."""

    at_once = 1  # batches that are computed side by side

    def __init__(self, task: Task) -> None:
        import torch

        self.dtype = task.dtype
        self._tokens = Tokens(Path(task.model))
        self._threads = len(os.sched_getaffinity(0))
        self._module = graph(Path(task.model))
        self._example = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)

    def encode(self, texts: list[str]) -> Any:
        """Shortest first; sparse weights with their zeros."""
        encoded = self._tokens(texts)
        batches = batched([len(ids) for ids in encoded], self.at_once)
        results: Any = None
        for batch, found in zip(
            batches, self._run_all([self._padded(encoded, batch) for batch in batches]), strict=True
        ):
            results = np.empty((len(encoded), found.shape[1]), np.float32) if results is None else results
            results[batch] = found
        return results

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
    """OpenVINO's CPU plugin with its throughput hint, in the precision of the task; int8 by NNCF's quantisation."""

    hint = "THROUGHPUT"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import openvino

        settings = {"PERFORMANCE_HINT": self.hint, "INFERENCE_NUM_THREADS": self._threads}
        if task.dtype == "int8":  # what is not quantised is computed in the plugin's own choice
            model, self.note = self._quantised(task)
        else:
            model = self._converted()
            settings["INFERENCE_PRECISION_HINT"] = {"bfloat16": "bf16", "float32": "f32"}[task.dtype]
        self._queue = openvino.AsyncInferQueue(openvino.Core().compile_model(model, "CPU", settings))
        self.at_once = len(self._queue)

    def _converted(self) -> Any:
        import openvino

        shapes = [openvino.PartialShape([-1, -1])] * 2
        return openvino.convert_model(self._module, example_input=self._example, input=shapes)

    def _quantised(self, task: Task) -> tuple[Any, str]:
        """The model after NNCF's calibration, from the cache of the run if an entrant before this one made it, and
        how it was made."""
        import nncf
        import openvino

        made = Path(task.cache or ".") / "openvino-int8.xml"
        note = f"NNCF's post-training quantisation for transformers, calibrated with {task.calibration_texts} texts"
        if task.cache and made.exists():
            return openvino.Core().read_model(made), note
        encoded = self._tokens(corpus.some(task.calibration_texts + 1))
        samples = nncf.Dataset([list(self._padded(encoded, [index])) for index in range(len(encoded))])
        kind = nncf.ModelType.TRANSFORMER
        model = nncf.quantize(self._converted(), samples, model_type=kind, subset_size=task.calibration_texts)
        if task.cache:
            openvino.save_model(model, made, compress_to_fp16=False)
        return model, note

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
