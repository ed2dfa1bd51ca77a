"""The models and paths of `bench peers`, made small: every path has the results of the first one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import child, exported, peers, report, weights
from bench.child import KINDS
from bench.contest import Row
from bench.encoders import Bare, Encoder, Task, Tokens
from bench.products import Products, linear_shapes
from bench.published import PUBLISHED, random_published

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,  # wide, so that results depend on the texts
}
_SMALLER: dict[str, dict[str, Any]] = dict.fromkeys(PUBLISHED, _SMALL)
_SMALLER["qwen3"] = _SMALL | {"num_key_value_heads": 2, "head_dim": 8}
_TYPES = ("float32", "bfloat16", "int8")
_TEXTS = [
    "how does fog form over the harbour",
    "Fog forms where warm and wet air comes to rest over cold water.",
    "yes",
    "The boats lay in the harbour with their lamps still lit, and nobody went out. " * 12,
    "The price of diesel went up again.",
]

Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The folder of a shape's small model, MiniLM itself for "minilm"."""
    folder = tmp_path_factory.mktemp("models")

    def build(shape: str) -> Path:
        if shape != "minilm" and not (folder / shape).exists():
            random_published(folder / shape, weights.minilm(), shape, **_SMALLER[shape])
        return weights.minilm() if shape == "minilm" else folder / shape

    return build


