"""One daemon with a model of each kind for the clients, and the environment in which the clients run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import models
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess

TEXTS = ["fog", "the quick brown fox", "Rain fell on the harbour all night; 东京 and Zürich."]
QUERY = "how long does a query wait"
KEY = "sesame"
IDS = [2, 7, 9, 3]

_PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
_SCRIPTS = Path(__file__).parent / "scripts"
_LIMIT_S = 100.0
_PROMPTS = {"query": "query: "}

Told = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Instances `embedding`, `locked` (the same behind a key), `reranker` and `classifier`."""
    embedding = models.build("bert", tmp_path_factory.mktemp("m"), prompts=_PROMPTS)
    folders = {
        "embedding": embedding,
        "locked": embedding,
        "reranker": models.build_cross_encoder("bert", tmp_path_factory.mktemp("m")),
        "classifier": models.build_classifier("bert", tmp_path_factory.mktemp("m")),
    }
    with WarmDaemonProcess() as daemon:
        with daemon.client() as client:
            for name, folder in folders.items():
                key = ["--api-key", KEY] if name == "locked" else []
                client.create(name, str(folder), dtype="float32", prometheus_port=0, extra_args=key)
            for name in folders:
                client.wait_until_running(name, deadline_s=_LIMIT_S)
        yield daemon


@pytest.fixture(scope="session")
def hear(served: DaemonProcess) -> Callable[[str], Told]:
    """Run a script in the clients' environment and return what it printed. Nothing of ours is on its path."""
    if not _PYTHON.exists():
        pytest.skip("no .venv-clients: `dev.py test` makes it")
    with served.client() as client:
        ports = {name: client.get(name).port for name in ("embedding", "locked", "reranker", "classifier")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    grpc = {f"grpc_{name}": f"127.0.0.1:{port}" for name, port in ports.items()}
    said = {**urls, **grpc, "daemon": served.api, "key": KEY, "texts": TEXTS, "query": QUERY, "ids": IDS}
    # Offline, InferenceClient refuses every URL; what looks for news elsewhere is switched off.
    quiet = {
        "ANONYMIZED_TELEMETRY": "False",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DISABLE_AIOHTTP_TRANSPORT": "True",
    }
    environ = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ} | quiet

    def run(script: str) -> Told:
        command = [str(_PYTHON), str(_SCRIPTS / f"{script}.py"), json.dumps(said)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environ, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run
