"""Settings in a folder of their own, on a port of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemon_process import free_ports

from teimgr.config.settings import Settings


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="t"))
    settings = Settings(state_file=folder / "state.toml", run_dir=folder, log_dir=folder, grpc_port=free_ports(1)[0])
    settings.prepare_folders()
    yield settings
    shutil.rmtree(folder)
