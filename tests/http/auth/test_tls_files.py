"""Certificate files that cannot be used are refused in a sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.credentials import Authority, needs_openssl, put

from teimgr.api.rest.app import RestTls
from teimgr.errors import InvalidConfig
from teimgr.http.auth.tls_files import TlsFiles

pytestmark = needs_openssl


def test_the_end_of_a_certificate_is_read(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    for days in (2, 20_000):  # the second after 2049
        cert, key = ours.sign(f"of-{days}", days=days)
        cert.write_text(cert.read_text() + ours.ca.read_text())
        ends = TlsFiles(cert, key).ends()
        assert ends == pytest.approx(time.time() + days * 86_400, abs=60)
    assert TlsFiles(key, key).ends() is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("server.pem", "no certificate", "not a PEM file"),
        ("server.key", "", "not a PEM file"),
        ("ca.pem", "nothing", "it contains no certificate"),
        ("server.key", "another", "the private key does not match the certificate"),
        ("server.key", "encrypted", "the private key is encrypted"),
        ("server.pem", None, "cannot be read: No such file or directory"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_a_sentence(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    ours = Authority(tmp_path / "ours")
    files = ours.server()
    target = ours.folder / file
    if content is None:
        target.unlink()
    elif content == "another":
        put(ours.sign("other")[1], target)
    elif content == "encrypted":
        from tests.support.credentials import openssl

        openssl("ec", "-in", files.key, "-aes256", "-passout", "pass:secret", "-out", ours.folder / "locked.key")
        put(ours.folder / "locked.key", target)
    else:
        target.write_text(content)
    with pytest.raises(InvalidConfig, match=message) as caught:
        RestTls(files)
    assert str(target) in caught.value.message
