"""Images by the client: paths, bytes and Pillow's, and the how-to's search in a folder of pictures."""

from __future__ import annotations

import base64
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models.dual_encoders import (
    build_clip,
    build_colqwen2,
    build_qwen3_vl_embedding,
    file_of,
    noise,
    pdf_of,
)

from teimgr.client.corpus import embed_file
from teimgr.client.payloads import unpack_vectors
from teimgr.errors import InvalidConfig, TeimgrError, ValidationError
from teimgr.wire import pdf_pages
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

pytestmark = pytest.mark.slow
_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "images.md"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        client.create("clip", str(build_clip(tmp_path_factory.mktemp("clip") / "clip")), dtype="float32")
        chat = build_qwen3_vl_embedding(tmp_path_factory.mktemp("chat") / "chat")
        client.create("chat", str(chat), dtype="float32")
        client.create("pages", str(build_colqwen2(tmp_path_factory.mktemp("pages") / "pages")), dtype="float32")
        for name in ("clip", "chat", "pages"):
            client.wait_until_running(name, deadline_s=100)
        yield daemon


def test_an_image_has_one_vector_however_it_is_given(daemon: DaemonProcess, tmp_path: Path) -> None:
    pictures = [noise(40, 30, seed) for seed in range(11)]
    paths = [tmp_path / f"{place}.png" for place in range(len(pictures))]
    for path, picture in zip(paths, pictures, strict=True):
        path.write_bytes(file_of(picture))
    with daemon.client() as client:
        given = [*pictures[:4], *(path.read_bytes() for path in paths[4:8]), *paths[8:]]
        vectors = client.embed_images(given, instance="clip")
        assert vectors.shape == (11, 24)
        assert vectors.dtype == np.float32
        assert np.allclose(client.embed_images(paths, instance="clip", in_flight=1), vectors, atol=1e-6)
        assert np.allclose(client.embed_images(str(paths[5]), instance="clip"), vectors[5:6], atol=1e-6)
        assert client.embed_images([], instance="clip").shape == (0, 0)
        assert client.embed_images(paths[0], instance="clip", dimensions=8).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_an_image_of_pillow_has_the_vector_of_its_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    noise(90, 60).save(tmp_path / "turned.jpg", exif=turned)
    noise(90, 60).save(tmp_path / "turned.png", exif=turned)
    noise(90, 60).convert("CMYK").save(tmp_path / "cmyk.jpg")
    noise(1600, 1500).save(tmp_path / "photograph.jpg")  # 7.2 MB as PNG
    with daemon.client() as client:
        for path in tmp_path.iterdir():
            expected = client.embed_images(path, instance="clip")
            with Image.open(path) as image:
                assert np.array_equal(client.embed_images(image, instance="clip"), expected), path
                if "photograph" not in path.name:
                    image.load()
                    assert np.array_equal(client.embed_images(image, instance="clip"), expected), path
        for mode in ("YCbCr", "LAB", "HSV", "RGBX", "RGBa", "PA"):
            image = noise(20, 20).convert("RGBA").convert("RGBa") if mode == "RGBa" else Image.new(mode, (20, 20))
            expected = client.embed_images(image.convert("RGBA" if mode in ("RGBa", "PA") else "RGB"), instance="clip")
            assert np.array_equal(client.embed_images(image, instance="clip"), expected), mode
        with Image.open(tmp_path / "photograph.jpg") as image:
            image.draft("RGB", (400, 400))
            assert image.size == (800, 750)
            drafted = client.embed_images(image, instance="clip")
            assert np.array_equal(client.embed_images(image.copy(), instance="clip"), drafted)


