"""What a daemon tries before it takes over from another one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from teimgr.config.cluster import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.daemon.listeners import other_ports, try_other_ports
from teimgr.errors import InvalidConfig, PortConflict


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        state_file=tmp_path / "state.toml",
        grpc_host="127.0.0.1",
        grpc_port=1,
        grpc_socket=tmp_path / "grpc.sock",
        cluster=ClusterSettings(address="127.0.0.1:2", enrolment_port=3),
    )


def held(is_shared: bool = False) -> socket.socket:
    """A listener of another program, or of a mux, which shares its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    sock.listen()
    return sock


Change = Callable[[Settings, int], Settings]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda old, port: replace(old, grpc_port=port), "grpc_port"),
        (
            lambda old, port: replace(old, cluster=replace(old.cluster, enrolment_port=port)),
            "cluster.enrolment_port",
        ),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_of_another_program_is_refused_also_where_it_shares_it(
    settings: Settings, change: Change, key: str, is_shared: bool
) -> None:
    with held(is_shared) as other:
        wanted = change(settings, other.getsockname()[1])
        with pytest.raises(PortConflict, match=key):
            try_other_ports(wanted, other_ports(settings))


@pytest.mark.parametrize("before", [None, {}])
def test_muxes_that_live_on_share_their_port(settings: Settings, before: Mapping[str, str] | None) -> None:
    with held(is_shared=True) as mux:
        wanted = replace(settings, grpc_port=mux.getsockname()[1], grpc_socket=None, cluster=ClusterSettings())
        try_other_ports(wanted, None if before is None else other_ports(wanted))


def test_what_the_daemon_before_listens_on_is_free_for_the_next_one(settings: Settings) -> None:
    with held(is_shared=True) as mux, held() as enrolment:
        assert settings.grpc_socket is not None
        settings.grpc_socket.touch()  # stands for the socket of its mux
        cluster = replace(settings.cluster, enrolment_port=enrolment.getsockname()[1])
        wanted = replace(settings, grpc_port=mux.getsockname()[1], cluster=cluster)
        try_other_ports(wanted, other_ports(wanted))


def test_a_file_in_the_place_of_a_new_socket_is_refused(settings: Settings, tmp_path: Path) -> None:
    with held(is_shared=True) as mux:
        before = replace(settings, grpc_port=mux.getsockname()[1])
        (tmp_path / "file").touch()
        with pytest.raises(InvalidConfig, match="not a socket"):
            try_other_ports(replace(before, grpc_socket=tmp_path / "file"), other_ports(before))
