"""Models of images alone: vectors as the library gives them, and texts refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import build_dinov2, file_of, noise
from tests.support.models.files import edit
from tests.support.native import needs_native_forward

from teimgr.engine.images.files import decode
from teimgr.engine.images.pixels import PixelTable, prepare
from teimgr.engine.job import Lane, Output
from teimgr.engine.native_forward.image_layers import NativeLayers
from teimgr.errors import InvalidConfig, InvalidInput, ModelLoadFailed, WrongModelKind

PICTURES = [noise(40, 50), noise(300, 200, 1), noise(64, 64, 2), noise(5, 90, 3)]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "dinov2": build_dinov2,
    "dinov2, of its own size": partial(build_dinov2, trained=42),
    "dinov2 with registers": partial(build_dinov2, registers=3),
}


@pytest.fixture(scope="module", params=list(BUILDERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(BUILDERS[request.param](tmp_path_factory.mktemp("alone") / "model"))
    yield found
    found.engine.close(1.0)


def read_by_library(folder: Path) -> list[torch.Tensor]:
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return [processor(images=[one], return_tensors="pt")["pixel_values"] for one in PICTURES]


def reference(folder: Path) -> torch.Tensor:
    """The vectors of `PICTURES` by the library, one at a time."""
    model: Any = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return torch.cat([model(one).last_hidden_state[:, 0] for one in read_by_library(folder)])


def test_pixels_are_those_of_the_librarys_processor_bit_for_bit(served: Served) -> None:
    dual = served.engine.layout.dual
    assert dual is not None
    table = PixelTable(dual.steps)
    for picture, there in zip(PICTURES, read_by_library(served.path), strict=True):
        here = table.numbers([prepare(decode(file_of(picture)), dual.steps)], torch.device("cpu"))
        assert torch.equal(here, there)


def test_vectors_are_the_librarys(served: Served) -> None:
    pictures = [served.engine.picture(file_of(one)) for one in PICTURES]
    job = served.wait(served.send(pictures, normalize=False))
    assert not job.errors
    there = reference(served.path)
    assert float(torch.cosine_similarity(torch.from_numpy(job.vectors).double(), there.double()).min()) > 0.99999
    assert np.allclose(np.linalg.norm(job.vectors, axis=1), np.linalg.norm(there, axis=1), rtol=1e-4)
    registers = served.engine.layout.config.get("num_register_tokens", 0)
    assert [one.tokens for one in pictures] == [1 + registers + 9] * 4
    assert job.tokens == sum(one.tokens for one in pictures)


@needs_native_forward
def test_its_layers_are_computed_by_the_native_forward(served: Served) -> None:
    assert isinstance(served.engine._runners[0]._model._tower.vision.encoder, NativeLayers)
    assert (served.engine.info.forward, served.engine.info.attention) == ("native", "varlen")


def test_a_picture_alone_has_the_vector_that_it_has_among_others(served: Served) -> None:
    files = [file_of(one) for one in PICTURES] * 8
    alone = served.wait(served.send([served.engine.picture(files[0])], Lane.BULK)).vectors[0]
    among = served.wait(served.send([*map(served.engine.picture, files)], Lane.BULK)).vectors
    assert np.abs(among[0] - alone).max() < 1e-6


def test_texts_pairs_and_ids_are_refused_by_name_and_pictures_beside_them_served(served: Served) -> None:
    picture = served.engine.picture(file_of(PICTURES[0]))
    job = served.wait(served.send(["a text", picture, np.array([1, 2], np.int32)]))
    assert sorted(job.errors) == [0, 2]
    for row in (0, 2):
        assert isinstance(job.errors[row], InvalidInput)
        assert "this model embeds images alone: send an image" in job.errors[row].message
    assert np.linalg.norm(job.vectors[1]) == pytest.approx(1.0)
    with pytest.raises(InvalidInput, match="embeds images alone"):
        served.engine.tokenize("a text", True, None)
    with pytest.raises(InvalidInput, match="embeds images alone"):
        served.engine.tokenizer.decode([1], False)


def test_a_truncated_picture_fails_alone(served: Served) -> None:
    whole = file_of(PICTURES[1])
    job = served.wait(served.send([served.engine.picture(whole[:-900]), served.engine.picture(whole)]))
    assert list(job.errors) == [0]
    assert "the PNG file is truncated or broken" in job.errors[0].message


def test_the_self_test_embeds_a_known_picture(served: Served) -> None:
    served.engine.self_test(30.0)
    assert served.engine._reference is None
    assert served.engine._picture_reference is not None
    test = served.engine._run_self_test(30.0, served.engine._known_picture)
    assert test.agrees_with(served.engine._picture_reference)


def test_it_tells_that_it_embeds_images_and_no_texts(served: Served) -> None:
    info = served.engine.info
    assert info.modalities == ("image",)
    assert info.warnings == ()
    assert (info.pooling, info.dimension, info.dtype) == ("cls", 32, "float32")
    with pytest.raises(WrongModelKind):
        served.send([served.engine.picture(file_of(PICTURES[0]))], outputs=frozenset({Output.TOKENS}))


def test_sixteen_bits_on_request_are_compared_on_known_pictures(tmp_path: Path) -> None:
    served = Served(build_dinov2(tmp_path / "model"), dtype="bfloat16")
    try:
        assert served.engine.info.dtype == "bfloat16"
        assert 0.99 <= served.engine.info.min_cosine < 1.0
    finally:
        served.engine.close(1.0)
    with pytest.raises(InvalidConfig, match="int8 is not for models of images"):
        Served(tmp_path / "model", dtype="int8")


@pytest.mark.parametrize(
    ("file", "changed", "why"),
    [
        ("preprocessor_config.json", {"do_center_crop": False}, "pictures of any size"),
        ("preprocessor_config.json", {"crop_size": {"height": 10, "width": 10}}, "patches of 14"),
        ("config.json", {"architectures": ["Dinov2ForImageClassification"]}, "more than a model of vectors"),
        ("config.json", {"image_size": 100_000}, "pictures of 100000 pixels"),
        ("config.json", {"image_size": 4096, "patch_size": 1}, "a weight of 16,777,216 × 32"),
        ("config.json", {"mlp_ratio": 1_000_000}, "a weight of 32,000,000 × 32"),
    ],
)
def test_files_of_what_is_not_served_are_refused_by_name(
    tmp_path: Path, file: str, changed: dict[str, Any], why: str
) -> None:
    folder = build_dinov2(tmp_path / "model")
    edit(folder / file, **changed)
    with pytest.raises(ModelLoadFailed, match=why):
        Served(folder)
