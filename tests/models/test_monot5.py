"""monoT5: an encoder-decoder that writes "true" or "false" behind a query and a document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teimgr.engine.job import Output, Pair
from teimgr.errors import InvalidConfig
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support.models import TEXTS
from tests.support.models.single_families import build_monot5, monot5_scores

PAIRS = [Pair("the lazy fox", "fog"), Pair("a ship", TEXTS[2]), Pair("a ship", " ".join(TEXTS) * 20)]


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_scores_are_the_probability_of_true(
    kind: str,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build_monot5(tmp_path, kind)
    served = serve(tmp_path)
    truth = monot5_scores(tmp_path, PAIRS, kind)
    scores = frozenset({Output.SCORES})
    together = served.embed(PAIRS, outputs=scores)
    alone = [served.embed([pair], outputs=scores).scores[0] for pair in PAIRS]

    assert (served.engine.info.kind, served.engine.info.warnings, together.errors) == ("reranker", (), {})
    np.testing.assert_allclose(together.scores, truth, atol=1e-5)
    np.testing.assert_allclose(alone, truth, atol=1e-5)
    assert np.ptp(truth) > 1e-3


@pytest.mark.parametrize("card", ["# duoT5, from monot5-3b", ""])
def test_another_encoder_decoder_is_refused_by_what_it_is(card: str, tmp_path: Path) -> None:
    build_monot5(tmp_path, "t5")
    (tmp_path / "README.md").write_text(card)

    with pytest.raises(InvalidConfig, match=r"T5ForConditionalGeneration.* reads a text and writes another"):
        read_layout(tmp_path)


def test_one_that_its_card_does_not_name_is_served_on_request(tmp_path: Path) -> None:
    build_monot5(tmp_path, "t5")
    (tmp_path / "README.md").unlink()

    assert "the prompt of monoT5 is used" in read_layout(tmp_path, kind="reranker").warnings[0]
