"""The reference of an API: an OpenAPI document as HTML without scripts or external assets."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #8884; padding: .5rem 0 }
h3 { font-size: 1rem; margin: .5rem 0; overflow-wrap: anywhere } h3 b { display: inline-block; min-width: 4.5rem }
pre, .table { overflow-x: auto } pre { font-size: .85rem; background: #8882; padding: .5rem }
code, h3 { font-family: ui-monospace, monospace } table { border-collapse: collapse; font-size: .9rem }
th { text-align: left } td, th { padding: .1rem 1rem .1rem 0; vertical-align: top } :root { color-scheme: light dark }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page(document: dict[str, Any], address: str) -> str:
    """Return an OpenAPI document as a whole page; `address` is the URL of the document itself."""
    info = document["info"]
    text = f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>"
    return html_document(info["title"], text + reference(document, address))


def reference(document: dict[str, Any], address: str) -> str:
    """Return an OpenAPI document as HTML: contents, each route with a call, its fields and its answers, then all
    bodies."""
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            by_tag.setdefault(operation.get("tags", ["routes"])[0], []).append((verb, path, operation))
    schemas = document.get("components", {}).get("schemas", {})
    contents = "".join(
        f"<details><summary>{_title(tag)}</summary><ul>{''.join(_entry(*each) for each in of)}</ul></details>"
        for tag, of in by_tag.items()
    )
    routes = "".join(
        f"<h2>{_title(tag)}</h2>{''.join(_section(document, *each) for each in of)}" for tag, of in by_tag.items()
    )
    bodies = "".join(
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{_text(schema)}{_table(_properties(schema))}</section>'
        for name, schema in schemas.items()
    )
    return (
        f'<nav class="contents" aria-label="Contents">{contents}<p><a href="#bodies">Bodies</a></p>'
        f'<p><a href="{escape(address)}">openapi.json</a>, the same for programs</p></nav>'
        f'<div>{routes}<h2 id="bodies">Bodies</h2>{bodies}</div>'
    )


def html_document(title: str, body: str) -> str:
    """Return a whole page in the style that `HEADERS` allow; `body` is HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{body}</html>"
    )


def prose(sentence: str) -> str:
    """Return a sentence of Markdown as HTML; of Markdown only code style is supported."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _title(tag: str) -> str:
    return escape(tag[:1].upper() + tag[1:]).replace("Gpus", "GPUs")


def _entry(verb: str, path: str, operation: dict[str, Any]) -> str:
    return f'<li><a href="#{_anchor(verb, path)}">{verb.upper()} {escape(path)}</a></li>'


def _anchor(verb: str, path: str) -> str:
    return escape(f"{verb}{path}")


def _section(document: dict[str, Any], verb: str, path: str, operation: dict[str, Any]) -> str:
    schema: dict[str, Any] = next((each.get("schema", {}) for each in _contents(operation).values()), {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][_name(schema)]
    rows = [*_parameters(operation), *((name, "body", *facts) for name, *facts in _properties(schema))]
    answers = "".join(
        f"<li>{escape(status.replace('default', ''))} {_answer(answer)}</li>"
        for status, answer in sorted(operation["responses"].items())
    )
    return (
        f'<section id="{_anchor(verb, path)}"><h3><b>{verb.upper()}</b> {escape(path)}</h3>{_text(operation)}'
        f"<pre><code>{escape(_call(verb, path, operation))}</code></pre>"
        f"{_table(rows)}<p>Answers</p><ul>{answers}</ul></section>"
    )


def _contents(operation: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    return found


def _call(verb: str, path: str, operation: dict[str, Any]) -> str:
    """Return the route as a curl command, with the example of its body."""
    known = example_of(_contents(operation).get("application/json", {}))
    is_form = "multipart/form-data" in _contents(operation)
    how = "" if verb == "get" or (verb == "post" and (is_form or known is not None)) else f" -X {verb.upper()}"
    command = f'curl -s{how} "$URL{path}"'
    if is_form:
        return f"{command} -F purpose=batch -F file=@calls.jsonl"
    if known is None:
        return command
    body = json.dumps(known, ensure_ascii=False).replace("'", r"'\''")
    return f"{command} -H 'content-type: application/json' -d '{body}'"


def example_of(content: Mapping[str, Any]) -> Any:
    """Return the example of a body; None if the document lacks one."""
    return content["example"] if "example" in content else (content.get("schema", {}).get("examples") or [None])[0]


def _answer(answer: dict[str, Any]) -> str:
    """Return the description of a status, and its body."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    words = answer.get("description", "").replace("Successful Response", "")
    return ": ".join(filter(None, (escape(words), _type(schema) if schema else "")))


def _text(described: dict[str, Any]) -> str:
    return "".join(f"<p>{prose(part)}</p>" for part in described.get("description", "").split("\n\n") if part)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table whose rows are a name and facts, which are HTML."""
    lines = "".join(
        f"<tr><th><code>{escape(name)}</code></th>{''.join(f'<td>{fact}</td>' for fact in facts)}</tr>"
        for name, *facts in rows
    )
    return f'<div class="table"><table>{lines}</table></div>' if lines else ""


def _parameters(operation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for each in operation.get("parameters", ()):
        yield each["name"], each["in"], _type(each["schema"]), prose(each.get("description", ""))


def _properties(schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return name, type and meaning of the fields of a body, or of each of its variants."""
    for each in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        for name, fact in each.get("properties", {}).items():
            needed = ", needed" if name in each.get("required", ()) else ""
            default = f", default {escape(json.dumps(fact['default']))}" if fact.get("default") is not None else ""
            yield name, f"{_type(fact)}{needed}{default}", prose(fact.get("description", ""))


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _type(schema: dict[str, Any]) -> str:
    """Return a type in words, as HTML."""
    if schema.get("$ref", "").startswith("#/$defs"):  # local to this body
        return escape(_name(schema))
    if "$ref" in schema:
        return f'<a href="#{escape(_name(schema))}">{escape(_name(schema))}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in choices if each.get("type") != "null"))
    if "enum" in schema:
        return " | ".join(escape(str(word)) for word in schema["enum"])
    if "const" in schema:
        return escape(str(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'values'}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = f" {low} to {high}" if low is not None and high is not None else ""
    return escape(f"{schema.get('type', '')}{limits}")
