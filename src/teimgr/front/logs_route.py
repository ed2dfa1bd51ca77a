"""GET /instances/{name}/logs: a slice of an instance's log, streamed.

The fleet is not consulted: the log of a deleted instance is still served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from teimgr.errors import InstanceNotFound
from teimgr.front.instances import UNKNOWN
from teimgr.front.log_lines import pieces, read_lines
from teimgr.front.schemas import LogSlice
from teimgr.settings import Settings
from teimgr.spec import check_name

router = APIRouter(tags=["instances"])

PART_BYTES = 64 * 2**10
I32 = 2**31

Index = Annotated[int | None, Query(ge=-I32, lt=I32, description="as in a Python slice; negative counts from the end")]


@router.get("/instances/{name}/logs", response_model=LogSlice, responses=UNKNOWN)
def get_logs(request: Request, name: str, start: Index = None, end: Index = None) -> StreamingResponse:
    """Lines [start, end) of the log, rotated files included; memory does not grow with the log."""
    settings: Settings = request.app.state.settings
    parts = pieces(settings.log_dir / f"{check_name(name)}.log")
    if not parts:
        raise InstanceNotFound(name)
    total = sum(piece.lines for piece in parts)
    first, last, _ = slice(start, end).indices(total)
    return StreamingResponse(_body(read_lines(parts, first, last), first, last, total), media_type="application/json")


def _body(lines: Iterator[str], start: int, end: int, total: int) -> Iterator[bytes]:
    part, comma = bytearray(b'{"lines":['), b""
    for line in lines:
        part += comma + orjson.dumps(line)
        comma = b","
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b'],"start":%d,"end":%d,"total_lines":%d}' % (start, end, total)
