"""Rows of the table hold, with fewer texts than the table is made with.

`python -m bench fidelity` measures all of them; here are the real model and, of every kind, the cases farthest apart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench import corpus

from teimgr.engine.job import Output
from teimgr.engine.native_library import LEVELS, native_library
from tests.fidelity.cases import CASES, MINILM, Case
from tests.fidelity.figures import LIMITS, Distance, Figures, between_vectors
from tests.fidelity.measure import measure

TEXTS = 30
_LIBRARY = native_library()
_MULTIPLIES_BFLOAT16 = _LIBRARY is not None and _LIBRARY.level >= LEVELS.index("avx512_bf16")


def some(cases: tuple[Case, ...]) -> list[Case]:
    """The first, the middle one and the last of every kind, and the real weights."""
    kinds = dict.fromkeys(case.row for case in cases)
    of_kind = [[case for case in cases if case.row == kind] for kind in kinds]
    chosen = [case for found in of_kind for case in (found[0], found[len(found) // 2], found[-1])]
    return list({id(case): case for case in chosen}.values())


@pytest.mark.parametrize("case", some(CASES), ids=lambda case: f"{case.row}: {case.name}")
def test_the_numbers_are_the_models_numbers(case: Case, tmp_path: Path) -> None:
    figures = case.figures(tmp_path / "model", TEXTS)["float32"]

    assert isinstance(figures, Figures)
    assert figures.pass_, figures
    assert figures.batches < figures.inputs, "every input was a batch of its own, so nothing was shown of batches"


@pytest.mark.skipif(not _MULTIPLIES_BFLOAT16, reason="needs the native library and a CPU with avx512_bf16")
def test_the_real_minilm_keeps_a_cosine_of_four_nines_in_bfloat16(tmp_path: Path) -> None:
    path = MINILM.make(tmp_path)
    texts = corpus.some(150)
    words = sorted(len(text.split()) for text in texts)
    assert words[15] < 15 < 60 < words[-15], "the texts are not of mixed length"

    figures = measure(path, texts, MINILM.reference(path, texts), Output.DENSE, dtype="bfloat16")

    assert figures.forward == "native"
    assert figures.reference.cosine is not None
    assert 0.9999 <= figures.reference.cosine < 0.9999999, "not bfloat16, or too far from float32"
    assert figures.is_bit_for_bit, figures
    assert figures.batches < figures.inputs


def test_a_dtype_is_measured_by_limits_of_its_own_and_a_refusal_is_a_result(tmp_path: Path) -> None:
    mpnet = next(case for case in CASES if case.name == "mpnet")  # whose forward is not native: no int8

    found = mpnet.figures(tmp_path / "model", 6, dtypes=("float32", "int8"))

    assert isinstance(found["float32"], Figures)
    assert found["float32"].limits is LIMITS["float32"]
    assert "int8" in str(found["int8"])
    assert not isinstance(found["int8"], Figures)


def test_the_mean_cosine_counts_as_well_as_the_lowest() -> None:
    one, other = np.eye(2, dtype=np.float32)[:, None], np.array([[[1, 0]], [[1, 1]]], dtype=np.float32)

    distance = between_vectors(list(one), list(other))

    assert distance.cosine == pytest.approx(0.5**0.5)
    assert distance.mean_cosine == pytest.approx((1 + 0.5**0.5) / 2)
    assert not Distance(0.985, 0.1, 0.99).meets(MINILM.limits["int8"])
    assert Distance(0.985, 0.1, 0.998).meets(MINILM.limits["int8"])
