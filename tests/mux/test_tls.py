"""Mutual TLS on the gRPC port, with certificates made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from mux_process import Control, embed, running, stub

from teimgr.front.mux_config import MuxTls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
_FILES = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ca -keyout ca.key -out ca.pem"
        )

    def sign(self, name: str) -> tuple[bytes, bytes]:
        """A key and a certificate for `name`, good for 127.0.0.1."""
        self._openssl(
            f"req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} "
            f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {name}.key -out {name}.csr"
        )
        self._openssl(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -copy_extensions copy -days 2 -out {name}.pem"
        )
        return self.read(f"{name}.key"), self.read(f"{name}.pem")

    def read(self, file: str) -> bytes:
        return (self._folder / file).read_bytes()

    def tls(self) -> MuxTls:
        self.sign("server")
        return MuxTls(**{part: str(self._folder / file) for part, file in _FILES.items()})

    def _openssl(self, command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=self._folder, check=True, capture_output=True)


async def test_only_clients_with_a_certificate_of_the_authority_get_through(
    tmp_path: Path, start_mux: Any, start_worker: Any
) -> None:
    ours, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "stranger")
    control = await Control.connect(start_mux(tls=ours.tls()))
    port = (await control.push(running("a", await start_worker())))["port"]

    async def code(*pair: bytes) -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials(ours.read("ca.pem"), *pair)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            return await stub(channel, "Embed")(embed("x")).code()

    assert await code(*ours.sign("client")) is grpc.StatusCode.OK
    assert await code() is grpc.StatusCode.UNAVAILABLE
    assert await code(*stranger.sign("client")) is grpc.StatusCode.UNAVAILABLE
    await control.close()
