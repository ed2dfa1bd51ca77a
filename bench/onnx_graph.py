"""An encoder with its head in ONNX Runtime, with the fusions of its transformers tool where they help."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.encoders import Task
from bench.exported import Exported

_MIN_COSINE = 0.9999  # of the fused graph's results to those of the plain one
_TRIED = ((4, 64), (16, 16))  # texts and tokens of the batches by which two graphs are compared
_TRIES = 3
_INPUTS = ("input_ids", "attention_mask")
_FIRST_WORD, _END_WORD = 1000, 28_000  # ids of ordinary words in BERT's vocabulary

Batch = tuple[Any, Any]


class OnnxRuntime(Exported):
    """ONNX Runtime's CPU provider with all its graph optimisations: float32, or int8 by its dynamic quantisation.

    Of the graph as it is and the graph fused by `onnxruntime.transformers.optimizer`, the faster one at load; the plain
    one where the fused one gives other results or cannot be made. `note` says which and why.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plain = self._exported(folder)
            try:
                fused, counts = _fused(plain, Path(task.model))
                _check_same(self._session_of(plain), self._session_of(fused))
                both = [self._session_of(self._in_dtype(path)) for path in (plain, fused)]
            except Exception as error:  # the tool fails in ways of its own with graphs that it does not know
                self.note = f"plain graph: {type(error).__name__}: {error}"
                self._session = self._session_of(self._in_dtype(plain))
                return
        plain_s, fused_s = _seconds(both)
        chosen = "fused" if fused_s < plain_s else "plain"
        self.note = f"{chosen} graph, in a warm-up fused {plain_s / fused_s:.2f} × as fast as plain; fused: {counts}"
        self._session = both[chosen == "fused"]

    def _exported(self, folder: Path) -> Path:
        import torch

        path, free = folder / "model.onnx", {0: "texts", 1: "length"}
        names: dict[str, Any] = {"input_names": list(_INPUTS), "output_names": ["results"]}
        axes = dict.fromkeys(_INPUTS, free) | {"results": {0: "texts"}}
        with warnings.catch_warnings(action="ignore"):  # tracing and this way of exporting warn of themselves
            torch.onnx.export(
                self._module, self._example, path, dynamo=False, opset_version=17, dynamic_axes=axes, **names
            )
        return path

    def _in_dtype(self, path: Path) -> Path:
        """The graph, quantised where the task is int8."""
        if self.dtype != "int8":
            return path
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantised = path.with_name(f"int8-{path.name}")
        untyped = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # of results of the fused operators
        quantize_dynamic(path, quantised, per_channel=True, weight_type=QuantType.QInt8, extra_options=untyped)
        return quantised

    def _session_of(self, path: Path) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def _run_all(self, batches: list[Batch]) -> list[Any]:
        return [_run(self._session, batch) for batch in batches]


def _fused(plain: Path, model: Path) -> tuple[Path, str]:
    """The graph as the transformers tool makes it, and how many of its operators it has.

    Raises:
        RuntimeError: it found no attention.
    """
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    config = json.loads((model / "config.json").read_text())
    made = optimizer.optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        optimization_options=FusionOptions("bert"),
        opt_level=0,
    )
    counts = {name: count for name, count in made.get_fused_operator_statistics().items() if count}
    if not counts.get("Attention"):
        raise RuntimeError(f"the transformers tool found no attention, but {counts or 'nothing'}")
    path = plain.with_name("fused.onnx")
    made.save_model_to_file(str(path))
    return path, ", ".join(f"{count} {name}" for name, count in counts.items())


def _check_same(plain: Any, fused: Any) -> None:
    """Compare results of texts of different lengths in a batch.

    Raises:
        RuntimeError: they differ.
    """
    for batch in _batches():
        ours, theirs = _run(fused, batch), _run(plain, batch)
        if ours.shape[1] == 1:
            closeness = 1.0 - float(np.abs(ours - theirs).max())
        else:
            lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            closeness = float(((ours * theirs).sum(axis=1) / lengths).min())
        if not closeness >= _MIN_COSINE:
            raise RuntimeError(f"the fused graph gives other results, {closeness:.5f}")


def _seconds(sessions: Sequence[Any]) -> list[float]:
    """The shortest time of each for the batches, taking turns."""
    spent = [float("inf")] * len(sessions)
    for attempt in range(_TRIES + 1):
        for number, session in enumerate(sessions):
            began = time.perf_counter()
            for batch in _batches():
                _run(session, batch)
            if attempt:  # the first warms up
                spent[number] = min(spent[number], time.perf_counter() - began)
    return spent


def _batches() -> list[Batch]:
    """Batches of random words, the last text of each half as long as the others."""
    chooser, found = np.random.default_rng(0), []
    for texts, length in _TRIED:
        ids, mask = chooser.integers(_FIRST_WORD, _END_WORD, (texts, length)), np.ones((texts, length), np.int64)
        ids[-1, length // 2 :], mask[-1, length // 2 :] = 0, 0
        found.append((ids, mask))
    return found


def _run(session: Any, batch: Batch) -> Any:
    return session.run(None, dict(zip(_INPUTS, batch, strict=True)))[0]
