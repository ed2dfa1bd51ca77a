"""A live step of load: replicas go from 1 to 3 and back by what waits, and no call fails.

The model has a module of its own that sleeps for each text, as on a device that is not the processor: a second replica
computes as much as the first on any machine.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from pathlib import Path

import pytest
from tests.support import models
from tests.support.daemon_process import DaemonProcess
from tests.support.polling import until

from teimgr.client import Client

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TEXT_S, TEXTS, CALLERS, LIMIT_S = 0.02, 16, 16, 240.0
MODULE = f"""
import time

import torch


class Slow(torch.nn.Module):
    def forward(self, features):
        time.sleep({TEXT_S} * len(features["sentence_embedding"]))
        return features

    @staticmethod
    def load(model_name_or_path, **kwargs):
        return Slow()
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    folder = models.build("bert", tmp_path / "model")
    (folder / "own.py").write_text(MODULE)
    (folder / "2_Slow").mkdir()
    (folder / "2_Slow" / "config.json").write_text("{}")
    chain = json.loads((folder / "modules.json").read_text())
    chain.append({"idx": len(chain), "name": str(len(chain)), "path": "2_Slow", "type": "own.Slow"})
    (folder / "modules.json").write_text(json.dumps(chain))
    return folder


class Callers:
    """Threads that call as long as the block runs, each with texts that no other call has."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        self.calls = 0
        self.failures: list[OSError] = []

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            texts = [f"rain and fog {next(self._numbers)}" for _ in range(TEXTS)]
            body = json.dumps({"model": "slow", "input": texts}).encode()
            request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
            try:
                urllib.request.urlopen(request, timeout=120).close()
                self.calls += 1
            except OSError as error:
                self.failures.append(error)


def test_a_step_of_load_brings_two_replicas_more_and_its_end_takes_them_away(slow: Path) -> None:
    with DaemonProcess(allow_remote_code=True, page=False) as daemon, daemon.client() as client:
        keys = {"max_replicas": 3, "scale_up_wait_ms": 500, "scale_down_wait_ms": 100, "scale_down_delay_secs": 6}
        client.create("slow", str(slow), trust_remote_code=True, **keys)
        client.wait_until_running("slow", deadline_s=LIMIT_S)
        with Callers(f"{daemon.api}/v1/embeddings") as callers:
            until(lambda: serving(client) == 3, f"three replicas: {reasons(daemon)}", LIMIT_S)
        until(lambda: serving(client) == 1, f"one replica: {reasons(daemon)}", LIMIT_S)
        assert callers.failures == []
        assert callers.calls > 3 * CALLERS
        told = reasons(daemon)
    ups, downs = [each for each in told if "would wait" in each], [each for each in told if "have been enough" in each]
    assert [each.split(":")[0] for each in ups] == ["1 → 2", "2 → 3"], told
    assert downs[-1].split(":")[0].endswith("→ 1"), told
    assert len(ups) + len(downs) == len(told), told


def serving(client: Client) -> int:
    workers = client.get("slow").details["workers"]
    return sum(each["role"] == "serving" and each["state"] == "running" for each in workers)


def reasons(daemon: DaemonProcess) -> list[str]:
    with urllib.request.urlopen(f"{daemon.api}/events?event=scaled") as answer:
        return [each["reason"] for each in json.load(answer)]
