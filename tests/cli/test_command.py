"""Commands against a server that is no daemon: a failure in words, no traceback and no endless wait."""

from __future__ import annotations

import errno
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer

from teimgr.cli.command import DaemonOptions, runnable

_DEEP = b"[" * 100_000


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """A server that answers everything with this body; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("line", ["explain OVERLOADED", "explain OVERLOADED --json", "context list --json"])
def test_an_output_that_cannot_be_written_is_a_failure_in_words(line: str) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "teimgr", *line.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot write the output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_error_of_a_socket_is_not_taken_for_one_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(typer.Exit) as end:
        runnable(command)()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "teimgr: Too many open files\n"


def _list(server: DaemonOptions) -> None:
    server.rest.list()


def _logs(server: DaemonOptions) -> None:
    server.rest.logs("a")


def _events(server: DaemonOptions) -> None:
    list(server.rest.events())


_BODIES = {
    "deep": _DEEP,
    "an object": b'{"a": 1}',
    "numbers": b"[1]",
    "an unknown state": b'[{"name": "a", "status": "odd"}]',
    "a text": b'"x"',
    "no event": b"nonsense\n\n",
    "half an event": b"event: x\ndata: {\n\n",
    "a deep event": b"event: x\ndata: " + _DEEP + b"\n\n",
    "a long event": b"data: " + bytes(17 * 2**20),
    "controls": b"\xff\x1b[2J",
}


@pytest.mark.parametrize(
    ("command", "status", "kind"),
    [
        *((command, 200, kind) for command in (_list, _logs) for kind in _BODIES if "event" not in kind),
        *((_events, 200, kind) for kind in _BODIES if "event" in kind),
        *((command, 500, kind) for command in (_list, _events) for kind in ("deep", "controls", "a text")),
    ],
)
def test_a_server_that_is_no_daemon_is_a_failure_in_words(
    command: Callable[..., None], status: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runnable(command)
    names = inspect.signature(run).parameters
    with answering(_BODIES[kind], status) as url, pytest.raises(typer.Exit) as end:
        run(**dict.fromkeys(names) | {"url": url, "request_timeout": 10.0})
    shown = capsys.readouterr()
    assert end.value.exit_code
    assert shown.err.startswith("teimgr: ")
    assert "\x1b" not in shown.err
