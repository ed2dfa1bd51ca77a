"""The choice for a GPU, made on a stand-in for a card: dtypes in turn from weights that stay on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.card import StandInCard
from tests.support.models import (
    TEXTS,
    build,
    build_classifier,
    build_m3,
    build_multi_vector,
    build_splade,
    build_yes_no_reranker,
)
from tests.support.models.dual_encoders import build_clip, build_colpali, build_gme

from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded, pack
from teimgr.engine.fidelity import fidelity_gate
from teimgr.engine.fidelity.fidelity_gate import Choice, probe_inputs
from teimgr.engine.gpu_choice import candidate_dtypes, choose_on_gpu
from teimgr.engine.gpu_kernels import varlen_kernel
from teimgr.engine.images.chats import load_chat_model
from teimgr.engine.images.model import PicturedModel, load_dual_model
from teimgr.engine.images.pages import load_page_model
from teimgr.engine.loading import EngineOptions, load_parts
from teimgr.engine.model import Model, load_model, tensor_bytes, tensors_of
from teimgr.engine.text.tokenizer import TextTokenizer
from teimgr.engine.weights.own import HostWeights
from teimgr.errors import DeviceFailed, InvalidConfig, ModelLoadFailed, OutOfDeviceMemory
from teimgr.models.reading import read_layout

from .conftest import Served

CPU = torch.device("cpu")
KNOWN = [Encoded(np.arange(5, 12, dtype=np.int32)), Encoded(np.array([3], dtype=np.int32))]


def chosen(path: Path, wanted: torch.dtype | None = None) -> tuple[Model, Choice]:
    layout = read_layout(path)
    model = load_model(layout, CPU)
    return model, choose_on_gpu(model, CPU, wanted, probe_inputs(layout, TextTokenizer(layout, layout.max_length)))


def test_the_finer_type_is_first_where_layers_end_in_a_normalisation() -> None:
    half, brain, single = torch.float16, torch.bfloat16, torch.float32

    assert candidate_dtypes("xlm-roberta", True) == [half, brain, single]
    assert candidate_dtypes("qwen3", True) == [brain, half, single]
    assert candidate_dtypes("qwen3", False) == [half, single]


def test_a_bert_is_served_in_half_precision_with_one_call_per_layer(
    card: StandInCard, model_dir: Callable[..., Path]
) -> None:
    model, choice = chosen(model_dir("bert"))

    assert (choice.dtype, choice.batching) == (torch.float16, Batching.VARLEN)
    assert card.flash_calls == 2 * (1 + 9)  # layers; one batch, and each of its texts alone
    assert {p.dtype for p in model.host_weights().module.parameters()} == {torch.float16}
    assert choice.closeness.min_cosine > 0.9995


def test_one_type_after_the_other_is_made_of_the_same_weights(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_16_bits(monkeypatch)
    layout = read_layout(model_dir("bert"))
    first = {name: value.clone() for name, value in load_model(layout, CPU).backbone._module.state_dict().items()}  # type: ignore[union-attr]
    model, choice = chosen(model_dir("bert"))

    assert (choice.dtype, choice.batching) == (torch.float32, Batching.BY_RUN)
    assert all(torch.equal(value, first[name]) for name, value in model.backbone._module.state_dict().items())  # type: ignore[union-attr]
    assert sum("deviates too much" in record.message for record in caplog.records) == 2
    assert choice.refused.keys() == {"float16", "bfloat16"}
    assert all(0.999 < cosine < 1 for cosine in choice.refused.values())


def refuse_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gate take float32 alone."""
    own = fidelity_gate.close_enough
    monkeypatch.setattr(
        fidelity_gate,
        "close_enough",
        lambda close, dtype, requested: dtype is torch.float32 and own(close, dtype, requested),
    )


