"""Models of texts and images: vectors as the library gives them, alone and in mixed batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sentence_transformers import SentenceTransformer
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import (
    build_clip,
    build_colpali,
    build_dinov2,
    build_embedding_gemma2,
    build_siglip,
    file_of,
    noise,
)
from tests.support.models.files import edit, read, write, write_modules
from tests.support.native import needs_native_forward

from teimgr.engine.job import Lane, Output
from teimgr.engine.native_forward.image_layers import NativeLayers, NativePatches
from teimgr.engine.text.truncation import MAX_SCANNED_CHARACTERS
from teimgr.errors import InvalidInput, ModelLoadFailed, WrongModelKind
from teimgr.models.reading import read_layout

TEXTS = ["a photo", "The quick brown fox jumps over the lazy dog.", "rain " * 100, "two <|endoftext|> ends", "Zürich"]
PICTURES = [noise(40, 50), noise(300, 200, 1), noise(64, 64, 2), noise(5, 90, 3)]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "clip": build_clip,
    "clip, highest id ends": partial(build_clip, old_end=True),
    "clip, 0_CLIPModel": partial(build_clip, layout="legacy"),
    "clip, sentence-transformers": partial(build_clip, layout="sentence-transformers"),
    "clip, words of its own": partial(build_clip, own_words=True),
    "siglip": build_siglip,
}


@pytest.fixture(scope="module", params=list(BUILDERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(BUILDERS[request.param](tmp_path_factory.mktemp("dual") / "model"))
    yield found
    found.engine.close(1.0)


def reference(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of `TEXTS` and `PICTURES` by the library, one at a time; SigLIP's texts padded and unmasked."""
    home = folder / "0_CLIPModel" if (folder / "0_CLIPModel").is_dir() else folder
    model: Any = transformers.AutoModel.from_pretrained(home).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(home)
    processor: Any = transformers.AutoImageProcessor.from_pretrained(home, backend="pil")
    pads = {"padding": "max_length"} if model.config.model_type == "siglip" else {"padding": False}
    with torch.inference_mode():
        texts = []
        for text in TEXTS:
            read = tokenizer(text, truncation=True, max_length=tokenizer.model_max_length, return_tensors="pt", **pads)
            texts.append(model.get_text_features(input_ids=read["input_ids"]).pooler_output)
        images = [
            model.get_image_features(**processor(images=[one], return_tensors="pt")).pooler_output for one in PICTURES
        ]
    return torch.cat(texts), torch.cat(images)


def cosines(here: np.ndarray[Any, Any], there: torch.Tensor) -> float:
    return float(torch.cosine_similarity(torch.from_numpy(here).double(), there.double()).min())


def test_vectors_of_texts_and_images_are_the_librarys_in_one_mixed_call(served: Served) -> None:
    pictures = [served.engine.picture(file_of(one)) for one in PICTURES]
    mixed = [one for pair in zip(TEXTS, pictures, strict=False) for one in pair] + TEXTS[len(pictures) :]
    job = served.wait(served.send(mixed, normalize=False))
    texts, images = reference(served.path)
    assert not job.errors
    assert cosines(job.vectors[[0, 2, 4, 6, 8]], texts) > 0.99999
    assert cosines(job.vectors[[1, 3, 5, 7]], images) > 0.99999
    assert np.allclose(np.linalg.norm(job.vectors[1]), np.linalg.norm(images[0]), rtol=1e-4)  # not normalised
    assert job.tokens == sum(one.tokens for one in pictures) + tokens_of_texts(served)


def tokens_of_texts(served: Served) -> int:
    return served.wait(served.send(TEXTS)).tokens


def test_a_picture_alone_has_the_vector_that_it_has_among_others(served: Served) -> None:
    files = [file_of(one) for one in PICTURES] * 8
    alone = served.wait(served.send([served.engine.picture(files[0])], Lane.BULK)).vectors[0]
    among = served.wait(served.send([*map(served.engine.picture, files), *TEXTS], Lane.BULK)).vectors
    assert np.abs(among[0] - alone).max() < 1e-6
    assert all((among[place] == among[0]).all() for place in range(0, len(files), len(PICTURES)))  # computed once


def test_a_truncated_picture_fails_alone(served: Served) -> None:
    whole = file_of(PICTURES[1])
    inputs = [served.engine.picture(whole[:-900]), "a text", served.engine.picture(whole)]
    job = served.wait(served.send(inputs))
    assert list(job.errors) == [0]
    assert "the PNG file is truncated or broken" in job.errors[0].message
    assert np.linalg.norm(job.vectors[1:], axis=1) == pytest.approx(1.0)


