"""Notifications to systemd, received on a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from teimgr.daemon.systemd import Notifier


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket that systemd would listen on, named in the environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def received(systemd: socket.socket) -> list[str]:
    return systemd.recv(4096).decode().split("\n")


async def test_ready_while_the_body_runs_and_stopping_after_it(systemd: socket.socket) -> None:
    notifier = Notifier()
    async with notifier.serving("2 instances"):
        assert received(systemd) == ["READY=1", "STATUS=2 instances"]
    assert received(systemd) == ["STOPPING=1"]


async def test_the_watchdog_is_fed_from_the_event_loop(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    notifier = Notifier()
    async with notifier.serving(""):
        received(systemd)
        for _ in range(3):
            assert await asyncio.to_thread(received, systemd) == ["WATCHDOG=1"]


def test_a_watchdog_of_another_process_is_not_ours(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert Notifier().watchdog_s is None


def test_children_do_not_inherit_the_socket(systemd: socket.socket) -> None:
    Notifier()
    assert "NOTIFY_SOCKET" not in os.environ


def test_a_reload_names_its_moment(systemd: socket.socket) -> None:
    Notifier().reloading()
    first, second = received(systemd)
    assert first == "RELOADING=1"
    assert int(second.removeprefix("MONOTONIC_USEC=")) > 0


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier().send("READY=1")


def test_a_systemd_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    Notifier().send("READY=1")
