"""`python -m bench.card_steps STEP DEVICE MODEL`: one step of `bench card`; its last line is what it found, as JSON.

A step writes its findings after each part as a line too, so what was found before a failure is not lost.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.card_engine import Findings, LoadedEngine, best_s, corpora, latencies, matrix_rate, timed_s, vectors_of
from bench.card_pack import install
from bench.card_served import served
from bench.card_sweep import sweep
from bench.machine import versions
from bench.report import RESULTS


def facts(device: str, model: Path) -> None:
    """Versions, the card, and what flash attention takes here."""
    import torch

    from teimgr.engine.gpu_kernels.varlen_kernel import varlen_kernel

    found = Findings()
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["schema"] = str(torch.ops.aten._flash_attention_forward.default._schema)
    found["kernel is taken"] = varlen_kernel() is not None
    with contextlib.suppress(ImportError):
        varlen = importlib.import_module("torch.nn.attention.varlen")
        found["varlen_attn"] = str(inspect.signature(varlen.varlen_attn))
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name(0)
        found["capability"] = torch.cuda.get_device_capability(0)
        found["free and all bytes"] = torch.cuda.mem_get_info()
        found["seconds to the first product"] = timed_s(
            lambda: (torch.ones(9, 9, device="cuda") @ torch.ones(9, 9).cuda()).sum().item()
        )
        found["bfloat16 TFLOP/s"] = matrix_rate() / 1e12
        y = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        found["copied bytes/s"] = 2 * 2**30 / best_s(lambda: y.clone(), torch.cuda.synchronize)


def carried(device: str, model: Path) -> None:
    """Install what was carried to this machine, without a network; say what it lacks."""
    found, target = Findings(), Path(os.environ["CARD_SITE"])
    pack = Path(os.environ["CARD_PACK"])
    found["pack"] = pack.is_dir()
    if pack.is_dir():
        for key, value in install(pack, target).items():
            found[key] = value
    importlib.invalidate_caches()  # the folder was not there when this process began
    found["versions"] = versions()
    missing = []
    for name in ("fastapi", "uvicorn", "httptools", "orjson", "grpc", "pyarrow", "lz4", "aiohttp", "hpack", "typer"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    found["missing"] = missing


def fork(device: str, model: Path) -> None:
    """The fork server's imports, then a child that uses the card by its UUID."""
    from teimgr.control.launch import nursery

    found = Findings()
    os.environ.update(nursery.ONE_THREAD | nursery.NO_DRIVER)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began = time.perf_counter()
    found["missing"] = nursery.preload(nursery.PRELOAD)
    found["seconds of imports"] = round(time.perf_counter() - began, 2)
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    uuid = ""
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        uuid = subprocess.check_output(command, text=True).split()[0]
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        import torch

        said: dict[str, Any] = {
            "driver was initialised": nursery.driver_was_initialised(),
            "cards": torch.cuda.device_count(),
        }
        began = time.perf_counter()
        said["sum"] = float(torch.ones(1000, device=device).sum())
        said["seconds to the first kernel"] = round(time.perf_counter() - began, 2)
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found["child"] = json.loads(answer.read() or "null")
    _, status = os.waitpid(pid, 0)
    if status or not found["child"]:
        raise RuntimeError(f"the child ended with status {status}")


def fidelity(device: str, model: Path) -> None:
    """Every dtype of MiniLM: what the gate chose and measured, and the vectors beside those of float32 on the CPU."""
    texts = corpus.corpus(200)
    found = Findings()
    truth = vectors_of(LoadedEngine(model, "cpu", "float32"), texts)
    for dtype in ("auto", "float16", "bfloat16", "float32"):
        loaded = LoadedEngine(model, device, dtype)
        info = loaded.engine.info
        cosines = (vectors_of(loaded, texts) * truth).sum(axis=1)
        loaded.engine.close(1.0)
        found[dtype] = {
            **{key: getattr(info, key) for key in ("dtype", "batching", "attention", "forward", "load_s")},
            "max_batch_tokens": info.max_batch_tokens,
            "gate": [info.min_cosine, info.mean_cosine],
            "lowest cosine": float(cosines.min()),
            "mean cosine": float(cosines.mean()),
        }


