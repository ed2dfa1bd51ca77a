"""GET /docs: the operations of the daemon's OpenAPI document for readers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from teimgr.docs_page import HEADERS, page

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(page(request.app.openapi(), "/openapi.json"), headers=HEADERS)
