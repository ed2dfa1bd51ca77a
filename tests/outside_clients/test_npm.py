"""OpenAI's and Ollama's packages of npm, as they are published: the example of files and batches in the how-to page for
TypeScript, AnythingLLM's calls with the settings of its page, and the calls of Ollama's client that embed."""

from __future__ import annotations

import json
import re
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


OLLAMA = """
import { Ollama } from "ollama";
const [host, input] = JSON.parse(process.argv[2]);
const client = new Ollama({ host });
const { embeddings, total_duration } = await client.embed({ model: "embedding", input, keep_alive: "5m" });
const { embedding } = await client.embeddings({ model: "embedding:latest", prompt: input[0] });
const [{ models }, running, { version }] = [await client.list(), await client.ps(), await client.version()];
const refused = await client.embed({ model: "nobody", input }).catch((error) => [error.status_code, error.message]);
console.log(JSON.stringify({
  embeddings, embedding, total_duration, version, refused,
  listed: models.map((one) => one.model), running: running.models.map((one) => one.name),
}));
"""


def test_ollama(served: DaemonProcess, truth: Truth, tmp_path: Path) -> None:
    told = json.loads(run(OLLAMA, tmp_path, json.dumps([served.api, TEXTS]), package="ollama"))

    same(told["embeddings"], truth.vectors)
    same(told["embedding"], truth.raw[0])
    assert told["total_duration"] > 0
    assert told["refused"][0] == 404
    assert "model 'nobody' not found" in told["refused"][1]
    assert {"embedding:latest"} <= {*told["running"]} <= {*told["listed"]}
    assert re.fullmatch(r"\d+\.\d+\.\d+", told["version"])


def run(code: str, folder: Path, *arguments: str, package: str = "openai") -> str:
    """What a module of JavaScript prints."""
    node = shutil.which("node")
    if node is None or not (MODULES / package).is_dir():
        pytest.skip(f"no node with {package}: `npm install --ignore-scripts --prefix .venv-clients {package}` makes it")
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(MODULES)
    (folder / "script.mjs").write_text(code)

    done = subprocess.run(
        [node, "script.mjs", *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