def test_an_image_that_cannot_be_sent_is_named_with_the_way_out(daemon: DaemonProcess, tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(file_of(noise(90, 60))[:-600])
    wide = noise(1600, 1500)
    with daemon.client() as client, Image.open(cut) as broken:
        for image, said in (
            (broken, "truncated"),
            (Image.new("F", (9, 9)), "cannot write mode F as PNG"),
            (wide, r"has 7,2\d\d,\d{3} bytes as PNG, and 6,291,456 are allowed .* send a JPEG file"),
            (file_of(wide), r"has 7,2\d\d,\d{3} bytes, and 6,291,456 are allowed"),
        ):
            with pytest.raises(ValidationError, match=rf"images\[1\]: .*{said}"):
                client.embed_images([noise(4, 4), image], instance="clip")


def test_info_tells_what_a_model_embeds(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        told = {name: client.info(instance=name) for name in ("clip", "chat")}
    assert {name: info.modalities for name, info in told.items()} == dict.fromkeys(told, ("text", "image"))
    assert {name: info.fused for name, info in told.items()} == {"clip": False, "chat": True}


def test_refusals_name_the_image(daemon: DaemonProcess, tmp_path: Path) -> None:
    with daemon.client() as client:
        with pytest.raises(ValidationError, match=r"images\[1\]: .*no such file"):
            client.embed_images([noise(4, 4), tmp_path / "no such file"], instance="clip")
        with pytest.raises(ValidationError, match=r"images\[0\]: must be bytes"):
            client.embed_images([3], instance="clip")  # type: ignore[list-item]
        with pytest.raises(TeimgrError) as refused:
            client.embed_images([*[noise(4, 4)] * 8, b"no image"], instance="clip")
        assert refused.value.message.startswith("images[8] to images[8]: ")
        assert "`inputs.0.data`: the bytes are not an image of an allowed format" in refused.value.message


def test_the_search_of_the_how_to(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", _HOW_TO.read_text(), re.DOTALL)
    (tmp_path / "pictures").mkdir()
    for colour in ("red", "lime", "blue"):
        Image.new("RGB", (20, 20), colour).save(tmp_path / "pictures" / f"{colour}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("teimgr.client.Client", lambda: daemon.client())
    exec(compile(code, str(_HOW_TO), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_a_table_with_images_and_texts_has_the_same_vectors(daemon: DaemonProcess) -> None:
    files = [file_of(noise(40, 30)), None, file_of(noise(40, 30))[:-300], b"none", file_of(noise(40, 30)), None]
    texts = [None, "a dog", None, None, "both", None]
    with daemon.client() as client:
        vectors = client.embed_images([files[0]], instance="clip")
        query = client.embed("a dog", instance="clip")
        for kind in (pa.binary(), pa.large_binary()):
            table = pa.table({"image": pa.array(files, kind), "text": pa.array(texts, pa.string())})
            found = client.infer(table, instance="clip")
            assert np.array_equal(np.array(found["dense"][0].as_py(), np.float32), vectors[0])
            assert np.allclose(found["dense"][1].as_py(), query[0], atol=1e-6)
            assert [row is None for row in found["dense"].to_pylist()] == [False, False, True, True, True, True]
            errors = found["error"].to_pylist()
            assert errors[:2] == [None, None]
            for error, said in zip(errors[2:], ("truncated", "send JPEG", "`image` and `text`", "null"), strict=True):
                assert said in error
        structs = pa.array([{"bytes": files[0], "path": None}, {"bytes": None, "path": "/etc/passwd"}])
        found = client.infer(pa.table({"image": structs}), instance="clip")
        assert np.array_equal(np.array(found["dense"][0].as_py(), np.float32), vectors[0])
        assert "a `path` is not opened" in found["error"][1].as_py()


def test_a_row_with_image_and_text_is_one_input_of_a_model_that_reads_both(daemon: DaemonProcess) -> None:
    file = file_of(noise(60, 40))
    table = pa.table({"image": pa.array([file, file, None]), "text": pa.array([None, "a fox", "a fox"])})
    content = {"content": [{"type": "image", "data": base64.b64encode(file).decode()}, "a fox"]}
    with daemon.client() as client:
        found = client.infer(table, instance="chat")
        port = client.get("chat").port
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed",
        json.dumps({"inputs": [content]}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        expected = np.array(json.load(reply)[0], np.float32)
    rows = [np.array(row, np.float32) for row in found["dense"].to_pylist()]
    assert found["error"].to_pylist() == [None] * 3
    assert np.allclose(rows[1], expected, atol=1e-6)
    assert all(np.abs(rows[1] - row).max() > 1e-3 for row in (rows[0], rows[2]))


def test_embed_arrow_takes_a_column_of_images_with_an_error_for_each_row(daemon: DaemonProcess) -> None:
    good = file_of(noise(40, 30))
    structs = pa.array([{"bytes": good, "path": None}, {"bytes": None, "path": "/etc/passwd"}, None, None])
    table = pa.table({"image": structs, "text": pa.array([None, None, "a dog", None], pa.string())})
    with daemon.client() as client, grpc.insecure_channel(daemon.grpc.removeprefix("http://")) as channel:
        expected = [client.embed_images([good], instance="clip")[0], client.embed("a dog", instance="clip")[0]]
        call = channel.unary_unary("/tei_multiplexer.v1.TeiMultiplexer/EmbedArrow")
        target = mux_pb2.Target(instance_name="clip")
        asked = mux_pb2.EmbedArrowRequest(target=target, arrow_ipc=_stream(table), normalize=True)
        found = unpack_vectors(call(asked.SerializeToString(), timeout=60))
    assert np.array_equal(found.vectors[0], expected[0])
    assert np.allclose(found.vectors[2], expected[1], atol=1e-6)
    assert sorted(found.errors) == [1, 3]
    assert "a `path` is not opened" in found.errors[1]


def test_the_images_of_a_folder_and_of_a_column_are_embedded_into_a_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    folder, files = tmp_path / "pictures", [file_of(noise(40, 30, seed)) for seed in range(3)]
    (folder / "b").mkdir(parents=True)
    names = ["a.png", "b/c.png", "z.jpg"]
    for name, content in zip(names, [*files[:2], b"none"], strict=True):
        (folder / name).write_bytes(content)
    rows = [{"bytes": files[2], "path": None}, {"bytes": None, "path": "/etc/passwd"}]
    pq.write_table(pa.table({"id": [7, 8], "image": rows}), tmp_path / "a.parquet")
    with daemon.client() as client:
        expected = client.embed_images(files, instance="clip")
        done = embed_file(client, folder, tmp_path / "v.parquet", instance="clip")
        of_table = embed_file(client, tmp_path / "a.parquet", tmp_path / "w.parquet", instance="clip")
        embed_file(client, folder / "b" / "c.png", tmp_path / "x.parquet", instance="clip")
    found, column = (pq.read_table(tmp_path / name) for name in ("v.parquet", "w.parquet"))
    alone = pq.read_table(tmp_path / "x.parquet")
    assert alone["path"].to_pylist() == ["c.png"]
    assert np.allclose(alone["embedding"].to_pylist(), expected[1:2], atol=1e-6)
    assert found["path"].to_pylist() == names
    assert np.allclose(found["embedding"].to_pylist()[:2], expected[:2], atol=1e-6)
    assert found["embedding"][2].as_py() is None
    assert done.failures is not None
    told = json.loads(done.failures.read_text())
    assert (told["row"], told["path"]) == (2, "z.jpg")
    assert "send JPEG" in told["error"]
    assert column["id"].to_pylist() == [7, 8]
    assert np.allclose(column["embedding"][0].as_py(), expected[2], atol=1e-6)
    assert of_table.failures is not None
    assert json.loads(of_table.failures.read_text()) == {
        "row": 1,
        "error": "the row has no `bytes`: a `path` is not opened",
    }


BLUE = (72, 36, "0 0 1 rg 0 0 72 36 re f")


def test_pages_of_documents_are_embedded_into_a_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(pdf_of(BLUE, (72, 72, "1 0 0 rg 0 0 30 72 re f")))
    (folder / "b.pdf").write_bytes(b"no document")
    (folder / "c.png").write_bytes(file_of(noise(40, 30)))
    images = [*pdf_pages.pages(folder / "a.pdf"), (folder / "c.png").read_bytes()]
    with daemon.client() as client:
        expected = client.embed_images(images, instance="clip")
        of_pages = client.infer(pa.table({"image": images}), instance="pages", outputs=["multi_vector"])
        done = embed_file(client, folder, tmp_path / "v.parquet", instance="clip")
        embed_file(client, folder / "a.pdf", tmp_path / "w.parquet", instance="pages", per_token=True)
        embed_file(
            client, folder, tmp_path / "x.arrow", instance="pages", per_token=True, float16=True, pool_factor=2.0
        )
        with pytest.raises(InvalidConfig, match=r"one vector a row, and this model gives several: use \.parquet"):
            embed_file(client, folder, tmp_path / "v.npy", instance="pages", per_token=True)
    found = pq.read_table(tmp_path / "v.parquet")
    assert found.select(["path", "page"]).to_pylist() == [
        {"path": path, "page": page} for path, page in (("a.pdf", 1), ("a.pdf", 2), ("b.pdf", None), ("c.png", None))
    ]
    assert np.allclose(found["embedding"].take([0, 1, 3]).to_pylist(), expected, atol=1e-6)
    assert done.failures is not None
    failure = {"row": 2, "error": "the PDF is broken, or no PDF", "path": "b.pdf", "page": None}
    assert json.loads(done.failures.read_text()) == failure
    alone = pq.read_table(tmp_path / "w.parquet")["embedding"]
    assert [np.shape(one) for one in alone.to_pylist()] == [
        np.shape(one) for one in of_pages["multi_vector"][:2].to_pylist()
    ]
    assert all(
        np.allclose(one, other, atol=1e-5)
        for one, other in zip(alone.to_pylist(), of_pages["multi_vector"].to_pylist(), strict=False)
    )
    with pa.memory_map(str(tmp_path / "x.arrow")) as mapped:
        pooled = pa.ipc.open_file(mapped).read_all()["embedding"]
    assert pooled.type.value_type.value_type == pa.float16()
    assert pooled[2].as_py() is None
    assert 0 < len(pooled[0]) < len(alone[0])


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
