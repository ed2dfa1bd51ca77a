"""All rows of the catalogue."""

from __future__ import annotations

from bench.families import decoders, encoders, others, own_code, scoring, senses, sounds, trusted
from bench.families.row import Row

ROWS: tuple[Row, ...] = (
    *encoders.ROWS,
    *decoders.ROWS,
    *own_code.ROWS,
    *others.ROWS,
    *senses.ROWS,
    *sounds.ROWS,
    *scoring.ROWS,
    *trusted.ROWS,
)
