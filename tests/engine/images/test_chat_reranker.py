"""Rerankers that read texts and images in one input: scores as the library's, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import CANDIDATES, ChatLibrary, build_qwen3_vl_reranker, file_of, noise

from teimgr.engine.job import Content, ContentPair, Input, Output, Pair
from teimgr.errors import InputTooLong, InvalidInput

FILES = [file_of(noise(*size, seed)) for seed, size in enumerate([(40, 50), (300, 200), (200, 300)])]
SCORES = frozenset({Output.SCORES})
Side = tuple[str, list[bytes]]
GIVEN: list[tuple[Side, Side]] = [
    (("what is a fox?", []), ("The quick brown fox", [])),
    (("what is a fox?", []), ("", [FILES[0]])),
    (("what is a fox?", []), ("a caption", [FILES[1]])),
    (("", [FILES[2]]), ("The quick brown fox", [])),
    (("like this", [FILES[2]]), ("a caption", FILES[:2])),
]


@pytest.fixture(scope="module", params=["sentence-transformers", "bare"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    modules = request.param != "bare"
    found = Served(build_qwen3_vl_reranker(tmp_path_factory.mktemp("chat") / "model", modules=modules))
    yield found
    found.engine.close(1.0)


def pairs(served: Served) -> list[Input]:
    def content(side: Side) -> Content:
        return Content(side[0], tuple(map(served.engine.picture, side[1])))

    return [ContentPair(content(query), content(document)) for query, document in GIVEN]


def reference(folder: Path, told: str = CANDIDATES) -> np.ndarray:
    """The scores of `GIVEN` by the library, in the prompt of the authors' code, one pair at a time."""
    library = ChatLibrary(folder, "Qwen3VLForConditionalGeneration")
    return np.array([library.score(*sides, told) for sides in GIVEN])


def test_scores_of_queries_and_documents_with_images_are_the_librarys(served: Served) -> None:
    job = served.embed(pairs(served), outputs=SCORES)
    assert not job.errors
    assert np.abs(job.scores[:, 0] - reference(served.path)).max() < 1e-6
    text = served.embed([Pair(GIVEN[0][0][0], GIVEN[0][1][0])], outputs=SCORES)
    assert abs(text.scores[0, 0] - job.scores[0, 0]) < 1e-6


def test_a_score_alone_is_that_of_a_mixed_batch(served: Served) -> None:
    given = pairs(served)
    together = served.embed(given, outputs=SCORES).scores
    alone = np.concatenate([served.embed([one], outputs=SCORES).scores for one in given])
    assert np.abs(alone - together).max() < 1e-6


def test_an_instruction_stands_in_its_place(served: Served) -> None:
    given = [one._replace(first=Content(one.first.text, one.first.pictures, "Find foxes")) for one in pairs(served)]
    job = served.embed(given, outputs=SCORES)
    assert np.abs(job.scores[:, 0] - reference(served.path, "Find foxes.")).max() < 1e-6


def test_a_long_document_is_cut_and_images_are_not(served: Served) -> None:
    picture, limit = served.engine.picture(FILES[1]), served.engine.info.max_input_length
    job = served.embed([ContentPair(Content("a"), Content("rain " * 2000, (picture,)))], outputs=SCORES)
    assert not job.errors
    assert job.tokens == limit
    hidden = ContentPair(Content("rain " * 2000), Content("a", (picture,)))
    refused = served.embed([hidden], outputs=SCORES)
    assert isinstance(refused.errors[0], InputTooLong)
    assert "not truncated" in refused.errors[0].message


def test_a_text_or_an_image_alone_is_refused(served: Served) -> None:
    job = served.embed(["a", served.engine.picture(FILES[0]), Content("a")], outputs=SCORES)
    assert sorted(job.errors) == [0, 1, 2]
    assert all(isinstance(error, InvalidInput) and "must be pairs" in error.message for error in job.errors.values())


def test_a_self_test_scores_an_image_too(served: Served) -> None:
    served.engine.self_test(60.0)
    assert served.engine.info.kind == "reranker"
    assert served.engine.info.modalities == ("text", "image")
