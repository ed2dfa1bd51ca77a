"""The step `sweep` of `bench card`: tokens per second in bulk by every setting of the engine that may decide them.

`python -m bench.card_sweep DEVICE MODEL KIND`: the part of it with one tokenizer, in a process of its own, since the
threads of the tokenizers library are set by the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import weights
from bench.card_engine import Findings, LoadedEngine, corpora, timed_s

_NATIVE = "native tokenizer"
_LIBRARYS = {f"tokenizers library, {threads} threads": threads for threads in (4, 8, 16)}
_LONGEST_S = {"cuda": 60.0, "cpu": 240.0}  # of one process


class Point(NamedTuple):
    """The settings of one pass."""

    inputs: str
    batch_tokens: int
    switch_ms: float
    in_flight: int


def points(is_card: bool, is_native: bool) -> Iterator[Point]:
    """What is measured; with the library as tokenizer those where it can matter."""
    sizes = (8192, 16384, 32768, 65536) if is_native else (16384, 32768)
    inputs = ("texts", "ids") if is_native else ("texts",)
    if not is_card:
        sizes = sizes[:1]
    yield from (Point(*each) for each in itertools.product(inputs, sizes, (0.5, 5.0), (2, 3)))


def sweep(device: str, model: Path) -> None:
    """BERT-base with texts of some 50 tokens: inputs × batch × switch interval × batches in flight, for the native
    tokenizer and the library's with 4, 8 and 16 threads."""
    found, failures = Findings(), []
    with tempfile.TemporaryDirectory() as folder:
        path = weights.random_bert(Path(folder) / "base", model, "base") if device == "cuda" else model
        for kind in (_NATIVE, *_LIBRARYS):
            changed = (
                {} if kind == _NATIVE else {"TEIMGR_NATIVE": "attention", "RAYON_NUM_THREADS": str(_LIBRARYS[kind])}
            )
            command = [sys.executable, "-m", "bench.card_sweep", device, str(path), kind]
            try:
                run = subprocess.run(
                    command,
                    env=os.environ | changed,
                    timeout=_LONGEST_S[device],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                found[kind] = json.loads(run.stdout.strip().splitlines()[-1])
            except subprocess.TimeoutExpired as late:
                found[kind] = _last(late.stdout)
                failures.append(f"{kind}: took longer than {_LONGEST_S[device]:g} s")
            except subprocess.CalledProcessError as failed:
                found[kind] = _last(failed.stdout)
                failures.append(f"{kind}: status {failed.returncode}")
    rates = {
        f"{kind}, {point}": figures["tokens/s"]
        for kind in (_NATIVE, *_LIBRARYS)
        for point, figures in found[kind].items()
    }
    found["best"] = max(rates, key=lambda name: rates[name]) if rates else None
    if failures:
        raise RuntimeError("; ".join(failures))


def _last(output: Any) -> dict[str, Any]:
    """What a process had found that did not end well."""
    said = output.decode() if isinstance(output, bytes) else output or ""
    lines = [line for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return last


def _part(device: str, path: Path, kind: str) -> None:
    from teimgr.engine import finisher
    from teimgr.engine.batching.batch import Encoded
    from teimgr.engine.batching.queue import TokenCap
    from teimgr.engine.text.tokenizer import TokenizeOptions

    is_card = device == "cuda"
    texts = corpora(is_card)["some 50 tokens"]
    tokens = weights.count_tokens(path, texts)
    loaded = LoadedEngine(path, device, "auto", 65536)
    encoded = loaded.engine.tokenizer.encode(texts, TokenizeOptions())
    ids = [each.ids for each in encoded if isinstance(each, Encoded)]
    loaded.run(texts[: len(texts) // 4])
    found = Findings()
    for point in points(is_card, kind == _NATIVE):
        loaded.engine._queue.token_cap = TokenCap(point.batch_tokens)
        sys.setswitchinterval(point.switch_ms / 1e3)
        finisher._BATCHES_IN_FLIGHT = point.in_flight
        busy_s = loaded.engine.stats().busy_s
        inputs = ids if point.inputs == "ids" else texts
        took_s = timed_s(lambda: loaded.run(inputs))  # noqa: B023  called here
        name = f"{point.inputs}, batches of {point.batch_tokens}, {point.switch_ms:g} ms, {point.in_flight} in flight"
        found[name] = {
            "tokens/s": round(tokens / took_s),
            "busy": round((loaded.engine.stats().busy_s - busy_s) / took_s, 2),
        }
    loaded.engine.close(1.0)


if __name__ == "__main__":
    _part(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
