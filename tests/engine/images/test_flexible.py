"""SigLIP2 NaFlex: pictures of several sizes, as transformers' processor and model read them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import build_siglip2_naflex, file_of, noise
from tests.support.models.files import edit, write_modules
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from teimgr.engine.images.files import decode
from teimgr.engine.images.pixels import PixelTable, prepare, resized_shape
from teimgr.engine.job import Lane
from teimgr.errors import ModelLoadFailed
from teimgr.models.dual_encoders import flexible_steps
from teimgr.models.layout import FlexibleSteps

TEXTS = ["a photo", "The Quick BROWN fox jumps over the lazy dog.", "rain " * 100, "ZÜRICH"]
PICTURES = [noise(40, 50), noise(300, 200, 1), noise(64, 64, 2), noise(5, 90, 3), noise(1, 700, 4)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(build_siglip2_naflex(tmp_path_factory.mktemp("flexible") / "model"))
    yield found
    found.engine.close(1.0)


def read_by_library(folder: Path) -> list[Any]:
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return [processor(images=[one], return_tensors="pt") for one in PICTURES]


def reference(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """By the library, the vectors of `TEXTS`, lower-cased and unmasked, and of `PICTURES`, padded and masked."""
    model: Any = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        texts = [
            model.get_text_features(
                input_ids=tokenizer(
                    text.lower(), truncation=True, max_length=64, padding="max_length", return_tensors="pt"
                )["input_ids"]
            ).pooler_output
            for text in TEXTS
        ]
        images = [model.get_image_features(**one).pooler_output for one in read_by_library(folder)]
    return torch.cat(texts), torch.cat(images)


def cosines(here: np.ndarray[Any, Any], there: torch.Tensor) -> float:
    return float(torch.cosine_similarity(torch.from_numpy(here).double(), there.double()).min())


def flexible(served: Served) -> FlexibleSteps:
    dual = served.engine.layout.dual
    assert dual is not None
    assert isinstance(dual.steps, FlexibleSteps)
    return dual.steps


def test_patches_are_those_of_the_librarys_processor_bit_for_bit(served: Served) -> None:
    steps = flexible(served)
    table = PixelTable(steps)
    for picture, there in zip(PICTURES, read_by_library(served.path), strict=True):
        numbers = table.numbers([prepare(decode(file_of(picture)), steps)], torch.device("cpu"))[0]
        down, across = numbers.shape[1] // 16, numbers.shape[2] // 16
        assert there["spatial_shapes"].tolist() == [[down, across]]
        here = numbers.reshape(3, down, 16, across, 16).permute(1, 3, 2, 4, 0).reshape(down * across, -1)
        assert torch.equal(here, there["pixel_values"][0, : down * across])
        assert served.engine.picture(file_of(picture)).tokens == down * across <= 20


@pytest.mark.parametrize("patches", [16, 20, 256, 1024])
def test_sizes_are_those_of_the_librarys_processor(patches: int) -> None:
    steps = flexible_steps({"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": patches})
    draw = random.Random(patches)
    sizes = [(draw.randint(1, 10 ** draw.randint(1, 4)), draw.randint(1, 10 ** draw.randint(1, 3))) for _ in range(500)]
    for width, height in [*sizes, (50_000_000, 1), (1, 50_000_000), (1, 1)]:
        across, down = resized_shape(steps, width, height)
        assert (down, across) == get_image_size_for_max_num_patches(height, width, 16, patches)
        assert (across // 16) * (down // 16) <= patches


def test_vectors_of_texts_and_images_are_the_librarys_in_one_mixed_call(served: Served) -> None:
    pictures = [served.engine.picture(file_of(one)) for one in PICTURES]
    mixed = [*TEXTS[:2], *pictures[:3], *TEXTS[2:], *pictures[3:]]
    job = served.wait(served.send(mixed, normalize=False))
    texts, images = reference(served.path)
    assert not job.errors
    assert cosines(job.vectors[[0, 1, 5, 6]], texts) > 0.99999
    assert cosines(job.vectors[[2, 3, 4, 7, 8]], images) > 0.99999
    assert np.allclose(np.linalg.norm(job.vectors[2]), np.linalg.norm(images[0]), rtol=1e-4)


def test_a_picture_alone_has_the_vector_that_it_has_among_others_of_other_sizes(served: Served) -> None:
    files = [file_of(one) for one in [*PICTURES, *(noise(30 + 7 * at, 90, at) for at in range(20))]]
    alone = [served.wait(served.send([served.engine.picture(one)], Lane.BULK)).vectors[0] for one in files]
    among = served.wait(served.send([*map(served.engine.picture, files), *TEXTS], Lane.BULK)).vectors
    assert np.abs(among[: len(files)] - np.stack(alone)).max() < 1e-6


def test_texts_are_lower_cased_as_the_authors_do(served: Served) -> None:
    found = served.wait(served.send(["A Photo", "a photo"])).vectors
    assert np.abs(found[0] - found[1]).max() < 1e-6


def test_the_self_test_embeds_a_text_and_a_picture(served: Served) -> None:
    served.engine.self_test(30.0)
    assert served.engine._reference is not None
    assert served.engine._picture_reference is not None
    assert served.engine.info.modalities == ("text", "image")
    assert served.engine.info.warnings == ()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"max_num_patches": 5000}, "whole number of 16 to 4096"),
        ({"max_num_patches": 4}, "whole number of 16 to 4096"),
        ({"patch_size": 8}, "patches of 8 x 8 pixels, and vision_config of config.json reads 16 x 16"),
        ({"do_resize": False}, "resizes no image"),
        ({"image_processor_type": "SiglipImageProcessor"}, "not served for SigLIP2 NaFlex"),
    ],
)
def test_files_of_what_is_not_served_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    folder = build_siglip2_naflex(tmp_path / "model")
    edit(folder / "preprocessor_config.json", **changed)
    with pytest.raises(ModelLoadFailed, match=why):
        Served(folder)


def test_the_layout_of_sentence_transformers_is_refused_by_name(tmp_path: Path) -> None:
    folder = build_siglip2_naflex(tmp_path / "model")
    write_modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    with pytest.raises(ModelLoadFailed, match=r"layout of sentence-transformers .* is not served"):
        Served(folder)
