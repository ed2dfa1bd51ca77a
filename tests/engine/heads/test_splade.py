"""SPLADE weights are the masked-LM logits of the library, pooled, however the row is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.plain_models import CPU, OFFSETS, Ids, layout_of, logits_of, random_texts, run, save_headed
from tests.support.card import WAITING, StandInCard
from torch.utils._python_dispatch import TorchDispatchMode

from teimgr.engine.backbone import Batching, WholeModel
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.heads import splade as heads
from teimgr.engine.host_copies import HostCopies
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.models.layout import Backbone, Splade
from teimgr.spec import Kind

PACKED = ("albert", "bert", "distilbert", "electra", "gte", "modernbert", "nomic_bert", "roberta", "xlm_roberta")
BY_EQUAL_LENGTH = ("deberta_v2", "mpnet")
WAYS = (("max", "relu"), ("sum", "relu"), ("max", "log1p_relu"), ("sum", "log1p_relu"))
MASKED = transformers.AutoModelForMaskedLM


def load(folder: Path, family: str, splade: Splade) -> Model:
    offset = OFFSETS.get(family, 0)
    layout = layout_of(folder, Backbone.MASKED_LM, Kind.SPARSE, splade=splade, position_offset=offset)
    return load_model(layout, CPU)


def truth(model: transformers.PreTrainedModel, text: Ids, splade: Splade) -> np.ndarray:
    weights = logits_of(model, text).relu().log1p()
    if splade.activation == "log1p_relu":
        weights = weights.log1p()
    pooled = weights.amax(0) if splade.strategy == "max" else weights.sum(0)
    return pooled.numpy()


def assert_weights(model: Model, theirs: transformers.PreTrainedModel, splade: Splade) -> None:
    texts = random_texts()
    vectors, entries = run(model, texts, Output.DENSE), run(model, texts, Output.SPARSE)
    for text, vector, (indices, values) in zip(texts, vectors, entries, strict=True):
        wanted = truth(theirs, text, splade)
        np.testing.assert_allclose(vector, wanted, rtol=1e-6, atol=1e-5)  # sums over tokens round in float32
        assert (np.diff(indices) > 0).all()
        assert (values > 0).all()
        filled = np.zeros_like(wanted)
        filled[indices] = values
        np.testing.assert_array_equal(filled, vector)


@pytest.mark.parametrize("family", [*PACKED, *BY_EQUAL_LENGTH])
def test_weights_are_the_librarys_logits_pooled(family: str, tmp_path: Path) -> None:
    theirs, splade = save_headed(family, MASKED, tmp_path), Splade()
    model = load(tmp_path, family, splade)
    model.backbone.use(Batching.BY_RUN if family in PACKED else Batching.EQUAL_LENGTH)

    assert model.widths == {Output.SPARSE: 120, Output.DENSE: 120}
    assert not isinstance(model.backbone, WholeModel)
    assert_weights(model, theirs, splade)


@pytest.mark.parametrize("room", [1, 7, 40, 100_000])
@pytest.mark.parametrize(("strategy", "activation"), WAYS)
def test_a_row_may_be_cut_anywhere(
    strategy: str, activation: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts within a text, between texts of one length, and between lengths."""
    monkeypatch.setattr(heads, "_CPU_BYTES", 4 * 120 * room)
    theirs, splade = save_headed("bert", MASKED, tmp_path), Splade(strategy, activation)

    assert_weights(load(tmp_path, "bert", splade), theirs, splade)


def test_the_plain_forward_is_the_librarys(tmp_path: Path) -> None:
    theirs, splade = save_headed("roberta", MASKED, tmp_path), Splade("sum")
    model = load(tmp_path, "roberta", splade)
    (text,) = random_texts([20])
    found = model.run_reference(Encoded(text))

    np.testing.assert_allclose(found[Output.DENSE].values[0], truth(theirs, text, splade), atol=1e-5)


