"""The docstring of the engine's package is its map: it names each module and package."""

from __future__ import annotations

import re
from pathlib import Path

import teimgr.engine

_FOLDER = Path(teimgr.engine.__file__).parent


def test_the_map_names_each_module_and_package_and_nothing_else() -> None:
    modules = {path.stem for path in _FOLDER.glob("*.py") if path.stem != "__init__"}
    packages = {f"{path.name}/" for path in _FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    named = set[str]()
    for line in (teimgr.engine.__doc__ or "").splitlines():
        if match := re.match(r"((?:[a-z_]+/?,? ?)+?)(?:  +|$)", line):
            named |= set(re.findall(r"[a-z_]+/?", match[1]))

    assert named == modules | packages
