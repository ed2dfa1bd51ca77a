"""API documentation page: an OpenAPI document as one HTML page without scripts or outside assets."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #8884; padding: .5rem 0 }
h2 { font-size: 1rem; margin: .5rem 0 } h2 b { display: inline-block; min-width: 4.5rem }
pre { overflow-x: auto; font-size: .85rem; background: #8882; padding: .5rem }
table { display: block; overflow-x: auto } h2 { overflow-wrap: anywhere }
code, h2 { font-family: ui-monospace, monospace } table { border-collapse: collapse; font-size: .9rem }
td { padding: .1rem 1rem .1rem 0; vertical-align: top } :root { color-scheme: light dark }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page(document: dict[str, Any], address: str) -> str:
    """An OpenAPI document as HTML; `address` is the URL of the document itself."""
    info = document["info"]
    sections = "".join(
        _section(document, verb, path, operation)
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    )
    return html_document(
        info["title"],
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info.get('description', ''))} The same for programs: "
        f'<a href="{escape(address)}">openapi.json</a>.</p>'
        f"{sections}",
    )


def html_document(title: str, body: str) -> str:
    """A whole page in the style that `HEADERS` allow; `body` is HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{body}</html>"
    )


def _section(document: dict[str, Any], verb: str, path: str, operation: dict[str, Any]) -> str:
    title = f"<h2><b>{escape(verb.upper())}</b> {escape(path)}</h2>"
    text = f"<p>{escape(operation.get('description', ''))}</p>"
    rows = "".join(_row(name, fact) for name, fact in (*_parameters(operation), *_fields(document, operation)))
    answers = ", ".join(
        f"{status} {answer.get('description', '')}" for status, answer in operation["responses"].items()
    )
    shown = _example(verb, path, document, operation)
    return f"<section>{title}{text}<table>{rows}</table>{shown}<p><small>{escape(answers)}</small></p></section>"


def _example(verb: str, path: str, document: dict[str, Any], operation: dict[str, Any]) -> str:
    """The call as a curl command, with the example of the body where there is one."""
    known = _example_of(document, operation)
    if known is None:
        return ""
    body = json.dumps(known, ensure_ascii=False).replace("'", r"'\''")
    how = "" if verb == "post" else f" -X {verb.upper()}"
    command = f"curl -s{how} \"$URL{path}\" -H 'content-type: application/json' -d '{body}'"
    return f"<pre><code>{escape(command)}</code></pre>"


def _example_of(document: dict[str, Any], operation: dict[str, Any]) -> Any:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return body["example"] if "example" in body else (body.get("schema", {}).get("examples") or [None])[0]


def _row(name: str, fact: dict[str, Any]) -> str:
    cells = (f"<code>{escape(name)}</code>", escape(_type(fact)), escape(fact.get("description", "")))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _parameters(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for parameter in operation.get("parameters", ()):
        yield parameter["name"], parameter["schema"] | {"description": parameter.get("description", "")}


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield from schema.get("properties", {}).items()


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    return str(schema.get("type", ""))
