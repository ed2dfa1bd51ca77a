"""Files and batches on a real daemon: docs/batches.md with the official client, large files, a killed daemon."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
from tests.support import models
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.polling import until

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_S = 100
REQUESTS = 4000
KILLED_AFTER = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("bert", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    """With an instance `mini`. One for all tests; the last of them kills it."""
    with WarmDaemonProcess() as daemon:
        with daemon.client() as client:
            client.create("mini", str(folder), dtype="float32", prometheus_port=0)
            client.wait_until_running("mini", deadline_s=LIMIT_S)
        yield daemon


@pytest.mark.skipif(not CLIENTS.exists(), reason="no .venv-clients: `dev.py test` makes it")
def test_the_examples_of_the_document_work(daemon: DaemonProcess, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "batches.md").read_text())
    outputs = []
    for language, code in blocks:
        code = code.replace("localhost:9000", f"127.0.0.1:{daemon.api_port}")
        command = [str(CLIENTS), "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, check=False)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)

    [in_python] = outputs
    assert in_python.splitlines() == [
        "completed BatchRequestCounts(completed=1000, failed=0, total=1000)",
        "request 32",
    ]


def test_a_large_file_is_never_in_memory(daemon: DaemonProcess, tmp_path: Path) -> None:
    assert daemon.process is not None
    process = psutil.Process(daemon.process.pid)
    begin(daemon, upload(daemon, tmp_path, [(0, "warm")]))
    before = process.memory_info().rss
    file = upload(daemon, tmp_path, ((number, "fog") for number in range(1700)), user="x" * 90_000)  # some 150 MB
    batch = begin(daemon, file)
    highest = before

    def ended() -> Any:
        nonlocal highest
        highest = max(highest, process.memory_info().rss)
        return has_ended(daemon, batch)

    assert until(ended, limit_s=LIMIT_S)["request_counts"]["total"] == 1700
    assert highest - before < 100 * 2**20


def test_a_killed_daemon_is_followed_by_one_that_finishes_the_batch(daemon: DaemonProcess, tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(REQUESTS)]
    batch = begin(daemon, upload(daemon, tmp_path, enumerate(texts)))
    until(lambda: counts(daemon, batch)["completed"] > KILLED_AFTER)
    daemon.kill()
    daemon.start()
    assert counts(daemon, batch)["completed"] > KILLED_AFTER
    ended = until(lambda: has_ended(daemon, batch), limit_s=LIMIT_S)

    assert ended["request_counts"] == {"total": REQUESTS, "completed": REQUESTS, "failed": 0}
    assert ended["usage"]["total_tokens"] > REQUESTS
    found = [json.loads(line) for line in content(daemon, ended["output_file_id"])]
    assert sorted(int(each["custom_id"]) for each in found) == list(range(REQUESTS))
    with daemon.client() as client:
        for each in found[:: REQUESTS // 20]:
            [row] = each["response"]["body"]["data"]
            truth = client.embed(texts[int(each["custom_id"])], instance="mini")[0]
            np.testing.assert_allclose(row["embedding"], truth, atol=1e-5)


def upload(daemon: DaemonProcess, folder: Path, texts: Iterable[tuple[int, str]], **more: str) -> str:
    """A file with a request for each of `texts`, with `more` in its body; the result is the file's id."""
    path = folder / "requests.jsonl"
    with path.open("w") as file:
        for number, text in texts:
            body = {"model": "mini", "input": text} | more
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
            file.write(json.dumps(request) + "\n")
    curl = ["curl", "-sS", f"{daemon.api}/v1/files", "-F", "purpose=batch", "-F", f"file=@{path}"]
    done = subprocess.run(curl, capture_output=True, timeout=LIMIT_S, check=True)
    return str(json.loads(done.stdout)["id"])


def begin(daemon: DaemonProcess, file: str) -> str:
    body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    request = Request(
        f"{daemon.api}/v1/batches", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urlopen(request, timeout=LIMIT_S) as reply:
        return str(json.load(reply)["id"])


def state(daemon: DaemonProcess, batch: str) -> Any:
    with urlopen(f"{daemon.api}/v1/batches/{batch}", timeout=LIMIT_S) as reply:
        return json.load(reply)


def counts(daemon: DaemonProcess, batch: str) -> Any:
    return state(daemon, batch)["request_counts"]


def has_ended(daemon: DaemonProcess, batch: str) -> Any:
    """The batch, once it is completed."""
    found = state(daemon, batch)
    assert found["status"] in ("validating", "in_progress", "finalizing", "completed"), found
    return found["status"] == "completed" and found


def content(daemon: DaemonProcess, file: str) -> Iterator[bytes]:
    with urlopen(f"{daemon.api}/v1/files/{file}/content", timeout=LIMIT_S) as reply:
        yield from reply
