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
from bench import exported, peers, report, weights
from bench.child import KINDS
from bench.contest import Row
from bench.encoders import Bare, Encoder, Task, Tokens
from bench.products import linear_shapes
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
    assert float(rows[1]["difference largest"]) < 1e-5
