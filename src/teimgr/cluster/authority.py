"""The certificate authority of a fleet: its keys on disk, certificates for nodes, its own replacement without a gap.

The authority has one or two generations, each a private key and a self-signed certificate. The times of a generation
follow from that certificate's beginning: it is trusted at once; it signs once every certificate has expired that a node
got without it, so all nodes that are in the fleet trust it by then; it is dropped when the last certificate that it
signed has expired. No state is kept besides the files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.files import write_atomically
from teimgr.wire.fleet_tls import CLOCKS_APART_S, FleetName

log = logging.getLogger(__name__)

CERTIFICATE_LIFE = timedelta(hours=72)
"""Of a node's certificate. Renewed when two thirds are left, so that the daemon may be away for two days."""
AUTHORITY_LIFE = timedelta(days=730)
AUTHORITY_RENEWAL = timedelta(days=365)
"""The age at which an authority gets a successor."""
CLOCKS_APART = timedelta(seconds=CLOCKS_APART_S)
MAX_REQUEST_BYTES = 16 * 1024
_CURVES = (ec.SECP256R1, ec.SECP384R1)


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _Generation:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def begun(self) -> datetime:
        return self.certificate.not_valid_before_utc + CLOCKS_APART


class FleetAuthority:
    """The fleet CA in `folder`, which is created with the first key if it is missing. Used by one process.

    Raises:
        InvalidConfig: a file of it cannot be read or written, or others than its owner may read it.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder = folder
        self._now = now
        self._generations: list[_Generation] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._generations = sorted(map(_read, folder.glob("ca-*.pem")), key=lambda each: each.begun)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidConfig(f"the fleet's certificate authority in {folder} cannot be read: {error}") from error
        if not self._generations:
            self._add_generation()
        self.maintain()

    def authorities(self) -> bytes:
        """The certificates of all trusted generations, as PEM."""
        return b"".join(_pem(each.certificate) for each in self._generations)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the signing generation's certificate, in hex: what a join token pins."""
        return fingerprint(self._signing().certificate)

    def issue(self, request_pem: bytes, name: FleetName) -> bytes:
        """Issue a certificate for `name` and the key of a signing request (CSR), as PEM. Names in the request do not
        count.

        Raises:
            InvalidInput: it is not a signing request for a key of P-256 or P-384, signed by that key.
        """
        return _pem(self._sign(self.key_of(request_pem), name))

    def key_of(self, request_pem: bytes) -> ec.EllipticCurvePublicKey:
        """Return the key of a signing request. Raises like `issue`."""
        if len(request_pem) > MAX_REQUEST_BYTES:
            raise InvalidInput(f"certificate request of {len(request_pem)} bytes, at most {MAX_REQUEST_BYTES}")
        try:
            request = x509.load_pem_x509_csr(request_pem)
            key = request.public_key()
            is_valid = request.is_signature_valid
        except (ValueError, TypeError, InvalidSignature) as error:
            raise InvalidInput(f"certificate request: {error}") from error
        if not is_valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
            raise InvalidInput("certificate request: not a key of P-256 or P-384 that signed it")
        return key

    def issue_own(self, name: FleetName) -> tuple[bytes, bytes]:
        """Make a key and its certificate, both PEM, for a process on the authority's host."""
        key = ec.generate_private_key(ec.SECP256R1())
        return private_pem(key), _pem(self._sign(key.public_key(), name))

    def maintain(self) -> bool:
        """Begin a new generation if the last one is old, and drop generations whose certificates have all expired.

        True if the trusted authorities have changed. Call at least once a day.
        """
        now, before = self._now(), len(self._generations)
        if now - self._generations[-1].begun >= AUTHORITY_RENEWAL:
            self._add_generation()
            log.warning(
                "the fleet's authority gets a successor", extra={"signs_from": self._signs_from(-1).isoformat()}
            )
        dropped = [
            old
            for old, new in zip(self._generations, self._generations[1:], strict=False)
            if now >= new.begun + 2 * CERTIFICATE_LIFE
        ]
        for old in dropped:
            self._generations.remove(old)
            self._path(old.certificate).unlink(missing_ok=True)
        return bool(dropped) or len(self._generations) != before

    def _signs_from(self, index: int) -> datetime:
        return self._generations[index].begun + CERTIFICATE_LIFE

    def _signing(self) -> _Generation:
        """The newest generation that every node trusts; the first one signs at once."""
        for index in range(len(self._generations) - 1, 0, -1):
            if self._now() >= self._signs_from(index):
                return self._generations[index]
        return self._generations[0]

    def _sign(self, key: ec.EllipticCurvePublicKey, name: FleetName) -> x509.Certificate:
        authority, now = self._signing(), self._now()
        return (
            x509.CertificateBuilder()
            .subject_name(_common_name(name.node or "daemon"))
            .issuer_name(authority.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS_APART)
            .not_valid_after(min(now + CERTIFICATE_LIFE, authority.certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(_authority_identifier(authority.key), critical=False)
            .sign(authority.key, hashes.SHA256())
        )

    def _add_generation(self) -> None:
        key, now = ec.generate_private_key(ec.SECP256R1()), self._now()
        number = x509.random_serial_number()
        name = _common_name(f"teimgr fleet {number:x}"[:32])  # distinct, as chains are looked up by it
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(number)
            .not_valid_before(now - CLOCKS_APART)
            .not_valid_after(now + AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_authority_identifier(key), critical=False)
            .sign(key, hashes.SHA256())
        )
        path = self._path(certificate)
        try:
            write_atomically(path, private_pem(key) + _pem(certificate), mode=0o600, durable=True)
        except OSError as error:
            raise InvalidConfig(f"the fleet's certificate authority cannot be written to {path}: {error}") from error
        self._generations.append(_Generation(key, certificate))

    def _path(self, certificate: x509.Certificate) -> Path:
        return self._folder / f"ca-{certificate.serial_number:x}.pem"


def fingerprint(certificate: x509.Certificate) -> str:
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def new_request() -> tuple[bytes, bytes]:
    """Make a private key, which never leaves its node, and a signing request for it, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return private_pem(key), request.public_bytes(serialization.Encoding.PEM)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _read(path: Path) -> _Generation:
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: others than its owner have access to this private key; chmod 600")
    content = path.read_bytes()
    key = serialization.load_pem_private_key(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{path}: not a key on an elliptic curve")
    return _Generation(key, x509.load_pem_x509_certificate(content))


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _authority_identifier(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
