"""Models of texts and sounds: vectors as the library gives them for the same windows, alone and in mixed batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.conftest import Served
from tests.support.models.dual_encoders import RATE, build_clap, sound, sound_file
from tests.support.models.files import edit
from tests.support.native import needs_native_forward

from teimgr.engine.job import Lane, Output
from teimgr.errors import ModelLoadFailed, WrongModelKind
from teimgr.models.reading import read_layout

TEXTS = ["a dog barks", "The quick brown fox jumps over the lazy dog.", "rain " * 100, "Zürich"]
SOUNDS = [sound(0.7), sound(2.0, 1), sound(3.1, 2), sound(7.0, 3), sound(2.003, 4)]
WINDOW = 2 * RATE


@pytest.fixture(scope="module", params=[False, True], ids=["unfused", "fused"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(build_clap(tmp_path_factory.mktemp("clap") / "model", fuses=request.param))
    yield found
    found.engine.close(1.0)


def reference_of_sounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The library's vectors with its own extractor, of windows at our places."""
    model: Any = transformers.ClapModel.from_pretrained(folder).eval()
    extractor: Any = transformers.ClapFeatureExtractor.from_pretrained(folder)
    found = []
    for samples in SOUNDS:
        last = len(samples) - WINDOW
        is_long = last > 0 and extractor.truncation != "fusion"
        starts = [*range(0, last, WINDOW), last] if is_long else [0]
        parts = [samples[at : at + WINDOW] for at in starts] if is_long else [samples]
        vectors = []
        for part in parts:
            places = iter([lambda one: one[0], lambda one: one[len(one) // 2], lambda one: one[-1]])
            monkeypatch.setattr(np.random, "choice", lambda given, places=places: next(places)(given))
            read = extractor(part, sampling_rate=RATE, return_tensors="pt")
            read["is_longer"] = torch.tensor([[len(part) >= WINDOW + 480]])
            with torch.inference_mode():
                vectors.append(model.get_audio_features(**read).pooler_output)
        found.append(torch.nn.functional.normalize(torch.cat(vectors).mean(dim=0, keepdim=True), dim=-1))
    return torch.cat(found)


def reference_of_texts(folder: Path) -> torch.Tensor:
    model: Any = transformers.ClapModel.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        read = [tokenizer(text, truncation=True, max_length=90, return_tensors="pt")["input_ids"] for text in TEXTS]
        return torch.cat([model.get_text_features(input_ids=ids).pooler_output for ids in read])


def cosines(here: np.ndarray[Any, Any], there: torch.Tensor) -> float:
    return float(torch.cosine_similarity(torch.from_numpy(here).double(), there.double()).min())


def test_vectors_are_the_librarys_in_one_mixed_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    sounds = [served.engine.sound(sound_file(one)) for one in SOUNDS]
    job = served.wait(served.send([TEXTS[0], *sounds, *TEXTS[1:]], normalize=False))
    assert not job.errors
    assert cosines(job.vectors[[0, 6, 7, 8]], reference_of_texts(served.path)) > 0.99999
    assert cosines(job.vectors[1:6], reference_of_sounds(served.path, monkeypatch)) > 0.99999
    assert np.linalg.norm(job.vectors, axis=1) == pytest.approx(1.0, abs=1e-5)  # as the library's own
    texts = served.wait(served.send(TEXTS)).tokens
    assert job.tokens == sum(one.tokens for one in sounds) + texts


def test_a_window_begun_is_charged_before_anything_is_decoded(served: Served) -> None:
    short, one, two, seven, _ = (served.engine.sound(sound_file(each)).tokens for each in SOUNDS)
    assert (short, two, seven) == (one, 2 * one, 4 * one)


def test_a_sound_has_one_vector_alone_twice_and_among_others(served: Served) -> None:
    files = [sound_file(one) for one in SOUNDS] * 3
    alone = [served.wait(served.send([served.engine.sound(each)], Lane.BULK)).vectors[0] for each in files[:5]]
    again = served.wait(served.send([served.engine.sound(files[3])], Lane.BULK)).vectors[0]
    assert (again == alone[3]).all()
    among = served.wait(served.send([*map(served.engine.sound, files), *TEXTS], Lane.BULK)).vectors
    assert np.abs(among[:5] - alone).max() < 1e-5


def test_a_cut_sound_fails_alone(served: Served) -> None:
    whole = sound_file(SOUNDS[1], "FLAC", "PCM_16")
    job = served.wait(served.send([served.engine.sound(whole[:-900]), "a text", served.engine.sound(whole)]))
    assert list(job.errors) == [0]
    assert "the FLAC file is truncated or broken" in job.errors[0].message
    assert np.linalg.norm(job.vectors[1:], axis=1) == pytest.approx(1.0)


@needs_native_forward
def test_texts_are_computed_by_the_native_forward(served: Served) -> None:
    assert served.engine.info.forward == "native"


def test_a_self_test_embeds_a_sound_too(served: Served) -> None:
    assert served.engine.info.modalities == ("text", "audio")
    served.engine.self_test(20.0)


def test_an_image_is_refused(served: Served) -> None:
    with pytest.raises(WrongModelKind, match="takes no image"):
        served.engine.picture(b"\x89PNG\r\n\x1a\n")
    assert served.engine.info.outputs == (Output.DENSE.value,)


def test_a_missing_package_is_told_at_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, find = build_clap(tmp_path / "model"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "soxr" else find(name))
    with pytest.raises(ModelLoadFailed, match="soxr is missing: install teimgr with the extra `audio`"):
        read_layout(folder)


def test_a_contradiction_of_the_files_is_refused(tmp_path: Path) -> None:
    edit(build_clap(tmp_path / "model") / "preprocessor_config.json", truncation="fusion")
    with pytest.raises(ModelLoadFailed, match="enable_fusion = False"):
        read_layout(tmp_path / "model")
