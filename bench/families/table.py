"""All rows of the catalogue."""

from __future__ import annotations

from bench.families import encoders
from bench.families.row import Row

ROWS: tuple[Row, ...] = (*encoders.ROWS,)
