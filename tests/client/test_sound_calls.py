"""The how-to's search in a folder of sounds, as it is written, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models.dual_encoders import build_clap, sound, sound_file

from teimgr.client.corpus import embed_file

pytestmark = pytest.mark.slow
_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "audio.md"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        client.create("clap", str(build_clap(tmp_path_factory.mktemp("clap") / "clap")), dtype="float32")
        client.wait_until_running("clap", deadline_s=100)
        yield daemon


def test_the_how_to_finds_sounds_by_a_text(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for seed in range(7):
        (folder / f"{seed}.wav").write_bytes(sound_file(sound(0.5 + seed, seed)))
    blocks = re.findall(r"```python\n(.*?)```", _HOW_TO.read_text(), re.DOTALL)
    assert len(blocks) == 1
    code = blocks[0].replace("Client()", f"Client({daemon.api!r}, {daemon.grpc!r})")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(_HOW_TO), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert {line.split()[1] for line in lines} <= {f"sounds/{seed}.wav" for seed in range(7)}


def test_the_sounds_of_a_folder_and_of_a_column_are_embedded_into_a_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    folder = tmp_path / "sounds"
    folder.mkdir()
    files = {f"{seed}.wav": sound_file(sound(0.5 + seed, seed)) for seed in range(2)} | {"x.mp3": b"no sound"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    pq.write_table(pa.table({"audio": list(files.values())}), tmp_path / "a.parquet")
    with daemon.client() as client:
        expected = client.infer(pa.table({"audio": list(files.values())}), instance="clap")["dense"].to_pylist()
        for source in (folder, tmp_path / "a.parquet"):
            done = embed_file(client, source, tmp_path / "v.parquet", instance="clap", overwrite=True)
            found = pq.read_table(tmp_path / "v.parquet")["embedding"].to_pylist()
            assert np.allclose(found[:2], expected[:2], atol=1e-6)
            assert found[2] is None
            assert done.failures is not None
            assert "send WAV" in done.failures.read_text()
