"""What the steps of `bench card` share: findings, an engine in this process, texts, times."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import corpus

_WAIT_S = 120.0


class Findings(dict[str, Any]):
    """What a step found so far; written with every change."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        print(json.dumps(self), flush=True)


class LoadedEngine:
    """An engine and the faults it reported."""

    def __init__(self, path: Path, device: str, dtype: str, batch_tokens: int = 16384) -> None:
        from teimgr.engine.engine import Engine, EngineOptions

        self.faults: list[str] = []
        self._done: dict[Any, threading.Event] = {}
        options = EngineOptions(
            path=path,
            model_id=path.name,
            device=device,
            dtype=dtype,
            threads=len(os.sched_getaffinity(0)),
            max_batch_tokens=batch_tokens,
            lane_limit_tokens=100_000_000,
        )
        self.engine = Engine.load(options, self._deliver, self.faults.append)

    def run(self, texts: Any, interactive: bool = False) -> Any:
        """The finished job for inputs of any kind that a job takes."""
        from teimgr.engine.job import InferOptions, Job, Lane

        job = Job(texts, InferOptions(), Lane.INTERACTIVE if interactive else Lane.BULK)
        done = self._done[job] = threading.Event()
        self.engine.submit(job)
        if not done.wait(_WAIT_S):
            raise TimeoutError(f"{len(texts)} texts took longer than {_WAIT_S:g} s")
        del self._done[job]
        return job

    def _deliver(self, jobs: list[Any]) -> None:
        for job in jobs:
            self._done[job].set()


def vectors_of(loaded: LoadedEngine, texts: Sequence[str]) -> Any:
    """The vectors of `texts`; raises the first error of one."""
    job = loaded.run(texts)
    if job.errors:
        raise next(iter(job.errors.values()))
    return job.vectors


def latencies(loaded: LoadedEngine, texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds of single queries, one after the other: all of it, and the medians of its stages."""
    took, stages = [], []
    for text in texts:
        began = time.perf_counter()
        job = loaded.run([text], interactive=True)
        took.append(1e3 * (time.perf_counter() - began))
        stages.append([job.tokenization_ns / 1e6, job.queue_ns / 1e6, job.inference_ns / 1e6])
    middle = [round(statistics.median(stage), 3) for stage in zip(*stages, strict=True)]
    of_stages = dict(zip(("tokenization", "queue", "inference"), middle, strict=True))
    return {"p50": round(statistics.median(took), 3), "p99": round(float(np.percentile(took, 99)), 3), **of_stages}


def corpora(is_card: bool) -> dict[str, list[str]]:
    """Texts by their length, a few where there is no card."""
    mixed = corpus.corpus(20_000 if is_card else 100)
    words = " ".join(mixed).split()
    texts = 60_000 if is_card else 50  # a pass takes seconds: of one call's texts nothing overlaps
    short = [" ".join(words[at % 50_000 : at % 50_000 + 34]) for at in range(0, 34 * texts, 34)]
    long = [" ".join(words[at % 50_000 : at % 50_000 + 480]) for at in range(0, 60 * texts, 480)]
    return {"some 50 tokens": short, "up to 512 tokens": long, "mixed": mixed}


def best_s(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Seconds of the fastest of ten calls until the device has finished."""

    def both() -> None:
        call()
        wait()

    both()
    return min(timed_s(both) for _ in range(10))


def matrix_rate() -> float:
    """FLOP/s of products of 8,192 × 8,192 bfloat16 numbers on the card."""
    import torch

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / best_s(lambda: x @ x, torch.cuda.synchronize)


def timed_s(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
