"""Settings from file, environment and command line, for tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from teimgr.config.settings import Settings
from teimgr.config.sources import Source, read


def load(
    config_path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of file, environment and command line; errors as `read`."""
    file = None if config_path is None else Path(config_path)
    return read(Source(file=file, environ=environ, overrides=overrides or {})).settings
