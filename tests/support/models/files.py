"""Writing and changing the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """Write `content` as JSON, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    write(path, {key: value for key, value in content.items() if value is not None})


def write_modules(folder: Path, *types: str) -> None:
    """modules.json: the first module at the root, the others in `{index}_{name}`; `types` are dotted class names."""
    names = [dotted.rsplit(".", 1)[-1] for dotted in types]
    paths = ["" if index == 0 else f"{index}_{name}" for index, name in enumerate(names)]
    rows = [
        {"idx": index, "name": str(index), "path": path, "type": dotted}
        for index, (path, dotted) in enumerate(zip(paths, types, strict=True))
    ]
    write(folder / "modules.json", rows)


def pad_and_truncate(path: Path) -> None:
    """Put padding and truncation into tokenizer.json, as training leaves them there; an engine must ignore them."""
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": content["added_tokens"][0]["content"],
    }
    write(path, content)