def forward(device: str, model: Path) -> None:
    """BERT-base's forward by tokens, length and way of attention: until it is launched, and until it has ended."""
    import torch
    from transformers import BertConfig, BertModel

    from teimgr.engine.backbone import Batching, Transformer
    from teimgr.engine.batching.batch import Encoded, pack
    from teimgr.engine.gpu_kernels.forward_graphs import MAX_TOKENS, CudaCapture
    from teimgr.engine.gpu_kernels.gpu_fusion import fuse
    from teimgr.engine.gpu_kernels.norm_kernel import Norms, norm_kernel

    at, is_card = torch.device(device), device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if is_card else _nothing
    torch.manual_seed(0)
    config = BertConfig() if is_card else BertConfig(num_hidden_layers=2)
    module: Any = BertModel(config, add_pooling_layer=False)
    transformer = Transformer(module.eval().requires_grad_(False).to(at), 0, at)
    transformer.convert(torch.float16 if is_card else torch.float32)
    ids = np.random.default_rng(0).integers(1000, 30000, 65536).astype(np.int32)
    found = Findings()
    sizes = (16, 128, 512, 4096, 16384, 32768) if is_card else (16, 512)
    ways = {"varlen": Batching.VARLEN, "by-run": Batching.BY_RUN, "graphs": Batching.VARLEN}
    ways |= {"fused": Batching.VARLEN, "fused with norms": Batching.VARLEN}  # graphs too
    for way, batching in ways.items():
        if batching is Batching.VARLEN and not is_card:
            continue
        transformer.use(batching)
        if way.startswith("fused"):
            transformer.close(1.0)
            kernel = norm_kernel() if way == "fused with norms" else None
            fusion = fuse(module, None if kernel is None else Norms(kernel, at))
            found[f"{way}: normalisations"] = fusion.norms
        if way == "graphs" or way.startswith("fused"):
            transformer.use_graphs(CudaCapture())
        for tokens in sizes:
            for length in (16, 50, 512, 0):
                if length > tokens or (way == "graphs" and tokens > MAX_TOKENS):
                    continue
                lengths = [length] * (tokens // length) if length else _mixed(tokens)
                batch = pack([Encoded(ids[:size]) for size in lengths])
                with torch.inference_mode():
                    for _ in range(3 if is_card else 0):
                        transformer.hidden(batch)
                    transformer.wait_for_graphs(20.0)
                    launched, ended = _launch_times(lambda: transformer.hidden(batch), wait)  # noqa: B023  called here
                name = f"{way}, {tokens} tokens of {length or 'mixed'}"
                found[name] = {
                    "launched ms": round(1e3 * launched, 3),
                    "ended ms": round(1e3 * ended, 3),
                    "tokens/s": round(batch.tokens / ended),
                }
    if is_card:
        found["graphs"] = transformer.graphs
        batch = pack([Encoded(ids[:512]) for _ in range(32)])
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.inference_mode(), torch.profiler.profile(activities=activities) as profile:
            transformer.hidden(batch)
            wait()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25))
        found["profile"] = "in the log"


