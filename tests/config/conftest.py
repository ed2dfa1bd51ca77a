"""The REST application on a real listener, and a place for a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rest_listener import front, settings

__all__ = ["front", "settings"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.toml"
