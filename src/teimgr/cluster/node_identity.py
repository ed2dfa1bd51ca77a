"""A node's side of enrolment: join the fleet by a token, and renew the node's certificate while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from teimgr.cluster.authority import fingerprint, new_request, utc_now
from teimgr.cluster.enrolment import JoinToken
from teimgr.cluster.enrolment_server import MAX_LINE_BYTES
from teimgr.cluster.messages import Versions
from teimgr.errors import Forbidden, InvalidConfig, TeimgrError, Unauthenticated, Unavailable, error_from_code
from teimgr.wire.fleet_tls import (
    IDENTITY_FILE,
    FleetIdentity,
    FleetName,
    check_node_name,
    new_context,
    peer_of,
    write_identity,
)
from teimgr.wire.json_messages import read_line, write_line

log = logging.getLogger(__name__)

_LIMIT_S = 15.0
_RENEW_AT = 1 / 3
"""The part of a certificate's life after which it is renewed."""
_RETRY_S = 60.0
_NOT_VALID_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL's x509_vfy.h; `ssl` does not name them."""
_MIN_PAUSE_S = 60.0
"""Between two renewals, also where this host's clock is so far ahead that each certificate looks old at once."""


async def admission(host: str, port: int, identity: FleetIdentity, token: str, versions: Versions) -> str:
    """Be admitted to the fleet by the certificate that this node has, else by a join token; return Ray's token.

    With a certificate a token is not needed, and tried only if the certificate is refused, as after a removal.

    Raises:
        InvalidConfig: there is neither. For others see `join`.
    """
    if has_certificate(identity):
        try:
            return await enter(host, port, identity, versions)
        except (Unauthenticated, Forbidden) as error:
            if not token:
                raise
            log.warning("this node's certificate was refused, its token is tried", extra={"reason": error.message})
    if not token:
        raise InvalidConfig(
            f"node '{identity.node}' has no valid certificate of the fleet in {identity.folder}: join with a token, "
            "which `teimgr cluster token` on the daemon's host makes"
        )
    return await join(host, port, token, identity, versions)


async def join(host: str, port: int, token: str, identity: FleetIdentity, versions: Versions) -> str:
    """Get a certificate from the daemon at an address, for the node and the folder of `identity`; returns Ray's token.

    The private key is made here. The daemon is recognised by the authority whose fingerprint the token has.

    Raises:
        ValidationError: the token or the name is malformed.
        InvalidConfig: the versions differ from the daemon's, or this host's clock is too late for its certificates.
        Unauthenticated, Forbidden: the daemon refuses the token, or is not the one that made it; or its certificate is
            not valid by this host's clock.
        Unavailable: the daemon cannot be reached.
        OSError: the files cannot be written.
    """
    parsed = JoinToken.parse(token)
    check_node_name(identity.node)
    blind = new_context(ssl.PROTOCOL_TLS_CLIENT)
    blind.verify_mode = ssl.CERT_NONE  # what it answers is compared with the token; nothing secret is sent
    offered = await _ask(host, port, blind, {"op": "authorities"})
    pinned = _pinned(offered.get("authorities"), parsed.fingerprint)
    context = new_context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pinned)
    message = {"op": "join", "token": str(parsed), "node": identity.node, **_about_this_host(versions)}
    answer = await _take(host, port, context, message, identity.folder)
    log.info("joined the fleet", extra={"node": identity.node})
    return _ray_token(answer)


async def enter(host: str, port: int, identity: FleetIdentity, versions: Versions) -> str:
    """Like `join`, by the right of the present certificate."""
    message = {"op": "enter", **_about_this_host(versions)}
    return _ray_token(await _take(host, port, identity.client_context(), message, identity.folder))


async def renew(host: str, port: int, identity: FleetIdentity) -> None:
    """Replace the node's key and certificate, by the right of the present one.

    Raises:
        InvalidConfig: the identity is missing. Others as `join`.
    """
    await _take(host, port, identity.client_context(), {"op": "renew"}, identity.folder)