def bulk(device: str, model: Path) -> None:
    """The engine with texts of 50 tokens, 512 and mixed lengths: MiniLM, and BERT-base with random weights."""
    found, is_card = Findings(), device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        base = weights.random_bert(Path(folder) / "base", model, "base") if is_card else model
        for name, path in {"minilm": model, "base": base}.items():
            for tokens in (16384, 32768) if name == "base" else (16384,):
                loaded = LoadedEngine(path, device, "auto", tokens)
                for kind, texts in corpora(is_card).items():
                    count = weights.count_tokens(path, texts)
                    loaded.run(texts[: len(texts) // 4])
                    before = loaded.engine.stats().busy_s
                    best_s = min(timed_s(lambda: loaded.run(texts)) for _ in range(2))  # noqa: B023  called here
                    busy = (loaded.engine.stats().busy_s - before) / 2
                    found[f"{name}, batches of {tokens}, {kind}"] = {
                        "texts/s": round(len(texts) / best_s),
                        "tokens/s": round(count / best_s),
                        "busy": round(busy / best_s, 2),
                        "attention": loaded.engine.info.attention,
                    }
                loaded.engine.close(1.0)


def queries(device: str, model: Path) -> None:
    """Single queries, idle and beside bulk work: milliseconds, and where they go."""
    found, texts = Findings(), corpus.queries(300 if device == "cuda" else 30)
    os.environ["TEIMGR_CUDA_GRAPHS"] = "0"
    loaded = LoadedEngine(model, device, "auto")
    found["idle, without graphs"] = latencies(loaded, texts)
    loaded.engine.close(1.0)
    del os.environ["TEIMGR_CUDA_GRAPHS"]
    loaded = LoadedEngine(model, device, "auto")
    found["first, as graphs are captured"] = latencies(loaded, texts)
    backbone: Any = loaded.engine._runners[0]._model.backbone
    found["all graphs in time"] = backbone.wait_for_graphs(20.0)
    found["graphs"] = backbone.graphs
    found["idle"] = latencies(loaded, texts)
    stopped = threading.Event()

    def keep_busy() -> None:
        bulk_texts = corpus.corpus(4000 if device == "cuda" else 100)
        while not stopped.is_set():
            loaded.run(bulk_texts)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    found["beside bulk"] = latencies(loaded, texts)
    stopped.set()
    thread.join()
    loaded.engine.close(1.0)


def faults(device: str, model: Path) -> None:
    """A full card, then a device assertion: what is served, what is reported, and how soon."""
    import torch

    from teimgr.engine.model import Model
    from teimgr.errors import Unavailable

    found, loaded = Findings(), LoadedEngine(model, device, "auto")
    if device != "cuda":
        found["skipped"] = "no card"
        loaded.engine.close(1.0)
        return
    texts = corpus.corpus(2000)
    before = vectors_of(loaded, texts)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - (64 << 20)), dtype=torch.uint8, device=device)
    job = loaded.run(texts)
    found["full card"] = {
        "errors": len(job.errors),
        "lowest cosine": float((job.vectors * before).sum(axis=1).min()),
        "batch tokens": loaded.engine._queue.token_cap.tokens,
        "healthy": loaded.engine.stats().healthy,
    }
    del hog
    original = Model.run

    def asserting(model: Model, *arguments: Any) -> Any:
        torch.zeros(2, device=device)[torch.tensor([5], device=device)]
        return original(model, *arguments)

    Model.run = asserting  # type: ignore[method-assign, assignment]
    began = time.perf_counter()
    job = loaded.run(texts)
    found["assertion"] = {
        "reported": loaded.faults,
        "errors by class": sorted({type(error).__name__ for error in job.errors.values()}),
        "seconds": round(time.perf_counter() - began, 2),
    }
    with contextlib.suppress(Unavailable):
        loaded.run(texts[:1])
        raise RuntimeError("an engine whose device has failed takes jobs")
    if not loaded.faults:
        raise RuntimeError("the fault of the device was not reported")
    os._exit(0)  # the context is broken: nothing can be freed


def tests(device: str, model: Path) -> None:
    """The tests marked `gpu`."""
    # What the image has of plugins may warn.
    command = [sys.executable, "-m", "pytest", "-W", "default", "-m", "gpu", "-q", "tests/gpu", "--maxfail=20"]
    command.append(f"--junitxml={Path(os.environ['CARD_OUT']) / 'card-tests.xml'}")
    status = subprocess.run(command, check=False).returncode
    Findings()["status"] = status
    if status:
        raise RuntimeError(f"pytest ended with status {status}")


def peers(device: str, model: Path) -> None:
    """`bench gpu`: BERT-base here and in sentence-transformers, in turn."""
    before = set(RESULTS.glob("gpu-*"))
    command = [sys.executable, "-m", "bench", "gpu", "--shape", "base", "--texts", "6000", "--rounds", "3"]
    status = subprocess.run([*command, "--brief", "--model", str(model)], check=False).returncode
    for report in set(RESULTS.glob("gpu-*")) - before:
        shutil.copy(report, os.environ["CARD_OUT"])
    Findings()["status"] = status
    if status:
        raise RuntimeError(f"bench gpu ended with status {status}")


def _mixed(tokens: int) -> list[int]:
    """Lengths of 1 to 512, long-tailed, that add up to `tokens`."""
    chooser, left, lengths = np.random.default_rng(1), tokens, list[int]()
    while left:
        lengths.append(min(left, int(np.clip(chooser.lognormal(3.7, 1.0), 4, 512))))
        left -= lengths[-1]
    return lengths


def _launch_times(call: Callable[[], Any], wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds until `call` returns and until the device has finished: medians of ten after three."""
    times = []
    for _ in range(13):
        wait()
        began = time.perf_counter()
        call()
        launched = time.perf_counter() - began
        wait()
        times.append((launched, time.perf_counter() - began))
    return statistics.median(t[0] for t in times[3:]), statistics.median(t[1] for t in times[3:])


def _nothing() -> None:
    """Wait for a device that has no queue."""


STEPS: dict[str, Callable[[str, Path], None]] = {
    each.__name__: each
    for each in (facts, carried, fork, fidelity, served, forward, queries, sweep, bulk, faults, tests, peers)
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
