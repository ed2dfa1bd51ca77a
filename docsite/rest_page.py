"""The reference of REST and of inference over HTTP on port 9000, from the application's own OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI

from docsite.markdown import MADE_BY, code, document, table
from teimgr.api.gateway.routes import DIALECT_HEADER, INFO, describe, paths
from teimgr.api.rest import (
    batches,
    config,
    daemon,
    events,
    files,
    fleet,
    gpus,
    hosts,
    instances,
    logs,
    models,
    plan,
    probes,
    recommendations,
    scaling,
    usage,
)
from teimgr.api.rest.access import PERMISSIONS

_INFERENCE = "inference"
_TITLES = {
    "instances": "Instances",
    "fleet": "Fleet",
    "models": "Models",
    "configuration": "Configuration",
    "gpus": "GPUs",
    "usage": "Usage",
    "hosts": "Hosts",
    "probes": "Probes and metrics",
    "files and batches": "Files and batches",
}
_HEAD = f"""# REST

{MADE_BY}

Port 9000 has the routes below; `/openapi.json` has them with every field and limit, `/docs` is the same as a page, with
calls to copy. Bodies are JSON. Unknown fields and query parameters are refused. Failures have the
shape of [Errors](errors.md).

*right*: what an [API key](../api-keys.md) needs; without authentication every route is open. Lists show a key with
`instances` those alone.
"""
_INFERENCE_HEAD = f"""## Inference

Where several products share a path, the first dialect is the default; the header `{DIALECT_HEADER}: NAME` chooses
another one, or the prefix `/jina`, `/vllm`, `/infinity`, `/voyage` or `/cohere` of the path. `model` in the body is an
instance, an alias or a model id, except where the path has it. All need the right `inference`; lists of models need
`inference` or `read`.

An instance's own port (8080 and up) has TEI's routes without the prefix `/instances/{{name}}`.
"""


def to_markdown() -> str:
    """The text of docs/reference/rest.md."""
    api = _openapi()
    by_tag: dict[str, list[str]] = {tag: [] for tag in _TITLES}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            if operation["tags"] != [_INFERENCE]:
                by_tag[operation["tags"][0]] += _operation(method.upper(), path, operation)
    lines = _HEAD.splitlines()
    for tag, title in _TITLES.items():
        lines += ["", f"## {title}", *by_tag[tag]]
    return document([*lines, "", *_INFERENCE_HEAD.splitlines(), "", *_inference(api)])


def _openapi() -> dict[str, Any]:
    app = FastAPI()
    for part in (
        *(instances, fleet, plan, logs, events, models, config, daemon, gpus),
        *(usage, hosts, probes, scaling, recommendations, files, batches),
    ):
        app.router.routes.extend(part.router.routes)
    describe(app)
    return app.openapi()


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"### {method} {path}", "")
    yield _prose(operation["description"])
    rows = [*_parameters(operation), *_fields(operation)]
    if rows:
        yield from ("", *table(("", "in", "meaning"), rows))
    answers = [
        f"{status} {_lower(answer['description'])}".rstrip(". ")
        for status, answer in sorted(operation["responses"].items())
        if status not in ("200", "default") and answer["description"] != "Successful Response"
    ]
    yield from ("", f"Right: {_right(method, path)}.{' Answers: ' + '; '.join(answers) + '.' if answers else ''}")


def _parameters(operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for each in operation.get("parameters", ()):
        if each["in"] == "query":
            yield code(each["name"]), "query", _with_type(each.get("description", ""), each["schema"])


def _fields(operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    contents = operation.get("requestBody", {}).get("content", {})
    schema = next((content["schema"] for content in contents.values()), {})
    for choice in (schema, *schema.get("anyOf", ())):
        for name, field in choice.get("properties", {}).items():
            needed = "body, needed" if name in choice.get("required", ()) else "body"
            yield code(name), needed, _with_type(field.get("description", ""), field)


def _with_type(meaning: str, schema: Mapping[str, Any]) -> str:
    kinds = [_type(each) for each in schema.get("anyOf", (schema,)) if each.get("type") != "null"]
    default = schema.get("default")
    shown = "" if default in (None, (), [], {}) else f", default {code(json.dumps(default))}"
    facts = f"{' or '.join(dict.fromkeys(filter(None, kinds)))}{shown}"
    return f"{meaning} ({facts})" if meaning and facts else meaning or facts


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(code(word) for word in schema["enum"])
    if "const" in schema:
        return str(code(schema["const"]))
    kind = str(schema.get("type", ""))
    low, high = schema.get("minimum"), schema.get("maximum")
    return f"{kind} {low} to {high}" if low is not None and high is not None else kind


def _right(method: str, path: str) -> str:
    inner = path.replace("{model_id}", "{model_id:path}")
    permission = PERMISSIONS[f"{method} {inner}"]
    if permission.is_public:
        return "none, public"
    names = " or ".join(sorted(f"`{right.value}`" for right in permission.rights)) or "any key"
    return names + (", with a key for all instances" if permission.is_fleet_wide else "")


def _inference(api: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for method, each in (*(("POST", path) for path in paths()), ("GET", INFO)):
        summary = api["paths"][each.path.replace(":path}", "}")][method.lower()]["summary"]
        dialects = ", ".join((each.dialect, *each.others))
        rows.append((code(f"{method} {each.path.replace(':path}', '}')}"), dialects, summary))
    lists = {path for path in api["paths"] if path.endswith(("/models", "/models/{model}")) or path.startswith("/api/")}
    for path in sorted(lists):
        operation = api["paths"][path].get("get", {})
        if operation.get("tags") == [_INFERENCE]:
            rows.append((code(f"GET {path}"), "", operation["summary"]))
    yield from table(("route", "dialects", "answers"), rows)


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
