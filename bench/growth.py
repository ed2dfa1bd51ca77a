"""`bench growth`: what becomes of speed and memory with more texts, longer texts, more instances and more models."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.contest import child
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.machine import peak_rss_mib, unique_mib
from bench.progress import partial, say
from bench.report import publish

HEADER = (
    *("what", "n", "texts/s", "tokens/s", "one text p50 ms", "p99 ms", "create to running s"),
    *("worker USS MiB", "worker peak RSS MiB", "mux USS MiB", "daemon USS MiB"),
)
_KEYS = ("what", "n", "texts_per_s", "tokens_per_s", "p50_ms", "p99_ms", "running_s", "worker", "peak", "mux", "daemon")
_PARTS = ("texts", "tokens", "instances", "models")
_INSTANCE = "bench"
_LONGEST = 8192
_TOKENS_OF_A_PASS = 16_384
_QUERIES = 200
_RUNNING_S = 120.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="these of them (all)")
    parser.add_argument("--texts", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 16, 64])


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    records: list[dict[str, Any]] = []
    parts: dict[str, Callable[[Path, argparse.Namespace, list[dict[str, Any]]], None]] = {
        "texts": _texts,
        "tokens": _tokens,
        "instances": _instances,
        "models": _models,
    }
    with tempfile.TemporaryDirectory() as folder, partial():
        for part in options.parts:
            parts[part](Path(folder), options, records)
    facts = {
        "texts": "as many short texts in one EmbedArrow of the client, to a look-up table of 30,522 × 256: a pass; the "
        "median of three up to 100,000 texts",
        "tokens": f"texts of exactly so many tokens, to a BERT of MiniLM's size with {_LONGEST:,} positions and random "
        f"weights: one alone by Embed, then {_TOKENS_OF_A_PASS:,} tokens at least by EmbedArrow",
        "instances": f"so many instances of MiniLM: {_QUERIES} queries, to each in turn, then bulk to all at once; "
        "create to running is the mean of those added since the row before, worker memory that of the last",
        "models": "one model after the other in one daemon, all stay: the memory of its worker, and one query",
        "memory": "USS is what comes back when the process ends, after the work of the row",
    }
    rows = [[record.get(key) for key in _KEYS] for record in records]
    publish("growth", facts, HEADER, rows, {"rows": records})
    return 0


def _texts(folder: Path, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    model, some = weights.random_static(folder / "static", weights.minilm()), corpus.queries(4096)
    with fleet() as running:
        _create(running, _INSTANCE, model)
        with child(Task("served", grpc=running.grpc, instance=_INSTANCE)) as caller:
            for count in options.texts:
                file = folder / "texts.json"
                file.write_text(json.dumps([some[index % len(some)] for index in range(count)]))
                caller.ask("texts", str(file))
                seconds = median(caller.ask("pass")["seconds"] for _ in range(3 if count <= 100_000 else 1))
                _add(records, running, _INSTANCE, what="texts", n=count, texts_per_s=count / seconds)


def _tokens(folder: Path, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    model = weights.random_bert(folder / "long", weights.minilm(), "mini", _LONGEST)
    words = _single_tokens(model)
    chooser = random.Random(7)
    with fleet() as running:
        _create(running, _INSTANCE, model)
        for length in options.tokens:
            count = max(2, _TOKENS_OF_A_PASS // length)
            texts = [" ".join(chooser.choices(words, k=length - 2)) for _ in range(count)]
            assert weights.count_tokens(model, texts[:1]) == length
            latencies = _latencies(running, [_INSTANCE], texts[:20] if length <= 512 else texts[:3])
            began = time.perf_counter()
            running.client.embed_arrow(texts, instance=_INSTANCE).checked()
            seconds = time.perf_counter() - began
            rates = {"texts_per_s": count / seconds, "tokens_per_s": count * length / seconds}
            _add(records, running, _INSTANCE, what="tokens", n=length, **rates, **_percentiles(latencies))


def _instances(folder: Path, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    texts, names = corpus.corpus(1024), list[str]()
    with fleet() as running:
        for count in sorted(options.instances):
            running_s = []
            while len(names) < count:
                names.append(f"bench-{len(names)}")
                running_s.append(_create(running, names[-1], weights.minilm()))
            latencies = _latencies(running, names, corpus.queries(_QUERIES))
            seconds = _bulk(running, names, texts)
            speed = {"texts_per_s": len(texts) / seconds, "running_s": sum(running_s) / len(running_s)}
            _add(records, running, names[-1], what="instances", n=count, **speed, **_percentiles(latencies))


def _models(folder: Path, options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    like = weights.minilm()
    models = {
        "MiniLM": like,
        "MiniLM, a second instance": like,
        "a look-up table": weights.random_static(folder / "added-static", like),
        "BERT of MiniLM's size": weights.random_bert(folder / "added-mini", like, "mini"),
        "BERT-base": weights.random_bert(folder / "added-base", like, "base"),
    }
    with fleet() as running:
        for number, (label, model) in enumerate(models.items()):
            name = f"model-{number}"
            running_s = _create(running, name, model)
            latencies = _latencies(running, [name], corpus.queries(20))
            _add(records, running, name, what=f"model: {label}", n=number + 1, running_s=running_s)
            records[-1] |= _percentiles(latencies)


def _create(running: Fleet, name: str, model: Path) -> float:
    """Seconds until it runs."""
    began = time.perf_counter()
    running.client.create(name, str(model))
    running.client.wait_until_running(name, deadline_s=_RUNNING_S)
    return time.perf_counter() - began


def _latencies(running: Fleet, instances: Sequence[str], texts: Sequence[str]) -> list[float]:
    """In ms of one query after the other, to each instance in turn, after one to each that does not count."""
    for name in instances:
        running.client.embed(texts[0], instance=name)
    found = []
    for number, text in enumerate(texts):
        began = time.perf_counter()
        running.client.embed(text, instance=instances[number % len(instances)])
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _bulk(running: Fleet, instances: Sequence[str], texts: Sequence[str]) -> float:
    """Seconds of all texts, shared by the instances, at once."""
    shares = [list(texts[start :: len(instances)]) for start in range(len(instances))]

    def one(name: str, share: list[str]) -> None:
        running.client.embed_arrow(share, instance=name).checked()

    began = time.perf_counter()
    with ThreadPoolExecutor(len(instances)) as pool:
        list(pool.map(one, instances, shares))
    return time.perf_counter() - began


def _percentiles(samples_ms: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(samples_ms, (50, 99)).tolist()
    return {"p50_ms": p50, "p99_ms": p99}


def _add(records: list[dict[str, Any]], running: Fleet, instance: str, **found: Any) -> None:
    """A record with the memory of the processes."""
    pids = running.pids(instance)
    memory = {name: unique_mib(pid) for name, pid in pids.items()}
    records.append(found | memory | {"peak": peak_rss_mib(pids["worker"])})
    say(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in found.items()))


def _single_tokens(model: Path) -> list[str]:
    """Words that the tokenizer takes as one token each."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    return sorted(word for word in vocabulary if word.isascii() and word.isalpha() and word.islower() and len(word) > 2)