def test_sixteen_bits_stay_close(tmp_path: Path) -> None:
    theirs, splade = save_headed("bert", MASKED, tmp_path), Splade()
    model, texts = load(tmp_path, "bert", splade), random_texts()
    model.backbone.convert(torch.bfloat16)
    ours = np.array(run(model, texts, Output.DENSE))
    wanted = np.array([truth(theirs, text, splade) for text in texts])
    cosines = (ours * wanted).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(wanted, axis=1)

    assert ours.dtype == np.float32
    assert cosines.min() > 0.999


def test_a_weight_that_is_no_number_is_not_lost(tmp_path: Path) -> None:
    save_headed("bert", MASKED, tmp_path)
    model = load(tmp_path, "bert", Splade())
    model.backbone.hidden = lambda batch: torch.full((batch.tokens, 32), float("nan"))  # type: ignore[method-assign]

    assert all(np.isnan(values).all() and len(values) for _, values in run(model, random_texts(), Output.SPARSE))


class NothingWaits(TorchDispatchMode):
    """Refuses what waits for a card, as long as it is entered, on this thread alone."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operator._schema.name not in WAITING, f"{operator} waits for the device"
        indices = args[1] if operator._schema.name == "aten::index" else ()
        assert all(each is None or each.dtype is not torch.bool for each in indices), "a mask waits for the device"
        return operator(*args, **(kwargs or {}))


def test_the_weights_of_queries_are_copied_to_a_device_once() -> None:
    """Each copy would wait for what the device does."""
    copies = []

    class Table:
        device = torch.device("cuda")

        def to(self, device: torch.device) -> torch.Tensor:
            copies.append(device)
            return torch.arange(4.0)

    table: Any = Table()
    weights = heads.RoutedWeights(heads.SpladeWeights(lambda hidden: hidden, 4, Splade()), table)
    batch = pack([Encoded(np.array(ids, np.int32), query=True) for ids in ([1, 3], [2, 2])])
    for _ in range(2):
        (found,) = weights.groups(torch.empty(0), batch)
    assert found.tolist() == [[0, 1, 0, 3], [0, 0, 2, 0]]
    assert copies == [CPU]


def test_the_mode_sees_what_waits() -> None:
    for wait in (torch.ones(3).nonzero, torch.ones(3).sum().item, lambda: torch.ones(3)[torch.ones(3) > 0]):
        with pytest.raises(AssertionError, match="waits for the device"), NothingWaits():
            wait()


@pytest.mark.parametrize("room", [1, 60, 100, 512])
def test_a_card_is_not_waited_for_before_the_finisher_is(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With room for few entries all are fetched by the thread that waits for the results."""
    save_headed("bert", MASKED, tmp_path)
    model = load(tmp_path, "bert", Splade())
    texts = random_texts()
    batch = pack([Encoded(np.array(text, np.int32)) for text in texts])
    hosts = HostCopies(model.run(batch, [Output.SPARSE])).wait()[Output.SPARSE]
    request.getfixturevalue("card")
    monkeypatch.setattr(heads, "_ROOM", room)

    with NothingWaits():
        rows = model.run(batch, [Output.SPARSE])
        copies = HostCopies(rows)
    with ThreadPoolExecutor(1) as finisher:
        found = finisher.submit(copies.wait).result()[Output.SPARSE]

    assert rows[Output.SPARSE].whole is not None
    assert (len(rows[Output.SPARSE].values) < len(hosts.values)) is (room < 77)
    for i in range(len(texts)):
        wanted, had = hosts.sparse_row(i), found.sparse_row(i)
        np.testing.assert_array_equal(had.indices, wanted.indices)
        np.testing.assert_array_equal(had.values, wanted.values)
        assert len(had.indices) > 1
    assert found.finite().all()


def test_what_is_no_number_is_found_on_a_card_too(card: StandInCard) -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0], [torch.nan, 0.0, 1.0]])
    pooled: Any = SimpleNamespace(width=3, groups=lambda hidden, batch: iter([weights[:1], weights[1:]]))
    batch = pack([Encoded(np.array([1], np.int32)), Encoded(np.array([2], np.int32))])

    with NothingWaits():
        copies = HostCopies({Output.SPARSE: heads.SpladeHead(pooled)(torch.zeros(2, 4), batch)})

    assert copies.wait()[Output.SPARSE].finite().tolist() == [True, False]
