"""What `auto` tries first: by the instruction set, unless a measurement says clearly otherwise; `/info` tells why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.models import build
from tests.support.models.single_families import build_jina_v5
from tests.support.native import HAS_FORWARD, LIBRARY, MULTIPLIES_BYTES

from teimgr.engine.fidelity import dtype_speed, fidelity_gate
from teimgr.engine.fidelity.dtype_speed import Preference, decided, preference
from teimgr.engine.loading import EngineOptions, load_parts
from teimgr.engine.model import load_model
from teimgr.engine.native_library import BFLOAT16_LEVEL
from teimgr.models.reading import read_layout
from teimgr.spec import LoadedModel


@pytest.mark.parametrize(
    ("times_as_fast", "multiplies", "dtype"),
    [
        (2.0, True, torch.bfloat16),
        (1.01, True, torch.bfloat16),  # of a measurement that other load has disturbed
        (0.9, True, torch.float32),
        (0.6, False, torch.float32),
        (1.4, False, torch.float32),
        (1.6, False, torch.bfloat16),
    ],
)
def test_a_measurement_overrules_the_instruction_set_only_by_a_margin(
    times_as_fast: float, multiplies: bool, dtype: torch.dtype
) -> None:
    found, reason = decided(times_as_fast, multiplies, "avx2")

    assert found is dtype
    assert reason.startswith("avx2")
    assert f"{times_as_fast:.2f} times as fast" in reason


def test_a_model_has_the_speed_of_each_type_that_runs_here(model_dir: Callable[..., Path]) -> None:
    layout = read_layout(model_dir("bert"))

    found = preference(load_model(layout, torch.device("cpu")))

    assert found.layer_us["float32"] > 0
    assert ("int8" in found.layer_us) == MULTIPLIES_BYTES
    if HAS_FORWARD and LIBRARY is not None:
        assert "bfloat16" in found.layer_us
    assert found.reason


def test_layers_are_measured_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype_speed, "_LIMIT_S", 0.0)
    runs: list[str] = []

    dtype_speed._timed({torch.float32: lambda: runs.append("float32"), torch.int8: lambda: runs.append("int8")})

    assert runs == ["float32", "int8"] * dtype_speed._MIN_RUNS


def test_info_has_the_reason_and_the_candidates(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = Preference(torch.bfloat16, "a reason", {"float32": 9.0, "bfloat16": 5.0, "int8": 3.0})
    monkeypatch.setattr(fidelity_gate, "preference", lambda _: why)
    monkeypatch.setattr(fidelity_gate, "MIN_COSINE", 0.99999999)
    info = load_parts(EngineOptions(path=model_dir("bert"), model_id="m")).info

    assert info.dtype == "float32"
    assert info.dtype_reason == "a reason; but its results in bfloat16 are too far from those in float32"
    by_name = {each["dtype"]: each for each in info.dtype_candidates}
    assert (by_name["float32"]["outcome"], by_name["float32"]["min_cosine"]) == ("chosen", info.min_cosine)
    assert by_name["int8"] == {"dtype": "int8", "layer_us": 3.0, "min_cosine": None, "outcome": "on request alone"}
    if HAS_FORWARD and LIBRARY is not None and LIBRARY.level >= BFLOAT16_LEVEL:
        assert by_name["bfloat16"]["outcome"] == "too far off"
        assert 0.99 < by_name["bfloat16"]["min_cosine"] < 1
    assert LoadedModel.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_a_requested_dtype_is_its_own_reason(model_dir: Callable[..., Path]) -> None:
    info = load_parts(EngineOptions(path=model_dir("bert"), model_id="m", dtype="float32")).info

    assert (info.dtype_reason, info.dtype_candidates) == ("dtype = float32", ())


TYPES = "auto", "bfloat16"
RISKS = {
    "qwen2_moe": "tokens may go to other experts",
    "qwen3_5": "linear attention carries its errors along a text",
    "jina_v5": "each task has its own weights, and the loss of precision differs between them",
}


@pytest.mark.parametrize("family", RISKS)
def test_what_fewer_bits_may_change_is_computed_in_float32_and_warned_about_in_others(
    family: str, tmp_path: Path
) -> None:
    """Their rows of the catalogue are off by cosines of 0.90 to 0.99 on texts that are not among the known ones."""
    if family == "jina_v5":
        build_jina_v5(tmp_path, nano=True)
    path = tmp_path if family == "jina_v5" else build(family, tmp_path)
    by_auto, requested = (load_parts(EngineOptions(path=path, model_id="m", dtype=dtype)).info for dtype in TYPES)

    assert (by_auto.dtype, by_auto.warnings) == ("float32", ())
    assert by_auto.dtype_reason.startswith(f"{RISKS[family]} in fewer bits")
    assert requested.warnings[0].startswith(f"{RISKS[family]} in bfloat16: vectors of some texts may be far")
