"""OpenAI's package of npm, as it is published: the example of files and batches in the how-to page for TypeScript."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docsite.pages import ROOT, blocks
from tests.support.daemon_process import DaemonProcess

MODULES = ROOT / ".venv-clients" / "node_modules"
PAGE = ROOT / "docs" / "how-to" / "clients" / "typescript.md"
LIMIT_S = 100.0


def test_files_and_batches_of_openai(served: DaemonProcess, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (MODULES / "openai").is_dir():
        pytest.skip("no node with openai: `npm install --ignore-scripts --prefix .venv-clients openai` makes it")
    [block] = [block for block in blocks(PAGE) if "client.batches.create" in block.code]
    code = block.code.replace("localhost:9000", f"127.0.0.1:{served.api_port}").replace('"mini"', '"embedding"')
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "batch.mjs").write_text(code)

    done = subprocess.run(
        [node, "batch.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == ["request-0 32", "request-1 32"]
