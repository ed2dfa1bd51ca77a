"""On a CUDA device: every kind of head gives the results of the float32 model on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.plain_models import layout_of, random_texts, save_headed

from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.heads import Rows
from teimgr.engine.heads import splade as splade_heads
from teimgr.engine.host_copies import HostCopies
from teimgr.engine.job import Output
from teimgr.engine.model import load_model
from teimgr.models.layout import M3, Backbone, CausalRerank, LateInteraction, Layout, ScoringConfig, Splade
from teimgr.spec import Kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES = ("classifier", "decoder classifier", "language model", "splade", "late", "m3")


def made(case: str, folder: Path) -> Layout:
    """The layout of a model with one kind of head."""
    scores = ScoringConfig(("score",), "sigmoid", CausalRerank(9, 40))
    forms: dict[str, tuple[str, Any, Backbone, Kind, dict[str, Any]]] = {
        "classifier": ("bert", "SequenceClassification", Backbone.SEQUENCE_CLASSIFICATION, Kind.CLASSIFIER, {}),
        "decoder classifier": (
            "qwen3",
            "SequenceClassification",
            Backbone.SEQUENCE_CLASSIFICATION,
            Kind.CLASSIFIER,
            {},
        ),
        "language model": ("qwen3", "CausalLM", Backbone.CAUSAL_LM, Kind.RERANKER, {"scoring": scores}),
        "splade": ("modernbert", "MaskedLM", Backbone.MASKED_LM, Kind.SPARSE, {"splade": Splade()}),
        "late": (
            "bert",
            None,
            Backbone.ENCODER,
            Kind.MULTI_VECTOR,
            {"late": LateInteraction((), None, None, skip_ids=tuple(range(5, 30)))},
        ),
        "m3": (
            "bert",
            None,
            Backbone.ENCODER,
            Kind.EMBEDDING,
            {"m3": M3(folder / "sparse.pt", folder / "vectors.pt", (0, 2)), "config": {"vocab_size": 120}},
        ),
    }
    family, head, backbone, kind, parts = forms[case]
    auto = transformers.AutoModel if head is None else getattr(transformers, f"AutoModelFor{head}")
    save_headed(family, auto, folder)
    torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "sparse.pt")
    torch.save(torch.nn.Linear(32, 16).state_dict(), folder / "vectors.pt")
    return layout_of(folder, backbone, kind, **parts)


def on_host(rows: Mapping[Output, Rows], output: Output, width: int) -> np.ndarray:
    """One dense matrix whatever the rows are, by way of the engine's own copies."""
    copies = HostCopies(rows)
    found = copies.wait()[output]
    if found.indices is None or found.offsets is None:
        return found.values.astype(np.float32)
    full = np.zeros((len(found.offsets) - 1, width), np.float32)
    for text, row in enumerate(full):
        sparse = found.sparse_row(text)
        assert (sparse.values > 0).all()
        row[sparse.indices] = sparse.values
    copies.free()
    return full


@pytest.mark.parametrize(
    ("dtype", "batching"),
    [
        (torch.float32, Batching.BY_RUN),
        (torch.float32, Batching.EQUAL_LENGTH),
        (torch.bfloat16, Batching.VARLEN),
        (torch.float16, Batching.VARLEN),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_a_head_says_what_it_says_on_the_cpu(
    case: str, dtype: torch.dtype, batching: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splade_heads, "_CUDA_BYTES", 4 * 120 * 20)  # so that rows are cut here as well
    layout = made(case, tmp_path)
    batch = pack([Encoded(text) for text in random_texts()])
    exact = load_model(layout, torch.device("cpu"))
    truth = exact.run(batch, exact.outputs)
    model = load_model(layout, torch.device("cuda"))
    model.backbone.convert(dtype)
    model.backbone.use(batching)
    ours = model.run(batch, model.outputs)

    assert model.outputs == exact.outputs
    allowed = 1e-4 if dtype is torch.float32 else 0.06  # of the largest number
    for output, width in exact.widths.items():
        wanted = on_host(truth, output, width)
        assert ours[output].values.is_cuda
        found = on_host(ours, output, width)
        np.testing.assert_allclose(found, wanted, atol=allowed * np.abs(wanted).max(), rtol=0)
