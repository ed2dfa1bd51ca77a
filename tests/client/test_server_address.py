"""Addresses of servers: what is none is refused."""

from __future__ import annotations

import pytest

from teimgr.client import AsyncClient
from teimgr.client.server_address import ServerAddress
from teimgr.errors import (
    InvalidConfig,
)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host:1", "http://", "http://host:port", "http://host:70000", "http://host:0", "host:1/path"),
        *("http://host:1/a/../b", "http://host:1//path", "http://host:1/a%20b", "http://host:1?query"),
        *("http://host:1/#part", "http://user:secret@host:1"),
        *("unix:run/a.sock", "unix://host/a.sock", "http+unix:/run/a.sock"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="endpoint"):
        AsyncClient(url)


def test_an_address_of_http_may_have_a_path_that_a_proxy_strips() -> None:
    address = ServerAddress.parse("https://host/tools/teimgr/")
    assert (address.port, address.prefix, address.url) == (443, "/tools/teimgr", "https://host:443/tools/teimgr")
    assert ServerAddress.parse(address.url) == address
    with pytest.raises(InvalidConfig, match="gRPC has no path"):
        AsyncClient(address.url, address.url)


@pytest.mark.parametrize(
    ("url", "path", "secure", "shown"),
    [
        ("unix:/run/a b.sock", "/run/a b.sock", False, "unix:/run/a b.sock"),
        ("unix:///run/a.sock", "/run/a.sock", False, "unix:/run/a.sock"),
        ("https+unix:/run/a.sock", "/run/a.sock", True, "https+unix:/run/a.sock"),
    ],
)
def test_an_endpoint_may_be_a_unix_socket(url: str, path: str, secure: bool, shown: str) -> None:
    address = ServerAddress.parse(url)
    assert (address.path, address.secure, address.url) == (path, secure, shown)
    assert ServerAddress.parse(address.url) == address
    assert address.grpc_target == f"unix:{path}".replace(" ", "%20")


def test_a_host_may_be_named_unix() -> None:
    assert ServerAddress.parse("unix:9000") == ServerAddress("unix", 9000, False)


def test_an_endpoint_may_end_in_a_slash() -> None:
    assert ServerAddress.parse("https://host/") == ServerAddress("host", 443, True)


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        ("mux.example:9001", {"http_proxy": "http://p:3128"}, "http://p:3128 of the variable http_proxy"),
        (
            "mux.example:9001",
            {"http_proxy": "http://p:1", "grpc_proxy": "http://me:x@p:2"},
            "http://p:2 of",
        ),
        ("mux.example:9001", {"http_proxy": "http://p:1", "grpc_proxy": ""}, None),
        ("mux.example:9001", {"https_proxy": "http://p:1", "no_proxy": "other.example, .example"}, None),
        ("mux.example:9001", {"http_proxy": "http://p:1", "no_proxy": "*"}, None),
        ("mux.example:9001", {"http_proxy": "http://p:1", "no_proxy": "*", "no_grpc_proxy": ""}, "http://p:1 of"),
        ("10.1.2.3:9001", {"http_proxy": "http://p:1", "no_proxy": "localhost,10.0.0.0/8"}, None),
        ("10.1.2.3:9001", {"http_proxy": "http://p:1", "no_proxy": "11.0.0.0/8"}, "http://p:1 of"),
        ("[fd00::1]:9001", {"http_proxy": "http://p:1", "no_proxy": "fd00::/8"}, None),
        *(
            (url, {"http_proxy": "http://p:1"}, None)
            for url in ("localhost:1", "127.8.0.1:1", "[::1]:1", "a.localhost:1")
        ),
        *(
            (url, {"http_proxy": "http://p:1"}, None)
            for url in ("unix:/run/a.sock", "[::ffff:127.0.0.1]:1", "0.0.0.0:1")
        ),
    ],
)
def test_the_proxy_of_an_address(url: str, environ: dict[str, str], proxy: str | None) -> None:
    found = ServerAddress.parse(url).grpc_proxy(environ)

    assert found is None if proxy is None else str(found).startswith(proxy)
