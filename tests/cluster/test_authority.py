"""The fleet's authority: its files, what it signs, and its successors, by a clock that the tests set."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from teimgr.cluster.authority import (
    AUTHORITY_RENEWAL,
    CERTIFICATE_LIFE,
    FleetAuthority,
    fingerprint,
    new_request,
    utc_now,
)
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.wire.fleet_tls import FleetName


class Clock:
    """A time that passes by `after`."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def after(self, pause: timedelta) -> None:
        self.now += pause

    def __call__(self) -> datetime:
        return self.now


def issued(authority: FleetAuthority, node: str = "a") -> x509.Certificate:
    _, request = new_request()
    return x509.load_pem_x509_certificate(authority.issue(request, FleetName(node)))


def trusted(authority: FleetAuthority) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(authority.authorities())


def signer(certificate: x509.Certificate, authority: FleetAuthority) -> int:
    """The place of the authority that signed the certificate among those that are trusted."""
    names = [each.subject for each in trusted(authority)]
    certificate.verify_directly_issued_by(trusted(authority)[names.index(certificate.issuer)])
    return names.index(certificate.issuer)


def test_the_key_is_the_owners_alone_and_stays_over_a_restart(tmp_path: Path) -> None:
    first = FleetAuthority(tmp_path / "ca")

    (file,) = (tmp_path / "ca").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert FleetAuthority(tmp_path / "ca").fingerprint == first.fingerprint


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    FleetAuthority(tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(0o640)

    with pytest.raises(InvalidConfig, match="chmod 600"):
        FleetAuthority(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    FleetAuthority(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"nothing of the kind")

    with pytest.raises(InvalidConfig, match="cannot be read"):
        FleetAuthority(tmp_path)


def test_a_certificate_names_the_node_and_lives_three_days(tmp_path: Path) -> None:
    certificate = issued(FleetAuthority(tmp_path), "gpu-1")

    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://teimgr/node/gpu-1"]
    assert abs(certificate.not_valid_after_utc - utc_now() - CERTIFICATE_LIFE) < timedelta(minutes=1)
    assert certificate.not_valid_before_utc < utc_now()


def test_a_request_cannot_choose_names_or_rights(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())

    with pytest.raises(InvalidInput, match="P-256"):
        FleetAuthority(tmp_path).issue(request.public_bytes(Encoding.PEM), FleetName("a"))


@pytest.mark.parametrize("request_pem", [b"", b"-----BEGIN CERTIFICATE REQUEST-----\n", b"x" * 20_000])
def test_what_is_no_request_is_refused(tmp_path: Path, request_pem: bytes) -> None:
    with pytest.raises(InvalidInput, match="certificate request"):
        FleetAuthority(tmp_path).issue(request_pem, FleetName("a"))


def test_a_successor_is_trusted_before_it_signs_and_the_former_one_until_nothing_of_it_is_valid(tmp_path: Path) -> None:
    clock = Clock()
    authority = FleetAuthority(tmp_path, clock)
    first = authority.fingerprint

    clock.after(AUTHORITY_RENEWAL)
    assert authority.maintain()
    assert [fingerprint(each) == first for each in trusted(authority)] == [True, False]
    assert signer(issued(authority), authority) == 0

    clock.after(CERTIFICATE_LIFE)  # what was issued without the successor has expired
    assert not authority.maintain()
    assert signer(issued(authority), authority) == 1
    assert len(trusted(authority)) == 2

    clock.after(CERTIFICATE_LIFE)
    assert authority.maintain()
    assert [fingerprint(each) == first for each in trusted(authority)] == [False]
    assert len(list(tmp_path.iterdir())) == 1
    assert len(trusted(FleetAuthority(tmp_path, clock))) == 1


def test_both_generations_verify_a_chain(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = utc_now() - AUTHORITY_RENEWAL - CERTIFICATE_LIFE
    FleetAuthority(tmp_path, clock)
    clock.after(AUTHORITY_RENEWAL)
    authority = FleetAuthority(tmp_path, clock)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.authorities().decode())

    assert len(context.get_ca_certs()) == 2
