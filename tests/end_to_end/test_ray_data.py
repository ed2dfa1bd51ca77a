"""The recipe of docs/how-to/ray-data.md: Parquet in, Parquet with vectors out, each block through a mux."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.docsite.pages import ROOT, blocks
from tests.support.cluster import needs_ray
from tests.support.daemon_process import HEAD_ADDRESS, WarmDaemonProcess, cluster_table
from tests.support.models import build

LIMIT_S = 300.0
FILES, ROWS = 4, 500
pytestmark = [
    needs_ray,
    pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray[data] is not installed"),
    pytest.mark.timeout(600),
]


def test_the_recipe_writes_a_vector_for_each_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    page = list(blocks(ROOT / "docs" / "how-to" / "ray-data.md"))
    (program,) = [each.code for each in page if each.language == "python"]
    (run,) = [each.code for each in page if "RAY_AUTH_MODE" in each.code]
    daemon = WarmDaemonProcess(
        cluster=cluster_table(HEAD_ADDRESS, "one", object_store_mb=200), grpc_host="0.0.0.0", api_host="0.0.0.0"
    )
    ray_port = daemon.settings["cluster"]["address"].rpartition(":")[2]
    values = {
        "10.0.0.1": HEAD_ADDRESS,
        "9000": daemon.api_port,
        "9001": daemon.grpc_port,
        "6379": ray_port,
        "/shared": tmp_path,
    }
    program = re.sub("|".join(map(re.escape, values)), lambda found: str(values[found[0]]), program)
    (tmp_path / "embed_parquet.py").write_text(program)
    (tmp_path / "texts").mkdir()
    for file in range(FILES):
        texts = [f"text {row} of file {file}" for row in range(ROWS)]
        ids = range(file * ROWS, (file + 1) * ROWS)
        pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "texts" / f"{file}.parquet")

    with daemon, daemon.client() as client:
        client.create("mini", str(build("bert", tmp_path / "model")), dtype="float32")
        client.wait_until_running("mini", deadline_s=LIMIT_S)
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "ray-token").symlink_to(daemon.folder / "ray-token")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-euc", run], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        written = pq.read_table(tmp_path / "vectors").sort_by("id").to_pydict()
        for row in (0, FILES * ROWS - 1):
            expected = client.embed(written["text"][row], instance="mini", normalize=True)[0]
            np.testing.assert_allclose(written["vector"][row], expected, atol=1e-5)

    assert written["id"] == list(range(FILES * ROWS))
    assert set(written["error"]) == {None}
