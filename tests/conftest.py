"""How the suite is shared out between processes: what shares a daemon stays together."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Folders whose files share one daemon, or models that take long to make.
TOGETHER = ("clients", "conformance", "contract", "dialects", "fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in the group of its file, or of its folder where the files share something."""
    for item in items:
        folder, *rest = item.path.relative_to(HERE).parts
        group = folder if folder in TOGETHER else "/".join((folder, *rest))
        item.add_marker(pytest.mark.xdist_group(group))