async def keep_renewed(host: str, port: int, identity: FleetIdentity) -> None:
    """Renew the certificate after a third of its life, and every minute while that fails, until cancelled."""
    while True:
        try:
            if (pause_s := seconds_to_renewal(identity.folder)) <= 0:
                await renew(host, port, identity)
                pause_s = _MIN_PAUSE_S
        except (TeimgrError, OSError, ValueError) as error:  # ValueError: of a file that is written at this moment
            log.warning("the node's certificate was not renewed", extra={"reason": str(error)})
            pause_s = _RETRY_S
        await asyncio.sleep(pause_s)


def has_certificate(identity: FleetIdentity) -> bool:
    """True if the identity's folder has a certificate of its node that has not expired."""
    try:
        certificate = x509.load_pem_x509_certificate((identity.folder / IDENTITY_FILE).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris == [FleetName(identity.node).uri] and utc_now() < certificate.not_valid_after_utc


def seconds_to_renewal(folder: Path) -> float:
    """Until the certificate in `folder` is to be renewed; 0 or less if it is due. Raises OSError, ValueError."""
    certificate = x509.load_pem_x509_certificate((folder / IDENTITY_FILE).read_bytes())
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return (begins + (ends - begins) * _RENEW_AT - utc_now()).total_seconds()


def _pinned(authorities: Any, expected: str) -> str:
    """The certificate among `authorities`, PEM, that has the expected fingerprint."""
    try:
        offered = x509.load_pem_x509_certificates(str(authorities).encode())
    except ValueError:
        offered = []
    for certificate in offered:
        if fingerprint(certificate) == expected:
            return certificate.public_bytes(Encoding.PEM).decode()
    raise Unauthenticated("what listens at this address is not the daemon that made the join token")


async def _take(host: str, port: int, context: ssl.SSLContext, message: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Send a request for a certificate of a new key, write the identity that the daemon answers with; returns all."""
    key, request = new_request()
    answer = await _ask(host, port, context, message | {"request": request.decode()})
    try:
        certificate, authorities = answer["certificate"].encode(), answer["authorities"].encode()
    except (KeyError, AttributeError) as error:
        raise Unavailable(f"the daemon's answer has no certificate: {error!r}") from error
    await asyncio.to_thread(write_identity, folder, key, certificate, authorities)
    return answer


def _about_this_host(versions: Versions) -> dict[str, Any]:
    """What the daemon compares with its own before it admits a node."""
    return {"versions": asdict(versions), "clock": utc_now().timestamp()}


def _ray_token(answer: dict[str, Any]) -> str:
    if not isinstance(token := answer.get("ray_token"), str):
        raise Unavailable("the daemon's answer has no token of Ray")
    return token


async def _ask(host: str, port: int, context: ssl.SSLContext, message: dict[str, Any]) -> dict[str, Any]:
    """Send one request to the enrolment port; the result is its answer."""
    writer = None
    try:
        async with asyncio.timeout(_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=MAX_LINE_BYTES)
            if (
                context.verify_mode is ssl.CERT_REQUIRED
                and not peer_of(writer.get_extra_info("ssl_object")).name.is_daemon
            ):
                raise Unauthenticated(f"{host}:{port} is not the daemon of the fleet")
            write_line(writer, **message)
            await writer.drain()
            answer = await read_line(reader)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_VALID_NOW:
            raise Unauthenticated(
                f"{host}:{port}: {error.verify_message} by this host's clock, {utc_now():%Y-%m-%d %H:%M:%S} UTC: set it"
            ) from error
        raise Unauthenticated(f"{host}:{port} is not of this fleet: {error.verify_message}") from error
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        raise Unavailable(f"{host}:{port}: {error or 'no answer'}") from error
    finally:
        if writer is not None:
            writer.close()
    if answer is None:
        raise Unavailable(f"{host}:{port}: no answer")
    if "error" in answer:
        raise error_from_code(int(answer["error"]["code"]), str(answer["error"]["message"]))
    return answer
