"""GET /docs/errors: causes and remedies of every error code as one page, and the links of error replies to it."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from teimgr.errors import Code
from teimgr.http.docs_page import HEADERS, html_document, prose
from teimgr.observability.troubleshooting import ADVICE, meaning, repetition

PATH = "/docs/errors"
router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def error_help() -> HTMLResponse:
    return HTMLResponse(_page(), headers=HEADERS)


def help_link(code: str) -> dict[str, str]:
    """The header `Link` of a reply with this code; none for a code that the page does not have."""
    return {"Link": f'<{PATH}#{code.lower()}>; rel="help"'} if code in Code.__members__ else {}


@cache
def _page() -> str:
    body = "<h1>Errors</h1>" + "".join(_section(code) for code in sorted(Code, key=lambda each: each.name))
    return html_document("Errors", body)


def _section(code: Code) -> str:
    advice = ADVICE[code]
    lists = "".join(
        f"<p>{title}</p><ul>{''.join(f'<li>{prose(sentence)}</li>' for sentence in sentences)}</ul>"
        for title, sentences in (("Causes", advice.causes), ("Remedies", advice.remedies))
    )
    text = f"<p>{prose(meaning(code))} {prose(repetition(code))}</p>"
    return f'<section id="{code.name.lower()}"><h2>{code.name}</h2>{text}{lists}</section>'
