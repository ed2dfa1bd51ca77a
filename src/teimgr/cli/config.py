"""`teimgr config check` and `teimgr config show`: a configuration judged and shown, without a daemon."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from teimgr.config.provenance import Value, effective
from teimgr.config.sources import Configuration, Source, read


def check(file: Path) -> int:
    """Say that the file is good, beside the environment there is, and what about it should be known.

    Raises:
        InvalidConfig: it is not; the message has a line for each fault.
    """
    settings = read(Source(file=file)).settings
    if settings.tls_files is not None:
        settings.tls_files.context()
    for warning in settings.warnings():
        print(f"{file}: warning: {warning}")
    print(f"{file}: good; {len(settings.instances)} seeds, REST on {settings.api_host}:{settings.api_port}")
    return 0


def show(file: Path | None, *, only_changed: bool) -> int:
    """Print the settings in effect as TOML that says of each key where it comes from.

    Raises:
        InvalidConfig: as `check`.
    """
    print("\n".join(_lines(read(Source(file=file)), only_changed)))
    return 0


def _lines(configuration: Configuration, only_changed: bool) -> list[str]:
    lines, table = [], ""
    for each in effective(configuration):
        if only_changed and each.source == "default":
            continue
        if each.table != table:
            table = each.table
            lines += ["", f"[[{table.partition('[')[0]}]]" if table.endswith("]") else f"[{table}]"]
        lines.append(_line(each))
    return lines


def _line(each: Value) -> str:
    if each.value is None:
        return f"# {each.key} is absent  # {each.source}"
    return f"{tomli_w.dumps({each.key: each.value}).rstrip()}  # {each.source}"
