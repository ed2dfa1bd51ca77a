"""Which certified callers are let in: the rule of every listener with mutual TLS.

A subject is text such as `O=Search, CN=indexer`; alternative names carry their kind, `DNS:indexer.local`. Nothing here
knows a server, so that the REST and the gRPC listener judge by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from teimgr.settings import Mtls


def permitted(mtls: Mtls, subject: str, sans: Sequence[str]) -> bool:
    """Whether a caller with this certificate may come in.

    One of `allowed_subjects` must occur in `subject`; one of `allowed_sans` must equal an alternative name, with or
    without its kind (`DNS:x` or `x`). A list that is empty, or whose `verify_` key is off, asks for nothing.
    """
    if asks_for_subject(mtls) and not any(part in subject for part in mtls.allowed_subjects):
        return False
    names = {*sans, *(san.partition(":")[2] for san in sans)}
    return not asks_for_san(mtls) or not names.isdisjoint(mtls.allowed_sans)


def asks_for_subject(mtls: Mtls) -> bool:
    """Whether a caller's subject matters."""
    return mtls.verify_subject and bool(mtls.allowed_subjects)


def asks_for_san(mtls: Mtls) -> bool:
    """Whether a caller's alternative names matter."""
    return mtls.verify_san and bool(mtls.allowed_sans)
