"""A failure as TEI's routes tell it."""

from __future__ import annotations

from teimgr.errors import TeimgrError
from teimgr.wire.status import STATUS
from teimgr.worker.tei.answers import to_json


def error_body(error: TeimgrError) -> bytes:
    """`{"error": …, "error_type": …}`; the type is written as TEI writes it, `Validation`."""
    return to_json({"error": error.message, "error_type": STATUS[error.code].tei})
