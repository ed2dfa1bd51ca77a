"""The REST application on a real listener, and one daemon with tiny models for the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.models import build_classifier, build_cross_encoder, build_static
from tests.support.rest_listener import front, settings

__all__ = ["front", "settings"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmDaemonProcess]:
    """A daemon with `static`, `ranker` and `classes`, all running."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        "static": build_static(folder / "static"),
        "ranker": build_cross_encoder("bert", folder / "ranker"),
        "classes": build_classifier("bert", folder / "classes"),
    }
    with WarmDaemonProcess() as daemon:
        with daemon.client() as client:
            for name, model in models.items():
                client.create(name, str(model), tags={"of": "tests"})
            for name in models:
                client.wait_until_running(name, deadline_s=60)
        yield daemon


@pytest.fixture
def named_fleet(fleet: WarmDaemonProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WarmDaemonProcess:
    """The daemon, which the environment names to commands in this process."""
    monkeypatch.setenv("TEIMGR_URL", fleet.api)
    monkeypatch.setenv("TEIMGR_CONTEXTS", str(tmp_path / "contexts.toml"))
    return fleet