class InTorch(exported.Exported):
    """The graph as it is traced, run by torch."""

    def _run_all(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        return [self._module(torch.from_numpy(ids), torch.from_numpy(mask)).numpy() for ids, mask in batches]


def _results(encoder: Encoder) -> Any:
    found = encoder.encode(_TEXTS)
    return np.asarray(found.to_dense() if hasattr(found, "to_dense") else found)


def _compared(shape: str, encoder: Encoder, folder: Path) -> Row:
    """The encoder's results beside those of the shape's baseline."""
    row = Row("ours")
    row.compare(_results(encoder), _results(KINDS[peers.SHAPES[shape].baseline](Task("", str(folder)))))
    return row


@pytest.mark.parametrize("shape", PUBLISHED)
def test_the_engine_gives_what_the_baseline_gives(shape: str, small: Build) -> None:
    engine = Bare(Task("", str(small(shape)), threads=1))
    try:
        row = _compared(shape, engine, small(shape))
    finally:
        engine.close()

    assert row.cosine_min > 0.99999
    assert row.difference_max < 1e-5


@pytest.mark.parametrize("shape", ["minilm", "xlm-r-reranker", "splade"])
def test_a_graph_gives_what_the_baseline_gives(shape: str, small: Build) -> None:
    row = _compared(shape, InTorch(Task("", str(small(shape)))), small(shape))

    assert row.cosine_min > 0.99999
    assert row.difference_max < 1e-5


def test_a_runtime_with_streams_has_two_batches_for_each_of_them() -> None:
    assert exported.batched([300, 10, 256, 256], 1) == [[1, 2, 3, 0]]
    assert exported.batched([256] * 4, 2) == [[0], [1], [2], [3]]
    assert exported.batched([10] * 64, 2) == [list(range(25)), list(range(25, 50)), list(range(50, 64))]
    assert len(exported.batched([256] * 80, 2)) == 10


@pytest.mark.filterwarnings("ignore")  # of tracing and of torch's former export to ONNX
@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("shape", ["xlm-r-reranker", "splade"])
def test_other_runtimes_take_the_graph(runtime: str, shape: str, small: Build) -> None:
    pytest.importorskip(runtime)
    row = _compared(shape, KINDS[runtime](Task("", str(small(shape)))), small(shape))

    assert row.cosine_min > 0.9999
    assert row.difference_max < 1e-4


def test_a_sparse_model_gives_few_words_a_weight(small: Build) -> None:
    engine = Bare(Task("", str(small("splade")), threads=1))
    try:
        found = engine.encode(_TEXTS)
    finally:
        engine.close()

    assert found.width == 30522
    assert all(10 < len(row.indices) <= 30522 / 128 + 1 for row in found.rows)


@pytest.mark.parametrize(
    ("shape", "of_a_layer", "of_the_head"),
    [
        ("xlm-r-reranker", [(32, 96), (32, 32), (32, 64), (64, 32)], []),
        ("splade", [(32, 96), (32, 32), (32, 64), (64, 32)], [(32, 32), (32, 30522)]),
        ("modernbert", [(32, 96), (32, 32), (32, 128), (64, 32)], []),
        ("qwen3", [(32, 64), (32, 32), (32, 128), (64, 32)], []),
    ],
)
def test_the_limit_multiplies_what_every_token_needs(
    shape: str, of_a_layer: list[tuple[int, int]], of_the_head: list[tuple[int, int]], small: Build
) -> None:
    assert linear_shapes(small(shape)) == 2 * of_a_layer + of_the_head


def test_tokens_of_a_reranker_are_those_of_its_pairs(small: Build) -> None:
    folder = small("xlm-r-reranker")
    of_pairs = [len(ids) for ids in Tokens(folder)(_TEXTS)]

    assert len(of_pairs) == len(_TEXTS) - 1
    assert weights.count_tokens(folder, _TEXTS) == sum(of_pairs)
    assert weights.count_tokens(folder, [_TEXTS[0], 1000 * "fog "]) == 512


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_onnx_runtime_takes_the_fused_graph_or_says_why_not(dtype: str) -> None:
    pytest.importorskip("onnxruntime")
    encoder = KINDS["onnxruntime"](Task("", str(weights.minilm()), dtype=dtype))
    row = _compared("minilm", encoder, weights.minilm())

    assert row.cosine_min > (0.9999 if dtype == "float32" else 0.95)
    assert encoder.dtype == dtype
    assert "6 Attention" in encoder.note  # both graphs were made, and the fused one gave the results of the plain one
    assert encoder.note.startswith(("fused graph, in a warm-up", "plain graph, in a warm-up"))


@pytest.mark.filterwarnings("ignore")
def test_openvino_in_int8_is_quantised_once_for_the_paths_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    task = Task("", str(weights.minilm()), dtype="int8", cache=str(tmp_path), calibration_texts=4)
    first = KINDS["openvino"](task)
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = KINDS["openvino-latency"](task)

    assert made.keys() == {"openvino-int8.xml", "openvino-int8.bin"}
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
    assert "calibrated with 4 texts" in first.note == second.note
    for encoder in (first, second):
        assert 0.7 < _compared("minilm", encoder, weights.minilm()).cosine_min < 0.99999  # few texts calibrate badly


@pytest.mark.parametrize("dtype", _TYPES)
def test_products_are_a_row_for_each_text_in_every_type(dtype: str, small: Build) -> None:
    if dtype == "bfloat16" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("torch packs no weights in bfloat16 on this CPU")
    encoder = Products(Task("", str(small("modernbert")), dtype=dtype))

    assert encoder.dtype == dtype
    assert np.array_equal(encoder.encode(_TEXTS), np.zeros((len(_TEXTS), 1)))


@pytest.mark.parametrize("shape", peers.SHAPES)
def test_every_shape_has_its_peers_the_engine_and_limits(shape: str) -> None:
    found = peers.tasks(Path("model"), peers.SHAPES[shape], Path("cache"))
    names = list(found)

    assert names[0] == peers.BASELINE
    assert {task.kind for task in found.values()} <= KINDS.keys()
    assert {"sentence-transformers, bfloat16, batch 32", "teimgr engine, auto", "teimgr engine, int8"} < found.keys()
    of_types = {f"{peers.LIMIT}, {dtype}" for dtype in ("float32", "bfloat16", "int8")}
    assert of_types < found.keys()
    assert (peers.SERVED in found) == (shape in {"minilm", "base", "large", "modernbert", "qwen3"})
    runtimes = {name for name in names if name.startswith(("OpenVINO", "ONNX"))}
    openvino = {f"OpenVINO, {dtype}{hint}" for dtype in _TYPES for hint in ("", ", latency hint")}
    onnx = {"ONNX Runtime, float32", "ONNX Runtime, int8"}
    assert runtimes == (set() if shape in {"modernbert", "qwen3"} else openvino | onnx)


def test_facts_have_the_limit_and_what_paths_say_of_themselves() -> None:
    found = peers.facts(peers.SHAPES["minilm"], False, 3, {"a path": "a note of its own"})

    assert "may exceed" in found["of limit"]
    assert "oneDNN's measured rate" in found["of limit"]
    assert found["a path"] == "a note of its own"
    assert "daemon in the same run" in found[peers.SERVED]


def test_a_corpus_that_the_model_would_cut_is_refused() -> None:
    minilm = peers.SHAPES["minilm"]

    assert peers._chosen(weights.minilm(), minilm, None) == ["mixed", "short", "all-256"]
    assert peers._chosen(weights.minilm(), minilm, ["short"]) == ["short"]
    with pytest.raises(SystemExit, match="all-512: longer than"):
        peers._chosen(weights.minilm(), minilm, ["short", "all-512"])


def test_a_line_has_median_least_and_most_of_paired_ratios_and_its_part_of_the_limit() -> None:
    baseline, limit = Row("theirs", "float32", [4.0, 6.0, 8.0]), Row(f"{peers.LIMIT}, int8", "int8", [1.0, 1.0, 1.0])
    row = Row("ours", "int8", [2.0, 2.0, 2.0], cosine_mean=0.999, cosine_min=0.99)

    found = dict(
        zip((*peers.KEYS[1:], "mean", "min"), peers._line(row, baseline, {"int8": limit}, 100, False), strict=True)
    )

    assert [found[f"× baseline {name}"] for name in ("median", "least", "most")] == [3.0, 2.0, 4.0]
    assert (found["of limit"], found["tokens/s median"], found["min"]) == ("50%", 50.0, "0.99000")


def test_queries_are_a_call_each_and_their_results_are_kept(tmp_path: Path, small: Build) -> None:
    engine = Bare(Task("", str(weights.minilm()), threads=1))
    file = tmp_path / "kept.npy"
    try:
        asked = {"count": 3, "every_s": 0.02, "keep": str(file)}
        found = child._do("queries", asked, engine, _TEXTS)["latencies_ms"]
        together = engine.encode(_TEXTS[:3])
    finally:
        engine.close()

    assert len(found) == 3
    assert all(0 < latency < 20_000 for latency in found)
    assert np.abs(np.load(file) - together).max() < 1e-5


def test_scores_are_compared_by_their_differences() -> None:
    row = Row("ours")
    row.compare(np.array([[0.5], [0.75]]), np.array([[0.5], [0.5]]))

    assert (row.difference_mean, row.difference_max) == (0.125, 0.25)
    assert row.cosine_min == 1.0


@pytest.mark.long
def test_a_reranker_is_measured_and_its_table_has_differences(
    small: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "_model", lambda shape, folder: small(shape))
    command = argparse.ArgumentParser()
    peers.arguments(command)
    options = ["--shape", "xlm-r-reranker", "--texts", "6", "--rounds", "1", "--corpora", "mixed"]

    assert peers.run(command.parse_args([*options, "--only", "teimgr engine, float32"])) == 0

    (found,) = tmp_path.glob("peers-xlm-r-reranker-20*.json")
    rows = json.loads(found.read_text())["rows"]
    assert [row["path"] for row in rows] == [peers.BASELINE, "teimgr engine, float32"]
    assert all(len(row["passes_s"]) == 1 and row["tokens"] > 0 for row in rows)
    assert float(rows[1]["difference largest"]) < 1e-5


@pytest.mark.long
def test_the_daemon_is_measured_beside_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    command = argparse.ArgumentParser()
    peers.arguments(command)
    options = ["--texts", "6", "--rounds", "2", "--corpora", "short", "--only", peers.SERVED, "teimgr engine, auto"]

    assert peers.run(command.parse_args(options)) == 0

    (found,) = tmp_path.glob("peers-20*.json")
    rows = json.loads(found.read_text())["rows"]
    assert [row["path"] for row in rows] == [peers.BASELINE, "teimgr engine, auto", peers.SERVED]
    assert rows[1]["dtype"] == rows[2]["dtype"]
    assert all(len(row["passes_s"]) == 2 for row in rows)
    assert all(float(row["cosine min"]) > 0.999 for row in rows)
