"""Write docs/conformance.md."""

from __future__ import annotations

from tests.conformance.report import FILE, text

FILE.parent.mkdir(exist_ok=True)
FILE.write_text(text())
print(f"{FILE.name} is written")