@torch.inference_mode()
def test_the_half_of_images_is_made_of_its_own_weights_in_each_type(
    card: StandInCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 it had been made of what a refused type had left of them."""
    refuse_16_bits(monkeypatch)
    layout = read_layout(build_clip(tmp_path))
    model = load_dual_model(layout, CPU, 1)
    exact = model.vectors(model.known)
    choice = choose_on_gpu(model, CPU, None, probe_inputs(layout, TextTokenizer(layout, layout.max_length)))

    assert choice.dtype is torch.float32
    assert torch.equal(model.vectors(model.known), exact)


@pytest.mark.parametrize(("build_it", "load"), [(build_colpali, load_page_model), (build_gme, load_chat_model)])
def test_a_type_in_which_images_stray_is_passed_over_by_auto_alone(
    build_it: Callable[[Path], Path],
    load: Callable[..., PicturedModel],
    card: StandInCard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = read_layout(build_it(tmp_path))
    closeness = PicturedModel._closeness
    monkeypatch.setattr(
        PicturedModel, "_closeness", lambda own: 0.9 if own.backbone.dtype is torch.bfloat16 else closeness(own)
    )
    choice = choose_on_gpu(load(layout, CPU, 1), CPU, None, KNOWN)

    assert (choice.dtype, choice.refused) == (torch.float16, {"bfloat16": 0.9})
    with pytest.raises(ModelLoadFailed, match="bfloat16 deviates too much from float32 on known"):
        choose_on_gpu(load(layout, CPU, 1), CPU, torch.bfloat16, KNOWN)


def test_a_model_with_experts_stays_in_float32(card: StandInCard, tmp_path: Path) -> None:
    model, choice = chosen(build("qwen2_moe", tmp_path))

    assert model.backbone.dtype is torch.float32
    assert choice.why is not None
    assert choice.why.reason.startswith("tokens may go to other experts")


def test_a_device_that_computes_float32_wrongly_is_not_served(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with itself alone it would agree."""
    place = Model.place

    def wrongly(own: Model, weights: HostWeights, dtype: torch.dtype, device: torch.device) -> None:
        place(own, weights, dtype, device)
        for weight in weights.module.parameters():
            weight.copy_(weight.sign())

    monkeypatch.setattr(Model, "place", torch.no_grad()(wrongly))
    with pytest.raises(DeviceFailed, match="are not the host's"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m", dtype="float32"))


@pytest.mark.parametrize("family", ["modernbert", "qwen3", "roberta", "distilbert"])
def test_other_architectures_are_packed_too(family: str, card: StandInCard, model_dir: Callable[..., Path]) -> None:
    assert chosen(model_dir(family), torch.bfloat16)[1].batching is Batching.VARLEN


KINDS: dict[str, Callable[[Path], Path]] = {
    "classifier": lambda folder: build_classifier("bert", folder),
    "m3": build_m3,
    "late": lambda folder: build_multi_vector("bert", folder),
    "sparse": lambda folder: build_splade("bert", folder),
    "yes or no": build_yes_no_reranker,
    "projected": lambda folder: build("bert", folder, modules=("Dense:Tanh", "LayerNorm", "Normalize")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_follows_its_model(kind: str, card: StandInCard, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    model, choice = chosen(folder, torch.bfloat16)
    assert (choice.batching, model.backbone.dtype) == (Batching.VARLEN, torch.bfloat16)

    model = load_model(read_layout(folder), CPU)
    bytes_of = tensor_bytes(model)
    model.place(model.host_weights(), torch.bfloat16, torch.device("meta"))
    assert bytes_of > 10_000
    assert {tensor.device.type for tensor in tensors_of(model)} == {"meta"}
    model.backbone.use(Batching.VARLEN)
    rows = model.run(pack(KNOWN), model.outputs)  # torch refuses what is on two devices
    assert {of.values.device.type for of in rows.values()} == {"meta"}


def test_a_kernel_that_refuses_is_reported(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with torch 2.11, which lacked two of the arguments of before: by run, in /info and in the log."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError("unexpected keyword argument 'enable_gqa'")

    monkeypatch.setattr(varlen_kernel.VarlenKernel, "__call__", refuse)
    with caplog.at_level(logging.INFO):
        info = load_parts(EngineOptions(path=model_dir("bert"), model_id="m")).info

    assert (info.batching, info.attention, info.dtype) == ("packed", "by-run", "float16")
    assert [r.levelno for r in caplog.records if "enable_gqa" in r.message] == [logging.WARNING]


def test_what_is_served_is_reported_and_right(card: StandInCard, model_dir: Callable[..., Path], serve: Any) -> None:
    served: Served = serve(model_dir("bert"), dtype="auto")
    exact = fidelity_gate_truth(model_dir("bert"))

    info = served.engine.info
    assert (info.attention, info.dtype) == ("varlen", "float16")
    assert (served.embed(TEXTS).vectors * exact).sum(axis=1).min() > 0.9999
    assert served.engine.stats().device_peak_bytes == 0  # torch's figure; None on a CPU
    assert info.dtype_reason.startswith("both types of 16 bits are equally fast, and float16 is the finer one")
    assert [(each["dtype"], each["outcome"], each["min_cosine"]) for each in info.dtype_candidates] == [
        ("float16", "chosen", info.min_cosine),
        ("bfloat16", "not tried", None),
        ("float32", "not tried", None),
    ]


def fidelity_gate_truth(path: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return np.asarray(SentenceTransformer(str(path), device="cpu").encode(TEXTS, normalize_embeddings=True))


def test_a_fault_of_the_device_is_not_the_models(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        card.fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        raise card.fault

    monkeypatch.setattr(varlen_kernel.VarlenKernel, "__call__", fail)
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m"))


def test_a_device_without_room_for_the_weights_is_named(
    card: StandInCard, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(Model, "place", full)
    with pytest.raises(OutOfDeviceMemory, match="does not fit"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m"))


def test_eight_bits_are_refused(card: StandInCard, model_dir: Callable[..., Path]) -> None:
    with pytest.raises(InvalidConfig, match="int8 is not for GPUs"):
        load_parts(EngineOptions(path=model_dir("bert"), model_id="m", dtype="int8"))
