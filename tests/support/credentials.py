"""API keys and certificates of tests: a key per right and one for some instances; an authority by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from teimgr.config.auth import ApiKeyEntry, Auth
from teimgr.http.auth.tls_files import TlsFiles

SECRETS = {name: f"{name}-{'k' * 32}" for name in ("admin", "inference", "read", "team")}
KEYS = (
    *(ApiKeyEntry(name=name, key=SECRETS[name], rights=(name,)) for name in ("admin", "inference", "read")),
    ApiKeyEntry(name="team", key=SECRETS["team"], rights=("admin", "inference", "read"), instances=("mine", "team-*")),
)
AUTH = Auth(enabled=True, providers=("api_keys",), api_keys=KEYS)


LOCAL = "DNS:localhost,IP:127.0.0.1"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-utf8")

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


class Authority:
    """A certificate authority with a folder of its own: `ca.pem`, and `NAME.pem` with `NAME.key` for each `sign`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.ca = folder / "ca.pem"
        openssl(
            *("req", "-x509", *_EC, "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", folder / "ca.key", "-out", self.ca),
        )

    def sign(self, name: str, subject: str = "", sans: str = LOCAL, days: int = 2) -> tuple[Path, Path]:
        """A certificate and its key. One of no days has expired as soon as it is there."""
        cert, key, request, extensions = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr", "ext"))
        extensions.write_text(f"subjectAltName={sans}\n")
        openssl("req", *_EC, "-subj", subject or f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            *("x509", "-req", "-days", str(days), "-in", request, "-CA", self.ca, "-CAkey", self.folder / "ca.key"),
            *("-CAcreateserial", "-extfile", extensions, "-out", cert),
        )
        return cert, key

    def server(self, name: str = "server") -> TlsFiles:
        """A server's files: its certificate for this host, and this authority for its clients."""
        cert, key = self.sign(name)
        return TlsFiles(cert, key, self.ca)


def openssl(*arguments: str | Path) -> None:
    """Run the command."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def put(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source` at once, as tools that renew certificates do."""
    beside = target.with_suffix(".new")
    beside.write_bytes(source.read_bytes())
    beside.replace(target)