def test_a_text_of_any_length_is_truncated_to_what_its_beginning_has(served: Served) -> None:
    """It is longer than what a text may have that can be cut nowhere."""
    words = "fog harbour, "
    text = words * (2 * MAX_SCANNED_CHARACTERS // len(words))
    job = served.wait(served.send([text, words * 100]))
    assert not job.errors
    assert (job.vectors[0] == job.vectors[1]).all()


@needs_native_forward
def test_both_halves_are_computed_by_the_native_forward(served: Served) -> None:
    assert served.engine.info.forward == "native"
    assert isinstance(served.engine._runners[0]._model._tower.vision.encoder, NativeLayers)


def test_a_self_test_embeds_a_picture_too(served: Served) -> None:
    served.engine.self_test(30.0)
    tests = [served.engine._run_self_test(30.0, served.engine._known_picture) for _ in range(2)]
    reference = served.engine._picture_reference
    assert reference is not None
    assert all(test.agrees_with(reference) for test in tests)
    assert served.engine._reference is not None
    assert not tests[0].agrees_with(served.engine._reference)


@pytest.mark.parametrize("build", [build_clip, build_colpali, build_dinov2, build_embedding_gemma2])
def test_without_pillow_a_model_of_images_is_refused_with_what_installs_it(
    build: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModelLoadFailed, match=r"pip install 'teimgr\[images\]'"):
        read_layout(folder)


def test_hidden_states_of_tokens_are_refused_by_name(served: Served) -> None:
    with pytest.raises(WrongModelKind, match="one vector for each text alone"):
        served.send(["a"], outputs=frozenset({Output.TOKENS}))


def test_a_text_that_looks_like_a_path_or_a_url_is_a_text(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(file_of(PICTURES[0]))
    names = [str(path), "http://127.0.0.1:1/picture.png", "data:image/png;base64,AAAA"]
    job = served.wait(served.send(names, normalize=False))
    assert not job.errors
    assert len({one.tobytes() for one in job.vectors}) == len(names)
    picture = served.wait(served.send([served.engine.picture(path.read_bytes())], normalize=False)).vectors[0]
    assert np.abs(job.vectors[0] - picture).max() > 1e-3


def test_ids_without_the_end_of_a_text_are_refused(served: Served) -> None:
    if served.engine.layout.config["model_type"] != "clip":
        pytest.skip("SigLIP takes the last token, whichever it is")
    job = served.wait(served.send([np.array([0, 5, 6], np.int32)]))
    assert isinstance(job.errors[0], InvalidInput)
    assert "end token" in job.errors[0].message


def test_files_that_make_another_picture_than_the_model_reads_are_refused(tmp_path: Path) -> None:
    folder = build_clip(tmp_path / "clip")
    settings = folder / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"height": 32', '"height": 30'))
    with pytest.raises(ModelLoadFailed, match="30 x 32 pixels, and the model reads 32 x 32"):
        Served(folder)


def test_settings_of_calls_in_the_layout_of_sentence_transformers_make_the_picture(tmp_path: Path) -> None:
    folder = build_clip(tmp_path / "clip", "sentence-transformers")
    settings = folder / "sentence_bert_config.json"
    edit(settings, processing_kwargs={"image": {"do_center_crop": False, "size": {"height": 32, "width": 32}}})
    served = Served(folder)
    [found] = served.embed([served.engine.picture(file_of(noise(90, 40)))], normalize=True).vectors
    served.engine.close(1.0)
    expected = SentenceTransformer(str(folder), device="cpu").encode([noise(90, 40)], normalize_embeddings=True)[0]
    assert float(found @ expected) > 0.999999
    for given, named in (({"crop_pct": 0.5}, "crop_pct"), ([1], "should be an object")):
        edit(settings, processing_kwargs={"image": given})
        with pytest.raises(ModelLoadFailed, match=named):
            Served(folder)


@pytest.mark.parametrize("padding", [False, "do_not_pad"])
def test_a_siglip_whose_files_leave_texts_unpadded_is_refused(padding: Any, tmp_path: Path) -> None:
    folder = build_siglip(tmp_path / "siglip")
    write_modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    write(folder / "sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": "max_length"}}})
    assert read_layout(folder).dual is not None
    write(folder / "sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": padding}}})
    with pytest.raises(ModelLoadFailed, match=f"has padding = {padding!r}"):
        read_layout(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({"rescale_factor": given}, "should be a number") for given in (None, "1/255", float("inf"), True)),
        ({"use_square_size": True}, "use_square_size = True"),  # the library puts 224 in the place of `size`
    ],
)
def test_settings_of_the_image_processor_that_are_not_served_are_refused_by_name(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = build_clip(tmp_path / "clip")
    settings = folder / "preprocessor_config.json"
    write(settings, read(settings) | change)
    with pytest.raises(ModelLoadFailed, match=named):
        Served(folder)


def test_a_model_of_texts_refuses_a_picture_by_name(
    model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    with pytest.raises(WrongModelKind, match="takes no image"):
        serve(model_dir("bert")).engine.picture(file_of(Image.new("RGB", (4, 4))))


@needs_native_forward
def test_the_last_layer_computes_the_pooled_row_alone_where_no_other_is_read(served: Served) -> None:
    """SigLIP's head reads all rows; patches are a native linear layer in both. Compared with the library's above."""
    vision = served.engine._runners[0]._model._tower.vision
    assert vision.encoder.first_alone == (vision.config.model_type != "siglip_vision_model")
    assert isinstance(vision.embeddings.patch_embedding, NativePatches)


@pytest.mark.parametrize("lowers", [True, False])
def test_a_tokenizer_of_siglip_without_its_steps_is_a_warning(lowers: bool, tmp_path: Path) -> None:
    folder = build_siglip(tmp_path / "siglip")
    edit(folder / "tokenizer_config.json", tokenizer_class="SiglipTokenizer", do_lower_case=lowers)
    tokenizer = read(folder / "tokenizer.json")
    steps = [{"type": "Lowercase"}] if lowers else []
    dropped = {"type": "Replace", "pattern": {"Regex": "[,!]"}, "content": ""}
    for normalizers in (steps, [dropped], [*steps, dropped]):
        normalizer = {"type": "Sequence", "normalizers": normalizers}
        write(folder / "tokenizer.json", tokenizer | {"normalizer": normalizer})
        served = Served(folder)
        warnings = [each for each in served.engine.info.warnings if "drops their punctuation" in each]
        served.engine.close(1.0)
        assert len(warnings) == (dropped not in normalizers or (lowers and len(normalizers) == 1))
