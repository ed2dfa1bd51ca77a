"""Models that read texts and images in one input: inputs and vectors as the library's, alone and in mixed batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import INSTRUCTION, build_qwen3_vl_embedding, file_of, noise
from tests.support.models.files import edit

from teimgr.engine.batch import Encoded
from teimgr.engine.images.chats import image_places
from teimgr.engine.images.inputs import EncodedPicture
from teimgr.engine.images.pages import patches
from teimgr.engine.images.pixels import PixelTable
from teimgr.engine.job import Content, Input
from teimgr.errors import InputTooLong, InvalidInput, ModelLoadFailed

TEXTS = ["what is a fox?", "The quick brown fox jumps over the lazy dog.", "Zürich x", " a\n b "]
FILES = [file_of(noise(*size, seed)) for seed, size in enumerate([(40, 50), (300, 200), (200, 300), (5, 90)])]
TOLD = "Retrieve images relevant to the query"


@pytest.fixture(scope="module", params=["sentence-transformers", "bare", "ends"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    modules, ends = request.param != "bare", request.param == "ends"
    folder = build_qwen3_vl_embedding(tmp_path_factory.mktemp("chat") / "model", modules=modules, ends=ends)
    found = Served(folder)
    yield found
    found.engine.close(1.0)


class Library:
    """The library's image processor, tokenizer, chat template and forward, as its authors put them together."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.Qwen3VLModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def inputs(self, text: str, files: list[bytes], told: str = INSTRUCTION) -> dict[str, torch.Tensor]:
        content: list[dict[str, Any]] = [{"type": "image"} for _ in files]
        content += [{"type": "text", "text": text}] if text else []
        messages = [
            {"role": "system", "content": [{"type": "text", "text": told}]},
            {"role": "user", "content": content},
        ]
        chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        seen = {}
        if files:
            seen = dict(self.processor(images=[Image.open(io.BytesIO(one)) for one in files], return_tensors="pt"))
            for grid in seen["image_grid_thw"]:
                chat = chat.replace("<|image_pad|>", "<|part|>" * (int(grid.prod()) // 4), 1)
            chat = chat.replace("<|part|>", "<|image_pad|>")
        encoded = self.tokenizer(chat, return_tensors="pt")
        ids = encoded["input_ids"]
        types = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": encoded["attention_mask"], "mm_token_type_ids": types, **seen}

    @torch.inference_mode()
    def vector(self, text: str, files: list[bytes], told: str = INSTRUCTION) -> Any:
        hidden = self.model(**self.inputs(text, files, told)).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=-1).numpy()


def mixed(served: Served) -> tuple[list[Input], list[tuple[str, list[bytes]]]]:
    """Texts, images, and both in one input, of the engine and of the library."""
    given: list[tuple[str, list[bytes]]] = [(one, []) for one in TEXTS] + [("", [one]) for one in FILES]
    given += [(text, [file]) for text, file in zip(TEXTS, FILES, strict=True)] + [("both", FILES[:2])]
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
    library = Library(served.path)
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
    library = Library(served.path)
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
        made = torch.cat([patches(PixelTable(steps).numbers([one]), steps)[0] for one in taken])
        assert torch.equal(made, theirs["pixel_values"])
        sides = [(one.shape[1] // steps.unit, one.shape[2] // steps.unit) for one in taken]
        assert [[1, 2 * down, 2 * across] for down, across in sides] == theirs["image_grid_thw"].tolist()
        positions, _ = library.model.get_rope_index(
            theirs["input_ids"], theirs["mm_token_type_ids"], image_grid_thw=theirs["image_grid_thw"]
        )
        assert image_places(ours.ids < 0, sides).tolist() == positions[:, 0].tolist()


def test_an_instruction_is_the_system_message_and_ends_in_a_full_stop(served: Served) -> None:
    picture = served.engine.picture(FILES[1])
    job = served.embed([TEXTS[0], Content("a", (picture,))], prompt=TOLD)
    own = served.embed([Content(TEXTS[0], (), TOLD), Content("a", (picture,), f"{TOLD}.")]).vectors
    library = Library(served.path)
    assert float(job.vectors[0] @ library.vector(TEXTS[0], [], f"{TOLD}.")) > 0.999999
    assert float(job.vectors[1] @ library.vector("a", [FILES[1]], f"{TOLD}.")) > 0.999999
    assert np.abs(own - job.vectors).max() < 2e-6


def test_image_tokens_are_counted_by_the_header_and_charged(served: Served) -> None:
    picture = served.engine.picture(FILES[1])
    assert picture.tokens == int((Library(served.path).inputs("", [FILES[1]])["mm_token_type_ids"]).sum())
    job = served.embed([picture])
    assert job.tokens == Library(served.path).inputs("", [FILES[1]])["input_ids"].numel()


def test_a_long_text_is_cut_and_images_are_not(served: Served) -> None:
    picture, limit = served.engine.picture(FILES[1]), served.engine.info.max_input_length
    long = Content("rain " * 2000, (picture,))
    job = served.embed([long])
    assert not job.errors
    assert job.tokens == limit
    assert isinstance(served.embed([long], truncate=False).errors[0], InvalidInput)
    many = served.embed([Content("a", (picture,) * 60), "a"])
    assert list(many.errors) == [0]
    assert isinstance(many.errors[0], InputTooLong)
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
