"""Models of queries and page images: a vector for each token as the library gives it, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import build_colmodernvbert, build_colpali, build_colqwen2, file_of, noise
from tests.support.models.files import edit, read
from tests.support.native import needs_native_forward

from teimgr.engine.images.files import decode
from teimgr.engine.images.pages import squares
from teimgr.engine.images.pixels import PixelTable, prepare, resized_shape
from teimgr.engine.job import Output
from teimgr.engine.native_forward.image_layers import NativeLayers, NativeTexts
from teimgr.errors import InvalidInput, ModelLoadFailed
from teimgr.models.layout import PatchSteps

QUERIES = ["what is a fox?", "The quick brown fox jumps over the lazy dog.", "Zürich <pad> x", " a\n b "]
PAGES = [noise(40, 50), noise(300, 200, 1), noise(200, 300, 2), noise(5, 90, 3), noise(300, 200, 4)]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "ColPali": build_colpali,
    "ColQwen2": build_colqwen2,
    "ColModernVBert": build_colmodernvbert,
}
VECTORS = frozenset({Output.MULTI_VECTOR})


@pytest.fixture(scope="module", params=list(BUILDERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(BUILDERS[request.param](tmp_path_factory.mktemp("pages") / "model"))
    yield found
    found.engine.close(1.0)


def reference(folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The vectors of `QUERIES` and `PAGES` by the library and its processor, one at a time."""
    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    name = next(name for name in BUILDERS if name.lower() == kind)
    model: Any = getattr(transformers, f"{name}ForRetrieval").from_pretrained(folder).eval()
    processor = getattr(transformers, f"{name}Processor").from_pretrained(folder)
    with torch.inference_mode():
        queries = [model(**processor.process_queries(text=[one])).embeddings[0] for one in QUERIES]
        pages = [model(**processor.process_images(images=[one])).embeddings[0] for one in PAGES]
    return queries, pages


def least_cosine(here: Any, there: list[torch.Tensor]) -> float:
    assert [one.shape for one in here] == [tuple(one.shape) for one in there]
    found = [
        torch.cosine_similarity(torch.from_numpy(one).double(), other.double(), dim=-1).min()
        for one, other in zip(here, there, strict=True)
    ]
    return float(min(found))


def test_vectors_of_queries_and_pages_are_the_librarys_in_one_mixed_call(served: Served) -> None:
    pages = [served.engine.picture(file_of(one)) for one in PAGES]
    mixed = [one for pair in zip(QUERIES, pages, strict=False) for one in pair] + pages[len(QUERIES) :]
    job = served.wait(served.send(mixed, outputs=VECTORS))
    queries, of_pages = reference(served.path)
    assert not job.errors
    assert least_cosine(job.multi_vectors[:8:2], queries) > 0.99999
    assert least_cosine([*job.multi_vectors[1:8:2], job.multi_vectors[8]], of_pages) > 0.99999
    assert [len(one) for one in job.multi_vectors[1:8:2]] == [one.tokens for one in pages[:4]]  # counted by the header
    alone = served.wait(served.send([pages[1]], outputs=VECTORS)).multi_vectors[0]
    assert np.abs(alone - job.multi_vectors[3]).max() < 1e-5


