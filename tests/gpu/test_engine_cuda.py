"""On a CUDA device: packed vectors are the float32 truth's, in every type and whatever shares the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tests.support.models import FAMILIES, TEXTS, build

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Job, Lane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WAIT_S = 120.0
Embed = Callable[[Sequence[str]], NDArray[np.float32]]
Start = Callable[[Path, str, str], tuple[Engine, Embed]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engines that end with the test."""
    with ExitStack() as stack:

        def load(path: Path, device: str, dtype: str) -> tuple[Engine, Embed]:
            arrived: dict[Job, threading.Event] = {}
            options = EngineOptions(path=path, model_id=path.name, device=device, dtype=dtype, threads=2)
            engine = Engine.load(options, lambda jobs: [arrived[job].set() for job in jobs])
            stack.callback(engine.close, 1.0)

            def embed(texts: Sequence[str]) -> NDArray[np.float32]:
                job = Job(texts, InferOptions(), Lane.BULK)
                done = arrived[job] = threading.Event()
                engine.submit(job)
                assert done.wait(WAIT_S)
                assert job.errors == {}
                return job.vectors

            return engine, embed

        yield load


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family == "gte" and not hasattr(transformers, "GteConfig"):
            pytest.skip("this transformers has no GTE")
        if family not in made:
            made[family] = build(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_float32_is_the_cpus_vector(family: str, folders: Callable[[str], Path], start: Start) -> None:
    _, on_cpu = start(folders(family), "cpu", "float32")
    engine, on_cuda = start(folders(family), "cuda", "float32")

    assert engine.info.device == "cuda"
    np.testing.assert_allclose(on_cuda(TEXTS), on_cpu(TEXTS), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sixteen_bits_stay_close_to_float32(
    family: str, dtype: str, folders: Callable[[str], Path], start: Start
) -> None:
    _, exact = start(folders(family), "cpu", "float32")
    engine, embed = start(folders(family), "cuda", dtype)
    cosines = (embed(TEXTS) * exact(TEXTS)).sum(axis=1)

    assert engine.info.dtype == dtype
    attention = "library" if family in ("deberta_v2", "mpnet", "t5") else "varlen"
    assert (engine.info.batching, engine.info.attention) == (
        "equal-length" if attention == "library" else "packed",
        attention,
    )
    lowest = 0.9985 if family == "t5" else 0.999  # random weights of T5 give the smallest vectors
    assert cosines.min() >= (lowest if dtype == "bfloat16" else 0.9999)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "roberta"])
def test_neighbours_do_not_change_a_vector(
    family: str, dtype: str, folders: Callable[[str], Path], start: Start
) -> None:
    """Within a rounding of the type: the shape of a matrix product may change the order of its sums."""
    _, embed = start(folders(family), "cuda", dtype)
    together = embed(TEXTS)
    alone = np.concatenate([embed([text]) for text in TEXTS])

    assert (together * alone).sum(axis=1).min() >= (0.999999 if dtype == "float32" else 0.9998)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "roberta"])
def test_queries_by_graphs_have_the_vectors_of_before(
    family: str, folders: Callable[[str], Path], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, embed = start(folders(family), "cuda", "float16")
    for _ in range(4):
        by_graph = np.concatenate([embed([text]) for text in TEXTS])
    backbone: Any = engine._runners[0]._model.backbone
    monkeypatch.setenv("TEIMGR_CUDA_GRAPHS", "0")
    _, plainly = start(folders(family), "cuda", "float16")

    assert backbone.graphs > 0
    assert (by_graph * np.concatenate([plainly([text]) for text in TEXTS])).sum(axis=1).min() >= 0.9999


def test_auto_takes_a_sixteen_bit_type_that_passes_the_gate(folders: Callable[[str], Path], start: Start) -> None:
    engine, embed = start(folders("bert"), "cuda", "auto")
    _, exact = start(folders("bert"), "cpu", "float32")

    assert engine.info.dtype in ("bfloat16", "float16", "float32")
    assert (embed(TEXTS) * exact(TEXTS)).sum(axis=1).min() >= 0.9995


def test_many_batches_in_flight_come_back_in_their_rows(folders: Callable[[str], Path], start: Start) -> None:
    _, embed = start(folders("bert"), "cuda", "float32")
    texts = [TEXTS[i % len(TEXTS)] for i in range(4000)]
    vectors, expected = embed(texts), embed(TEXTS)

    np.testing.assert_allclose(vectors, np.tile(expected, (400, 1)), atol=2e-5, rtol=0)


def test_a_batch_over_the_devices_memory_is_served_in_parts(folders: Callable[[str], Path], start: Start) -> None:
    engine, embed = start(folders("bert"), "cuda", "float32")
    before = embed(TEXTS)
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - 8 * 2**20), dtype=torch.uint8, device="cuda")
    vectors = embed([*TEXTS] * 200)
    del hog

    np.testing.assert_allclose(vectors[: len(TEXTS)], before, atol=2e-5, rtol=0)
    assert engine.stats().healthy
