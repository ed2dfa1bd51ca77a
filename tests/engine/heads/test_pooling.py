"""Vectors of texts: every pooling against its formula, and the modules behind it against sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.plain_models import CPU, END, Ids, layout_of, random_texts, run, save_headed
from tests.support.models import TOKEN_WIDTH, WIDTH
from tests.support.models.encoders import IDENTITY, TANH, write_dense
from tests.support.native import needs_native_library
from torch import nn

from teimgr.engine.backbone import Batching, StaticTable
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack, pack_as_given
from teimgr.engine.finisher import HostRows
from teimgr.engine.heads import pooling
from teimgr.engine.heads.pooling import POOLINGS, DenseHead, Segments, finish, finish_on_device, pool
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import M3, Backbone, Dense, LateInteraction
from teimgr.spec import Kind

LENGTHS = (4, 1, 9, 4)
PROMPTS = (2, 0, 3, 2)


def packed(lengths: Sequence[int], prompts: Sequence[int] | None = None) -> PackedBatch:
    return pack(
        [
            Encoded(np.zeros(length, dtype=np.int32), prompt_tokens=prompt)
            for length, prompt in zip(lengths, prompts or (0,) * len(lengths), strict=True)
        ]
    )


def plainly(name: str, rows: np.ndarray, prompt: int) -> np.ndarray:
    kept, weights = rows[prompt:], np.arange(1, len(rows) + 1)[prompt:, None]
    return {
        "cls": kept[0],
        "last_token": kept[-1],
        "max": kept.max(0),
        "mean": kept.mean(0),
        "mean_sqrt_len": kept.sum(0) / np.sqrt(len(kept)),
        "weighted_mean": (kept * weights).sum(0) / weights.sum(),
    }[name]


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("prompts", [None, PROMPTS])
@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_pooling_is_its_formula(
    name: str, prompts: tuple[int, ...] | None, on_card: bool, request: pytest.FixtureRequest
) -> None:
    """On a card run by run, where there are few runs and no prompts."""
    if on_card:
        request.getfixturevalue("card")
    batch = packed(LENGTHS, prompts)
    assert bool(Segments.of(batch, torch.device("cpu")).runs) is (on_card and prompts is None)
    hidden = torch.randn(batch.tokens, 6, generator=torch.Generator().manual_seed(1))
    result = pool(hidden, batch, [name]).numpy()

    for row, source in enumerate(batch.order):
        rows = hidden[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]].numpy()
        np.testing.assert_allclose(result[row], plainly(name, rows, prompts[source] if prompts else 0), atol=1e-6)


def test_several_poolings_are_concatenated() -> None:
    batch = packed([3])
    hidden = torch.randn(3, 6)

    torch.testing.assert_close(pool(hidden, batch, ["cls", "mean"])[0], torch.cat([hidden[0], hidden.mean(0)]))


def test_half_precision_is_summed_in_single() -> None:
    batch = packed([4096])
    hidden = torch.full((4096, 1), 1.0078125, dtype=torch.bfloat16)

    assert pool(hidden, batch, ["mean"]).item() == 1.0078125


@pytest.mark.parametrize(("dimensions", "normalize"), [(None, True), (3, True), (3, False), (None, False)])
def test_a_device_finishes_as_the_host_does(dimensions: int | None, normalize: bool) -> None:
    vectors = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
    vectors[2] = 0.0
    found = finish_on_device(vectors, dimensions, normalize)

    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    np.testing.assert_allclose(found.numpy(), finish(vectors.numpy(), dimensions, normalize), atol=1e-7)


def test_the_cut_comes_before_the_norm_and_a_zero_row_stays_zero() -> None:
    rows = np.array([[3, 4, 12], [0, 0, 5]], dtype=np.float32)

    np.testing.assert_allclose(finish(rows, 2, True), [[0.6, 0.8], [0, 0]])
    np.testing.assert_allclose(finish(rows, None, True)[0], rows[0] / 13)
    np.testing.assert_allclose(finish(rows, 1, False), [[3], [0]])


@needs_native_library
class TestNative:
    """The native functions beside the operators that take their place where there are none."""

    def test_means_are_those_of_the_operators_bit_for_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = packed((1, 3, 17, 512))
        hidden = torch.randn(batch.tokens, 385, generator=torch.Generator().manual_seed(2)) * 50
        native = pool(hidden, batch, ["mean"])
        monkeypatch.setattr(pooling, "native_library", lambda: None)

        assert torch.equal(native, pool(hidden, batch, ["mean"]))

    @pytest.mark.parametrize("dimensions", [None, 1, 64])
    def test_rows_are_scaled_to_length_1(self, dimensions: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        vectors = np.random.default_rng(3).normal(size=(9, 385)).astype(np.float32) * 1e18
        vectors[4] = 0
        native = finish(vectors, dimensions, True)
        monkeypatch.setattr(pooling, "native_library", lambda: None)

        np.testing.assert_allclose(native, finish(vectors, dimensions, True), rtol=1.2e-7)
        assert not native[4].any()

    def test_a_row_does_not_depend_on_those_beside_it(self) -> None:
        vectors = np.random.default_rng(4).normal(size=(9, 385)).astype(np.float32)
        hidden = torch.from_numpy(vectors)

        np.testing.assert_array_equal(finish(vectors, None, True)[5], finish(vectors[5:6], None, True)[0])
        alone = pool(hidden[3:], packed((6,)), ["mean"])
        assert torch.equal(pool(hidden, packed((3, 6)), ["mean"])[1], alone[0])

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
    def test_rows_with_what_is_no_number_are_found(self, number: float) -> None:
        values = np.zeros((5, 33), np.float32)
        values[1, 32] = values[3, 0] = number

        assert HostRows(values).finite().tolist() == [True, False, True, False, True]


ROWS, TABLE_WIDTH, IDS = 50, 8, 100


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_is_that_of_the_rows(mapped: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "mapping": torch.arange(IDS) // 2 if mapped else None,
        "weights": torch.rand(IDS) if weighted else None,
    }
    table = StaticTable(torch.randn(ROWS if mapped else IDS, TABLE_WIDTH), **parts)
    chooser = np.random.default_rng(0)
    texts = [Encoded(chooser.integers(0, IDS, length, dtype=np.int32)) for length in (3, 1, 40, 7)]
    batch = pack_as_given(texts)

    means = table.mean_head(nn.Sequential(), table.width)(torch.empty(0), batch).values

    pooled = DenseHead(("mean",), nn.Sequential(), TABLE_WIDTH)(table.hidden(batch), batch).values
    torch.testing.assert_close(means, pooled, rtol=1e-6, atol=1e-7)
    assert table.is_float32_on_cpu


CLS = 0


@pytest.fixture
def texts() -> list[Ids]:
    drawn = random_texts()
    for text in drawn:
        text[0] = CLS
    return drawn


@torch.inference_mode()
def hidden_of(theirs: torch.nn.Module, text: Ids) -> torch.Tensor:
    states: torch.Tensor = theirs(input_ids=torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
    return states


def encoder(folder: Path) -> torch.nn.Module:
    from transformers import AutoModel

    return save_headed("xlm_roberta", AutoModel, folder)  # type: ignore[no-any-return]


def load(folder: Path, kind: Kind, **parts: object) -> Model:
    model = load_model(layout_of(folder, Backbone.ENCODER, kind, position_offset=2, **parts), CPU)
    model.backbone.use(Batching.BY_RUN)
    return model


def test_token_vectors_are_the_last_hidden_states(tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    model = load(tmp_path, Kind.EMBEDDING)

    assert model.widths == {Output.DENSE: WIDTH, Output.TOKENS: WIDTH}
    for text, rows in zip(texts, run(model, texts, Output.TOKENS), strict=True):
        np.testing.assert_allclose(rows, hidden_of(theirs, text), atol=2e-5)


def late(folder: Path, **changes: object) -> LateInteraction:
    torch.manual_seed(1)
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, TANH, bias=False)
    write_dense(folder / "2_Dense", TOKEN_WIDTH, 8, IDENTITY)
    first = Dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, False, TANH)
    second = Dense(folder / "2_Dense", TOKEN_WIDTH, 8, True, IDENTITY)
    settings: dict[str, object] = {"query_length": None, "document_length": None} | changes
    return LateInteraction(projections=(first, second), **settings)  # type: ignore[arg-type]


def projected(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    from safetensors.torch import load_file

    first, second = (load_file(folder / name / "model.safetensors") for name in ("1_Dense", "2_Dense"))
    return torch.tanh(hidden @ first["linear.weight"].T) @ second["linear.weight"].T + second["linear.bias"]


@pytest.mark.parametrize("normalize", [True, False])
def test_every_token_is_projected(normalize: bool, tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    model = load(tmp_path, Kind.MULTI_VECTOR, late=late(tmp_path, normalize=normalize))

    assert model.widths == {Output.MULTI_VECTOR: 8, Output.TOKENS: WIDTH}
    for text, rows in zip(texts, run(model, texts, Output.MULTI_VECTOR), strict=True):
        wanted = projected(tmp_path, hidden_of(theirs, text))
        if normalize:
            wanted = torch.nn.functional.normalize(wanted, dim=-1)
        np.testing.assert_allclose(rows, wanted, atol=2e-5)


@pytest.mark.parametrize("in_queries", [True, False])
def test_skipped_tokens_have_no_vector_in_documents(in_queries: bool, tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    skipped = tuple(range(5, 60))
    texts.append(np.array([6, 7], dtype=np.int32))  # nothing of it is kept
    model = load(tmp_path, Kind.MULTI_VECTOR, late=late(tmp_path, skip_ids=skipped, skip_in_queries=in_queries))
    roles = [index % 2 == 0 for index in range(len(texts))]
    asked = [Encoded(text, query=query) for text, query in zip(texts, roles, strict=True)]

    for text, query, rows in zip(texts, roles, run(model, asked, Output.MULTI_VECTOR), strict=True):
        kept = ~np.isin(text, skipped) | (query and not in_queries)
        wanted = torch.nn.functional.normalize(projected(tmp_path, hidden_of(theirs, text)), dim=-1)
        np.testing.assert_allclose(rows, wanted[torch.from_numpy(kept)], atol=2e-5)


def test_bge_m3_gives_three_outputs_of_one_forward(tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    torch.manual_seed(2)
    sparse, vectors = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, 12)
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    torch.save(vectors.half().state_dict(), tmp_path / "colbert_linear.pt")
    texts[3][5:20] = texts[3][4]  # a word again and again
    m3 = M3(tmp_path / "sparse_linear.pt", tmp_path / "colbert_linear.pt", (CLS, END, 1, 3))
    model = load(tmp_path, Kind.EMBEDDING, m3=m3, config={"vocab_size": 120})

    assert model.widths == {Output.DENSE: 32, Output.TOKENS: 32, Output.SPARSE: 120, Output.MULTI_VECTOR: 12}
    sparse.requires_grad_(False), vectors.float().requires_grad_(False)
    found = zip(texts, run(model, texts, Output.SPARSE), run(model, texts, Output.MULTI_VECTOR), strict=True)
    for text, (indices, values), rows in found:
        hidden = hidden_of(theirs, text)
        wanted: dict[int, float] = {}
        for token, weight in zip(text.tolist(), sparse(hidden).relu().flatten().tolist(), strict=True):
            if token not in m3.unused_ids and weight > 0:
                wanted[token] = max(weight, wanted.get(token, 0.0))
        assert indices.tolist() == sorted(wanted)
        np.testing.assert_allclose(values, [wanted[token] for token in sorted(wanted)], atol=1e-5)
        np.testing.assert_allclose(rows, torch.nn.functional.normalize(vectors(hidden[1:]), dim=-1), atol=2e-5)


def test_a_file_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    (tmp_path / "sparse_linear.pt").write_bytes(b"nothing of torch's")
    m3 = M3(tmp_path / "sparse_linear.pt", tmp_path / "sparse_linear.pt", ())

    with pytest.raises(ModelLoadFailed, match=r"sparse_linear.pt holds no linear layer"):
        load(tmp_path, Kind.EMBEDDING, m3=m3, config={"vocab_size": 120})
