"""Write docs/contract.md; the exit status is 1 when a clause has no test."""

from __future__ import annotations

import sys

from tests.contract.report import FILE, faults, text

FILE.parent.mkdir(exist_ok=True)
FILE.write_text(text())
found = faults()
print("\n".join(found) or f"{FILE.name} is written: every clause has its test")
sys.exit(bool(found))
