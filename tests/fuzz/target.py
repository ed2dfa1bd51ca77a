"""The daemon that is fuzzed: one tiny model of each kind that has calls of its own, and caches nobody else uses."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from teimgr.client import Client
from tests.support import models
from tests.support.daemon_process import DaemonProcess, free_ports

SEED = 20261121
STARTING_LIMIT_S = 100.0
MAX_TOKENS = 300
CALL_LIMIT_S = 30.0
SENTENCE = "rain on the harbour"

# One of each kind; names that no generator thinks of, so that no random DELETE finds them.
FLEET: dict[str, Callable[[Path], Path]] = {
    "fuzz-embedding": lambda folder: models.build("bert", folder),
    "fuzz-sparse": lambda folder: models.build_splade("bert", folder),
    "fuzz-reranker": lambda folder: models.build_cross_encoder("bert", folder),
    "fuzz-classifier": lambda folder: models.build_classifier("bert", folder),
}

CALLS: dict[str, tuple[str, Callable[[list[str]], dict[str, Any]]]] = {
    "fuzz-embedding": ("/embed", lambda texts: {"inputs": texts}),
    "fuzz-sparse": ("/embed_sparse", lambda texts: {"inputs": texts}),
    "fuzz-reranker": ("/rerank", lambda texts: {"query": "rain", "texts": texts}),
    "fuzz-classifier": ("/predict", lambda texts: {"inputs": [[text] for text in texts]}),
}
"""A call on the port of each instance that computes all texts in one batch."""


class Target:
    """A running daemon, and what must still be true of it after any input."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        with daemon.client() as client:
            self.ports = {name: client.get(name).port for name in FLEET}
            self._lives = self._lives_of(client)
            self._vector = client.embed(SENTENCE, instance="fuzz-embedding")

    def fill_caches(self) -> None:
        """Make calls of ever more tokens: workers keep generated code for the last 256 shapes of matrix products.

        It is some 70 MiB when full. Filled during a run it would look like a leak, or hide one.
        """
        for tokens in range(1, MAX_TOKENS):
            # Unequal ones, as equal texts are computed once; the models take 128 tokens.
            lengths = [100 - number for number in range(tokens // 100)] + [tokens % 100]
            texts = ["rain " * (words + 1) for words in lengths]
            for name, (path, body) in CALLS.items():
                url, head = f"http://127.0.0.1:{self.ports[name]}{path}", {"content-type": "application/json"}
                request = urllib.request.Request(url, json.dumps(body(texts)).encode(), head)
                urllib.request.urlopen(request, timeout=CALL_LIMIT_S).close()

    def check_unharmed(self) -> None:
        """The same workers live, none was restarted, and the embedding of a known text is what it was."""
        with self.daemon.client() as client:
            found = client.embed(SENTENCE, instance="fuzz-embedding")
            assert np.allclose(found, self._vector, atol=1e-6)
            assert self._lives_of(client) == self._lives, "a worker died"

    def _lives_of(self, client: Client) -> dict[str, tuple[int | None, int]]:
        found = {name: client.get(name) for name in FLEET}
        return {name: (instance.pid, instance.restarts) for name, instance in found.items()}


@contextmanager
def running(kind: type[DaemonProcess] = DaemonProcess) -> Iterator[Target]:
    """The daemon with its whole fleet running, for as long as the block runs."""
    with TemporaryDirectory(prefix="tf") as kept:
        folder = Path(kept)
        daemon = kind(max_instances=len(FLEET) + 2, grpc_request_timeout_secs=60)
        with closing(daemon), daemon.client() as client:
            daemon.start({"HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"})
            for (name, build), port in zip(FLEET.items(), free_ports(len(FLEET)), strict=True):
                # A port for metrics of its own choice: other daemons on this machine count upwards from 9100 as well.
                client.create(name, str(build(folder / name)), dtype="float32", prometheus_port=port)
            for name in FLEET:
                client.wait_until_running(name, deadline_s=STARTING_LIMIT_S)
            yield Target(daemon)
