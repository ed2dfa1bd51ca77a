"""OpenAI's package of npm, as it is published: the example of files and batches in the how-to page for TypeScript, and
AnythingLLM's calls with the settings of its page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docsite.pages import ROOT, blocks
from tests.outside_clients.conftest import TEXTS, Page, Truth, same
from tests.support.daemon_process import DaemonProcess

MODULES = ROOT / ".venv-clients" / "node_modules"
PAGE = ROOT / "docs" / "how-to" / "clients" / "typescript.md"
LIMIT_S = 100.0


# Mintplex-Labs/anything-llm 0ac463e2: server/utils/EmbeddingEngines/genericOpenAi/index.js.
ANYTHING_LLM = """
import OpenAI from "openai";
const [settings, input] = JSON.parse(process.argv[2]);
const openai = new OpenAI({
  baseURL: settings.EMBEDDING_BASE_PATH,
  apiKey: settings.GENERIC_OPEN_AI_EMBEDDING_API_KEY ?? null,
});
const { data } = await openai.embeddings.create({ model: settings.EMBEDDING_MODEL_PREF, input });
console.log(JSON.stringify(data.map((row) => Array.from(row.embedding))));
"""


def test_files_and_batches_of_openai(served: DaemonProcess, tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE) if "client.batches.create" in block.code]
    code = block.code.replace("localhost:9000", f"127.0.0.1:{served.api_port}").replace('"mini"', '"embedding"')

    assert sorted(run(code, tmp_path).splitlines()) == ["request-0 32", "request-1 32"]


def test_anything_llm(page: Page, truth: Truth, tmp_path: Path) -> None:
    settings = page("anythingllm", "Embedding").fields

    same(json.loads(run(ANYTHING_LLM, tmp_path, json.dumps([settings, TEXTS]))), truth.vectors)
    keyless = {name: value for name, value in settings.items() if not name.endswith("API_KEY")}
    same(json.loads(run(ANYTHING_LLM, tmp_path, json.dumps([keyless, TEXTS]))), truth.vectors)


def run(code: str, folder: Path, *arguments: str) -> str:
    """What a module of JavaScript prints."""
    node = shutil.which("node")
    if node is None or not (MODULES / "openai").is_dir():
        pytest.skip("no node with openai: `npm install --ignore-scripts --prefix .venv-clients openai` makes it")
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(MODULES)
    (folder / "script.mjs").write_text(code)

    done = subprocess.run(
        [node, "script.mjs", *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
