"""The guides in docs/moving: their commands run in order, as a new user would type them, and print what the pages show.

docs/moving/from-tei.md, from-infinity.md, from-ollama.md and from-tei-manager.md start a daemon with the configuration
they have imported; from-openai.md and from-sie.md use one that runs. A block of `yaml` or `toml` whose first line
names a file is that file. A block of `text` is the output of the block before it; `UPDATE_PAGES=1 pytest FILE` writes
these anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.docsite.forked_commands import write_programs
from tests.docsite.pages import ROOT, blocks
from tests.support.daemon_process import MINILM, STOP_LIMIT_S, WarmDaemonProcess, free_ports
from tests.support.fork_server import SERVICE, nursery_service
from tests.support.models import build_classifier, build_cross_encoder

from teimgr.models import hub

FOLDER = ROOT / "docs" / "moving"
SHOWN_FOLDER = "/srv/search"
LIMIT_S = 100.0
UPDATE = "UPDATE_PAGES" in os.environ
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(not shutil.which("curl"), reason="the commands are curl")]


@dataclass(frozen=True)
class Host:
    """A folder with models, in which a page's commands run; `ports` are ours by those of the page."""

    folder: Path
    ports: Mapping[str, int]
    environ: Mapping[str, str]

    def follow(self, page: str) -> dict[str, list[str]]:
        """Run the blocks of a page; the outputs, by language."""
        file = FOLDER / page
        outputs: dict[str, list[str]] = {"bash": [], "python": []}
        pairs = list(self._outputs(file, outputs))
        if UPDATE:
            lines = file.read_text().splitlines(keepends=True)
            for at, shown, printed in reversed(pairs):
                lines[at : at + shown.count("\n")] = [printed.rstrip("\n") + "\n"]
            file.write_text("".join(lines))
        else:
            for at, shown, printed in pairs:
                assert_same(shown, printed, f"{page}:{at}")
        return outputs

    def _outputs(self, file: Path, outputs: dict[str, list[str]]) -> Iterator[tuple[int, str, str]]:
        """Run the blocks; yields the line of each shown output, the output shown and the one printed."""
        printed = ""
        for block in blocks(file):
            if block.reason:
                continue
            if block.language in outputs:
                printed = self.run(block.language, block.code, block.environment)
                outputs[block.language].append(printed)
            elif block.language == "text":
                yield block.line, block.code, printed
            elif name := re.match(r"# ([\w.-]+\.(?:yml|toml))\n", block.code):
                (self.folder / name[1]).write_text(self.with_our_ports(block.code))

    def run(self, language: str, code: str, environment: str = "") -> str:
        """What a block prints on both outputs, with the page's ports and folder in it."""
        programs = ROOT / environment / "bin" if environment else Path(sys.executable).parent
        python = str(programs / "python" if environment else self.folder / "bin" / "python-c")
        code = self.with_our_ports(code)
        command = [python, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        path = os.pathsep.join([str(self.folder / "bin"), str(programs), os.environ["PATH"]])
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **self.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        log = self.folder / "teimgr.log"
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{log.read_text()[-3000:] if log.exists() else ''}"
        printed = done.stdout.replace(str(self.folder), SHOWN_FOLDER)
        for documented, ours in self.ports.items():
            printed = re.sub(rf"\b{ours}\b", documented, printed)
        return printed

    def with_our_ports(self, code: str) -> str:
        code = code.replace(SHOWN_FOLDER, str(self.folder))
        return re.sub(rf"\b({'|'.join(self.ports)})\b", lambda match: str(self.ports[match[0]]), code)

    def close(self) -> None:
        """Stop the daemon that a page has started, if it runs."""
        file = self.folder / "teimgr.pid"
        if file.exists() and psutil.pid_exists(pid := int(file.read_text())):
            process = psutil.Process(pid)
            if str(self.folder) in process.cwd():
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def assert_same(shown: str, printed: str, place: str) -> None:
    """Equal up to white space and the last digits of fractions, which differ between processors."""
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split(), f"{place}\n{printed}"
    numbers = [list(map(float, NUMBER.findall(text))) for text in (shown, printed)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-3), f"{place}\n{printed}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, `reranker` and `emotions`; the latter with random weights."""
    folder = tmp_path_factory.mktemp("models")
    build_cross_encoder("bert", folder / "reranker")
    build_classifier("bert", folder / "emotions")
    (folder / "all-MiniLM-L6-v2").symlink_to(hub.resolve(MINILM).path)
    return folder


def new_host(models: Path, *documented: str, rest_port: str = "9000") -> Host:
    """A host whose daemon takes free ports where the pages have the usual ones."""
    folder = Path(tempfile.mkdtemp(prefix="tm"))  # short: sockets lie below it
    (folder / "models").symlink_to(models)
    write_programs(folder / "bin", "teimgr", "python-c")
    rest, grpc, first, *others = free_ports(3 + 20 + len(documented))
    ports = {"9000": rest, "9001": grpc, "8080": first, **dict(zip(documented, others, strict=False))}
    metrics = others[len(documented)]
    environ = {
        "TEIMGR_GRPC_PORT": str(grpc),
        "TEIMGR_INSTANCE_PORT_START": str(first),
        "TEIMGR_INSTANCE_PORT_END": str(first + 15),
        "TEIMGR_PROMETHEUS_PORT_START": str(metrics),
        "HF_HUB_OFFLINE": "1",
        SERVICE: nursery_service(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    if rest_port == "9000":
        environ |= {"TEIMGR_API_PORT": str(rest), "TEIMGR_URL": f"http://127.0.0.1:{rest}"}
    return Host(folder, ports, environ)


TEXTS = ["What is deep learning?", "Tax law of 1986", "Привет, мир", "test"]


@pytest.fixture(scope="module")
def vectors(models: Path) -> list[list[float]]:
    """What another server would have answered to `TEXTS`: vectors of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    found: list[list[float]] = (
        SentenceTransformer(str(models / "all-MiniLM-L6-v2"), device="cpu").encode(TEXTS).tolist()
    )
    return found


def keep(host: Host, answer: object) -> None:
    """Put the answer of the server that is left into before.json."""
    (host.folder / "before.json").write_text(json.dumps(answer))


@pytest.fixture
def opened(models: Path) -> Iterator[Callable[..., Host]]:
    """Makes hosts, which are closed after the test."""
    hosts: list[Host] = []

    def new(*documented: str, **how: Any) -> Host:
        hosts.append(new_host(models, *documented, **how))
        return hosts[-1]

    yield new
    for host in hosts:
        host.close()


def test_from_tei(opened: Callable[..., Host], vectors: list[list[float]]) -> None:
    host = opened("8081", "8082", "8083")
    keep(host, vectors)

    done = host.follow("from-tei.md")
    assert done["python"] == ["1.0000\n" * 4]
    # TEI's own snapshot of this request begins so, before it is cut to four dimensions and normalised again.
    snapshot = [0.020964134, 0.04565805, -0.066505864, 0.10739273]
    length = sum(value**2 for value in snapshot) ** 0.5
    vector = json.loads(next(text for text in done["bash"] if text.startswith("[[")).splitlines()[0])[0]
    assert vector == pytest.approx([value / length for value in snapshot], abs=4e-3)


def test_from_infinity(opened: Callable[..., Host], vectors: list[list[float]]) -> None:
    host = opened("7997", rest_port="7997")
    keep(host, {"data": [{"embedding": vector} for vector in vectors]})

    done = host.follow("from-infinity.md")
    assert done["python"] == ["1.0000\n" * 4]
    assert not [text for text in done["bash"] if "a-key-that-clients-have" in text]


def test_from_ollama(opened: Callable[..., Host], vectors: list[list[float]]) -> None:
    host = opened("11434")
    keep(host, {"embeddings": vectors})
    details = {"format": "gguf", "family": "bert", "quantization_level": "F16"}
    listed = [("all-minilm:latest", details), ("llama3.2:3b", details | {"family": "llama"})]
    tags = {"models": [{"name": name, "model": name, "details": each} for name, each in listed]}
    (host.folder / "ollama.json").write_text(json.dumps(tags))

    assert host.follow("from-ollama.md")["python"] == ["1.0000\n" * 4]


def test_from_tei_manager(opened: Callable[..., Host], vectors: list[list[float]]) -> None:
    host = opened("8081")
    keep(host, vectors)

    assert host.follow("from-tei-manager.md")["python"] == ["1.0000\n" * 4]


@pytest.fixture(scope="module")
def fleet(models: Path) -> Iterator[WarmDaemonProcess]:
    """A daemon with `mini` and `ranker`."""
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        for name, model in (("mini", "all-MiniLM-L6-v2"), ("ranker", "reranker")):
            client.create(name, str(models / model))
        for name in ("mini", "ranker"):
            client.wait_until_running(name, deadline_s=LIMIT_S)
        yield daemon


@pytest.mark.parametrize("page", ["from-openai.md", "from-sie.md"])
def test_pages_for_a_daemon_that_runs(
    page: str, fleet: WarmDaemonProcess, opened: Callable[..., Host], vectors: list[list[float]]
) -> None:
    if page == "from-openai.md" and not (ROOT / ".venv-clients").exists():
        pytest.skip("no .venv-clients: `dev.py test` makes it")
    host = opened()
    host = replace(host, ports={"9000": fleet.api_port}, environ={**host.environ, "TEIMGR_URL": fleet.api})
    keep(host, {"items": [{"dense": {"values": vector}} for vector in vectors]})

    host.follow(page)


def test_every_page_is_followed() -> None:
    named = set(re.findall(r"from-[a-z-]+\.md", Path(__file__).read_text()))

    assert {page.name for page in FOLDER.glob("*.md")} == named
