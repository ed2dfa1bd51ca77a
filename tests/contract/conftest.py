"""One daemon for every clause that a request can show: the real MiniLM, and a tiny model with prompts."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.support import models
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """`mini` is MiniLM, `prompted` a tiny model whose prompt `query` changes vectors; Arrow answers in float16."""
    folder = models.build("bert", tmp_path_factory.mktemp("model"), prompts={"query": "query: "})
    with WarmDaemonProcess(arrow_output_dtype="f16", grpc_request_timeout_secs=0) as daemon:
        with daemon.client() as client:
            client.create("mini", MINILM, dtype="float32")
            client.create("prompted", str(folder), dtype="float32")
            for name in ("mini", "prompted"):
                client.wait_until_running(name, deadline_s=60)
        yield daemon


@pytest.fixture(scope="package")
def channel(served: DaemonProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as opened:
        yield opened
