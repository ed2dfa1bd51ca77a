"""Files of Unix sockets: taken from the dead, refused where a process listens, removed by their owner alone."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from teimgr.errors import InvalidConfig, PortConflict
from teimgr.http.unix_listener import UnixListener, bind_unix, check_free, publish, remove_stale


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def leave_behind(path: Path) -> None:
    """The file of a socket whose process is dead."""
    listening(path).close()


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_it_listens_at_once_with_its_permissions_and_removes_its_file(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "api.sock"

    listener = bind_unix(path, mode, "api_socket")

    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert connects(path)
    listener.close()
    assert not path.exists()


def test_the_file_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    leave_behind(path)

    listener = bind_unix(path, 0o600, "api_socket")

    assert connects(path)
    listener.close()


def test_a_socket_on_which_a_process_listens_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    expected = rf"Socket {path} already in use by process {os.getpid()}; choose another `api_socket`"
    with listening(path):
        with pytest.raises(PortConflict, match=expected):
            bind_unix(path, 0o600, "api_socket")
        with pytest.raises(PortConflict, match=expected):
            check_free(path, "api_socket")
        remove_stale(path)
        assert connects(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "no folder", "too long"])
def test_where_nothing_can_listen_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "api.sock"
    if kind == "file":
        path.write_text("kept")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "no folder":
        path = tmp_path / "missing" / "api.sock"
    else:
        path = tmp_path / ("x" * 108)

    with pytest.raises((InvalidConfig, OSError), match="api_socket: cannot listen on"):
        bind_unix(path, 0o600, "api_socket")
    remove_stale(path)

    assert os.path.lexists(path) is (kind in ("file", "folder", "link"))


def test_of_many_that_find_the_file_of_a_dead_process_one_gets_it(tmp_path: Path) -> None:
    path, barrier = tmp_path / "api.sock", threading.Barrier(8)
    leave_behind(path)

    def claim(_: int) -> UnixListener | None:
        barrier.wait(20)
        try:
            return bind_unix(path, 0o600, "api_socket")
        except PortConflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        (winner,) = filter(None, pool.map(claim, range(8)))

    assert connects(path)
    winner.close()


def test_the_file_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path, temporary = tmp_path / "grpc.sock", tmp_path / "grpc.sock.1"
    former = bind_unix(path, 0o600, "grpc_socket")
    with listening(temporary):
        file = publish(temporary, path)
        former.close()
        assert connects(path)
        assert not temporary.exists()
        file.remove()
        assert not path.exists()
    remove_stale(path)


def test_a_lock_on_the_folder_by_another_stops_no_start(tmp_path: Path) -> None:
    """Whoever may read the folder could hold it."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with closing(bind_unix(tmp_path / "api.sock", 0o600, "api_socket")):
            assert (tmp_path / "api.sock").is_socket()
    finally:
        os.close(descriptor)


def test_the_lock_of_another_user_and_a_link_to_a_file_are_refused_by_name(tmp_path: Path) -> None:
    lock = tmp_path / f".teimgr-{os.geteuid()}.lock"
    lock.symlink_to(tmp_path / "target")
    with pytest.raises(InvalidConfig, match="api_socket: cannot listen on"):
        bind_unix(tmp_path / "api.sock", 0o600, "api_socket")
    assert not (tmp_path / "target").exists()

    lock.unlink()
    if os.geteuid() == 0:
        lock.touch()
        os.chown(lock, 12345, 12345)
        with pytest.raises(InvalidConfig, match="belongs to another user"):
            bind_unix(tmp_path / "api.sock", 0o600, "api_socket")
