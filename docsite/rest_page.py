"""The reference of REST and of inference over HTTP on port 9000, from the application's own OpenAPI document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI

from docsite.markdown import MADE_BY, code, document, table
from teimgr.api.gateway.routes import DIALECT_HEADER, INFO, describe, paths
from teimgr.api.rest import (
    batches,
    daemon,
    events,
    files,
    fleet,
    hosts,
    instances,
    logs,
    models,
    probes,
    recommendations,
)
from teimgr.api.rest.access import PERMISSIONS
from teimgr.http.docs_page import example_of

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
_EXAMPLE = "<!-- not run: an example by the declaration of the route -->"
# What the calls have in the places of their paths.
_PLACES = {"model_id": "sentence-transformers/all-MiniLM-L6-v2", "id": "ID"}
# Instances of routes that `mini`, a model of dense vectors, does not answer, as in the examples of bodies.
_KINDS = {
    "rerank": "reranker",
    "score": "reranker",
    "predict": "classifier",
    "extract": "classifier",
    "embed_sparse": "splade",
}
_ANSWERS_HEAD = """## Bodies of answers

Fields that do not apply are absent or `null`. A failure has `error`, `code` and `timestamp` everywhere but in the
dialects ([Errors](errors.md)); any route answers 401 `UNAUTHENTICATED` and 403 `FORBIDDEN` where keys are required, 404
for a name that is not there, 400 or 422 for a body or query that is refused, 429 and 503, with `Retry-After` where the
time is known.
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
                by_tag[operation["tags"][0]] += _operation(api, method.upper(), path, operation)
    lines = _HEAD.splitlines()
    for tag, title in _TITLES.items():
        lines += ["", f"## {title}", *by_tag[tag]]
    bodies = ["", *_ANSWERS_HEAD.splitlines(), *_answers(api)]
    return document([*lines, "", *_INFERENCE_HEAD.splitlines(), "", *_inference(api), *_calls(api), *bodies])


def _openapi() -> dict[str, Any]:
    app = FastAPI()
    for router in (
        *(part.router for part in (instances, fleet, logs, events, models)),
        *(daemon.config_router, daemon.router, hosts.gpu_router, fleet.usage_router, hosts.router, probes.router),
        *(recommendations.scaling_router, recommendations.router, files.router, batches.router),
    ):
        app.router.routes.extend(router.routes)
    describe(app)
    return app.openapi()


def _operation(api: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"### {method} {path}", "")
    yield _prose(operation["description"])
    yield from ("", _EXAMPLE, "```console", curl(method, path, operation), "```")
    rows = [*_parameters(operation), *_fields(operation)]
    if rows:
        yield from ("", *table(("", "in", "meaning"), rows))
    answers = [
        f"{status} {_lower(answer['description'])}".rstrip(". ")
        for status, answer in sorted(operation["responses"].items())
        if status not in ("200", "default") and answer["description"] != "Successful Response"
    ]
    others = f" Others: {'; '.join(answers)}." if answers else ""
    yield from ("", f"Right: {_right(method, path)}.{_answered(api, operation)}{others}")


def curl(method: str, path: str, operation: Mapping[str, Any]) -> str:
    """A call of the route; names in its path are examples, the body is that of the document."""
    kind = next((kind for route, kind in _KINDS.items() if f"/{route}" in path.removeprefix("/v1")), "mini")
    for name, value in ({"name": kind, "model": kind} | _PLACES).items():
        path = path.replace(f"{{{name}}}", value)
    parts = ["curl", "--silent", *(() if method in ("GET", "POST") else ("--request", method)), f"localhost:9000{path}"]
    contents = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in contents:
        parts += ["--form", "purpose=batch", "--form", "file=@calls.jsonl"]
    elif (example := example_of(contents.get("application/json", {}))) is not None:
        parts += ["--json", json.dumps(example, ensure_ascii=False)]
    elif method == "POST":
        parts += ["--request", "POST"]
    return " ".join(each if each.startswith("localhost") else shlex.quote(each) for each in parts)


def _answered(api: Mapping[str, Any], operation: Mapping[str, Any]) -> str:
    """The status and the body of success, the latter as a link to its fields."""
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            schema = answer.get("content", {}).get("application/json", {}).get("schema") or {}
            listed, schema = schema.get("type") == "array", schema.get("items", schema)
            if name := _name(schema):
                return f" Answer: {status}, {'a list of ' if listed else ''}[{name}](#{name.lower()})."
            return f" Answer: {status}."
    return ""


def _name(schema: Mapping[str, Any]) -> str:
    """The name of the schema that is referred to, directly or as one of several; empty if none is."""
    for each in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
        if "$ref" in each:
            return str(each["$ref"]).rpartition("/")[2]
    return _name(schema["items"]) if "anyOf" in schema.get("items", {}) else ""


def _answers(api: Mapping[str, Any]) -> Iterator[str]:
    """The fields of each body of success, and of what these refer to."""
    schemas = api["components"]["schemas"]
    waiting = [
        name
        for operations in api["paths"].values()
        for operation in operations.values()
        if operation["tags"] != [_INFERENCE]
        for status, answer in operation["responses"].items()
        if status.startswith("2")
        for schema in (answer.get("content", {}).get("application/json", {}).get("schema") or {},)
        if (name := _name(schema))
    ]
    seen: dict[str, None] = {}
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in schemas:
            continue
        seen[name] = None
        waiting += [found for field in schemas[name].get("properties", {}).values() if (found := _name(field))]
    for name in sorted(seen):
        rows = [
            (
                code(key),
                " ".join(filter(None, (_with_type(field.get("description", ""), field), _linked(_name(field))))),
            )
            for key, field in schemas[name].get("properties", {}).items()
        ]
        yield from ("", f"### {name}", "")
        yield from (
            table(("field", "meaning"), rows) if rows else (_prose(schemas[name].get("description", "Any JSON.")),)
        )


def _linked(name: str) -> str:
    return f"[{name}](#{name.lower()})" if name else ""


def _calls(api: Mapping[str, Any]) -> Iterator[str]:
    """A call of each route of inference with a body, without its prefixed names."""
    prefixes = tuple(f"/{each}/" for each in ("cohere", "infinity", "jina", "vllm", "voyage"))
    yield from ("", "### Calls", "", _EXAMPLE, "```console")
    for path, operations in api["paths"].items():
        operation = operations.get("post", {})
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if operation.get("tags") == [_INFERENCE] and example_of(content) is not None and not path.startswith(prefixes):
            yield curl("POST", path, operation)
    yield "```"


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
