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
        *("http://host:1/path", "http://host:1?query", "http://host:1/#part", "http://user:secret@host:1"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="endpoint"):
        AsyncClient(url)


def test_an_endpoint_may_end_in_a_slash() -> None:
    assert ServerAddress.parse("https://host/") == ServerAddress("host", 443, True)
