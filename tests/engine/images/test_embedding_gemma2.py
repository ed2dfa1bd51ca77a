"""EmbeddingGemma 2: ids, pixels and vectors of texts and of images as the library's, alone and in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import Gemma2Library, build_embedding_gemma2, file_of, noise
from tests.support.models.files import edit, read, write

from teimgr.engine.images.files import decode
from teimgr.engine.images.pixels import PixelTable, prepare
from teimgr.engine.job import Content, Input
from teimgr.errors import ModelLoadFailed
from teimgr.models.reading import read_layout

TEXTS = ["what is a fox?", "The quick brown fox jumps over the lazy dog. " * 3, "Zürich x"]
FILES = [file_of(noise(*size)) for size in [(40, 50), (300, 200), (64, 64), (5, 900), (900, 5), (57, 71)]]
PROMPT = "task: search result | query: "


def test_vectors_ids_and_pixels_are_the_librarys_in_one_mixed_call_and_alone(tmp_path: Path) -> None:
    served = Served(build_embedding_gemma2(tmp_path / "model"))
    library, pictures = Gemma2Library(served.path), [served.engine.picture(one) for one in FILES]
    inputs: list[Input] = [*TEXTS, *pictures]
    job = served.embed(inputs, prompt_name="SearchQuery")
    wanted = [library.vector(text, (), PROMPT) for text in TEXTS] + [library.vector("", [one]) for one in FILES]
    assert not job.errors
    assert min(float(here @ there) for here, there in zip(job.vectors, wanted, strict=True)) > 0.999999
    alone = np.concatenate([served.embed([one], prompt_name="SearchQuery").vectors for one in inputs])
    assert np.abs(alone - job.vectors).max() < 2e-6

    steps = served.engine.layout.dual.steps
    for file, picture in zip(FILES, pictures, strict=True):
        theirs = library.inputs("", [file])
        numbers = PixelTable(steps).numbers([prepare(decode(file), steps)], torch.device("cpu"))[0]
        down, across = numbers.shape[1] // steps.patch, numbers.shape[2] // steps.patch
        split = numbers.reshape(3, down, steps.patch, across, steps.patch).permute(1, 3, 2, 4, 0)
        assert torch.equal(split.reshape(down * across, -1), theirs["pixel_values"][0, : down * across])
        assert picture.tokens == int((theirs["input_ids"] == library.model.config.image_token_id).sum())

    both = served.embed([Content("a", (pictures[0],)), "a"])
    assert list(both.errors) == [0]
    assert "a text or an image alone" in both.errors[0].message
    served.engine.self_test(60.0)
    info = served.engine.info
    assert (info.modalities, info.fused, info.dimension, info.batching) == (("text", "image"), False, 24, "packed")
    served.engine.close(1.0)


def test_files_without_the_part_for_images_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = build_embedding_gemma2(tmp_path / "model")
    edit(folder / "config.json", vision_config=None)
    with pytest.raises(ModelLoadFailed, match=r"vision_config.*with all parts, like those of google/embeddinggemma-2"):
        read_layout(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_soft_tokens": 71}, "max_soft_tokens = 71"),
        ({"do_normalize": True}, "do_normalize"),
        ({"do_resize": None}, "do_resize = None"),
        ({"patch_size": 8}, "8"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = build_embedding_gemma2(tmp_path / "model")
    settings = folder / "preprocessor_config.json"
    write(settings, read(settings) | change)
    with pytest.raises(ModelLoadFailed, match=named):
        Served(folder)
