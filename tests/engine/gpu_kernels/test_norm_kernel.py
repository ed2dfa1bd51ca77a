"""The kernel's arithmetic, by Triton's interpreter on the CPU; and how it is tried before use."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from teimgr.engine.gpu_kernels.norm_kernel import Norms, NormShape, eager_norm, norm_kernel

SOURCES = Path(__file__).parents[3] / "src"
CPU = torch.device("cpu")
SHAPE = NormShape(24, torch.float16, is_rms=False, adds=True, has_bias=True)
# In a process of its own: Triton decides when it is imported.
INTERPRETED = """
import itertools, json, torch
from teimgr.engine.gpu_kernels.norm_kernel import eager_norm, norm_rows
torch.manual_seed(0)
worst, calls = {}, 0
for dtype, width, is_rms, adds, biased in itertools.product(
    (torch.float16, torch.bfloat16), (1, 24, 64, 384, 1000), (False, True), (False, True), (False, True)
):
    if is_rms and biased:
        continue
    x, residual = (3 * torch.randn(2, 5, width) + 1).to(dtype), torch.randn(2, 5, width).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    given = (x, residual if adds else None, weight, bias if biased else None, 1e-5, is_rms)
    found = norm_rows(*given)
    assert found.dtype is dtype and found.shape == x.shape and found.is_contiguous()
    # In float64, so that neither is compared with its own rounding.
    exact = eager_norm(*(part.double() if isinstance(part, torch.Tensor) else part for part in given))
    off = ((found.double() - exact).abs() / (1 + exact.abs())).max().item()
    worst[str(dtype)] = max(worst.get(str(dtype), 0.0), off)
    calls += 1
x = torch.randn(4, 64).half()
def plain(rows):
    return norm_rows(rows, None, weight, None, 1e-5, False)

big = torch.full((2, 64), 60000.0).half()
weight = torch.ones(64).half()
print(json.dumps({
    "worst": worst,
    "calls": calls,
    "strided": torch.equal(plain(x.t().contiguous().t()), plain(x)),
    "none": list(norm_rows(x[:0], x[:0], weight, None, 1e-5, False).shape),
    "sum beyond 16 bits is finite": bool(norm_rows(big, big, weight, None, 1e-5, False).isfinite().all()),
    "nan is kept": bool(norm_rows(x * torch.nan, None, weight, None, 1e-5, True).isnan().all()),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_arithmetic_is_torchs_by_the_interpreter() -> None:
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCES)}
    said = json.loads(subprocess.check_output([sys.executable, "-c", INTERPRETED], env=environ, text=True))

    assert said["calls"] == 60
    assert said["worst"]["torch.float16"] < 2**-10  # a rounding of the result
    assert said["worst"]["torch.bfloat16"] < 2**-7
    assert said["none"] == [0, 64]
    assert said["strided"]
    assert said["sum beyond 16 bits is finite"]
    assert said["nan is kept"]


def test_without_triton_there_is_no_kernel() -> None:
    assert (norm_kernel() is None) is (importlib.util.find_spec("triton") is None)


def test_torchs_own_is_the_library_layers() -> None:
    norm = torch.nn.LayerNorm(24, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(3, 24), torch.randn(3, 24)

    torch.testing.assert_close(eager_norm(x, residual, norm.weight, norm.bias, 1e-5, False), norm(x + residual))
    squares = x.square().mean(-1, keepdim=True)
    torch.testing.assert_close(
        eager_norm(x, None, norm.weight, None, 1e-5, True), x / (squares + 1e-5).sqrt() * norm.weight
    )


def test_a_shape_is_tried_once_and_only_in_16_bits() -> None:
    calls: list[NormShape] = []

    def counted(*given: object) -> torch.Tensor:
        calls.append(SHAPE)
        return eager_norm(*given)  # type: ignore[arg-type]

    norms = Norms(counted, CPU)

    assert norms.has(SHAPE)
    assert norms.has(SHAPE)
    assert len(calls) == 1
    assert not norms.has(SHAPE._replace(dtype=torch.float32))


@pytest.mark.parametrize(("factor", "is_one"), [(1.0, True), (1.1, False), (float("nan"), False)])
def test_a_kernel_that_gives_other_results_is_not_used(
    factor: float, is_one: bool, caplog: pytest.LogCaptureFixture
) -> None:
    norms = Norms(lambda *given: eager_norm(*given) * factor, CPU)

    assert norms.has(SHAPE) is is_one
    assert [record.levelno for record in caplog.records] == ([] if is_one else [logging.WARNING])


def test_a_kernel_that_cannot_be_compiled_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def refused(*given: object) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    assert not Norms(refused, CPU).has(SHAPE)
    assert "C compiler" in caplog.text
