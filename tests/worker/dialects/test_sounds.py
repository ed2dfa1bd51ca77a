"""Sounds in the words of every dialect that carries them: TEI's items, Infinity, vLLM's messages, SIE, Arrow."""

from __future__ import annotations

import base64
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from tests.support.models.dual_encoders import file_of as picture_file
from tests.support.models.dual_encoders import noise, sound, sound_file
from tests.worker.dialects.dialect_client import Asking

from teimgr.errors import TeimgrError

FILES = [sound_file(sound(seconds, seed), "FLAC", "PCM_16") for seed, seconds in enumerate((0.5, 3.0))]
PLAIN = [base64.b64encode(one).decode() for one in FILES]
URIS = [f"data:audio/flac;base64,{one}" for one in PLAIN]
TEXT = "a dog barks"
TYPED = [{"type": "audio", "data": one} for one in PLAIN]
PICTURE = base64.b64encode(picture_file(noise(20, 20))).decode()


async def vectors(ask: Asking) -> np.ndarray:
    """Of both sounds and the text, by the instance's own port."""
    inputs = [*TYPED, {"type": "text", "value": TEXT}]
    return np.array(await ask.own_port("clap", "/embed", {"inputs": inputs}), np.float32)


def of_openai(answer: Any) -> list[Any]:
    return [one["embedding"] for one in answer["data"]]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Infinity": ("/infinity/embeddings", {"input": URIS, "modality": "audio"}),
    "Infinity, as older clients": ("/embeddings_audio", {"input": URIS}),
    "Infinity at /v1": ("/v1/embeddings", {"input": PLAIN, "modality": "audio"}),
    "vLLM, input_audio": (
        "/v1/embeddings",
        {
            "messages": [
                [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": one, "format": "flac"}}]}]
                for one in PLAIN
            ]
        },
    ),
    "vLLM, audio_url": (
        "/v1/embeddings",
        {
            "messages": [
                [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": one}}]}] for one in URIS
            ]
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_sound_has_one_vector_bit_for_bit_in_every_form(ask: Asking, form: str) -> None:
    expected = await vectors(ask)
    assert np.linalg.norm(expected, axis=1) == pytest.approx(1.0, abs=1e-5)
    path, body = FORMS[form]
    answer = (await ask.post(path, body | {"model": "clap"})).ok
    assert (np.array(of_openai(answer), np.float32) == expected[:2]).all()
    assert answer["usage"]["prompt_tokens"] == 3 * 1024  # windows of two seconds that have begun


async def test_sies_bytes_in_msgpack_with_a_text_beside_them(ask: Asking) -> None:
    items = [{"audio": {"data": one, "format": "flac", "sample_rate": 48_000}} for one in FILES]
    packed: Any = msgpack.packb({"items": [*items, {"text": TEXT}]}, use_bin_type=True)
    answer = (
        await ask.post("/v1/encode/clap", packed, content_type="application/msgpack", accept="application/json")
    ).ok
    found = np.array([one["dense"]["values"] for one in answer["items"]], np.float32)
    expected = await vectors(ask)
    assert (found[:2] == expected[:2]).all()
    assert np.allclose(found[2], expected[2], atol=1e-6)
    assert answer["usage"]["audio_ms"] == 3500


async def test_a_column_of_arrow_has_errors_by_row(ask: Asking) -> None:
    rows = [{"bytes": FILES[0], "path": None}, {"bytes": FILES[1][:-500], "path": "b"}, None]
    table = pa.table({"audio": rows, "text": [None, None, TEXT]})
    async with ask.daemon.async_client() as client:
        answer = await client.infer(table, instance="clap")
    first, cut, text = answer["dense"].to_pylist()
    expected = await vectors(ask)
    assert (np.array(first, np.float32) == expected[0]).all()
    assert cut is None
    assert "FLAC file is truncated" in answer["error"][1].as_py()
    assert np.allclose(text, expected[2], atol=1e-6)


async def test_a_column_of_files_counts_where_the_model_reads_such(ask: Asking) -> None:
    picture = base64.b64decode(PICTURE)
    table = pa.table({"text": [TEXT], "image": [picture], "audio": [FILES[0]]})
    async with ask.daemon.async_client() as client:

        async def vector(table: pa.Table, instance: str) -> np.ndarray:
            answer = await client.infer(table, instance=instance)
            assert answer["error"].null_count == len(answer)
            return np.array(answer["dense"][0].as_py(), np.float32)

        for given in (table, table.set_column(1, "image", pa.array(["http://a/b.png"]))):
            assert np.allclose(await vector(given, "dense"), (await ask.vectors("dense", [TEXT]))[0], atol=1e-6)
        expected = await vectors(ask)
        assert (await vector(table.drop(["text"]), "clap") == expected[0]).all()
        image = await ask.own_port("clip", "/embed", {"inputs": [{"type": "image", "data": PICTURE}]})
        assert (await vector(table.drop(["text"]), "clip") == np.array(image[0], np.float32)).all()
        for column, instance in (("audio", "clip"), ("image", "clap"), ("image", "dense")):
            with pytest.raises(TeimgrError, match=f"reads no {column} files, and no column is named `text`"):
                await client.infer(pa.table({column: [picture]}), instance=instance)
        with pytest.raises(TeimgrError, match="Column `image` must be of image files"):
            await client.infer(pa.table({"image": ["http://a/b.png"]}), instance="clip")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/instances/dense/embed", {"inputs": [TYPED[0]]}, "only text is supported by the model"),
        ("/instances/clip/embed", {"inputs": [TYPED[0]]}, "text and image are supported by the model"),
        ("/instances/clap/embed", {"inputs": [{"type": "image", "data": PICTURE}]}, "text and audio are supported"),
        ("/instances/clap/embed", {"inputs": [TEXT, {"type": "audio", "data": PICTURE}]}, "not a sound of an allowed"),
        ("/instances/clap/embed", {"inputs": [{"type": "audio", "url": "http://a/b.wav"}]}, "links are not fetched"),
        ("/infinity/embeddings", {"model": "clap", "input": ["!"], "modality": "audio"}, "base64 of an audio file"),
        ("/v1/encode/clap", {"items": [{"text": "a", "audio": {"data": PLAIN[0]}}]}, "must have a text or a sound"),
        ("/v1/encode/clap", {"items": [{"video": {}}]}, "video and documents are not supported"),
        ("/v2/embed", {"model": "clap", "images": [URIS[0]], "embedding_types": ["float"]}, "text and audio are"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals_name_the_item_and_the_way_out(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path, body)
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()


async def test_what_is_served_is_told(ask: Asking) -> None:
    listed = (await ask.get("/v1/models")).json["data"]
    assert next(one for one in listed if one["id"] == "clap")["inputs"] == ["text", "audio"]
