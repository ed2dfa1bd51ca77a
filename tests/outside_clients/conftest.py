"""One daemon with a model of each kind for the clients, its own numbers, and the environment of the clients."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.outside_clients.products import Section, section
from tests.support import models
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models.dual_encoders import build_clip, file_of, noise

from teimgr.client import Client

TEXTS = ["fog", "the quick brown fox", "Rain fell on the harbour all night; 东京 and Zürich."]
QUERY = "how long does a query wait"
KEY = "sesame"
IDS = [2, 7, 9, 3]
TOLERANCE = 1e-5
PICTURE = file_of(noise(60, 40))

_PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
_SCRIPTS = Path(__file__).parent / "scripts"
_LIMIT_S = 100.0
_PROMPTS = {"query": "query: "}

Told = dict[str, Any]
Hear = Callable[..., Told]
Page = Callable[[str, str], Section]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Instances `embedding`, `locked` (the same behind a key), `reranker`, `classifier` and `pictures`, a CLIP."""
    embedding = models.build("bert", tmp_path_factory.mktemp("m"), prompts=_PROMPTS)
    folders = {
        "embedding": embedding,
        "locked": embedding,
        "reranker": models.build_cross_encoder("bert", tmp_path_factory.mktemp("m")),
        "classifier": models.build_classifier("bert", tmp_path_factory.mktemp("m")),
        "pictures": build_clip(tmp_path_factory.mktemp("m")),
    }
    # Requests without a model go to `embedding`, not to `locked`; the alias is the model that LibreChat asks for.
    defaults, aliases = {"embedding": "embedding"}, {"jina-reranker-v2-base-multilingual": "reranker"}
    with WarmDaemonProcess(default_instances=defaults, aliases=aliases, health_check_interval_secs=10) as daemon:
        with daemon.client() as client:
            for name, folder in folders.items():
                key = ["--api-key", KEY] if name == "locked" else []
                client.create(name, str(folder), dtype="float32", prometheus_port=0, extra_args=key)
            for name in folders:
                client.wait_until_running(name, deadline_s=_LIMIT_S)
        yield daemon


@pytest.fixture(scope="package")
def ports(served: DaemonProcess) -> dict[str, int]:
    """The instances' own ports."""
    with served.client() as client:
        return {name: client.get(name).port for name in ("embedding", "locked", "reranker", "classifier")}


@pytest.fixture(scope="package")
def page(served: DaemonProcess, ports: dict[str, int]) -> Page:
    """A section of a how-to page by its page and heading, with this daemon's addresses."""
    addresses = {
        "teimgr:9000": f"127.0.0.1:{served.api_port}",
        "teimgr:8080": f"127.0.0.1:{ports['embedding']}",
        "teimgr:8081": f"127.0.0.1:{ports['reranker']}",
    }
    return lambda name, heading: section(name, heading, addresses)


@pytest.fixture(scope="package")
def hear(served: DaemonProcess, ports: dict[str, int]) -> Hear:
    """Run a script in the clients' environment and return what it printed. Nothing of ours is on its path."""
    if not _PYTHON.exists():
        pytest.skip("no .venv-clients: `dev.py test` makes it")
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    grpc = {f"grpc_{name}": f"127.0.0.1:{port}" for name, port in ports.items()}
    picture = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    said = {
        **urls,
        **grpc,
        "picture": picture,
        "daemon": served.api,
        "key": KEY,
        "texts": TEXTS,
        "query": QUERY,
        "ids": IDS,
    }
    # Offline, InferenceClient refuses every URL; what looks for news elsewhere is switched off.
    quiet = {
        "ANONYMIZED_TELEMETRY": "False",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DISABLE_AIOHTTP_TRANSPORT": "True",
    }
    environ = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ} | quiet

    def run(script: str, **more: Any) -> Told:
        command = [str(_PYTHON), str(_SCRIPTS / f"{script}.py"), json.dumps(said | more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environ, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run


class Truth:
    """The engine's vectors of `TEXTS`, through teimgr's own client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.vectors = self.embedded()
        self.short = self.embedded(dimensions=8)
        self.raw = self.embedded(normalize=False)
        self.picture = client.embed_images([PICTURE], instance="pictures")

    def embedded(self, *texts: str, **how: Any) -> NDArray[np.float32]:
        return self._client.embed(texts or TEXTS, instance="embedding", **how)

    def ranks(self, **how: Any) -> list[list[Any]]:
        """Texts and their scores, best first."""
        found = self._client.rerank(QUERY, TEXTS, instance="reranker", **how)
        return [[TEXTS[rank.index], rank.score] for rank in found]

    def best_class(self) -> Any:
        return self._client.predict(TEXTS[0], instance="classifier")[0][0]


@pytest.fixture(scope="package")
def truth(served: DaemonProcess) -> Iterator[Truth]:
    with served.client() as client:
        yield Truth(client)


def same(told: Any, expected: Any) -> None:
    """Vectors, or one, and of the same number."""
    assert np.shape(told) == np.shape(expected)
    assert np.allclose(told, expected, atol=TOLERANCE)


def same_ranks(told: list[list[Any]], expected: list[list[Any]]) -> None:
    assert [text for text, _ in told] == [text for text, _ in expected]
    assert [score for _, score in told] == pytest.approx([score for _, score in expected], abs=TOLERANCE)
