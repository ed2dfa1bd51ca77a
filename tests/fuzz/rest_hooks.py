"""Loaded by schemathesis: what it must not ask, and the one check of its own.

`SCHEMATHESIS_HOOKS` names this module, so it imports nothing of teimgr.
"""

from __future__ import annotations

import schemathesis

from tests.fuzz import hypothesis_optimiser

hypothesis_optimiser.tolerate()

# A parameter that asks for an answer which never ends: nothing to check in it.
ENDLESS = "follow"


@schemathesis.hook
def before_call(context, case, kwargs):  # type: ignore[no-untyped-def]
    """The fleet of the fuzzer stays, though schemathesis learns its names from the list; and every answer ends."""
    case.query = {key: value for key, value in (case.query or {}).items() if key != ENDLESS}
    parameters = case.path_parameters or {}
    if str(parameters.get("name", "")).startswith("fuzz-") and case.method not in ("GET", "HEAD"):
        case.path_parameters = {**parameters, "name": "nobody"}


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
