"""The choices at load are made by trying, and undone where the trial fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import models
from tests.support.models import build, edit
from tests.support.native import PACKED, needs_int8
from torch import Tensor

from teimgr.engine import attention, gpu
from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded, PackedBatch, pack
from teimgr.engine.fidelity import fidelity_gate
from teimgr.engine.fidelity.dtype_speed import Preference
from teimgr.engine.fidelity.fidelity_gate import (
    PROBE_TEXTS,
    Choice,
    choose,
    compare,
    finite_reference,
    probe_inputs,
    probe_texts,
)
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.errors import InvalidConfig, ModelLoadFailed
from teimgr.models.reading import read_layout


def chosen(path: Path, wanted: torch.dtype | None) -> Choice:
    layout = read_layout(path)
    inputs = probe_inputs(layout, TextTokenizer(layout, layout.max_length))
    return choose(partial(load_model, layout, torch.device("cpu")), wanted, inputs)[1]


@pytest.mark.parametrize(
    ("family", "batching"),
    [("bert", PACKED), ("t5", Batching.EQUAL_LENGTH), ("mpnet", Batching.EQUAL_LENGTH)],
)
def test_packing_is_used_where_it_gives_the_librarys_vectors(
    family: str, batching: Batching, model_dir: Callable[..., Path]
) -> None:
    choice = chosen(model_dir(family), torch.float32)

    assert choice.batching is batching
    assert choice.closeness.min_cosine > 1 - 1e-9


def test_a_wrong_position_offset_is_noticed(model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the offset a packed RoBERTa is silently wrong; the trial sees it and packing is not used."""
    monkeypatch.setattr("teimgr.models.json_files.OFFSET_TYPES", set())

    assert chosen(model_dir("roberta"), torch.float32).batching is Batching.EQUAL_LENGTH


def test_a_wrong_window_is_noticed_though_no_common_text_is_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = build("modernbert", tmp_path)
    edit(path / "config.json", local_attention=1000, max_position_embeddings=2048)
    edit(path / "sentence_bert_config.json", max_seq_length=2048)
    assert chosen(path, torch.float32).batching is PACKED

    run = attention._by_run

    def without_window(*inputs: Any) -> Tensor:
        return run(*inputs[:-1], None)

    monkeypatch.setenv("TEIMGR_NATIVE", "attention")
    monkeypatch.setattr(attention, "_by_native_kernel", without_window)
    monkeypatch.setattr(attention, "_by_run", without_window)
    assert chosen(path, torch.float32).batching is Batching.EQUAL_LENGTH


def test_only_a_model_with_a_window_is_tried_with_a_long_text() -> None:
    def words(max_length: int, **config: object) -> int:
        return max((len(text.split()) for text in probe_texts(config, max_length)[len(PROBE_TEXTS) :]), default=0)

    assert words(512) == 0
    assert words(512, sliding_window=None, use_sliding_window=True) == 0
    assert words(512, sliding_window=512) == 0
    assert words(32768, sliding_window=128, use_sliding_window=False) == 0
    assert words(32768, sliding_window=100_000) == 0
    assert 256 < words(8192, local_attention=128) < 400
    assert 512 < words(2048, sliding_window=512) < 800
    assert words(32768, sliding_window=4096) == 0


def test_auto_returns_to_float32_where_a_faster_type_strays(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity_gate, "preference", lambda model: Preference(torch.bfloat16, "", {}))
    assert chosen(model_dir("bert"), None).dtype is torch.bfloat16

    monkeypatch.setattr(fidelity_gate, "MIN_COSINE", 0.99999999)
    choice = chosen(model_dir("bert"), None)
    assert choice.dtype is torch.float32
    assert choice.batching is PACKED


def test_the_first_model_is_gone_before_another_is_loaded(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity_gate, "preference", lambda model: Preference(torch.bfloat16, "", {}))
    monkeypatch.setattr(fidelity_gate, "MIN_COSINE", 0.99999999)
    layout = read_layout(model_dir("bert"))
    inputs = probe_inputs(layout, TextTokenizer(layout, layout.max_length))
    loaded: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def load(*, is_known: bool = False) -> Model:
        alive.append(sum(ref() is not None for ref in loaded))
        embedder = load_model(layout, torch.device("cpu"))
        loaded.append(weakref.ref(embedder.backbone._module))
        return embedder

    choose(load, None, inputs)
    assert len(alive) > 1
    assert set(alive) == {0}


def test_a_type_that_was_asked_for_is_not_second_guessed_until_it_is_broken(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity_gate, "MIN_COSINE", 0.99999999)
    assert chosen(model_dir("bert"), torch.bfloat16).dtype is torch.bfloat16

    monkeypatch.setattr(fidelity_gate, "MIN_REQUESTED_COSINE", 1.1)
    with pytest.raises(ModelLoadFailed, match="differ"):
        chosen(model_dir("bert"), torch.bfloat16)


@needs_int8
def test_int8_is_taken_where_it_is_asked_for_and_reported_with_its_closeness(minilm: Path) -> None:
    choice = chosen(minilm, torch.int8)

    assert (choice.dtype, choice.batching) == (torch.int8, Batching.NATIVE)
    assert 0.99 < choice.closeness.min_cosine < 0.9999


def test_int8_is_refused_by_name_for_a_model_that_is_not_lowered(model_dir: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="dtype int8 is not for this model or this machine"):
        chosen(model_dir("mpnet"), torch.int8)


