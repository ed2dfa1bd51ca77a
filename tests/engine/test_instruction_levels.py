"""The real model by every instruction set of the native library that this CPU has, against its own float32 forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.conftest import Served
from tests.support.native import LIBRARY, needs_native_forward

from teimgr.engine.attention_kernel import attention_kernel
from teimgr.engine.backbone import Transformer
from teimgr.engine.fidelity.fidelity_gate import reference_of
from teimgr.engine.job import Lane, Output
from teimgr.engine.model import load_model
from teimgr.engine.native_library import LEVELS
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import InvalidConfig
from teimgr.models.reading import read_layout

pytestmark = needs_native_forward
HERE = LEVELS[: LIBRARY.level + 1] if LIBRARY else ()
NATIVE = HERE[1:]  # "baseline" has a code for attention alone
WORDS = Path(__file__).read_text().split()
TEXTS = [" ".join(WORDS[i : i + length]) for i, length in enumerate((1, 2, 3, 5, 8, 13, 13, 13, 30, 55, 90, 140))]


@pytest.fixture(scope="module")
def expected(minilm: Path) -> NDArray[np.float32]:
    """Vectors of the model's own float32 forward, one text at a time, [texts, width] of length 1."""
    layout = read_layout(minilm)
    model = load_model(layout, torch.device("cpu"))
    rows = []
    for encoded in TextTokenizer(layout, 256).encode(TEXTS, TokenizeOptions()):
        assert not isinstance(encoded, Exception)
        rows.append(reference_of(model, encoded)[Output.DENSE][0])
    vectors = torch.nn.functional.normalize(torch.stack(rows).float()).numpy()
    return np.asarray(vectors, np.float32)


@pytest.fixture
def use_level(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the library compute as on a CPU of that level."""

    def use(level: str) -> None:
        library, kernel = LIBRARY, attention_kernel()
        assert library is not None
        assert kernel is not None
        monkeypatch.setattr(library, "level", LEVELS.index(level))
        monkeypatch.setattr(kernel, "_best", LEVELS.index(level))

    return use


def lowest_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    return float((found * expected).sum(axis=1).min())


def level_of(served: Served) -> str:
    """The instructions of the kernel that serves."""
    backbone = served.engine._runners[0]._model.backbone
    assert isinstance(backbone, Transformer)
    if backbone._kernel is not None:
        return LEVELS[backbone._kernel._program.level]
    kernel = attention_kernel()
    assert kernel is not None
    return kernel.level


@pytest.mark.parametrize("level", NATIVE)
def test_the_native_forward_is_the_models_own(
    level: str,
    use_level: Callable[[str], None],
    minilm: Path,
    expected: NDArray[np.float32],
    serve: Callable[..., Served],
) -> None:
    use_level(level)
    served = serve(minilm, dtype="float32")
    assert (served.engine.info.forward, served.engine.info.attention) == ("native", "varlen")
    assert level_of(served) == level

    together = served.embed(TEXTS)
    assert not together.errors
    assert lowest_cosine(together.vectors, expected) > 0.99999
    alone = [served.embed([text], Lane.INTERACTIVE).vectors[0] for text in TEXTS]
    np.testing.assert_array_equal(together.vectors, alone)  # bit for bit, whatever is beside it


@pytest.mark.parametrize("level", HERE)
def test_attention_alone_is_the_models_own(
    level: str,
    use_level: Callable[[str], None],
    minilm: Path,
    expected: NDArray[np.float32],
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_level(level)
    if level != "baseline":  # which has no more
        monkeypatch.setenv("TEIMGR_NATIVE", "attention")
    served = serve(minilm, dtype="float32")
    assert (served.engine.info.forward, served.engine.info.attention) == ("library", "varlen")
    assert level_of(served) == level

    assert lowest_cosine(served.embed(TEXTS).vectors, expected) > 0.99999


@pytest.mark.parametrize(
    ("level", "dtype", "least"),
    [
        ("avx2", "float16", 0.99999),
        ("avx2", "bfloat16", 0.9999),
        ("avx2", "int8", 0.99),
        ("avx_vnni", "int8", 0.99),
        ("avx512", "float16", 0.99999),
        ("avx512", "bfloat16", 0.9999),
        ("avx512", "int8", 0.99),
        ("avx512_bf16", "bfloat16", 0.9999),
        ("avx512_bf16", "int8", 0.99),
        ("amx", "float16", 0.99999),
        ("amx", "bfloat16", 0.9999),
        ("amx", "int8", 0.99),
    ],
)
def test_other_types_are_native_at_every_level(
    level: str,
    dtype: str,
    least: float,
    use_level: Callable[[str], None],
    minilm: Path,
    expected: NDArray[np.float32],
    serve: Callable[..., Served],
) -> None:
    if level not in HERE:
        pytest.skip(f"this CPU has no {level}")
    use_level(level)
    served = serve(minilm, dtype=dtype)
    assert (served.engine.info.forward, served.engine.info.dtype) == ("native", dtype)

    assert lowest_cosine(served.embed(TEXTS).vectors, expected) > least


@pytest.mark.skipif("baseline" not in HERE, reason="needs the native library")
def test_int8_is_refused_where_the_instructions_lack_it(
    use_level: Callable[[str], None], minilm: Path, serve: Callable[..., Served]
) -> None:
    use_level("baseline")

    with pytest.raises(InvalidConfig, match=r"dtype int8 .* baseline"):
        serve(minilm, dtype="int8")
