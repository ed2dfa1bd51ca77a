"""Keys change with a reload, on both ports, without a restart of anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.credentials import Authority, needs_openssl
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, toml

from teimgr.client import Client
from teimgr.errors import Forbidden, TeimgrError, Unauthenticated

ADMIN, OLD, NEW = (f"{name}-{'k' * 24}" for name in ("admin", "old", "new"))


def auth(*asking: str) -> dict[str, object]:
    tables = [{"name": "admin", "key": ADMIN, "rights": ["admin", "read"]}]
    tables += [{"name": key[:3], "key": key, "rights": ["inference"]} for key in asking]
    return {"enabled": True, "providers": ["api_keys"], "api_keys": tables}


def reload(daemon: DaemonProcess, table: dict[str, object]) -> None:
    (daemon.folder / "teimgr.toml").write_text(toml(daemon.settings | {"auth": table}))
    with daemon.client(api_key=ADMIN) as client:
        client._loop.run(client._client._http.call("POST", "/config/reload", timeout_s=30))  # type: ignore[union-attr]


def ending(daemon: DaemonProcess, key: str | None) -> type[Exception]:
    """What an Embed call to an instance that is not there fails with."""
    with Client(daemon.api, daemon.grpc, api_key=key) as client, pytest.raises(TeimgrError) as caught:
        client.embed("x", instance="nowhere")
    return caught.type


def test_keys_change_with_a_reload() -> None:
    with WarmDaemonProcess(auth=auth(OLD)) as daemon:
        with daemon.client(api_key=ADMIN) as client:
            assert client.list() == []
        with daemon.client() as client, pytest.raises(Unauthenticated):
            client.list()
        with daemon.client(api_key=OLD) as client, pytest.raises(Forbidden):
            client.list()

        reload(daemon, auth(NEW))
        with daemon.client(api_key=OLD) as client, pytest.raises(Unauthenticated):
            client.list()
        with daemon.client(api_key=NEW) as client, pytest.raises(Forbidden):
            client.list()
        assert ending(daemon, OLD) is Unauthenticated
        assert ending(daemon, None) is Unauthenticated
        assert ending(daemon, ADMIN) is Forbidden
        assert ending(daemon, NEW) not in (Unauthenticated, Forbidden)
        assert not any(key in daemon.log(10_000) for key in (ADMIN, OLD, NEW))


@needs_openssl
def test_mutual_tls_that_a_reload_asks_for_opens_nothing(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").server()
    mtls = {"ca_cert": str(files.ca), "server_cert": str(files.cert), "server_key": str(files.key)}
    with WarmDaemonProcess(auth=auth(OLD)) as daemon:
        reload(daemon, {"enabled": True, "providers": ["mtls"], "mtls": mtls})
        with daemon.client() as client, pytest.raises(Unauthenticated):
            client.list()
        with daemon.client(api_key=ADMIN) as client:
            assert client.list() == []
        assert "at the next start" in daemon.log()
