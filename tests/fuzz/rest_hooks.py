"""Loaded by schemathesis: what it must not ask, and the one check of its own.

`SCHEMATHESIS_HOOKS` names this module, so it imports nothing of teimgr.
"""

from __future__ import annotations

import schemathesis

# An endless answer is nothing to check, and a trial or a download that is waited for is somebody else's test.
ENDLESS = ("follow",)


@schemathesis.hook
def map_query(context, query):  # type: ignore[no-untyped-def]
    """No query asks for an answer that never ends."""
    if isinstance(query, dict):
        return {key: value for key, value in query.items() if key not in ENDLESS}
    return query


@schemathesis.hook
def map_case(context, case):  # type: ignore[no-untyped-def]
    """Nothing deletes or stops the fleet of the fuzzer, though schemathesis learns its names from the list."""
    parameters = case.path_parameters or {}
    if str(parameters.get("name", "")).startswith("fuzz-") and case.method not in ("GET", "HEAD"):
        case.path_parameters = {**parameters, "name": "nobody"}
    return case


@schemathesis.check
def server_error_is_documented(ctx, response, case):  # type: ignore[no-untyped-def]
    """A status of 500 and above is one that the document names for this very operation."""
    if response.status_code < 500:
        return
    told = case.operation.definition.raw.get("responses", {})
    if str(response.status_code) not in told:
        raise AssertionError(f"{response.status_code} is not documented for {case.method} {case.operation.path}")
    if "INTERNAL_ERROR" in response.text:
        raise AssertionError("a defect of the daemon")