def test_every_kind_is_tried_as_it_will_be_used(tmp_path: Path) -> None:
    def inputs(path: Path) -> list[Encoded]:
        layout = read_layout(path)
        return probe_inputs(layout, TextTokenizer(layout, layout.max_length))

    def second_halves(found: list[Encoded]) -> int:
        return sum(encoded.type_ids is not None and bool(encoded.type_ids.any()) for encoded in found)

    reranker = inputs(models.build_cross_encoder("bert", tmp_path / "reranker"))
    classifier = inputs(models.build_classifier("bert", tmp_path / "classifier"))
    late = inputs(models.build_multi_vector("bert", tmp_path / "late"))

    assert 2 < second_halves(reranker) < len(reranker)
    assert 0 < second_halves(classifier) < len(classifier)
    assert {encoded.query for encoded in late} == {True, False}
    assert any(encoded.keys is not None for encoded in late)


@pytest.mark.parametrize("kind", ["cross_encoder", "classifier", "multi_vector"])
def test_halves_and_keys_that_a_batch_loses_are_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = getattr(models, f"build_{kind}")("bert", tmp_path)
    assert chosen(path, torch.float32).batching is PACKED

    def losing(texts: Sequence[Encoded]) -> PackedBatch:
        return replace(pack(texts), type_ids=None, keys=None)

    monkeypatch.setattr(fidelity_gate, "pack", losing)  # of batches; the reference is packed by the model
    with pytest.raises(ModelLoadFailed, match="differ"):
        chosen(path, torch.float32)


def test_a_sparse_model_is_packed(tmp_path: Path) -> None:
    choice = chosen(models.build_splade("bert", tmp_path), torch.float32)

    assert choice.batching is PACKED
    assert choice.closeness.min_cosine > 1 - 1e-9


def test_a_type_in_which_scores_stray_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.build_cross_encoder("bert", tmp_path)
    monkeypatch.setattr(fidelity_gate, "preference", lambda model: Preference(torch.bfloat16, "", {}))
    monkeypatch.setattr(fidelity_gate, "_MAX_SCORE_DIFFERENCE", 1.0)
    choice = chosen(path, None)
    assert choice.dtype is torch.bfloat16
    assert 0.0 < choice.closeness.score_difference < 0.1
    assert choice.closeness.min_cosine == 1.0

    monkeypatch.setattr(fidelity_gate, "_MAX_SCORE_DIFFERENCE", choice.closeness.score_difference / 2)
    assert chosen(path, None).dtype is torch.float32


def test_two_texts_without_any_weight_are_alike() -> None:
    nothing, something = torch.zeros(1, 8), torch.eye(8)[:1]

    assert compare([{Output.SPARSE: nothing}], [{Output.SPARSE: nothing}]).min_cosine == 1.0
    assert compare([{Output.SPARSE: something}], [{Output.SPARSE: nothing}]).min_cosine == 0.0


@pytest.mark.parametrize(("family", "batching"), [("lfm2", Batching.EQUAL_LENGTH), ("qwen3", Batching.BY_RUN)])
def test_sixteen_bits_do_not_hide_a_neighbour_in_a_packed_row(
    model_dir: Callable[..., Path], family: str, batching: Batching
) -> None:
    """Convolutions of LFM2 reach over the ends of packed texts, which is within the limits of the type itself."""
    choice = chosen(model_dir(family), torch.bfloat16)
    assert choice.batching in (batching, Batching.VARLEN if batching is Batching.BY_RUN else batching)


def test_attention_of_a_models_own_is_not_packed_in_a_type_that_hides_it(model_dir: Callable[..., Path]) -> None:
    """Flaubert takes a packed row and lets each text see all of it: of weights as it is trained from, by less than a
    type of 16 bits rounds."""
    assert chosen(model_dir("flaubert"), torch.bfloat16).batching is Batching.EQUAL_LENGTH


def test_code_of_the_library_that_fails_is_named(tmp_path: Path) -> None:
    """Flaubert's with pre_norm, in transformers 5."""
    path = build("flaubert", tmp_path)
    edit(path / "config.json", pre_norm=True)

    with pytest.raises(ModelLoadFailed, match="FlaubertModel fails on known texts, so it is not served: TypeError: "):
        chosen(path, torch.float32)


def test_vectors_of_another_size_than_the_files_say_are_named(tmp_path: Path) -> None:
    path = build("bert", tmp_path)
    layout = read_layout(path)
    model = load_model(layout, torch.device("cpu"))
    model.backbone.config.hidden_size = 24
    model = model.with_heads_of(layout)

    with pytest.raises(ModelLoadFailed, match=r"BertModel gives 32 numbers \(dense\), and its files declare 24"):
        finite_reference(model, probe_inputs(layout, TextTokenizer(layout, 96)))


def test_a_failure_on_a_card_is_not_called_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of cuBLAS beside others that fill the card: the next attempt may succeed."""

    def failing(_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)")

    monkeypatch.setattr(gpu, "wait_for", lambda _: None)  # the card still computes
    backbone = SimpleNamespace(device=torch.device("cuda"))
    model: Any = SimpleNamespace(backbone=backbone, widths={}, run_reference=failing)
    with pytest.raises(RuntimeError, match="CUBLAS"):
        finite_reference(model, [Encoded(np.array([1, 2]))])
