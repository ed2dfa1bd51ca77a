"""`python -m bench.child TASK`: one encoder in a process of its own, with commands as lines of JSON.

    {"texts": FILE}    load the texts of a JSON file, and warm up on the first of them
    {"pass": null}     encode them all              → {"seconds": s, "cpu_seconds": s}
    {"save": FILE}     encode them all, keep the results as .npy
    {"memory": null}                                → {"peak_rss_mib": m, "unique_mib": m}

The first line it writes, when it is loaded, is {"dtype": name, "load_seconds": s}; a failure is {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench import encoders, exported
from bench.encoders import Encoder, Task
from bench.machine import peak_rss_mib, unique_mib

KINDS: dict[str, type[Any]] = {
    "sentence-transformers": encoders.SentenceTransformers,
    "sparse-encoder": encoders.SparseEncoder,
    "cross-encoder": encoders.CrossEncoder,
    "padded": encoders.Padded,
    "openvino": exported.OpenVino,
    "openvino-latency": exported.OpenVinoLatency,
    "onnxruntime": exported.OnnxRuntime,
    "engine": encoders.Bare,
    "products": encoders.Products,
    "served": encoders.Served,
    "streamed": encoders.Streamed,
    "reranked": encoders.Reranked,
}
_WARM_UP_TEXTS = 128


def main() -> None:
    """Serve until stdin ends. What libraries print goes to stderr: stdout belongs to the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _serve(Task(**json.loads(sys.argv[1])), answers)
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _serve(task: Task, answers: TextIO) -> None:
    began = time.perf_counter()
    encoder: Encoder = KINDS[task.kind](task)
    _say(answers, {"dtype": encoder.dtype, "load_seconds": time.perf_counter() - began})
    texts: list[str] = []
    for line in sys.stdin:
        [(verb, argument)] = json.loads(line).items()
        if verb == "texts":
            texts = json.loads(Path(argument).read_text())
            encoder.encode(texts[:_WARM_UP_TEXTS])
        _say(answers, _do(verb, argument, encoder, texts))


def _do(verb: str, argument: Any, encoder: Encoder, texts: list[str]) -> dict[str, float]:
    if verb == "pass":
        began, began_cpu = time.perf_counter(), time.process_time()
        encoder.encode(texts)
        return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}
    if verb == "save":
        found = encoder.encode(texts)
        np.save(argument, found.to_dense() if hasattr(found, "to_dense") else found)
    if verb == "memory":
        return {"peak_rss_mib": peak_rss_mib(os.getpid()), "unique_mib": unique_mib(os.getpid())}
    return {}


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
