"""docs/cli.md is what the commands say now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_reference_is_up_to_date() -> None:
    made = subprocess.run([sys.executable, "-m", "teimgr.cli.reference"], capture_output=True, text=True, check=True)
    assert DOCUMENT.read_text() == made.stdout, "run: python -m teimgr.cli.reference > docs/cli.md"
