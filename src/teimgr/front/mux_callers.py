"""Who a gRPC call is from: what its connection and its metadata say, put before the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from teimgr.access import ANYBODY, Caller, Certified, Policy, attributes, key_in, san
from teimgr.errors import Code, TeimgrError, Unauthenticated, error_from_code
from teimgr.front.callers import NOT_LISTED
from teimgr.wire.status import STATUS

# TEI's words.
_NO_KEY = "No valid auth token"
_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}
# gRPC has the alternative names by kind.
_SANS = {"peer_dns": "DNS", "peer_ip": "IP", "peer_uri": "URI", "peer_email": "email"}


def caller_of_call(policy: Policy, context: Any) -> Caller:
    """Who makes a call, by its servicer context.

    Raises:
        Unauthenticated: the certificate is none of those let in, or the key none of those known.
    """
    if policy.certificates.ask and not policy.certificates.admit(certified_by_grpc(context.auth_context())):
        raise Unauthenticated(NOT_LISTED)
    if policy.keys is None:
        return ANYBODY
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    caller = policy.caller(key_in(metadata.get("authorization"), metadata.get("x-api-key")))
    if caller is None:
        raise error_from_code(Code.UNAUTHENTICATED, _NO_KEY)
    return caller


def certified_by_grpc(facts: Mapping[str, Sequence[bytes]]) -> Certified:
    """The names in a certificate as gRPC's `auth_context` gives it."""
    subjects = (attributes(value.decode("utf-8", "replace")) for value in facts.get("x509_subject", ()))
    sans = ((kind, value) for fact, kind in _SANS.items() for value in facts.get(fact, ()))
    return Certified(
        frozenset(part for subject in subjects for part in subject),
        frozenset(san(kind, value.decode("utf-8", "replace")) for kind, value in sans),
    )


def grpc_status(error: TeimgrError) -> grpc.StatusCode:
    """What gRPC calls a failure."""
    return _STATUS_BY_NUMBER[STATUS[error.code].grpc]
