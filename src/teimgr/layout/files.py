"""The JSON files of a model directory, read once and complained about by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teimgr.errors import ModelLoadFailed


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file.

    Raises:
        ModelLoadFailed: it is no JSON, or no object.
    """
    content = _parse(path)
    if content is not None and not isinstance(content, dict):
        raise ModelLoadFailed(f"{path.name} should hold a JSON object")
    return content


def read_list(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON file, [] where there is no such file.

    Raises:
        ModelLoadFailed: it is no JSON, or no list of objects.
    """
    content = _parse(path)
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ModelLoadFailed(f"{path.name} should hold a list of JSON objects")
    return content


def first_object(folder: Path, *names: str) -> dict[str, Any]:
    """The object in the first of these files that exists, {} where none does."""
    return next((content for name in names if (content := read_object(folder / name)) is not None), {})


def _parse(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadFailed(f"{path.name} is not valid JSON: {error}") from error
