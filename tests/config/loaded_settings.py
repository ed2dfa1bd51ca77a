"""Settings from file, environment and command line, for tests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from teimgr.config.settings import Settings
from teimgr.config.sources import Source, read
from teimgr.errors import InvalidConfig

# Tables of a configuration file.
SEED = '[[instances]]\nname = "a"\nmodel_id = "m"\n'
SECOND = '[[instances]]\nname = "b"\nmodel_id = "m"\n'
MTLS = '[auth]\nenabled = true\nproviders = ["mtls"]\n[auth.mtls]\n'


def load(
    config_path: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of file, environment and command line; errors as `read`."""
    file = None if config_path is None else Path(config_path)
    return read(Source(file=file, environ=environ, overrides=overrides or {})).settings


def refused(file: Path, text: str) -> str:
    """Why `text` is no configuration, without the file's name, which the message must start with."""
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load(file, {})
    place = re.compile(rf"{re.escape(str(file))}(:\d+)?: ")
    lines = caught.value.message.split("\n")
    assert all(place.match(line) for line in lines)
    return "\n".join(place.sub("", line) for line in lines)
