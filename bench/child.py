"""`python -m bench.child TASK`: one encoder in a process of its own, with commands as lines of JSON.

    {"texts": FILE}    load the texts of a JSON file, and warm up on the first of them
    {"pass": FILE}     encode them all, and keep the results as .npy unless FILE is null
                                                    → {"seconds": s, "cpu_seconds": s}
    {"queries": {"count": n, "every_s": s, "keep": FILE}}
                       the first n texts, a call each: one after the other, or where s > 0 one every s seconds; their
                       results in FILE unless it is null
                                                    → {"latencies_ms": [...]}
    {"stages": n}      the first n inputs, one stage of the encoder after the other
                                                    → {name of a stage: processor seconds}
    {"memory": null}                                → {"peak_rss_mib": m, "unique_mib": m}

The first line it writes, when it is loaded, is {"dtype": name, "load_seconds": s, "note": text}, with what the encoder
says of itself; a failure is {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench import callers, encoders, exported, onnx_graph, pictures, products
from bench.encoders import Encoder, Task
from bench.machine import peak_rss_mib, unique_mib

KINDS: dict[str, type[Any]] = {
    "sentence-transformers": encoders.SentenceTransformers,
    "sparse-encoder": encoders.SparseEncoder,
    "cross-encoder": encoders.CrossEncoder,
    "padded": encoders.Padded,
    "openvino": exported.OpenVino,
    "openvino-latency": exported.OpenVinoLatency,
    "onnxruntime": onnx_graph.OnnxRuntime,
    "engine": encoders.Bare,
    "products": products.Products,
    "sentence-transformers-images": pictures.SentenceTransformersImages,
    "transformers-images": pictures.TransformersImages,
    "transformers-pages": pictures.TransformersPages,
    "engine-images": pictures.EngineImages,
    "served-images": pictures.ServedImages,
    "served": encoders.Served,
    "streamed": encoders.Streamed,
    "reranked": encoders.Reranked,
    "grpc": callers.OverGrpc,
    "http2": callers.OverHttp2,
    "openai": callers.OpenAiRoute,
    "openai-bulk": callers.OpenAiBulk,
    "embed": callers.EmbedRoute,
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
    loaded = {"dtype": encoder.dtype, "load_seconds": time.perf_counter() - began}
    _say(answers, loaded | {"note": getattr(encoder, "note", "")})
    texts: list[str] = []
    for line in sys.stdin:
        [(verb, argument)] = json.loads(line).items()
        if verb == "texts":
            texts = json.loads(Path(argument).read_text())
            encoder.encode(texts[:_WARM_UP_TEXTS])
        _say(answers, _do(verb, argument, encoder, texts))


def _do(verb: str, argument: Any, encoder: Encoder, texts: list[str]) -> dict[str, Any]:
    if verb == "pass":
        began, began_cpu = time.perf_counter(), time.process_time()
        found = encoder.encode(texts)
        spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}
        if argument is not None:
            np.save(argument, found.to_dense() if hasattr(found, "to_dense") else found)
        return spent
    if verb == "queries":
        return {"latencies_ms": _queries(encoder, texts[: argument["count"]], argument["every_s"], argument["keep"])}
    if verb == "stages":
        return pictures.staged(getattr(encoder, "stages", {}), texts[:argument])
    if verb == "memory":
        return {"peak_rss_mib": peak_rss_mib(os.getpid()), "unique_mib": unique_mib(os.getpid())}
    return {}


def _queries(encoder: Encoder, texts: list[str], every_s: float, keep: str | None) -> list[float]:
    """Milliseconds of each call, from its own begin: no call waits for another."""
    call: Callable[[str], Any] = getattr(encoder, "query", lambda text: encoder.encode([text]))
    latencies_ms, results = [], []
    first = time.perf_counter()
    for number, text in enumerate(texts):
        if every_s:
            time.sleep(max(0.0, first + number * every_s - time.perf_counter()))
        began = time.perf_counter()
        found = call(text)
        latencies_ms.append((time.perf_counter() - began) * 1e3)
        if keep is not None:
            results.append(np.asarray(found, np.float32).reshape(1, -1))
    if keep is not None:
        np.save(keep, np.concatenate(results))
    return latencies_ms


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
