"""`teimgr serve` on a terminal of its own."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

from teimgr.cli.quickstart import free_port


def test_serve_names_a_new_folder_logs_readably_and_ends_with_its_terminal(tmp_path: Path) -> None:
    ports = ["--port", str(free_port(0)), "--grpc-port", str(free_port(0))]
    command = [sys.executable, "-m", "teimgr", "serve", *ports, "--state-dir", str(tmp_path / "new")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    shown = b""
    while b"daemon ready" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)

    assert os.WIFEXITED(status), status
    assert f"new state folder {tmp_path / 'new'}" in shown.decode()
    assert b'{"ts"' not in shown
