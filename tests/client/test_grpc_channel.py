"""Connections of the client to a multiplexer: ports and Unix sockets, with mutual TLS and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.small_servers import INSTANCE, Certificates, vector_of

from teimgr.client import AsyncClient, Tls
from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.server_address import ServerAddress
from teimgr.errors import Unavailable, Unreachable


@pytest.mark.parametrize("place", [0, 1], ids=["port", "Unix socket"])
async def test_a_server_is_verified_and_asks_for_a_certificate(
    mtls_urls: tuple[str, str], certificates: Certificates, place: int
) -> None:
    url = mtls_urls[place]
    proof = Tls(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key)
    async with AsyncClient(grpc=url, tls=proof) as client:
        np.testing.assert_array_equal(await client.embed("a", instance=INSTANCE), [vector_of("a")])
    elsewhere = Tls(proof.ca, proof.cert, proof.key, server_name="elsewhere")
    for tls in (Tls(ca=certificates.ca), elsewhere, Tls()):
        async with AsyncClient(grpc=url, tls=tls) as client:
            with pytest.raises(Unavailable):
                await client.embed("a", instance=INSTANCE)


async def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    address = ServerAddress.parse(f"unix:{tmp_path}/grpc.sock")
    channel = GrpcChannel(address, Tls(), 1 << 20)
    await channel.open()
    with pytest.raises(Unreachable, match="No such file") as caught:
        await channel.connect(10)
    assert caught.value.address == address.url
    await channel.close()
