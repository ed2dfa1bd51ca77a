"""The paths of inference in the daemon's OpenAPI document; what they read is in `openapi.json`.

That file is written by the workers' side, which has the classes that read requests: see `worker/dialects/openapi.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI

from teimgr.gateway.gateway import CHOICE, DialectPath, paths

_TAG = "inference"
_NOTES = {
    "400": "the request breaks a rule, or the model does not do this",
    "404": "nothing is called so; the text names what nearly is",
    "413": "the body is over the limit",
    "415": "another content type",
    "422": "the request breaks a rule, as TEI says it",
    "424": "inference failed, or the model does not do this, as TEI says it",
    "429": "too much is under way; Retry-After says when to come again",
    "503": "the instance does not run; Retry-After says when to come again",
}


def describe(app: FastAPI) -> None:
    """Have the document of `app` tell of inference too."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = own()
            for path, operations in _paths().items():
                document["paths"].setdefault(path, {}).update(operations)
            document.setdefault("components", {}).setdefault("schemas", {}).update(_file()["schemas"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


@cache
def _file() -> dict[str, Any]:
    text = files("teimgr.gateway").joinpath("openapi.json").read_bytes()
    document: dict[str, Any] = orjson.loads(text)
    return document


def _paths() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in paths():
        if path.method == "POST":
            found[path.path.replace(":path}", "}")] = {"post": _operation(path)}
        else:
            found[path.path] = {"get": _information()}
    listed = {"200": {"description": "OK", "content": _json({"type": "object"})}}
    found["/v1/models"] = {"get": _got("What the `model` of a request may say", listed)}
    one = _got("One of them", listed | {"404": _failure("nothing is called so")}, "model")
    found["/v1/models/{model}"] = {"get": one}
    return found


def _operation(path: DialectPath) -> dict[str, Any]:
    told = _file()["operations"][path.dialect][path.inner]
    also = f" The header `{CHOICE}` chooses {' or '.join(path.others)} instead." if path.others else ""
    return {
        "tags": [_TAG],
        "summary": told["summary"],
        "description": told.get("description", told["summary"] + ".") + f" In the dialect {path.dialect}.{also}",
        "operationId": f"{path.dialect}{path.path}".translate(_AS_NAME),
        "parameters": [_parameter(name) for name in ("name", "model") if f"{{{name}" in path.path],
        "requestBody": {"required": True, "content": {kind: {"schema": told["request"]} for kind in told["types"]}},
        "responses": {
            "200": {"description": "OK", "content": {kind: {"schema": told["response"]} for kind in told["types"]}},
            **{status: _failure(note) for status, note in _NOTES.items()},
            "default": _failure("any other failure"),
        },
    }


def _information() -> dict[str, Any]:
    failures = {status: _failure(_NOTES[status]) for status in ("404", "503")} | {"default": _failure("a failure")}
    responses = {"200": {"description": "OK", "content": _json({"type": "object"})}} | failures
    return _got("The model and the limits, as TEI says them", responses, "name")


def _got(summary: str, responses: dict[str, Any], *parameters: str) -> dict[str, Any]:
    return {
        "tags": [_TAG],
        "summary": summary,
        "description": summary + ".",
        "operationId": summary.casefold().translate(_AS_NAME),
        "parameters": [_parameter(name) for name in parameters],
        "responses": responses,
    }


def _parameter(name: str) -> dict[str, Any]:
    meaning = "an instance" if name == "name" else "an instance, a model id or an alias"
    return {"name": name, "in": "path", "required": True, "description": meaning, "schema": {"type": "string"}}


def _failure(description: str) -> dict[str, Any]:
    """A failure in the form of the dialect: JSON, or a sentence where TEI's framework has one."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {"description": description, "content": _json({"type": "object"}) | text}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_AS_NAME = str.maketrans({"/": "_", "{": None, "}": None, ":": "_", " ": "_", ",": None, "`": None, "-": "_"})
