"""The system's Chromium for browser tests, and why there is none."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

# Without a browser's windows it takes two thirds of the processor time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# As root in a container there is no sandbox to be had; the pages are our own.
OPTIONS: dict[str, Any] = {"args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}


def missing() -> str:
    """The reason to skip; empty where the browser can run."""
    if importlib.util.find_spec("playwright") is None:
        return "no playwright: pip install playwright"
    return "" if CHROMIUM else "no chromium: apt-get install chromium-headless-shell"
