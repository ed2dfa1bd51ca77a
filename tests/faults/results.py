"""Reports of long runs: Markdown to read and JSON to compute with, in a folder that the caller names."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.report import markdown_table


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    return markdown_table(header, rows).split("\n")


def write(folder: Path, name: str, title: str, lines: Sequence[str], facts: dict[str, Any]) -> None:
    """Write `folder`/`name`.md and .json; an earlier report of this name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = describe()
    document = {"title": title, "date": today, "machine": machine, **facts}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    where = f"{machine['cores']} cores, {machine['cpu']}, {machine['memory_gib']} GiB, Python {machine['python']}."
    (folder / f"{name}.md").write_text("\n".join([f"# {title}, {today}", "", *lines, "", where, ""]))
    print(f"written: {folder / name}.md and .json")