def test_a_patch_is_that_of_the_vector_which_changes_with_it(served: Served) -> None:
    steps = served.engine.layout.dual.steps
    side = 28 if isinstance(steps, PatchSteps) else 8 if steps.size else 32  # of a patch, where nothing is resized
    patches = 4 if isinstance(steps, PatchSteps) or steps.size else 8  # squares scale a smaller page up
    across, down = (112, 56) if isinstance(steps, PatchSteps) else (patches * side, patches * side)
    plain = np.asarray(noise(across, down))
    page = served.engine.picture(file_of(Image.fromarray(plain)))
    places = served.engine.tokenizer.patches(page)
    assert places.shape == (down // side, across // side)
    for row, column in ((0, 0), (1, 2), (places.shape[0] - 1, 1)):
        changed = plain.copy()
        changed[row * side : (row + 1) * side, column * side : (column + 1) * side] ^= 255
        other = served.engine.picture(file_of(Image.fromarray(changed)))
        before, after = served.wait(served.send([page, other], outputs=VECTORS)).multi_vectors
        differences = np.linalg.norm(after - before, axis=1)[places]
        assert np.unravel_index(differences.argmax(), places.shape) == (row, column)
    assert served.engine.tokenizer.patches("a text") is None


@needs_native_forward
def test_layers_of_both_halves_are_computed_by_the_native_forward(served: Served) -> None:
    own = served.engine._runners[0]._model._module.vlm
    vision = getattr(own, "vision_tower", None) or getattr(own, "vision_model", None)
    assert isinstance(getattr(own, "language_model", None) or own.text_model, NativeTexts)
    assert vision is None or isinstance(vision.encoder, NativeLayers)  # Qwen2-VL has one without batches
    assert (served.engine.info.forward, served.engine.info.batching) == ("native", "equal-length")


def test_a_turned_page_has_the_vectors_and_the_tokens_of_an_upright_one(served: Served) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    turned, upright = noise(300, 150), noise(300, 150).transpose(Image.Transpose.ROTATE_90)
    pages = [served.engine.picture(one) for one in (file_of(turned, exif=exif), file_of(upright))]
    job = served.wait(served.send(pages, outputs=VECTORS))
    assert [len(one) for one in job.multi_vectors] == [one.tokens for one in pages]
    assert (job.multi_vectors[0] == job.multi_vectors[1]).all()


def test_a_text_as_a_document_is_refused_with_the_way_out(served: Served) -> None:
    page = served.engine.picture(file_of(PAGES[0]))
    job = served.wait(served.send(["a text", page], outputs=VECTORS, prompt_name="document"))
    assert list(job.errors) == [0]
    assert "send an image" in job.errors[0].message
    assert len(job.multi_vectors[1]) == page.tokens


def test_a_text_with_the_token_of_an_image_is_refused_as_by_the_library(served: Served) -> None:
    token = served.engine.layout.pages.image_token
    job = served.wait(served.send([f"a {token} b", "a"], outputs=VECTORS))
    assert list(job.errors) == [0]
    assert token in job.errors[0].message


def test_a_long_query_is_cut_and_its_end_stays(served: Served) -> None:
    whole = served.wait(served.send(["rain " * 2000, "a"], outputs=VECTORS))
    assert len(whole.multi_vectors[0]) == served.engine.info.max_input_length
    refused = served.wait(served.send(["rain " * 2000], outputs=VECTORS, truncate=False))
    assert isinstance(refused.errors[0], InvalidInput)


def test_a_self_test_embeds_a_page_too(served: Served) -> None:
    served.engine.self_test(60.0)
    assert served.engine.info.modalities == ("text", "image")
    assert served.engine.info.multi_vector_dimension == 24


def test_a_page_too_long_for_its_width_is_refused_by_its_header(served: Served) -> None:
    if not isinstance(served.engine.layout.dual.steps, PatchSteps):
        pytest.skip("it scales every image, or divides it")
    with pytest.raises(InvalidInput, match="200 times"):
        served.engine.picture(file_of(noise(2010, 5)))


@pytest.mark.parametrize(
    ("build", "change", "named"),
    [
        (build_colpali, {"image_seq_length": 0}, "image_seq_length"),
        (build_colpali, {"image_seq_length": 15}, "which should be a square"),
        (build_colqwen2, {"temporal_patch_size": 4}, "temporal_patch_size"),
        (build_colqwen2, {"size": {"shortest_edge": 1, "longest_edge": 10**9}}, "longest_edge"),
        (build_colmodernvbert, {"do_image_splitting": None}, "do_image_splitting = None"),
        (build_colmodernvbert, {"do_resize": None}, "do_resize = None"),
        (build_colmodernvbert, {"do_normalize": None}, "do_normalize = None, which is not served"),
        (build_colmodernvbert, {"max_image_size": {"longest_edge": 32}}, "squares of 32 pixels"),
        (build_colmodernvbert, {"size": {"longest_edge": 1024}}, "squares of 64"),
        (build_colmodernvbert, {"size": {"longest_edge": 512}}, "<row_1_col_5>"),
        (build_colmodernvbert, {"image_mean": [0.0, 0.0, 0.0]}, "for padding"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(
    tmp_path: Path, build: Callable[[Path], Path], change: dict[str, Any], named: str
) -> None:
    folder = build(tmp_path / "model")
    settings = folder / "processor_config.json"
    edit(settings, image_processor=read(settings)["image_processor"] | change)
    with pytest.raises(ModelLoadFailed, match=named):
        Served(folder)


SIZES = [(40, 50), (300, 200), (64, 64), (1, 500), (500, 1), (2010, 5), (256, 256), (255, 257), (90, 1000), (199, 53)]


@pytest.mark.parametrize("more", [{}, {"default_to_square": True, "do_center_crop": None, "disable_grouping": None}])
def test_squares_and_ids_of_a_page_are_those_of_the_librarys_processor_bit_for_bit(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """`more`: as the library's fast processors save themselves."""
    folder = build_colmodernvbert(tmp_path / "model")
    edit(
        folder / "processor_config.json",
        image_processor=read(folder / "processor_config.json")["image_processor"] | more,
    )
    served = Served(folder)
    processor: Any = transformers.ColModernVBertProcessor.from_pretrained(served.path)
    tokenizer, steps = served.engine.tokenizer, served.engine.layout.dual.steps
    for seed, size in enumerate(SIZES):
        theirs = processor.process_images(images=[noise(*size, seed)])
        made = prepare(decode(file_of(noise(*size, seed))), steps)
        assert torch.equal(
            squares(PixelTable(steps).numbers([made], torch.device("cpu")), steps.tile), theirs["pixel_values"]
        ), size
        ids = tokenizer._page_ids.of(*resized_shape(steps, *size))
        assert ids.tolist() == theirs["input_ids"][0].tolist(), size
        assert tokenizer.picture(file_of(noise(*size, seed))).tokens == len(ids)
    options = served.engine.prompts.tokenize_options(served.send(["a"], outputs=VECTORS).options)
    query = tokenizer.encode(["a fox"], options)[0]
    served.engine.close(1.0)
    assert query.ids.tolist() == processor.process_queries(text=["a fox"])["input_ids"][0].tolist()
