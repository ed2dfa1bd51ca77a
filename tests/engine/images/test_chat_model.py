"""Models that read texts and images in one input: inputs and vectors as the library's, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import (
    ChatLibrary,
    GmeLibrary,
    build_gme,
    build_qwen3_vl_embedding,
    file_of,
    noise,
)
from tests.support.models.files import edit, read, write

from teimgr.engine.batching.batch import Encoded
from teimgr.engine.images.chats import image_places
from teimgr.engine.images.inputs import EncodedPicture
from teimgr.engine.images.pages import patches
from teimgr.engine.images.pixels import PixelTable
from teimgr.engine.job import Content, Input
from teimgr.errors import InputTooLong, InvalidInput, ModelLoadFailed

TEXTS = ["what is a fox?", "The quick brown fox jumps over the lazy dog.", "Zürich x", " a\n b "]
SIZES = [(40, 50), (300, 200), (200, 300), (5, 90), (57, 71), (28, 5000)]
FILES = [file_of(noise(*size, seed)) for seed, size in enumerate(SIZES)]
TOLD = "Retrieve images relevant to the query"


BUILDERS = {
    "sentence-transformers": build_qwen3_vl_embedding,
    "bare": partial(build_qwen3_vl_embedding, modules=False),
    "ends": partial(build_qwen3_vl_embedding, ends=True),
    "GME": build_gme,
    "GME, bare": partial(build_gme, modules=False),
}


@pytest.fixture(scope="module", params=list(BUILDERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(BUILDERS[request.param](tmp_path_factory.mktemp("chat") / "model"))
    yield found
    found.engine.close(1.0)


def library_of(served: Served) -> ChatLibrary:
    is_gme = served.engine.layout.config["model_type"] == "qwen2_vl"
    return (GmeLibrary if is_gme else ChatLibrary)(served.path)


def mixed(served: Served) -> tuple[list[Input], list[tuple[str, list[bytes]]]]:
    """Texts, images, and both in one input, of the engine and of the library."""
    given: list[tuple[str, list[bytes]]] = [(one, []) for one in TEXTS] + [("", [one]) for one in FILES]
    given += [(text, [file]) for text, file in zip(TEXTS, FILES, strict=False)] + [("both", FILES[:2])]
    pictures = {one: served.engine.picture(one) for one in FILES}
    inputs: list[Input] = []
    for text, files in given:
        if not files:
            inputs.append(text)
        elif not text:
            inputs.append(pictures[files[0]])
        else:
            inputs.append(Content(text, tuple(pictures[one] for one in files)))
    return inputs, given


def test_vectors_of_texts_images_and_both_are_the_librarys_in_one_mixed_call(served: Served) -> None:
    inputs, given = mixed(served)
    job = served.embed(inputs)
    library = library_of(served)
    assert not job.errors
    for here, (text, files) in zip(job.vectors, given, strict=True):
        assert float(here @ library.vector(text, files)) > 0.999999


def test_a_vector_alone_is_that_of_a_mixed_batch(served: Served) -> None:
    inputs, _ = mixed(served)
    together = served.embed(inputs).vectors
    alone = np.concatenate([served.embed([one]).vectors for one in inputs])
    assert np.abs(alone - together).max() < 2e-6


def test_ids_pixels_and_positions_are_the_librarys_bit_for_bit(served: Served) -> None:
    inputs, given = mixed(served)
    library = library_of(served)
    tokenizer = served.engine.tokenizer
    encoded = tokenizer.encode(inputs, served.engine.prompts.tokenize_options(served.send(["a"]).options))
    steps = served.engine.layout.dual.steps
    for ours, (text, files) in zip(encoded, given, strict=True):
        assert isinstance(ours, Encoded)
        theirs = library.inputs(text, files)
        ids = np.where(ours.ids < 0, library.model.config.image_token_id, ours.ids)
        assert ids.tolist() == theirs["input_ids"][0].tolist()
        if not isinstance(ours, EncodedPicture):
            continue
        taken = [one.take() for one in ours.waiting]
        made = torch.cat([patches(PixelTable(steps).numbers([one], torch.device("cpu")), steps)[0] for one in taken])
        assert torch.equal(made, theirs["pixel_values"])
        sides = [(one.shape[1] // steps.unit, one.shape[2] // steps.unit) for one in taken]
        assert [[1, 2 * down, 2 * across] for down, across in sides] == theirs["image_grid_thw"].tolist()
        if not served.engine.layout.chat.has_grid:
            continue
        positions, _ = library.model.get_rope_index(
            theirs["input_ids"], theirs["mm_token_type_ids"], image_grid_thw=theirs["image_grid_thw"]
        )
        assert image_places(ours.ids < 0, sides).tolist() == positions[:, 0].tolist()


def test_an_instruction_is_the_system_message_and_ends_as_by_the_authors(served: Served) -> None:
    library = library_of(served)
    told = f"{TOLD}." if library.has_full_stop else TOLD
    picture = served.engine.picture(FILES[1])
    job = served.embed([TEXTS[0], Content("a", (picture,))], prompt=TOLD)
    own = served.embed([Content(TEXTS[0], (), TOLD), Content("a", (picture,), told)]).vectors
    assert float(job.vectors[0] @ library.vector(TEXTS[0], [], told)) > 0.999999
    assert float(job.vectors[1] @ library.vector("a", [FILES[1]], told)) > 0.999999
    assert np.abs(own - job.vectors).max() < 2e-6


def test_image_tokens_are_counted_by_the_header_and_charged(served: Served) -> None:
    picture = served.engine.picture(FILES[1])
    assert picture.tokens == int((library_of(served).inputs("", [FILES[1]])["mm_token_type_ids"]).sum())
    job = served.embed([picture])
    assert job.tokens == library_of(served).inputs("", [FILES[1]])["input_ids"].numel()


def test_a_long_text_is_cut_and_images_are_not(served: Served) -> None:
    picture, limit = served.engine.picture(FILES[1]), served.engine.info.max_input_length
    long = Content("rain " * 2000, (picture,))
    job = served.embed([long])
    assert not job.errors
    assert job.tokens == limit
    refused = served.embed([long], truncate=False).errors[0]
    assert isinstance(refused, InputTooLong)
    whole = library_of(served).inputs(long.text, [FILES[1]])["input_ids"].numel()
    assert (refused.limit, refused.given) == (limit, f"{whole} tokens")
    assert f"less than {limit} tokens. Given: {whole}" in refused.message
    many = served.embed([Content("a", (picture,) * 60), "a"])
    assert list(many.errors) == [0]
    assert isinstance(many.errors[0], InputTooLong)
    assert "not truncated" in many.errors[0].message
    many = served.embed([Content("rain " * 2000, (picture,) * 60)], truncate=False)
    assert "not truncated" in many.errors[0].message


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_text_with_the_token_of_an_image_or_a_video_is_refused(served: Served, token: str) -> None:
    picture = served.engine.picture(FILES[0])
    job = served.embed([f"a {token} b", Content(token, (picture,)), "a"])
    assert list(job.errors) == [0, 1]
    assert all(token in error.message for error in job.errors.values())


def test_a_broken_image_fails_alone(served: Served) -> None:
    broken = served.engine.picture(FILES[1][:-2000])
    job = served.embed(["a", Content("b", (broken,)), served.engine.picture(FILES[0])])
    assert list(job.errors) == [1]


def test_a_self_test_embeds_an_image_too(served: Served) -> None:
    served.engine.self_test(60.0)
    assert served.engine.info.modalities == ("text", "image")
    assert served.engine.info.fused
    assert served.engine.info.batching == "packed"


def test_a_vision_model_that_only_writes_texts_is_refused_by_name(tmp_path: Path) -> None:
    folder = build_qwen3_vl_embedding(tmp_path / "model", modules=False)
    (folder / "README.md").write_text("# Qwen3-VL-2B-Instruct\n")
    with pytest.raises(ModelLoadFailed, match="writes texts about images"):
        Served(folder)


def test_the_pixels_of_any_qwen3_vl_are_those_of_its_authors_code(tmp_path: Path) -> None:
    folder = build_qwen3_vl_embedding(tmp_path / "model")
    edit(folder / "preprocessor_config.json", size={"shortest_edge": 65_536, "longest_edge": 16_777_216})
    found = Served(folder)
    steps = found.engine.layout.dual.steps
    found.engine.close(1.0)
    assert (steps.least, steps.most) == (4 * 32 * 32, 1800 * 32 * 32)


@pytest.mark.parametrize(
    ("change", "named"), [({"patch_size": 14}, "patches of 14"), ({"temporal_patch_size": 4}, "temporal_patch_size")]
)
def test_settings_that_are_not_served_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = build_qwen3_vl_embedding(tmp_path / "model")
    edit(folder / "preprocessor_config.json", **change)
    with pytest.raises(ModelLoadFailed, match=named):
        Served(folder)


def test_a_chat_template_without_a_place_for_images_is_refused(tmp_path: Path) -> None:
    folder = build_qwen3_vl_embedding(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content[-1].text }} {% endfor %}"
    )
    with pytest.raises(ModelLoadFailed, match="no place for an image"):
        Served(folder)


def test_limits_of_gme_are_those_of_its_code_or_of_its_modules(tmp_path: Path) -> None:
    for modules, longest in ((True, 512), (False, 400)):
        found = Served(build_gme(tmp_path / str(longest), modules=modules))
        assert found.engine.info.max_input_length == longest
        with pytest.raises(InvalidInput, match="100000 x 1 pixels"):
            found.engine.picture(file_of(noise(100_000, 1)))
        found.engine.close(1.0)


def test_another_qwen2_vl_is_refused_by_name_and_its_module_is_not_taken_for_gme(tmp_path: Path) -> None:
    folder = build_gme(tmp_path / "model")
    config = read(folder / "config.json")
    for own, named in (({}, "trust_remote_code"), ({"AutoModel": "modeling_other.GmeQwen2VL"}, "trust_remote_code")):
        write(folder / "config.json", config | {"auto_map": own})
        with pytest.raises(ModelLoadFailed, match=named):
            Served(folder)
    (folder / "modules.json").unlink()
    write(folder / "config.json", config | {"auto_map": {}})
    with pytest.raises(ModelLoadFailed, match="GME-Qwen2-VL is"):
        Served(folder)
